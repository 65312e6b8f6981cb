"""Prefill elsewhere in real vLLM: an engine waits for blocks that another one computes, or computes the rest itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.servers import server_process
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS

from kvtide_lab.bench.engine_process import kvtide_transfer
from kvtide_lab.bench.services import wait_until
from kvtide_lab.bench.shaped import ShapedProxy

pytestmark = pytest.mark.timeout(900)

SHORT = 1044
BLOCK_BYTES_MIN = 3 << 20
# Steps are much shorter, on slow machines too.
FOLLOW_S = 8.0
LINK_BYTES_PER_S = 12.5e6


def test_engine_follows_another_and_computes_the_rest_where_the_link_is_cut(
    engine: Any, plain: Any, tokens: list[int]
) -> None:
    rate = LINK_BYTES_PER_S.__mul__
    with server_process() as server, ShapedProxy(("127.0.0.1", server.port), rate) as link, ThreadPoolExecutor(2) as at:
        link_url = f"http://127.0.0.1:{link.port}"
        leading = engine(kvtide_transfer(server.url, codec="lossless"), max_num_batched_tokens=PAGE_TOKENS)
        following = engine(
            kvtide_transfer(link_url, codec="lossless", follow_s=FOLLOW_S), max_num_batched_tokens=PAGE_TOKENS
        )
        with leading as one, following as other:
            one.ask(tokens[-300:], 2)
            other.ask(list(reversed(tokens[-300:])), 2)
            short = tokens[9000 : 9000 + SHORT]
            first, second = at.submit(one.ask, short, ANSWER_TOKENS), at.submit(other.ask, short, ANSWER_TOKENS)
            assert second.result()["ids"] == first.result()["ids"]
            assert second.result()["cached_tokens"] == (SHORT - 1) // PAGE_TOKENS * PAGE_TOKENS

            before, long = link.passed_bytes, tokens[:PROMPT_TOKENS]
            first, second = at.submit(one.ask, long, ANSWER_TOKENS), at.submit(other.ask, long, ANSWER_TOKENS)
            wait_until(lambda: link.passed_bytes > before + 2 * BLOCK_BYTES_MIN, "blocks to come", 120.0)
            link.cut()
            assert first.result()["ids"] == second.result()["ids"] == plain["long"]["ids"]
            assert 0 < second.result()["cached_tokens"] < (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
            link.mend()
