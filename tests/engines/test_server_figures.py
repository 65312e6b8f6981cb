"""What a server says of hits is what the engines that use it have restored."""

from __future__ import annotations

from typing import Any

import torch
from tests.servers import counted, running_server

from kvtide.engines.transformers import attach


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
