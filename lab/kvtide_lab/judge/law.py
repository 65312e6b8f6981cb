"""The loss law as benches and simulators ask it: the KL of answers after a hit of mixed refinements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import PositionLaw, Purpose, losses_by_block

# Losses are what five texts of six keep at most: so many times the mean of a dozen texts that deviate as texts do.
CURVE_OVER_MEAN = 1.7


@dataclass(frozen=True, slots=True)
class LossLaw:
    """Predicts the KL of answers after a hit, as five texts of six keep it; CURVE_OVER_MEAN times what is expected.

    positions: by Purpose. losses: KL with 0 refinements, 1, and so on.
    """

    positions: tuple[PositionLaw, PositionLaw]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, codec: TideCodec) -> LossLaw:
        """Return the law of a codec's profile, at its quality. ValueError without a profile."""
        model, steps = codec.model, codec.steps
        if model is None:
            raise ValueError("a loss law is a profile's, this codec has none")
        return cls(model.positions, tuple(model.quality_at(steps, each) for each in range(steps.refinements, -1, -1)))

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
        share = self.positions[Purpose.GOES_ON].curve_share(losses)
        by_block = share * law.of_blocks(len(found), block_tokens, losses)
        copied = found if passages is None else found[list(passages)]
        everywhere = np.take_along_axis(by_block, found[:, None], axis=1).sum()
        return float(everywhere + (share * law.of_passage(losses))[copied].mean())

    def lost(self, blocks: int, block_tokens: int) -> NDArray[np.float64]:
        """Return what each block adds to each purpose's KL: (purposes, blocks, refinements + 1)."""
        return losses_by_block(self.positions, self.losses, blocks, block_tokens)
