"""The loss law: what a hit costs in answers whose blocks keep different refinements.

Losses of tokens add up. A token's follows from the curve's KL at its refinement and its distance to the end of the hit.
Measured by `kvtide-lab bench position` (docs/codec.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import CorruptPayload

LAW_VERSION = 1
# Distances to the end of the hit between which all tokens weigh alike; the last range has no end.
DISTANCES = (0, 64, 128, 256, 512, 1024, 2048, 4096)
# The first tokens of a prompt, which all later ones look at.
SINK_TOKENS = 256
# As long are the texts of a curve: a hit of so many tokens that all keep one refinement costs what it says.
CURVE_TOKENS = 1536
# Values of the curve's KL at which powers change.
KNOTS = (0.01, 0.1)
NEAR_RANGES = 3
_RANGES = (NEAR_RANGES, len(DISTANCES) - NEAR_RANGES)
# Sink, passage, ranges, and three times three powers.
LAW_NUMBERS = 2 + len(DISTANCES) + 9

_Floats = NDArray[np.float64]


class Purpose(IntEnum):
    """The text after the hit: one that goes on, or an answer that copies a passage from anywhere in the hit."""

    GOES_ON = 0
    COPIES = 1


class Powers(NamedTuple):
    """The growth of a loss with the curve's KL: its power below, between and above KNOTS."""

    fine: float
    middle: float
    coarse: float

    def grown(self, curve: _Floats) -> _Floats:
        """Return the loss at each KL of the curve, 1 where that is KNOTS[0]."""
        logs, (low, high) = np.log(np.maximum(curve, 1e-30)), np.log(KNOTS)
        parts = (np.minimum(logs - low, 0), np.clip(logs - low, 0, high - low), np.maximum(logs - high, 0))
        return np.where(curve > 0, np.exp(np.array(self) @ np.stack(parts)), 0.0)


@dataclass(frozen=True, slots=True)
class PositionLaw:
    """Loss by position, for one purpose. ValueError for numbers that are no law.

    Weights are losses at KNOTS[0], up to a level (`curve_share`). sink: of the first SINK_TOKENS together. passage: of
    the block that an answer copies from. by_distance: of a thousand tokens in each range of DISTANCES. near: how the
    first NEAR_RANGES grow; copied: how the passage does; far: how the others do, which are soon ignored if rough.
    """

    sink: float
    passage: float
    by_distance: tuple[float, ...]
    near: Powers
    copied: Powers
    far: Powers

    def __post_init__(self) -> None:
        numbers = self.numbers
        if len(numbers) != LAW_NUMBERS or not np.isfinite(numbers).all() or min(numbers) < 0:
            raise ValueError(f"a position law has {LAW_NUMBERS} numbers from 0 on, got {numbers}")
        if min(*numbers[-9:], self.by_distance[0]) <= 0:
            raise ValueError("a position law's powers are above 0, and so is the weight of the newest tokens")

    @classmethod
    def of(cls, numbers: Sequence[float]) -> PositionLaw:
        """Return the law of `numbers`. ValueError if they are none."""
        sink, passage, *rest = numbers
        powers = (Powers(*rest[start : start + 3 or None]) for start in range(-9, 0, 3))
        return cls(sink, passage, tuple(rest[:-9]), *powers)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return all numbers, in the order of a profile's array `law`."""
        return (self.sink, self.passage, *self.by_distance, *self.near, *self.copied, *self.far)

    def of_blocks(self, blocks: int, block_tokens: int, curve: _Floats) -> _Floats:
        """Return each block's loss, oldest first, at each KL of the curve, but for the passage's."""
        ranges = np.repeat([self.near.grown(curve), far := self.far.grown(curve)], _RANGES, axis=0)
        terms = np.array((self.sink, *self.by_distance))[:, None] * np.concatenate([[far], ranges])
        # How much of the sink, and how many thousand tokens of each range of DISTANCES, each block is.
        edges = block_tokens * np.arange(blocks + 1)
        sinks = np.diff(np.minimum(edges, SINK_TOKENS)) / SINK_TOKENS
        distances = (edges[-1] - edges)[:, None] - np.array(DISTANCES)
        within = -np.diff(np.clip(distances, 0, np.append(np.diff(DISTANCES), np.inf)), axis=0) / 1000
        found: _Floats = np.column_stack([sinks, within]) @ terms
        return found

    def of_passage(self, curve: _Floats) -> _Floats:
        """Return what the copied block's own refinement adds, at each KL of the curve."""
        return self.passage * self.copied.grown(curve)

    def curve_share(self, curve: _Floats) -> _Floats:
        """Return what losses are multiplied by, of each purpose, where this is the law of texts that go on."""
        return np.asarray(curve / self.of_blocks(1, CURVE_TOKENS, curve).sum(axis=0).clip(1e-30))


# Of `tide-layer` on SmolLM2-135M, eleven prefixes of 1,024 to 4,096 tokens: for a profile without a law.
DEFAULT_POSITIONS = (
    PositionLaw(
        sink=0.00094,
        passage=0,
        by_distance=(0.074, 0.026, 0.0066, 0.0177, 0.0005, 0.0003, 0.0003, 0.0002),
        near=Powers(1.0, 0.82, 1.0),
        copied=Powers(1, 1, 1),
        far=Powers(1.0, 0.65, 0.67),
    ),
    PositionLaw(
        sink=0.00104,
        passage=0.0085,
        by_distance=(0.049, 0.0132, 0.0035, 0.0053, 0.002, 0.0018, 0.0003, 0.0001),
        near=Powers(1.0, 0.89, 0.78),
        copied=Powers(1.0, 1.01, 1.13),
        far=Powers(1.0, 0.71, 0.39),
    ),
)


def losses_by_block(
    positions: Sequence[PositionLaw], losses: Sequence[float], blocks: int, block_tokens: int
) -> _Floats:
    """Return what each block of a hit adds to each purpose's KL; see `EmbeddedCodec.losses_by_block`."""
    curve = np.array(losses)
    found = [law.of_blocks(blocks, block_tokens, curve) + law.of_passage(curve) / blocks for law in positions]
    return np.stack(found) * positions[Purpose.GOES_ON].curve_share(curve)


def read_law_table(table: NDArray[Any] | None) -> tuple[PositionLaw, PositionLaw]:
    """Return the laws in a profile's array, the default without one. CorruptPayload for an array that is none."""
    if table is None:
        return DEFAULT_POSITIONS
    if table.shape != (len(Purpose), 1 + LAW_NUMBERS) or (table[:, 0] != LAW_VERSION).any():
        raise CorruptPayload(f"the profile's law must be of version {LAW_VERSION}, got an array of {table.shape}")
    try:
        goes_on, copies = (PositionLaw.of(row) for row in table[:, 1:].astype(np.float64).tolist())
    except ValueError as error:
        raise CorruptPayload(f"the profile's law is none: {error}") from error
    return goes_on, copies
