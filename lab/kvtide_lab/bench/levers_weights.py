"""Weights of K and V of a few layers by what the model says of their errors, in place of the profile's own.

At the best sharing of a rate each stream's error has the share of the KL that it has of the rate's slope: what a stream
has more of says how much finer it should be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.grid import UNITS, step_of
from kvtide.codec.tide.model import ONE, TideModel
from kvtide_lab.bench.levers_levels import BlockCoefficients
from kvtide_lab.bench.levers_transform import TokenBlock, principal

_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]
# Few texts don't know the shares well: a part of what they say is followed, and no share is taken for less.
FOLLOWED, SHARE_MIN = 0.6, 0.1


def rate_shares(model: TideModel, units: int, span: int) -> _Doubles:
    """Return the share of the rate's slope that K and V of each `span` layers have at a step: (streams, 2)."""
    active = np.zeros((model.profile.layers, 2))
    error = step_of(units, 0) ** 2 / 12
    for group in model.groups:
        rows = np.square(_rows(group.matrix))[4.0 ** (group.scales / UNITS) > error]
        layers = group.layer_stop - group.layer_start
        active[group.layer_start : group.layer_stop] += rows.sum(axis=0).reshape(layers, 2, -1).sum(axis=-1)
    found: NDArray[np.float64] = active.reshape(-1, span, 2).sum(axis=1)
    found /= found.sum()
    return found


def possible_kl(kl_shares: _Doubles, rates: _Doubles) -> float:
    """Return the KL over today's, at equal rate, if errors were shared as both say."""
    shares = _bounded(kl_shares)
    return float(np.exp(-(rates * np.log(rates / shares)).sum()))


def _bounded(kl_shares: _Doubles) -> _Doubles:
    shares = np.maximum(kl_shares, SHARE_MIN * kl_shares.mean())
    found: _Doubles = shares / shares.sum()
    return found


class Reweighed:
    """A profile's transform with other weights by stream. `weigh` comes first."""

    def __init__(self, model: TideModel, span: int) -> None:
        """span: layers of a stream, a divisor of a group's."""
        self._model, self.span = model, span
        self._forth: list[_Floats] = []
        self._back: list[_Floats] = []
        self._scales: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.mflop = 0.0

    def weigh(self, kl_shares: _Doubles, units: int) -> None:
        """Take the share of the KL that each stream's error has at a step: (streams, 2)."""
        rates, scales = rate_shares(self._model, units, self.span), []
        factors = (_bounded(kl_shares) / rates) ** (FOLLOWED / 2)
        factors /= np.exp((np.log(factors) * rates).sum())
        by_layer = np.repeat(factors, self.span, axis=0)
        for group in self._model.groups:
            rows = _rows(group.matrix)
            values = rows.shape[1] // (2 * (group.layer_stop - group.layer_start))
            factor = np.repeat(by_layer[group.layer_start : group.layer_stop].reshape(-1), values)
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


def _rows(matrix: NDArray[np.int16]) -> _Doubles:
    return matrix.astype(np.float64) / ONE
