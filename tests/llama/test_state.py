"""llama.cpp's states taken apart and put together: bounds, damage, cells in any order."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engines.llamacpp.identity import block_tokens_for, positions_of
from kvtide.engines.llamacpp.state import PartShape, Tensor, build_state, parse_context
from kvtide.errors import CorruptPayload

ROWS, COLUMNS, QUANTISED = Tensor(1, 32, 0), Tensor(1, 32, 2), Tensor(8, 34, 0)
SHAPES: list[PartShape] = [(ROWS, ROWS) * 2, (ROWS, COLUMNS) * 3]


def built(shapes: list[PartShape], positions: Any = range(5)) -> memoryview:
    """A state of random rows, as llama.cpp writes that of a whole context."""
    rng = np.random.default_rng(0)
    state, parts = build_state(shapes, [np.array(positions, np.int32)] * len(shapes))
    for part in parts:
        for rows in part.rows:
            rows[:] = rng.integers(0, 1 << 16, rows.shape)
    return memoryview(bytearray(b"\x05\0\0\0llama" + state[8:]))


@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES[1:], SHAPES, [(QUANTISED, QUANTISED)]])
def test_what_is_put_together_is_taken_apart_again(shapes: list[PartShape]) -> None:
    parts = parse_context(built(shapes))
    assert [part.shape for part in parts] == shapes
    for part in parts:
        assert list(part.positions) == [0, 1, 2, 3, 4]
        assert [rows.shape[0] for rows in part.rows] == [5] * len(part.rows)


@given(st.data())
def test_cut_or_damaged_state_is_refused_or_read_within_its_bytes(data: st.DataObject) -> None:
    state = built(SHAPES)
    with pytest.raises(CorruptPayload):
        parse_context(
            state[: data.draw(st.integers(0, len(state) - 1).filter(lambda size: size != len(built(SHAPES[:1]))))]
        )
    at = data.draw(st.integers(0, 140))
    state[at] = data.draw(st.integers(0, 255))
    try:
        parts = parse_context(state)
    except CorruptPayload:
        return
    assert all(part.positions.min() >= 0 for part in parts)


def test_cells_of_a_window_hold_the_newest_positions() -> None:
    assert list(positions_of(3, 0)) == [0, 1, 2]
    assert list(positions_of(3, 8)) == [0, 1, 2]
    assert list(positions_of(11, 8)) == [8, 9, 10, 3, 4, 5, 6, 7]


def test_blocks_and_batches_end_together() -> None:
    assert [block_tokens_for(unit) for unit in (1, 32, 64, 96, 128, 512, 600, 2048, 257)] == [
        *(128, 128, 128, 96, 128, 256, 200, 256, 257)
    ]
