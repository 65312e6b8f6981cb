"""Fits the groups of layers of one model so that a step means the same in all, and makes one profile of several.

Engines whose blocks have the rows of all layers, whatever each attends to, take the one profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockLayout
from kvtide.codec.profile import Profile
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide.fit import COSTS, is_staged, section_layers, stages_for, weighted_moments, weighted_power
from kvtide.codec.tide.stages import Stages
from kvtide.group import ALL_ROWS

Arrays = Mapping[str, NDArray[Any]]
# What a profile says of each layer; the rest it says of all, but for `rotary` and `span`, and the name of a group.
_BY_LAYER = ("mean", "weight", "even_weight", "octaves", "scale", "order", "fine", "coarse", "unit", "place", "mixed")
_PREFIXES = ("", "mix_", "block_")


class AllRows(NamedTuple):
    """Rows of one shape in all groups of a model: the layout of a block of all, and each group's layers in it."""

    layout: BlockLayout
    places: tuple[tuple[int, ...], ...]
    rotary: Rotary | None


def joint_power(groups: Sequence[tuple[BlockLayout, Arrays]]) -> float:
    """Return the power of all values of a model of several groups, by which `draft_profile` scales each one's alike.

    groups: layout and moments of each. ValueError without moments.
    """
    values = [layout.layers * layout.kv_heads * layout.head_dim for layout, _ in groups]
    powers = [weighted_power(*each) for each in groups]
    return float(np.average(powers, weights=values))


def joint_stages(
    rows: AllRows, cost_name: str, groups: Sequence[tuple[BlockLayout, Arrays]], power: float | None
) -> Stages | None:
    """Return the stages of all groups' transforms, chosen by all layers, which share a profile; None for one stage.

    power: `joint_power`, None for a lone group's own.
    """
    if not all(is_staged(COSTS[cost_name], layout) for layout, _ in groups):
        return None
    homes = {place: (group, layer) for group, mine in enumerate(rows.places) for layer, place in enumerate(mine)}
    moments = [weighted_moments(*each, power) for each in groups]

    def weighted(place: int) -> NDArray[np.float64]:
        group, layer = homes[place]
        return moments[group](layer)

    has_all = all(each["square"].ndim == 3 for _, each in groups)
    return stages_for(rows.layout, has_all, weighted)


def joined_draft(rows: AllRows, drafts: Sequence[Profile]) -> Profile | None:
    """Return one draft of all layers, of the group ALL_ROWS; None if transforms span layers, which groups part.

    drafts: of each group, with `joint_power` and `joint_stages`.
    """
    if any(int(each.arrays["span"][0]) != 1 for each in drafts):
        return None
    parts = [dict(each.arrays) for each in drafts]
    if any("octaves" in each for each in parts):
        parts = [each if "octaves" in each else _in_line(each) for each in parts]
    order = np.argsort([place for places in rows.places for place in places])
    names = {f"{prefix}{name}" for prefix in _PREFIXES for name in _BY_LAYER}
    joined = {name: np.concatenate([each[name] for each in parts])[order] for name in parts[0] if name in names}
    layers = rows.layout.layers
    shared: dict[str, NDArray[Any]] = {
        "span": np.array([1, section_layers(layers, 1)], dtype=np.uint32),
        "rotary": np.frombuffer(rows.rotary.to_bytes() if rows.rotary else b"", dtype=np.uint8),
        "group": np.frombuffer(ALL_ROWS.encode(), dtype=np.uint8),
    }
    rest = {name: array for name, array in parts[0].items() if name not in names}
    return Profile.parse(replace(drafts[0], layers=layers, arrays=rest | joined | shared).to_bytes())


def _in_line(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a group's arrays as where channels are out of line, of which it has none."""
    weight = arrays.pop("weight")
    return arrays | {"even_weight": weight, "octaves": np.zeros(weight.shape, dtype=np.int16)}
