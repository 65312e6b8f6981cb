"""Servers behind an engine: the latest of all regions, and figures that are the engine's own."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.server.worlds import invalidate, region_processes
from tests.servers import ServerProcess, counted, running_server

from kvtide.engines.transformers import CachedModel, attach


def restored(cached: CachedModel, prompt: torch.Tensor, **arguments: Any) -> int:
    """Answer a prompt; return how much of it was restored, the answer's blocks stored."""
    cached.generate(prompt, max_new_tokens=1, do_sample=False, **arguments)
    assert cached.cache.flush(10)
    assert cached.last is not None and cached.last.bypass is None
    return cached.last.hit_tokens


def test_request_for_the_latest_finds_what_another_region_has_and_no_stale_copy(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines hear of what is invalidated when they start, and not again.
    monkeypatch.setattr("kvtide.tier.stack.invalidation._POLL_S", 3600.0)
    with region_processes(tmp_path) as regions, ExitStack() as stack:
        one, two = (stack.enter_context(attach(tiny_model, url, block_tokens=16)) for url in regions)
        assert restored(one, prompt) == 0
        assert restored(two, prompt, kvtide_force_latest=True) == 96
        assert restored(one, prompt, kvtide_force_latest=True) == 96
        invalidate(regions[1], one.namespace)
        assert restored(one, prompt) == 96, "its memory has not heard of it"
        assert restored(one, prompt, kvtide_force_latest=True) == 0


def test_latest_of_a_store_without_servers_is_what_it_has(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    with attach(tiny_model, str(tmp_path), block_tokens=16) as cached:
        assert [restored(cached, prompt, kvtide_force_latest=True) for _ in range(2)] == [0, 96]


def test_latest_that_nobody_can_tell_is_a_miss(tiny_model: Any, prompt: torch.Tensor) -> None:
    server = ServerProcess()
    with attach(tiny_model, server.url, block_tokens=16) as cached:
        assert restored(cached, prompt) == 0
        server.kill()
        assert [restored(cached, prompt, kvtide_force_latest=latest) for latest in (True, False)] == [0, 96]


def test_server_says_which_tokens_its_engines_restored(tiny_model: Any, prompt: torch.Tensor) -> None:
    # Three turns of 2, 4 and 6 full blocks of 16 tokens: each finds what the one before has stored, 6 of 12.
    with running_server() as server:
        for tokens in (33, 65, 97):
            with attach(tiny_model, server.url, block_tokens=16) as cached:
                cached.generate(prompt[:, :tokens], max_new_tokens=1, do_sample=False)
                assert cached.cache.flush(10)
    metric, labels = "kvtide_prompt_tokens_total", {"namespace": cached.namespace.hex()[:12], "tenant": "(open)"}
    assert counted(server, metric, decision="load", reason="in_time", **labels) == 96
    assert counted(server, metric, decision="recompute", reason="absent", **labels) == 96
    assert counted(server, metric) == 192
    # A load takes several ranges of an object, a store asks for it before it sends it: neither counts again.
    reads = "kvtide_object_reads_total"
    assert counted(server, reads) == counted(server, reads, result="found") == 6
