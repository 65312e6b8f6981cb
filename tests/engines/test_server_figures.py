"""What a server says of hits is what the engines that use it have restored."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

import torch
from tests.servers import running_server

from kvtide.engines.transformers import attach


def test_server_says_which_tokens_its_engines_restored(tiny_model: Any, prompt: torch.Tensor) -> None:
    # Three turns of 2, 4 and 6 full blocks of 16 tokens: each finds what the one before has stored, 6 of 12.
    with running_server() as server:
        for tokens in (33, 65, 97):
            with attach(tiny_model, server.url, block_tokens=16) as cached:
                cached.generate(prompt[:, :tokens], max_new_tokens=1, do_sample=False)
                assert cached.cache.flush(10)
        with urlopen(f"{server.url}/v1/status") as answer:
            status = json.loads(answer.read())
        with urlopen(f"{server.url}/metrics") as answer:
            metrics = answer.read().decode()
    assert (status["loaded_tokens"], status["missed_tokens"]) == (96, {"absent": 96})
    # A load takes several ranges of an object, a store asks for it before it sends it: neither counts again.
    assert status["reads"] == {"found": 6}
    namespace = cached.namespace.hex()[:12]
    labels = f'decision="load",namespace="{namespace}",reason="in_time",tenant="(open)"'
    assert f"kvtide_prompt_tokens_total{{{labels}}} 96.0" in metrics
    assert [(each["namespace"], each["loaded_tokens"]) for each in status["namespaces"]] == [(namespace, 96)]
    assert status["namespaces"][0]["model"].endswith("float32")
