"""Streaming in real vLLM: over a slow link by a deadline, and from an engine that computes the prompt meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.servers import server_process
from tests.vllm.conftest import ANSWER_TOKENS, PAGE_TOKENS, PROMPT_TOKENS

from kvtide_lab.bench.engine_process import kvtide_transfer
from kvtide_lab.bench.services import wait_until
from kvtide_lab.bench.shaped import ShapedProxy

pytestmark = pytest.mark.timeout(900)

PROMPT = 1044
FULL_PAGES = (PROMPT - 1) // PAGE_TOKENS
# Computing the prompt takes longer, and so do the refinements of its blocks over such a link.
SOON_S, SLOW_BYTES_PER_S = 1.5, 0.48e6
TIDE = {"codec": "tide:1e-3:3"}


@pytest.mark.real_time
def test_refinements_come_until_the_model_should_start(engine: Any, tokens: list[int]) -> None:
    read_bytes, counted = {}, {}
    with server_process() as server:
        with engine(kvtide_transfer(server.url, **TIDE)) as process:
            process.ask(tokens[:PROMPT], 2)
            assert process.do("settle")["is_done"]
        with ShapedProxy(("127.0.0.1", server.port), lambda seconds: 1e9 * seconds) as proxy:
            url = f"http://127.0.0.1:{proxy.port}"
            for name, options, rate in (("whole", {}, 1e9), ("soon", {"start_within_s": SOON_S}, SLOW_BYTES_PER_S)):
                with engine(kvtide_transfer(url, **options, **TIDE), disable_log_stats=False) as process:
                    process.ask(tokens[-300:], 2)
                    proxy.restart(rate.__mul__)
                    before = proxy.passed_bytes
                    answer = process.ask(tokens[:PROMPT], 2)
                    read_bytes[name] = proxy.passed_bytes - before
                    assert answer["cached_tokens"] == FULL_PAGES * PAGE_TOKENS, name
                    assert process.do("settle")["is_done"]
                    counted[name] = process.do("check")["stats"]["metrics"]
    assert 0 < read_bytes["soon"] < 0.8 * read_bytes["whole"], read_bytes
    for name, metrics in counted.items():
        # The prompt before may have been stored by the engine before.
        assert 1 <= metrics["vllm:kvtide_loads"] <= 2
        assert metrics["vllm:kvtide_loaded_tokens"] >= FULL_PAGES * PAGE_TOKENS
        # Beside a busy neighbour much is on its way when the model starts.
        assert metrics["vllm:kvtide_loaded_bytes"] > (0.9 if name == "whole" else 0.1) * read_bytes[name]
        assert metrics["vllm:kvtide_rough_loads"] >= (name == "soon")
    assert counted["soon"]["vllm:kvtide_streamed_kl"] > 1e-3
    assert counted["whole"]["vllm:kvtide_rough_loads"] == 0


BLOCK_BYTES_MIN = 3 << 20
# Steps are much shorter, on slow machines too.
FOLLOW_S = 12.0
# Loading is much faster than computing, also beside others: what was slower once is left alone for a minute.
LINK_BYTES_PER_S = 100e6


@pytest.mark.real_time
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
            short = tokens[9000 : 9000 + PROMPT]
            first, second = at.submit(one.ask, short, ANSWER_TOKENS), at.submit(other.ask, short, ANSWER_TOKENS)
            assert second.result()["ids"] == first.result()["ids"]
            assert second.result()["cached_tokens"] == FULL_PAGES * PAGE_TOKENS

            before, long = link.passed_bytes, tokens[:PROMPT_TOKENS]
            first, second = at.submit(one.ask, long, ANSWER_TOKENS), at.submit(other.ask, long, ANSWER_TOKENS)
            wait_until(lambda: link.passed_bytes > before + 2 * BLOCK_BYTES_MIN, "blocks to come", 120.0)
            link.cut()
            assert first.result()["ids"] == second.result()["ids"] == plain["long"]["ids"]
            assert 0 < second.result()["cached_tokens"] < (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
            link.mend()
