"""Levels along a trellis: kernels against their twin on every path, and the codec that is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec import tide_twin as twin
from tests.codec.tide_profiles import LAYOUT, fitted

from kvtide import _native
from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import Profile
from kvtide.codec.tide import Steps, TideCodec
from kvtide.codec.tide.model import TideModel
from kvtide.codec.tide.section import split_base, split_refinement
from kvtide.errors import CorruptPayload
from kvtide.testing import block_meta, smooth_bits
from kvtide.types import Section, SectionId, SectionKind

PATHS = _native.tide_paths()
TWINS = (4, 20)
META, BITS = block_meta(LAYOUT, 0, 1), smooth_bits(LAYOUT, 77)
LAYERS = TideModel(fitted(LAYOUT)).section_layers
CODEC = TideCodec(fitted(LAYOUT), 1e-3, 2)


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    tokens=st.integers(1, 150),
    loud=st.sampled_from([2, 20, 300, 32600]),
)
@settings(max_examples=40, deadline=None)
def test_cheapest_path_is_the_twins(path: str, seed: int, rows: int, tokens: int, loud: int) -> None:
    rng = np.random.default_rng(seed)
    exact = np.clip(np.rint(rng.laplace(0, loud / 2, (rows, tokens))), -32600, 32600).astype(np.int16)
    classes = rng.integers(0, 3, (rows, 4)).astype(np.uint16)
    rates = rng.integers(0, rng.choice([2, 200, 1000]), (3, 32)).astype(np.int16)
    found = np.empty_like(exact)
    _native.tide_find_path(path, exact, classes, rates, found)
    assert np.array_equal(found, twin.find_path(exact, classes, rates))


def lists_of(rng: np.random.Generator, rows: int, tokens: int) -> tuple[Any, ...]:
    parents = np.rint(rng.laplace(0, 1.2, (rows, tokens))).astype(np.int16)
    modes = rng.integers(0, 3, rows).astype(np.uint8)
    levels = parents * np.int16(3) + rng.integers(-1, 2, (rows, tokens)).astype(np.int16)
    # Top values are lists 0 to 7, digits 8 to 47.
    tables = np.where(modes[:, None] == twin.TOP, rng.integers(0, 4, (rows, 4)), 8 + 3 * rng.integers(0, 6, (rows, 4)))
    return levels, parents, modes, tables.astype(np.uint16)


@pytest.mark.parametrize("path", PATHS)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 12), tokens=st.integers(1, 150))
@settings(max_examples=80, deadline=None)
def test_lists_by_state_are_the_twins_and_taking_undoes_putting(path: str, seed: int, rows: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    levels, parents, modes, tables = lists_of(rng, rows, tokens)
    expected = twin.put_states(levels, parents, modes, tables, TWINS)
    counts = np.zeros(48, dtype=np.int64)
    _native.tide_count_states(path, levels, parents, modes, tables, TWINS, counts)
    assert counts.tolist() == [len(expected.get(table, [])) for table in range(48)]
    stops = np.cumsum(counts)
    items, cursors = np.zeros(int(stops[-1]) + _native.TIDE_SLACK, dtype=np.int16), stops - counts
    assert _native.tide_put_states(path, levels, parents, modes, tables, TWINS, items, cursors, stops)
    assert np.array_equal(cursors, stops)
    assert items[: stops[-1]].tolist() == [item for table in range(48) for item in expected.get(table, [])]
    taken = np.where(modes[:, None] == twin.DIGIT, levels, parents)
    assert _native.tide_take_states(path, taken, modes, tables, TWINS, items, stops - counts, stops)
    assert np.array_equal(taken, twin.half_steps(levels))


@pytest.mark.parametrize("path", PATHS)
def test_lists_that_states_ask_too_much_of_are_refused(path: str) -> None:
    values, modes = np.ones((2, 40), dtype=np.int16), np.zeros(2, dtype=np.uint8)
    tables, items = np.zeros((2, 4), dtype=np.uint16), np.ones(80 + _native.TIDE_SLACK, dtype=np.int16)
    # Of the second row quantiser 1 takes all; one too few for it, or for the first.
    for first in (39, 41):
        cursors = np.array([0] * 4 + [first] * 4, dtype=np.int64)
        stops = np.array([first] * 4 + [80] * 4, dtype=np.int64)
        assert not _native.tide_take_states(path, values.copy(), modes, tables, (4, 4), items, cursors, stops)
        cursors[4:] = first
        cursors[:4] = 0
        assert not _native.tide_put_states(path, values, values, modes, tables, (4, 4), items.copy(), cursors, stops)
    for cursor, stop in ((-1, 40), (0, 81), (41, 40)):
        cursors, stops = np.full(8, cursor, dtype=np.int64), np.full(8, stop, dtype=np.int64)
        assert not _native.tide_take_states(path, values.copy(), modes, tables, (4, 4), items, cursors, stops)


@pytest.mark.parametrize(
    ("exact", "number", "rate"), [(0, 0, 1001), (0, 0, -1), (32601, 0, 0), (-32601, 0, 0), (0, 3, 0)]
)
def test_prices_that_would_overflow_are_refused(exact: int, number: int, rate: int) -> None:
    values, classes = np.full((2, 8), exact, dtype=np.int16), np.full((2, 4), number, dtype=np.uint16)
    rates, levels = np.full((3, 32), rate, dtype=np.int16), np.zeros((2, 8), dtype=np.int16)
    with pytest.raises(ValueError, match="tide"):
        _native.tide_find_path(PATHS[0], values, classes, rates, levels)


def decoded(codec: TideCodec, sections: list[Section]) -> np.ndarray:
    out = np.empty_like(BITS)
    codec.decode(META, sections, out)
    return out.view(np.float32)


def lost(found: np.ndarray, bits: np.ndarray) -> float:
    off = found - bits.view(np.float32)
    return float(np.square(off[:, :, 4:].astype(np.float64)).mean())


@pytest.mark.parametrize("refinements", [0, 2])
def test_a_trellis_loses_less_with_the_same_bytes(refinements: int) -> None:
    # As many values as it takes for counts and fillings to be few.
    layout = BlockLayout(5, 256, 2, 16, KVDtype.FLOAT32)
    meta, bits, codec = block_meta(layout, 0, 1), smooth_bits(layout, 77), TideCodec(fitted(layout, "layer", 6))
    by_levels = []
    for is_trellis in (False, True):
        points, out = [], np.empty_like(bits)
        for units in range(-40, 0, 4):
            at_step = codec.with_steps(Steps(units, refinements, is_trellis))
            sections = at_step.encode(meta, bits)
            at_step.decode(meta, sections, out)
            points.append((sum(len(each.data) for each in sections), lost(out.view(np.float32), bits)))
        by_levels.append(np.array(points))
    plain, found = by_levels
    at = found[len(found) // 2]
    error = np.exp(np.interp(-at[0], -plain[:, 0], np.log(plain[:, 1])))
    assert at[1] < 0.87 * error


def test_less_than_all_refinements_are_thirds_of_the_path() -> None:
    sections = CODEC.encode(META, BITS)
    by_last = [[each for each in sections if each.id.refinement <= last] for last in range(3)]
    errors = [lost(decoded(CODEC, here), BITS) for here in by_last]
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert CODEC.losses[0] > CODEC.losses[1] > CODEC.losses[2] == pytest.approx(1e-3, rel=0.1)
    assert [CODEC.quality_of(here) for here in by_last] == pytest.approx(CODEC.losses)


def test_rounded_levels_are_those_of_a_profile_that_knows_no_trellis() -> None:
    arrays = {name: each for name, each in fitted(LAYOUT).arrays.items() if not name.startswith("trellis")}
    old = fitted(LAYOUT)
    plain = TideCodec(Profile.make(old.kind, old.model, LAYOUT, (old.texts, old.tokens), arrays), CODEC.quality, 2)
    assert not plain.steps.is_trellis
    assert plain.encode(META, BITS) == CODEC.rounded().encode(META, BITS)
    assert plain.losses == CODEC.rounded().losses
    assert np.array_equal(decoded(plain, plain.encode(META, BITS)), decoded(CODEC, CODEC.rounded().encode(META, BITS)))
    with pytest.raises(CorruptPayload, match="trellis"):
        decoded(plain, CODEC.encode(META, BITS))


@pytest.mark.parametrize("change", ["one more", "one less", "a byte more", "a byte less", "of a rounded section"])
def test_what_states_share_out_must_add_up(change: str) -> None:
    codec = CODEC.with_steps(Steps(-20, 1, is_trellis=True))
    sections = codec.encode(META, BITS)
    last = [each.id for each in sections].index(SectionId(SectionKind.DATA, 1, 0, LAYERS))
    data = bytes(sections[last].data)
    counts = split_refinement(memoryview(data)).state_counts
    before, _, after = data.partition(counts)
    assert counts
    changed = {
        "one more": bytes([counts[0] + 1]) + counts[1:],
        "one less": bytes([counts[0] - 1]) + counts[1:],
        "a byte more": counts + bytes(1),
        "a byte less": counts[:-1],
        "of a rounded section": counts,
    }
    if change == "of a rounded section":
        before = before[:3] + bytes(1) + before[4:]
    sections[last] = Section(sections[last].id, before + changed[change] + after)
    with pytest.raises(CorruptPayload):
        decoded(codec, sections)


def test_thirds_have_nothing_to_share_out() -> None:
    codec = CODEC.with_steps(Steps(-20, 1, is_trellis=True))
    sections = codec.encode(META, BITS)
    base = [each.id for each in sections].index(SectionId(SectionKind.DATA, 0, 0, LAYERS))
    data = bytes(sections[base].data)
    # Where a last section has its counts: before the streams and escapes.
    found, _ = split_base(memoryview(data), BITS[:LAYERS].shape)
    at = len(data) - sum(found.lists.streams.sizes) - 2 * sum(found.lists.escape_counts)
    sections[base] = Section(sections[base].id, data[:at] + bytes(3) + data[at:])
    with pytest.raises(CorruptPayload, match="too many"):
        decoded(codec, sections)


def test_a_base_that_is_the_last_section_has_states() -> None:
    codec = CODEC.with_steps(Steps(-20, 0, is_trellis=True))
    (section,) = [each for each in codec.encode(META, BITS) if each.id.layer_start == 0]
    found, _ = split_base(memoryview(section.data), BITS[:LAYERS].shape)
    assert found.steps == Steps(-20, 0, is_trellis=True)
    assert found.state_counts
