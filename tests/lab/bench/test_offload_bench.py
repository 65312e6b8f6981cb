"""The offload bench: swaps of a small model on this machine, and bad input."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide_lab.bench import offload


def test_swaps_are_measured_for_the_studys_shapes() -> None:
    smallest = [shape for shape in offload.MODELS if shape.kv_heads == 2]
    result = offload.run("cpu", smallest, lambda step, done, total: None)
    (row,) = result.swaps
    assert (row.layers, row.kv_heads, row.head_dim) == (36, 2, 128)
    # 8,192 tokens of 36 layers, K and V, two heads of 128 values of two bytes.
    assert row.gb == pytest.approx(8192 * 36 * 2 * 2 * 128 * 2 / 1e9)
    assert 0 < row.swap_in_s < 60
    assert result.throughput == []


def test_text_that_is_too_short_is_refused() -> None:
    def start(**arguments: object) -> Any:
        raise AssertionError("no engine is started for a text that does not do")

    with pytest.raises(ValueError, match="tokens, got 10"):
        offload.run("cpu", [], lambda step, done, total: None, start, range(10))
