"""Costs and losses of codecs, as measured on SmolLM2-135M: the only place where simulations take quality from.

Bits for each KV element, and KL in nats of the next-token distribution, 12 texts of 1,536 tokens unless said otherwise.
A larger model may differ; what is compared is policies on the same curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvtide.codec.tide.law import DEFAULT_POSITIONS
from kvtide_lab.judge.law import LossLaw


@dataclass(frozen=True, slots=True)
class Curve:
    """A codec's steps: bits of each of them alone, KL and speed of decoding with all up to it (levels: with it alone).

    decode: 10^9 elements a second of one core, by CPU time (a shared Xeon with AVX-512, one block of 256 tokens).
    """

    name: str
    is_layered: bool
    bits: tuple[float, ...]
    kl: tuple[float, ...]
    decode: tuple[float, ...]
    source: str

    def law(self) -> LossLaw:
        """Return the law of its losses by position: every codec's by the weights that were measured on tide's."""
        return LossLaw(DEFAULT_POSITIONS, self.kl)

    def order(self, blocks: int, block_tokens: int) -> list[tuple[int, int]]:
        """Return (block, refinement) pairs in the order in which to fetch them when time is short.

        Bases first, oldest first: a hit is a leading run. Then refinements by what a byte gains, for text that goes
        on and for copies alike, which begins with the newest and the first blocks.
        """
        size, lost = (
            np.cumsum(self.bits) if self.is_layered else np.array(self.bits),
            self.law().lost(blocks, block_tokens),
        )
        steps = len(size) - 1
        value = np.tensordot(np.array((0.5, 0.5)) / lost[:, :, 0].sum(axis=1), lost, axes=1)
        slopes = np.zeros((blocks, steps))
        for kept in range(steps):
            # The best that this step or a longer one gains: a poor step must not hold up a good one after it.
            gains = value[:, kept, None] - value[:, kept + 1 :]
            slopes[:, kept] = (gains / np.maximum(size[kept + 1 :] - size[kept], 1e-9)).max(axis=1)
        places = np.argsort(-np.minimum.accumulate(slopes, axis=1), axis=None, kind="stable")
        found, refined = [(block, 0) for block in range(blocks)], [0] * blocks
        for block in (places // max(steps, 1)).tolist():
            refined[block] += 1
            found.append((block, refined[block]))
        return found


CURVES: Mapping[str, Curve] = MappingProxyType(
    {
        "tide": Curve(
            "tide",
            is_layered=True,
            bits=(0.369, 0.617, 1.001, 1.181),
            kl=(0.103, 0.00966, 0.00124, 0.00038),
            decode=(0.13, 0.075, 0.055, 0.043),
            source="tide-deep:0.00038, made for engines on a GPU: curve in the shipped profile smollm2-135m.tide-deep, "
            "as its calibration measured it, at 12, -7, -26 and -45 units: each step a third of the one before",
        ),
        # The same qualities stored one beside the other, to tell the planner's gain from the codec's.
        "tide-levels": Curve(
            "tide-levels",
            is_layered=False,
            bits=(0.369, 0.986, 1.987, 3.168),
            kl=(0.103, 0.00966, 0.00124, 0.00038),
            decode=(0.13, 0.075, 0.055, 0.043),
            source="tide, each quality as an object of its own",
        ),
        "cachegen": Curve(
            "cachegen",
            is_layered=False,
            bits=(2.60, 3.45, 4.33, 5.22),
            kl=(0.07399, 0.01315, 0.00335, 0.00087),
            decode=(0.12, 0.12, 0.10, 0.065),
            source="kvtide-lab bench codec-quality, cachegen levels 4 to 1, shared tables, rans",
        ),
        "cachegen-apart": Curve(
            "cachegen-apart",
            is_layered=True,
            bits=(0.679, 0.405, 0.405, 0.811, 0.811, 0.811, 0.405),
            kl=(0.525, 0.462, 0.403, 0.234, 0.107, 0.0405, 0.00337),
            decode=(0.19, 0.18, 0.13, 0.12, 0.12, 0.11, 0.10),
            source="cachegen level 2, shared tables, decoded with the deltas of positions up to 0, 1, 2, 4, 6, 8, 9 in "
            "their groups; 6 texts",
        ),
    }
)
