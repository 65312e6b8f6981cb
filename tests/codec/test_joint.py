"""One profile of several groups' rows: what it makes of a block is what the groups' own make of its layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from tests.codec.tide_profiles import alike_bits, out_of_line_bits

from kvtide.block import BlockBits, BlockLayout, KVDtype
from kvtide.codec import Profile
from kvtide.codec.tide import (
    COSTS,
    AllRows,
    Moments,
    Steps,
    TideCodec,
    draft_profile,
    fit,
    joined_draft,
    joint_power,
    joint_stages,
)
from kvtide.group import ALL_ROWS
from kvtide.testing import block_meta

WHOLE = BlockLayout(layers=5, tokens=32, kv_heads=4, head_dim=8, dtype=KVDtype.FLOAT32)
# A layer of full attention after every two windows.
PLACES = ((0, 1, 3, 4), (2,))
STEPS = Steps(-20, 1)


def part_of(bits: BlockBits, group: int) -> BlockBits:
    part: Any = np.ascontiguousarray(bits[list(PLACES[group])])
    return cast(BlockBits, part)


def layout_of(group: int) -> BlockLayout:
    return BlockLayout(len(PLACES[group]), WHOLE.tokens, WHOLE.kv_heads, WHOLE.head_dim, WHOLE.dtype)


def made(seed: int, is_loud: bool) -> BlockBits:
    bits = alike_bits(WHOLE, seed)
    if is_loud:
        bits[2] = out_of_line_bits(WHOLE, seed)[2]
    return bits


def drafts_of(cost: str, is_loud: bool, is_split: bool) -> tuple[AllRows, list[Profile]]:
    """Drafts of two groups, of which one may have loud channels, or second moments by block alone."""
    pairs: list[Any] = []
    for group in range(len(PLACES)):
        with patch.object(fit, "has_full_moments", lambda layout: not (is_split and layout.layers == 4)):
            moments = Moments(layout_of(group), COSTS[cost])
        for seed in range(12):
            moments.add(block_meta(layout_of(group), 0, 1), part_of(made(seed, is_loud), group), None)
        shape = (layout_of(group).layers, 2, 32)
        loud = np.tile(np.array([1, 64, 1, 1, 1, 64, 1, 1 / 16]), 4) ** -2.0
        felt = np.stack([loud, np.ones(32)]) if is_loud and group else np.ones(shape)
        moments.add_sensitivity(felt * np.ones(shape))
        pairs.append((layout_of(group), moments.state))
    rows = AllRows(WHOLE, PLACES, None)
    power = joint_power(pairs)
    stages = joint_stages(rows, cost, pairs, power)
    return rows, [draft_profile("m", layout, cost, None, state, power, stages) for layout, state in pairs]


@pytest.mark.parametrize("is_loud", [False, True], ids=["in line", "loud"])
@pytest.mark.parametrize("way", ["light", "layer", "staged", "split"])
def test_joined_profile_codes_layers_as_their_own_does(way: str, is_loud: bool) -> None:
    cost = "light" if way == "light" else "layer"
    with patch.object(fit, "DENSE_VALUES_MAX", 0) if way in ("staged", "split") else nullcontext():
        rows, drafts = drafts_of(cost, is_loud, way == "split")
        joined = joined_draft(rows, drafts)
    assert joined is not None and (joined.layers, joined.group) == (5, ALL_ROWS)
    assert ("octaves" in joined.arrays) == is_loud
    assert ("place" in joined.arrays) == (way in ("staged", "split"))
    bits = made(77, is_loud)
    found = decoded(joined, WHOLE, bits)
    own = np.empty_like(bits)
    for group, draft in enumerate(drafts):
        own[list(PLACES[group])] = decoded(draft, layout_of(group), part_of(bits, group))
    # Tokens' loudness is taken from all layers of a section.
    exact = bits.view(np.float32)
    errors = [np.square(each.view(np.float32) - exact).mean((1, 2, 3, 4)) for each in (found, own)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=0.1)
    assert errors[0].max() > 0


def decoded(profile: Profile, layout: BlockLayout, bits: BlockBits) -> BlockBits:
    codec, meta, out = TideCodec(profile).with_steps(STEPS), block_meta(layout, 0, 1), np.empty_like(bits)
    codec.decode(meta, codec.encode(meta, bits), out)
    return out


def test_transforms_that_span_layers_are_not_joined() -> None:
    rows, drafts = drafts_of("layer", False, False)
    spanning = [each.with_arrays({"span": np.array([2, 2], dtype=np.uint32)}) for each in drafts]
    assert joined_draft(rows, spanning) is None
