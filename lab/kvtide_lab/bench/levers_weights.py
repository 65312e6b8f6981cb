"""Weights of heads by what the model says of their errors, in place of the profile's own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import UNITS
from kvtide.codec.tide.model import ONE, TideModel
from kvtide_lab.bench.levers_levels import BlockCoefficients
from kvtide_lab.bench.levers_transform import TokenBlock, principal

_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]


class Reweighed:
    """A profile's transform with other weights by head. `weigh` comes first."""

    def __init__(self, model: TideModel) -> None:
        self.model = model
        self._forth: list[_Floats] = []
        self._back: list[_Floats] = []
        self._scales: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.mflop = 0.0

    def weigh(self, finer: _Doubles) -> None:
        """Take what weights are multiplied by: (layers, 2, kv_heads)."""
        scales = []
        for group in self.model.groups:
            rows = group.matrix.astype(np.float64) / ONE
            by_head = finer[group.layer_start : group.layer_stop].reshape(-1)
            factor = np.repeat(by_head, rows.shape[1] // len(by_head))
            deviation = (rows * factor) * 2.0 ** (group.scales / UNITS)[:, None]
            turn, found = principal(deviation.T @ deviation)
            turn, found = turn[: len(rows)], found[: len(rows)]
            self._forth.append((turn * factor @ rows.T).astype(np.float32))
            self._back.append((rows / factor @ turn.T).astype(np.float32))
            scales.append(found)
        self._scales = np.stack(scales)

    def add(self, block: TokenBlock) -> None:
        """Need no blocks: covariances are the profile's."""

    def fit(self) -> None:
        """Nothing follows from blocks."""

    def forth(self, block: TokenBlock) -> BlockCoefficients:
        """Return the block by the new weights."""
        found = block.coefficients
        return found._replace(values=np.stack(self._forth) @ found.values, scales=self._scales)

    def back(self, block: TokenBlock, values: _Floats) -> _Floats:
        """Return values by the profile's weights."""
        found: _Floats = np.stack(self._back) @ values
        return found
