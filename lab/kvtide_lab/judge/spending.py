"""What to read of a hit by the loss law: the fewest bytes for a loss, or the order when time is short.

Blocks are given by how many refinements of theirs are kept: 0 is the base alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.law import LossLaw

# By what share of its value a byte is valued for text that goes on, the rest for copies: what `cheapest` tries.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def cheapest(law: LossLaw, sizes: Sequence[Sequence[int]], block_tokens: int, kl_max: float) -> list[int]:
    """Return what to keep of each block, so that few bytes hold `kl_max` for both purposes.

    sizes[i][r]: bytes of block i with r refinements, which do not fall. Never more bytes than one refinement for all
    that holds it. If not even the whole objects do, they are what is returned. ValueError for other sizes or goals.
    """
    if not sizes:
        return []
    size = np.array(sizes, dtype=np.float64)
    is_rising = size.shape == (len(sizes), len(law.losses)) and (np.diff(size, axis=1) >= 0).all()
    if block_tokens <= 0 or not kl_max > 0 or not is_rising:
        raise ValueError(f"expected rising sizes of blocks and a KL above 0, got {kl_max!r}, {sizes!r}")
    lost = law.lost(len(size), block_tokens)

    def holds(kept: _Ints) -> bool:
        return bool((lost[:, np.arange(len(kept)), kept].sum(axis=1) <= kl_max).all())

    flats = [np.full(len(size), kept) for kept in range(len(law.losses))]
    found = [next(filter(holds, flats), flats[-1])]
    for share in _SHARES:
        ladder = _ladder(size, lost, share)
        low, high = 0, len(ladder)
        while low < high:
            middle = (low + high) // 2
            is_enough = holds(np.bincount(ladder[:middle], minlength=len(size)))
            low, high = (low, middle) if is_enough else (middle + 1, high)
        kept = np.bincount(ladder[:low], minlength=len(size))
        if holds(kept):
            found.append(kept)
    best = min(found, key=lambda kept: float(np.take_along_axis(size, kept[:, None], axis=1).sum()))
    return [int(each) for each in best]


def order(law: LossLaw, sizes: Sequence[float], blocks: int, block_tokens: int) -> list[tuple[int, int]]:
    """Return (block, refinement) pairs in the order in which to fetch them when time is short.

    sizes: of a block with 0 refinements, 1, and so on, in any unit. Bases first, oldest first: a hit is a leading run.
    Then refinements by what a byte gains, which begins with the newest and the first blocks.
    """
    size = np.tile(np.array(sizes, dtype=np.float64), (blocks, 1))
    kept = [0] * blocks
    found = [(block, 0) for block in range(blocks)]
    for block in _ladder(size, law.lost(blocks, block_tokens), 0.5).tolist():
        kept[block] += 1
        found.append((block, kept[block]))
    return found


def _ladder(size: _Floats, lost: _Floats, share: float) -> _Ints:
    """Return the blocks that get one more refinement each, in the order of what a byte of it gains."""
    refinements = size.shape[1] - 1
    value = np.tensordot(np.array((share, 1 - share)) / lost[:, :, 0].sum(axis=1), lost, axes=1)
    slopes = np.zeros((len(size), refinements))
    for kept in range(refinements):
        # The best that this step or a longer one gains: a poor step must not hold up a good one after it.
        gains = value[:, kept, None] - value[:, kept + 1 :]
        slopes[:, kept] = (gains / np.maximum(size[:, kept + 1 :] - size[:, kept, None], 1e-9)).max(axis=1)
    places: _Ints = np.argsort(-np.minimum.accumulate(slopes, axis=1), axis=None, kind="stable") // max(refinements, 1)
    return places
