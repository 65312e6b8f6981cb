"""The offload bench: swaps of a small model on this machine, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvtide_lab.bench import offload
from kvtide_lab.bench.offload import MODELS


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


class _Engine:
    """Takes as long as its way says: the first time, and once it has seen the prompt."""

    def __init__(self, transfer: Any, options: dict[str, bool]) -> None:
        self.loads_s = 0.25 if transfer else 1.0
        self.has_cache = options["enable_prefix_caching"]
        self.seen: set[tuple[int, ...]] = set()

    def open(self) -> None:
        pass

    close = open

    def ask(self, ids: Any, answer_tokens: int) -> None:
        pass

    def ask_timed(self, ids: Any, answer_tokens: int) -> float:
        is_known = tuple(ids) in self.seen
        self.seen.add(tuple(ids))
        return (0.125 if self.has_cache else self.loads_s) if is_known else 1.0

    def do(self, verb: str) -> None:
        pass


def test_second_table_has_medians_of_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "EngineProcess", _Engine)
    size = offload.OffloadSize(prompts=2, prompt_tokens=10, answers=(2, 4))
    start: Any = _Engine
    result = offload.run("cpu", [], lambda step, done, total: None, start, range(100), size)
    assert [row.answer_tokens for row in result.throughput] == [2, 4]
    row = result.throughput[0]
    assert (row.naive.median, row.prefix_caching_2.median, row.offload_prefix_2.median) == (1.0, 8.0, 8.0)
    assert (row.offload_1.median, row.offload_2.median, row.overhead_s.median) == (1.0, 4.0, 0.125)


def test_text_that_is_too_short_is_refused() -> None:
    def start(**arguments: object) -> Any:
        raise AssertionError("no engine is started for a text that does not do")

    with pytest.raises(ValueError, match="tokens, got 10"):
        offload.run("cpu", [], lambda step, done, total: None, start, range(10))
