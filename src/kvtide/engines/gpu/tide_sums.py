"""Sums over a block that a device encodes: which make loudness, which say how well the profile fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.tide.encoder import loudness_weights
from kvtide.codec.tide.model import SIXTEENTHS
from kvtide.codec.tide.promise import Seen
from kvtide.codec.tide.rows import Place, RangeRows

# Loudness is summed in sixteen places, group by group, as on the processor.
LANES = 16
END_OF_GROUP = -2
TOKEN_BYTES = 16


def loud_columns(rows: RangeRows, final_units: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the row and the weight of each column that loudness is summed over, -1 for none.

    Each group's fill whole sixteens; sixteen of END_OF_GROUP follow.
    """
    weights, columns, factors = loudness_weights(rows.scales, final_units), [], []
    for place in rows.places:
        count = place.group.shape[1] if place.group.order.size else place.stop - place.start
        numbers = np.arange(place.start, place.stop, dtype=np.int32)
        padded = np.full(-(-count // LANES) * LANES, -1, dtype=np.int32)
        padded[:count] = place.by_column(numbers, count, -1)
        columns += [padded, np.full(LANES, END_OF_GROUP, dtype=np.int32)]
        factors += [np.where(padded < 0, 0, weights[padded]), np.zeros(LANES)]
    return np.concatenate(columns), np.concatenate(factors).astype(np.float32)


class PerToken(NamedTuple):
    """What kernels note of a group's tokens; see TideSource of kernels/tide_project.cuh."""

    crossed: NDArray[np.int64]
    halvings: NDArray[np.int32]
    squares: NDArray[np.float32]


def per_token(data: NDArray[np.uint8], tokens: int) -> Iterator[PerToken]:
    """Yield what each source's tokens have, in the order of sources."""
    for row in data.reshape(-1, TOKEN_BYTES * tokens):
        crossed, halvings, squares = np.split(row, [8 * tokens, 12 * tokens])
        yield PerToken(crossed.view(np.int64), halvings.view(np.int32), squares.view(np.float32))


def seen_of(place: Place, totals: NDArray[np.int64], tokens: PerToken, is_coded: NDArray[np.bool_]) -> Seen:
    """Return what was found of a group, as native/tide_project.hpp does.

    totals: (rows, 2), sums of steps and of their squares. is_coded: of each token of the range. A token that a later
    group is too loud for counts in none; on the processor it does in those before.
    """
    sums, squares = totals[place.start : place.stop].T.astype(np.float64)
    count, energy = int(is_coded.sum()), float(squares.sum())
    error = float(tokens.squares[is_coded].sum(dtype=np.float64)) / SIXTEENTHS**2 - energy
    # A product of steps and what rounding took is in 2^-17, and counts twice.
    error -= float(tokens.crossed[is_coded].sum()) / (1 << 16)
    # Values are whole 16ths, those of halved tokens coarser.
    coarse = float(np.exp2(2.0 * tokens.halvings[is_coded]).sum())
    error += place.group.shape[1] * coarse / (12 * SIXTEENTHS**2)
    return Seen(error, energy - float((sums**2).sum()) / max(count, 1), float(count))
