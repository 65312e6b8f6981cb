"""A request never fails for the cache's sake: before `open`, while closing, after it, in a fork, without threads."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.joints.conftest import attached, no_threads
from tests.joints.operations import in_child
from tests.store.test_cache import metas_of
from transformers import GenerationConfig

from kvtide.block import BlockLayout
from kvtide.store import PendingBlock
from kvtide.store.cache import Cache
from kvtide.store.load import MissReason, Whole
from kvtide.testing import smooth_bits

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def store(tiny_model: Any, prompt: torch.Tensor, tmp_path: Path) -> Path:
    with attached(tiny_model, tmp_path) as cached:
        cached.generate(prompt, **GREEDY)
        assert cached.flush(10)
    return tmp_path


def test_without_threads_requests_run(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    plain = tiny_model.generate(prompt, **GREEDY)
    with attached(tiny_model, store) as cached:
        with no_threads():
            assert torch.equal(cached.generate(prompt, **GREEDY), plain)
            assert cached.last is not None and cached.last.hit_tokens == 0
        assert torch.equal(cached.generate(prompt, **GREEDY), plain)
        assert cached.last.hit_tokens == 96


def test_a_cache_that_opened_without_threads_stores_once_there_are_some(
    tiny_model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    with no_threads():
        cached = attached(tiny_model, tmp_path)
        cached.cache.open()
        assert torch.equal(cached.generate(prompt, **GREEDY), tiny_model.generate(prompt, **GREEDY))
    cached.generate(prompt, **GREEDY)
    assert cached.last is not None and cached.last.blocks_queued == 6
    cached.cache.close()


def test_before_open_and_after_close_everything_is_a_miss(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    plain = tiny_model.generate(prompt, **GREEDY)
    cached = attached(tiny_model, store)
    for _ in range(2):
        assert cached.hit_tokens(prompt) == 0
        assert torch.equal(cached.generate(prompt, **GREEDY), plain)
        assert cached.last is not None and (cached.last.hit_tokens, cached.last.blocks_queued) == (0, 0)
        assert cached.restored(prompt).get_seq_length() == 0
        assert cached.flush(1)
        with cached:
            assert cached.hit_tokens(prompt) == 96


def test_closing_beside_loads_makes_them_misses(
    layout: BlockLayout, open_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    metas = metas_of(layout, 8)
    writer = open_cache(tmp_path, "raw")
    writer.store([PendingBlock(meta, lambda: lambda: smooth_bits(layout, 1)) for meta in metas])
    assert writer.flush(10)

    def load_until_closed(cache: Cache) -> None:
        while cache.load(metas, Whole(lambda position, bits: None)).reason is not MissReason.CLOSED:
            cache.match([meta.id for meta in metas])

    for pause_s in (0.0, 0.001, 0.003, 0.01, 0.03):
        cache = open_cache(tmp_path, "raw")
        with ThreadPoolExecutor(3) as pool:
            loading = [pool.submit(load_until_closed, cache) for _ in range(3)]
            time.sleep(pause_s)
            cache.close()
            for each in loading:
                each.result(30)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_misses_at_once_and_writes_nothing(
    layout: BlockLayout, open_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    metas = metas_of(layout, 4)
    cache = open_cache(tmp_path, "raw", load_s_max=300, close_s_max=300)
    pending = [PendingBlock(meta, lambda: lambda: smooth_bits(layout, 1)) for meta in metas]
    cache.store(pending[:2])
    assert cache.flush(10)
    before = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*"))

    def child() -> None:
        report = cache.load(metas[:2], Whole(lambda position, bits: None))
        found = (report.reason, cache.match([meta.id for meta in metas]), cache.store(pending), cache.flush(60))
        cache.close()
        assert found == (MissReason.CLOSED, 0, 0, True)

    # While another thread holds the locks that the child inherits.
    with cache.guarded.counts._lock, cache._counts._lock:
        in_child(child)
    assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*")) == before
    assert cache.load(metas[:2], Whole(lambda position, bits: None)).blocks == 2


def run(script: str, store: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(store)], capture_output=True, text=True, timeout=120, check=False
    )


ENDS = """
import atexit, sys
from kvtide.store import PendingBlock, cache_for
from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import LosslessCodec
from kvtide.testing import smooth_bits
from tests.joints.conftest import attached, no_threads
from tests.joints.operations import in_child
from tests.store.test_cache import metas_of

layout = BlockLayout(layers=3, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
metas = metas_of(layout, 40)
cache = cache_for(sys.argv[1], LosslessCodec())
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise SystemError('the engine has failed')"])
def test_a_process_that_ends_without_close_stores_what_is_queued(end: str, tmp_path: Path) -> None:
    queue = "cache.open()\ncache.store([PendingBlock(m, lambda: lambda: smooth_bits(layout, 1)) for m in metas])\n"
    run(f"{ENDS}{queue}{end}", tmp_path)
    check = "with cache:\n    print(cache.match([meta.id for meta in metas]))\n"
    assert run(ENDS + check, tmp_path).stdout.strip() == "40"


def test_at_interpreter_shutdown_loads_are_misses(tmp_path: Path) -> None:
    script = f"""{ENDS}
atexit.register(lambda: print(cache.load(metas, None).reason, cache.store(pending)))
pending = [PendingBlock(m, lambda: lambda: smooth_bits(layout, 1)) for m in metas]
cache.open()
cache.store(pending)
"""
    ended = run(script, tmp_path)
    assert (ended.returncode, ended.stdout.strip()) == (0, "MissReason.CLOSED 0"), ended.stderr


def test_a_child_of_multiprocessing_ends_at_once(
    layout: BlockLayout, open_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    cache = open_cache(tmp_path, "raw")
    cache.store([PendingBlock(metas_of(layout, 1)[0], lambda: lambda: smooth_bits(layout, 1))])
    assert cache.flush(10)
    with pytest.warns(DeprecationWarning) if sys.version_info >= (3, 12) else nullcontext():
        child = multiprocessing.get_context("fork").Process(target=cache.close)
        child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"past_key_values": None},
        {"past_key_values": None, "attention_mask": None, "position_ids": None, "inputs_embeds": None},
        {"stopping_criteria": None, "logits_processor": None, "generation_config": None, "streamer": None},
    ],
)
def test_arguments_that_are_none_are_as_if_not_given(
    arguments: dict[str, Any], tiny_model: Any, prompt: torch.Tensor, store: Path
) -> None:
    with attached(tiny_model, store) as cached:
        assert torch.equal(cached.generate(prompt, **GREEDY, **arguments), tiny_model.generate(prompt, **GREEDY))
        assert cached.last is not None and cached.last.hit_tokens == 96


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("is_in_config", [False, True])
def test_outputs_of_every_token_have_a_part_for_every_token(
    name: str, is_in_config: bool, tiny_model: Any, prompt: torch.Tensor, store: Path
) -> None:
    usual = tiny_model.config._attn_implementation
    tiny_model.set_attn_implementation("eager")
    try:
        arguments = {**GREEDY, "return_dict_in_generate": True}
        if is_in_config:
            arguments["generation_config"] = tiny_model.generation_config.from_dict(
                {**tiny_model.generation_config.to_dict(), name: True}
            )
        else:
            arguments[name] = True
        with attached(tiny_model, store) as cached:
            found = cached.generate(prompt, **arguments)
            field = name.removeprefix("output_")
            assert found[field][0][0].shape == tiny_model.generate(prompt, **arguments)[field][0][0].shape
            assert cached.last is not None and name in str(cached.last.bypass)
    finally:
        tiny_model.set_attn_implementation(usual)


def test_calls_are_those_of_the_plain_model(tiny_model: Any, prompt: torch.Tensor, store: Path) -> None:
    plain, config = tiny_model.generate(prompt, **GREEDY), GenerationConfig(**GREEDY, pad_token_id=0)
    with attached(tiny_model, store) as cached:
        assert torch.equal(cached.generate(prompt, config), plain)
        assert torch.equal(cached.generate(inputs=prompt, **GREEDY), plain)
        assert torch.equal(cached.generate(input_ids=prompt, generation_config=config), plain)
        assert cached.last is not None and cached.last.hit_tokens == 96
        embedded = {"inputs_embeds": tiny_model.model.embed_tokens(prompt), **GREEDY}
        assert torch.equal(cached.generate(**embedded), tiny_model.generate(**embedded))
