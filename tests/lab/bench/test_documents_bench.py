"""The tables of the prefix report, the CacheGen notes and the offloading study: engines are made up, swaps are real."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvtide_lab.bench import completion, offload, prompts
from kvtide_lab.bench.completion import CODECS, LOCAL, CompletionSize
from kvtide_lab.bench.offload import MODELS
from kvtide_lab.bench.prompts import PROMPT_TOKENS, PromptsSize
from kvtide_lab.swap import PageSwapper, runs

SIZE = PromptsSize(requests=10, frequent=1, probabilities=(0.0, 1.0))


class _Engine:
    """Computes for a second; finds what its store has in a quarter of one, what vLLM itself keeps in an eighth.

    stores: by transfer, outlive engines.
    """

    stores: dict[str, set[tuple[int, ...]]]

    def __init__(self, transfer: dict[str, Any] | None, options: dict[str, Any]) -> None:
        self.codec = (transfer or {}).get("kv_connector_extra_config", {}).get("codec", "")
        self.hit_s = 0.125 if options.get("enable_prefix_caching") else 0.25
        is_kept = bool(transfer) or options["enable_prefix_caching"]
        self.seen = self.stores.setdefault(f"{transfer} {options}", set()) if is_kept else None

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def open(self) -> None:
        pass

    close = open

    def ask(self, ids: Any, answer_tokens: int) -> dict[str, Any]:
        is_known = self.seen is not None and tuple(ids) in self.seen
        if self.seen is not None:
            self.seen.add(tuple(ids))
        encode_s = 0.5 if self.codec == "cachegen:2" else 0.0
        return {"ids": [1], "cached_tokens": len(ids) * is_known, "seconds": self.hit_s if is_known else 1.0 + encode_s}

    def ask_timed(self, ids: Any, answer_tokens: int) -> float:
        seconds: float = self.ask(ids, answer_tokens)["seconds"]
        return seconds

    def do(self, verb: str) -> dict[str, Any]:
        loaded = 100.0 if self.codec == "raw" else 25.0
        return {"seconds": 0.0, "stats": {"metrics": {"vllm:kvtide_loaded_bytes": loaded}}}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_Engine, "stores", {}, raising=False)
    return _Engine


def test_frequent_prompts_are_found_and_new_ones_are_not(engine: Any) -> None:
    result = prompts.run(engine, "model", SIZE, lambda step, done, total: None)
    new, frequent = result.rows
    assert (new.hit_rate_own, new.hit_rate_kvtide, new.items_per_s_kvtide) == (0.0, 0.0, 1.0)
    # The first of ten computes.
    assert frequent.hit_rate_kvtide == frequent.hit_rate_own == pytest.approx(0.9)
    assert frequent.items_per_s_kvtide == pytest.approx(10 / (1 + 9 * 0.25))
    assert (frequent.items_per_s_none, result.pays_from_p, frequent.answers_changed) == (1.0, 1.0, 0)


def test_requests_of_a_p_are_the_same_at_every_call() -> None:
    first = prompts.prompts_of(0.5, SIZE)
    assert first == prompts.prompts_of(0.5, SIZE)
    assert {len(prompt) for prompt in first} == {PROMPT_TOKENS}
    with pytest.raises(ValueError, match="from 0 to 1"):
        prompts.run(_Engine, "model", PromptsSize(probabilities=(1.5,)), lambda *step: None)  # type: ignore[arg-type]


def test_completion_is_measured_on_hits_and_on_misses_of_every_codec(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SimpleNamespace(url="http://127.0.0.1:1", restart=lambda carried: None)
    monkeypatch.setattr(completion, "server_behind", lambda carried: nullcontext((None, link)))
    size = CompletionSize(prompts=2, prompt_tokens=10, answer_tokens=1)
    result = completion.run(engine, "model", range(400), 1000.0, size, lambda step, done, total: None)
    rows = {row.way: row for row in result.rows}
    assert list(rows) == [LOCAL, *CODECS]
    assert {row.hit_speedup.median for row in result.rows} == {4.0}
    assert (rows["raw"].miss_slowdown.median, rows["cachegen:2"].miss_slowdown.median) == (1.0, 1.5)
    assert (rows["raw"].bytes_vs_raw, rows["tide"].bytes_vs_raw) == (1.0, 0.25)
    assert {row.hit_tokens for row in result.rows} == {20}


def test_swaps_are_measured_for_the_studys_shapes() -> None:
    # A layer that computes less keeps as much.
    smallest = [replace(shape, hidden=128, mlp=256) for shape in MODELS if shape.kv_heads == 2]
    result = offload.run("cpu", smallest, lambda step, done, total: None, size=offload.OffloadSize(swap_repeats=1))
    (row,) = result.swaps
    assert (row.layers, row.kv_heads, row.head_dim) == (36, 2, 128)
    # 8,192 tokens of 36 layers, K and V, two heads of 128 values of two bytes.
    assert row.gb == pytest.approx(8192 * 36 * 2 * 2 * 128 * 2 / 1e9)
    assert min(row.prefill_s.median, row.swap_in_s.median, row.swap_out_s.median) > 0
    assert result.throughput == []


def test_second_table_has_medians_of_all_ways(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "EngineProcess", engine)
    size = offload.OffloadSize(prompts=2, prompt_tokens=10, answers=(2, 4))
    result = offload.run("cpu", [], lambda step, done, total: None, engine, range(100), size)
    assert [row.answer_tokens for row in result.throughput] == [2, 4]
    row = result.throughput[0]
    assert (row.naive.median, row.prefix_caching_2.median, row.offload_prefix_2.median) == (1.0, 8.0, 8.0)
    assert (row.offload_1.median, row.offload_2.median, row.overhead_s.median) == (1.0, 4.0, 0.125)


# Pages out and in again: bytes, bounds and bad input.


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_pages_come_back_as_they_went(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    layers = [torch.randint(-128, 128, (6, 64), dtype=torch.int8, generator=generator).to(device) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    with PageSwapper(layers, slots=4) as swapper:
        swapper.swap_out([5, 1], [0, 3]).wait()
        for layer in layers:
            layer.zero_()
        swapper.swap_in([3, 0], [1, 5]).wait()
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[1, 5]], old[[1, 5]])
        assert not layer[[0, 2, 3, 4]].any()


def test_neighbours_are_copied_at_once() -> None:
    assert runs([4, 5, 6, 2, 3], [0, 1, 2, 7, 3]) == [(4, 0, 3), (2, 7, 1), (3, 3, 1)]
    assert runs([], []) == []
