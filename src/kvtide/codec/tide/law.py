"""The loss law: what a hit costs in answers whose blocks keep different refinements, and how to spend bytes by it.

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
# By what share of its value a byte is valued for text that goes on, the rest for copies: what `cheapest` tries.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class Purpose(IntEnum):
    """The text after the hit: one that goes on, or an answer that copies a passage from anywhere in the hit."""

    GOES_ON = 0
    COPIES = 1


class Powers(NamedTuple):
    """The growth of a loss with the curve's KL: its power below, between and above KNOTS."""

    fine: float
    middle: float
    coarse: float


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
        numbers = np.array((self.sink, self.passage, *self.by_distance, *self.powers), dtype=np.float64)
        if len(numbers) != LAW_NUMBERS or not np.isfinite(numbers).all() or (numbers < 0).any():
            raise ValueError(f"a position law has {LAW_NUMBERS} numbers from 0 on, got {numbers.tolist()}")
        if min(*self.powers, self.by_distance[0]) <= 0:
            raise ValueError("a position law's powers are above 0, and so is the weight of the newest tokens")

    @property
    def powers(self) -> tuple[float, ...]:
        """Return all powers: near, copied, far."""
        return (*self.near, *self.copied, *self.far)

    def of_blocks(self, blocks: int, block_tokens: int, curve: _Floats) -> _Floats:
        """Return each block's loss, oldest first, at each KL of the curve, but for the passage's."""
        ranges = np.repeat([self._grown(self.near, curve), far := self._grown(self.far, curve)], _RANGES, axis=0)
        terms = np.array((self.sink, *self.by_distance))[:, None] * np.concatenate([[far], ranges])
        found: _Floats = tokens_by_term(blocks, block_tokens) @ terms
        return found

    def of_passage(self, curve: _Floats) -> _Floats:
        """Return what the copied block's own refinement adds, at each KL of the curve."""
        return self.passage * self._grown(self.copied, curve)

    @staticmethod
    def _grown(powers: Powers, curve: _Floats) -> _Floats:
        logs, (low, high) = np.log(np.maximum(curve, 1e-30)), np.log(KNOTS)
        parts = (np.minimum(logs - low, 0), np.clip(logs - low, 0, high - low), np.maximum(logs - high, 0))
        return np.where(curve > 0, np.exp(np.array(powers) @ np.stack(parts)), 0.0)


def tokens_by_term(blocks: int, block_tokens: int) -> _Floats:
    """Return how much of the sink, and how many thousand tokens of each range of DISTANCES, each block is."""
    edges = block_tokens * np.arange(blocks + 1)
    distances = (edges[-1] - edges)[:, None] - np.array(DISTANCES)
    within = -np.diff(np.clip(distances, 0, np.append(np.diff(DISTANCES), np.inf)), axis=0) / 1000
    sinks = np.diff(np.minimum(edges, SINK_TOKENS)) / SINK_TOKENS
    return np.column_stack([sinks, within])


# Of `tide-layer` on SmolLM2-135M, eleven prefixes of 1,024 to 4,096 tokens: what a profile without a law is given.
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


@dataclass(frozen=True, slots=True)
class LossLaw:
    """Predicts the KL of answers after a hit of one codec, and chooses what to read of it.

    Blocks are given by how many refinements of theirs are kept: 0 is the base alone, `refinements` the whole object,
    `refinements + 1` a block without error. positions: by Purpose. losses and sizes: the curve's KL, and bytes in any
    unit, of a block with 0 refinements, 1, and so on.
    """

    positions: tuple[PositionLaw, PositionLaw]
    losses: tuple[float, ...]
    sizes: tuple[float, ...]

    @property
    def refinements(self) -> int:
        """Return how many refinements follow a base."""
        return len(self.losses) - 1

    def kl(
        self, kept: Sequence[int], block_tokens: int, purpose: Purpose, passages: Sequence[int] | None = None
    ) -> float:
        """Return the KL in nats of an answer's first tokens. kept: by block, oldest first; none gives 0.

        An answer that copies is the mean over copies from each block of `passages`, None for all. ValueError for what
        no block can keep.
        """
        found = np.array(kept, dtype=np.int64)
        if block_tokens <= 0 or (found < 0).any() or (found > self.refinements + 1).any():
            raise ValueError(f"blocks of tokens keep 0 to {self.refinements + 1}, got {kept!r} of {block_tokens}")
        if not len(found):
            return 0.0
        law, losses = self.positions[purpose], np.append(self.losses, 0.0)
        everywhere = np.take_along_axis(law.of_blocks(len(found), block_tokens, losses), found[:, None], axis=1).sum()
        copied = found if passages is None else found[list(passages)]
        return float(everywhere + law.of_passage(losses)[copied].mean())

    def cheapest(self, sizes: Sequence[Sequence[int]], block_tokens: int, kl_max: float) -> list[int]:
        """Return what to keep of each block, so that few bytes hold `kl_max` for both purposes.

        sizes[i][r]: bytes of block i with r refinements, `refinements + 1` numbers that do not fall. Never more bytes
        than one refinement for all that holds it. If not even the whole objects do, they are what is returned.
        """
        if not sizes:
            return []
        size = np.array(sizes, dtype=np.float64)
        is_rising = size.shape == (len(sizes), len(self.losses)) and (np.diff(size, axis=1) >= 0).all()
        if block_tokens <= 0 or not kl_max > 0 or not is_rising:
            raise ValueError(f"expected rising sizes of blocks and a KL above 0, got {kl_max!r}, {sizes!r}")
        lost = self.lost(len(size), block_tokens)
        flats = [np.full(len(size), kept) for kept in range(self.refinements + 1)]
        found = [next((flat for flat in flats if (_sums(lost, flat) <= kl_max).all()), flats[-1])]
        for share in _SHARES:
            ladder = self._ladder(size, lost, share)
            kept = np.bincount(ladder[: _steps_needed(lost, ladder, kl_max)], minlength=len(size))
            if (_sums(lost, kept) <= kl_max).all():
                found.append(kept)
        best = min(found, key=lambda kept: float(np.take_along_axis(size, kept[:, None], axis=1).sum()))
        return [int(each) for each in best]

    def order(self, blocks: int, block_tokens: int) -> list[tuple[int, int]]:
        """Return (block, refinement) pairs in the order in which to fetch them when time is short.

        Bases first, refinement 0, oldest first: a hit is a leading run. Then refinements by what a byte gains,
        which begins with the newest and the first blocks.
        """
        size = np.tile(np.array(self.sizes), (blocks, 1))
        kept = [0] * blocks
        found = [(block, 0) for block in range(blocks)]
        for block in self._ladder(size, self.lost(blocks, block_tokens), 0.5).tolist():
            kept[block] += 1
            found.append((block, kept[block]))
        return found

    def lost(self, blocks: int, block_tokens: int) -> _Floats:
        """Return what each block adds to each purpose's KL: (purposes, blocks, refinements + 1)."""
        losses = np.array(self.losses)
        return np.stack(
            [law.of_blocks(blocks, block_tokens, losses) + law.of_passage(losses) / blocks for law in self.positions]
        )

    def _ladder(self, size: _Floats, lost: _Floats, share: float) -> _Ints:
        """Return the blocks that get one more refinement each, in the order of what a byte of it gains."""
        shares = np.array((share, 1 - share)) / lost[:, :, 0].sum(axis=1)
        value = np.tensordot(shares, lost, axes=1)
        slopes = np.zeros((len(size), self.refinements))
        for kept in range(self.refinements):
            # The best that this step or a longer one gains: a poor step must not hold up a good one after it.
            gains = value[:, kept, None] - value[:, kept + 1 :]
            slopes[:, kept] = (gains / np.maximum(size[:, kept + 1 :] - size[:, kept, None], 1e-9)).max(axis=1)
        rising = -np.minimum.accumulate(slopes, axis=1)
        places: _Ints = np.argsort(rising, axis=None, kind="stable") // max(self.refinements, 1)
        return places


def _sums(lost: _Floats, kept: _Ints) -> _Floats:
    found: _Floats = lost[:, np.arange(len(kept)), kept].sum(axis=1)
    return found


def _steps_needed(lost: _Floats, ladder: _Ints, kl_max: float) -> int:
    """Return after how many steps both purposes hold a KL; all of them if they never do."""
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        kept = np.bincount(ladder[:middle], minlength=lost.shape[1])
        low, high = (low, middle) if (_sums(lost, kept) <= kl_max).all() else (middle + 1, high)
    return low


def law_table(positions: Sequence[PositionLaw]) -> NDArray[np.float32]:
    """Return the array `law` of a profile: for each purpose the version, then the numbers."""
    rows = [(LAW_VERSION, law.sink, law.passage, *law.by_distance, *law.powers) for law in positions]
    return np.array(rows, dtype=np.float32)


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
    return PositionLaw(
        sink, passage, tuple(rest[:-9]), *(Powers(*rest[start : start + 3 or None]) for start in range(-9, 0, 3))
    )
