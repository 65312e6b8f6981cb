"""Fits a profile of static distributions from blocks of a model's cache. Pure: the caller runs the model.

Memory is bounded by the histograms: about 2 KB for each (layer, channel, level), whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, check_bits
from kvtide.codec.base import layer_views
from kvtide.codec.profile import Profile
from kvtide.codec.published.cachegen import ANCHOR_HALF, GROUP_TOKENS, LEVELS, delta_deviation, layer_step
from kvtide.codec.published.chunkwise import CHUNKWISE_LEVELS, half_bins
from kvtide.codec.published.integers import VALUE_MAX, Integers, fit_distribution, value_counts
from kvtide.codec.published.shared import distribution_arrays, split

# Yields (name of the distribution, numbers of one of K and V of a layer: (channels, symbols)).
_Splitter = Callable[["ProfileFitter", int, int, NDArray[np.uint8]], Iterator[tuple[str, Integers]]]


def _cachegen(
    fitter: ProfileFitter, layer: int, which: int, values: NDArray[np.uint8]
) -> Iterator[tuple[str, Integers]]:
    layout = fitter.layout
    deviation = float(fitter.deviation[layer, which])
    for level in LEVELS:
        step = float(np.float32(layer_step(deviation, layer, layout.layers, level)))
        found = split(values, layout, GROUP_TOKENS, ANCHOR_HALF, step)
        yield f"delta.{level}", found.deltas
    yield "anchor", found.anchors


def _chunkwise(
    fitter: ProfileFitter, layer: int, which: int, values: NDArray[np.uint8]
) -> Iterator[tuple[str, Integers]]:
    layout = fitter.layout
    for level in CHUNKWISE_LEVELS:
        yield f"share.{level}", split(values, layout, 1, half_bins(layer, which, layout.layers, level)).anchors


_SPLITTERS: dict[str, _Splitter] = {"cachegen": _cachegen, "chunkwise": _chunkwise}
PROFILE_KINDS = tuple(_SPLITTERS)


class ProfileFitter:
    """Counts what a codec would code, block by block, and makes tables of the counts in the end.

    Steps follow the standard deviations of the first text's blocks, which must be given to `scale` before `add`.
    """

    def __init__(self, kind: str, model: str, layout: BlockLayout) -> None:
        if kind not in _SPLITTERS:
            raise ValueError(f"profiles are made for {', '.join(_SPLITTERS)}, got {kind!r}")
        self.layout = layout
        self.deviation: NDArray[np.float32] = np.zeros((layout.layers, 2), dtype=np.float32)
        self._kind = kind
        self._model = model
        self._blocks = 0
        self._counts: dict[str, NDArray[np.uint32]] = {}

    def scale(self, blocks: list[BlockBits]) -> None:
        """Set the steps from the root mean square of these blocks' deviations. ValueError for none."""
        if not blocks:
            raise ValueError("calibration needs at least one full block, got none")
        squares = np.zeros((self.layout.layers, 2))
        for bits in blocks:
            for layer, values in enumerate(layer_views(bits)):
                for which, half in enumerate(values.reshape(2, -1)):
                    squares[layer, which] += delta_deviation(half, self.layout) ** 2
        self.deviation = np.sqrt(squares / len(blocks)).astype(np.float32)

    def add(self, bits: BlockBits) -> None:
        """Count a block. ValueError if it is not of the layout; UnencodableBlock if a value is not finite."""
        check_bits(bits, self.layout)
        assert self.deviation.any(), "scale before add"
        for layer, values in enumerate(layer_views(bits)):
            for which, half in enumerate(values.reshape(2, -1)):
                for name, numbers in _SPLITTERS[self._kind](self, layer, which, half):
                    self._count(name, layer, which, numbers)
        self._blocks += 1

    def _count(self, name: str, layer: int, which: int, numbers: Integers) -> None:
        shape = (self.layout.layers, 2, len(numbers), 2 * VALUE_MAX + 1)
        if name not in self._counts:
            self._counts[name] = np.zeros(shape, dtype=np.uint32)
        self._counts[name][layer, which] += value_counts(numbers).astype(np.uint32)

    def profile(self, texts: int) -> Profile:
        """Return the profile of all blocks counted. ValueError if there were none."""
        if not self._blocks:
            raise ValueError("calibration needs at least one full block, got none")
        arrays: dict[str, NDArray[Any]] = {"deviation": self.deviation}
        for name, counts in self._counts.items():
            by_layer = [
                fit_distribution(layer.reshape(-1, layer.shape[-1]).astype(np.uint64), 0, is_open=True)
                for layer in counts
            ]
            arrays |= distribution_arrays(name, by_layer)
        tokens = self._blocks * self.layout.tokens
        return Profile.make(self._kind, self._model, self.layout, (texts, tokens), arrays)
