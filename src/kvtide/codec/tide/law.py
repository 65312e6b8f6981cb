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

    Weights are losses where the curve has KNOTS[0]. sink: of the first SINK_TOKENS together. passage: of the block that
    an answer copies from. by_distance: of a thousand tokens in each range of DISTANCES. near: how the first
    NEAR_RANGES grow; copied: how the passage does; far: how the others do, which are soon ignored where they are rough.
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

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return all numbers, in the order of `law_table`."""
        return (self.sink, self.passage, *self.by_distance, *self.near, *self.copied, *self.far)

    def of_blocks(self, blocks: int, block_tokens: int, curve: _Floats) -> _Floats:
        """Return each block's loss, oldest first, at each KL of the curve, but for the passage's."""
        ranges = np.repeat([self.near.grown(curve), far := self.far.grown(curve)], _RANGES, axis=0)
        terms = np.array((self.sink, *self.by_distance))[:, None] * np.concatenate([[far], ranges])
        found: _Floats = _tokens_by_term(blocks, block_tokens) @ terms
        return found

    def of_passage(self, curve: _Floats) -> _Floats:
        """Return what the copied block's own refinement adds, at each KL of the curve."""
        return self.passage * self.copied.grown(curve)


def _tokens_by_term(blocks: int, block_tokens: int) -> _Floats:
    """Return how much of the sink, and how many thousand tokens of each range of DISTANCES, each block is."""
    edges = block_tokens * np.arange(blocks + 1)
    distances = (edges[-1] - edges)[:, None] - np.array(DISTANCES)
    within = -np.diff(np.clip(distances, 0, np.append(np.diff(DISTANCES), np.inf)), axis=0) / 1000
    sinks = np.diff(np.minimum(edges, SINK_TOKENS)) / SINK_TOKENS
    return np.column_stack([sinks, within])


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


# Losses are what five texts of six keep at most: so many times the mean of a dozen texts that deviate as texts do.
CURVE_OVER_MEAN = 1.7


@dataclass(frozen=True, slots=True)
class LossLaw:
    """Predicts the KL of answers after a hit, as five texts of six keep it; CURVE_OVER_MEAN times what is expected.

    positions: by Purpose. losses: KL with 0 refinements, 1, and so on.
    """

    positions: tuple[PositionLaw, PositionLaw]
    losses: tuple[float, ...]

    @property
    def refinements(self) -> int:
        """The number of refinements behind a base."""
        return len(self.losses) - 1

    def kl(
        self, kept: Sequence[int], block_tokens: int, purpose: Purpose, passages: Sequence[int] | None = None
    ) -> float:
        """Return the KL in nats of an answer's first tokens.

        kept: refinements of each block, oldest first, or one more than there are for a block without error; none gives
        0. An answer that copies is the mean over copies from each block of `passages`, None for all. ValueError for
        what no block can keep.
        """
        found, law, losses = np.array(kept, dtype=np.int64), self.positions[purpose], np.append(self.losses, 0.0)
        if block_tokens <= 0 or (found < 0).any() or (found >= len(losses)).any():
            raise ValueError(f"blocks of tokens keep 0 to {len(self.losses)}, got {kept!r} of {block_tokens}")
        if not len(found):
            return 0.0
        everywhere = np.take_along_axis(law.of_blocks(len(found), block_tokens, losses), found[:, None], axis=1).sum()
        copied = found if passages is None else found[list(passages)]
        return float(everywhere + law.of_passage(losses)[copied].mean())

    def lost(self, blocks: int, block_tokens: int) -> _Floats:
        """Return what each block adds to each purpose's KL: (purposes, blocks, refinements + 1)."""
        losses = np.array(self.losses)
        return np.stack(
            [law.of_blocks(blocks, block_tokens, losses) + law.of_passage(losses) / blocks for law in self.positions]
        )


def law_table(positions: Sequence[PositionLaw]) -> NDArray[np.float32]:
    """Return the array `law` of a profile: for each purpose the version, then the numbers."""
    return np.array([(LAW_VERSION, *law.numbers) for law in positions], dtype=np.float32)


def read_law_table(table: NDArray[Any] | None) -> tuple[PositionLaw, PositionLaw]:
    """Return the laws in a profile's array, the default without one. CorruptPayload for an array that is none."""
    if table is None:
        return DEFAULT_POSITIONS
    if table.shape != (len(Purpose), 1 + LAW_NUMBERS) or (table[:, 0] != LAW_VERSION).any():
        raise CorruptPayload(f"the profile's law must be of version {LAW_VERSION}, got an array of {table.shape}")
    try:
        goes_on, copies = (law_of(row) for row in table[:, 1:].astype(np.float64).tolist())
    except ValueError as error:
        raise CorruptPayload(f"the profile's law is none: {error}") from error
    return goes_on, copies


def law_of(numbers: Sequence[float]) -> PositionLaw:
    """Return the law of LAW_NUMBERS numbers in the order of `law_table`. ValueError if they are none."""
    sink, passage, *rest = numbers
    powers = (Powers(*rest[start : start + 3 or None]) for start in range(-9, 0, 3))
    return PositionLaw(sink, passage, tuple(rest[:-9]), *powers)
