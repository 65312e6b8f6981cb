"""Levels along a trellis: two quantisers with interleaved values, and a state that says which of them comes next.

Quantiser 0 has the even multiples of half a step, quantiser 1 zero and the odd ones. A token's path goes through its
components in coded order; the parity of a level moves the state. Trellis-coded quantisation with eight states (Fischer,
Marcellin and Wang, 1991; JPEG 2000 part 2), chosen by error and rate together (docs/codec.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.entropy import SYMBOLS, RansCoder, RansTables
from kvtide.codec.tide.grid import (
    CLASS_UNITS,
    STATE_DIGITS,
    STATE_TOPS,
    TOP_CENTRE,
    TOP_UNITS_MIN,
    TOPS,
    TOPS_TWIN,
    TRELLIS_TABLES,
    UNITS,
)

_SIXTEENTHS_OF_HALF = 8
# What a bit is worth, in half steps squared. Least error at equal bits takes .35, 2 ln 2 times the error at many bits;
# the model minds zeros in weak components more than their error says, and loses least at .1 to .2 (docs/codec.md).
_PRICE = 0.12 * _SIXTEENTHS_OF_HALF**2
_PRICED_LEVELS, _RATE_MAX = 16, 1000
_TOTAL = 4096
# Bits that a magnitude costs which has no symbol.
_ESCAPE_BITS = 16

_Prices = NDArray[np.int16]


class Trellis(NamedTuple):
    """The part of a profile that belongs to levels along a trellis.

    tables: of thirds, then of levels by state. curve: as a profile's. rates: what the path's search takes of a class,
    quantiser and magnitude, (TOPS, 32).
    """

    tables: RansTables
    curve: NDArray[np.float32]
    rates: _Prices


def make_trellis(frequencies: NDArray[np.uint16], curve: NDArray[np.float32]) -> Trellis:
    """Return a trellis of these tables, (TRELLIS_TABLES, 32)."""
    return Trellis(RansTables(frequencies), curve, _rates(frequencies))


def read_trellis(arrays: Mapping[str, NDArray[Any]]) -> Trellis | None:
    """Return what a profile says of a trellis, None if nothing. CorruptPayload for arrays that are none; KeyError."""
    if "trellis_tables" not in arrays:
        return None
    parsed = RansCoder().parse(arrays["trellis_tables"].tobytes(), TRELLIS_TABLES)
    return make_trellis(parsed.frequencies, arrays["trellis_curve"].astype(np.float32))


def first_trellis() -> Trellis:
    """Return a trellis for Laplace-distributed values of each class' scale, to begin a fit with."""
    scales = np.exp2((TOP_UNITS_MIN + CLASS_UNITS * (np.arange(TOPS) + 0.5)) / UNITS)
    counts = np.ones((TRELLIS_TABLES, SYMBOLS))
    levels = np.arange(TOP_CENTRE + 1)
    for quantiser in (0, 1):
        upper = np.maximum(levels + 0.5 * (1 - quantiser), 0.25 + 0.25 * (1 - quantiser))
        below = np.exp(-np.sqrt(2) * upper / scales[:, None])
        shares = np.concatenate([1 - below[:, :1], -np.diff(below, axis=1) / 2], axis=1)
        here = counts[STATE_TOPS + quantiser * TOPS_TWIN :][:TOPS]
        here[:, TOP_CENTRE - levels] = here[:, TOP_CENTRE + levels] = 1 + 1e6 * shares
    whole = RansCoder().build(counts.astype(np.uint64)).frequencies
    return make_trellis(whole, np.empty((0, 3), dtype=np.float32))


def _rates(frequencies: NDArray[np.uint16]) -> _Prices:
    tops = frequencies[STATE_TOPS:STATE_DIGITS].astype(np.float64)
    levels = np.arange(1, _PRICED_LEVELS)
    either = np.maximum(tops[:, TOP_CENTRE + levels] + tops[:, TOP_CENTRE - levels], 0.5) / 2
    zero = np.maximum(tops[:, TOP_CENTRE, None], 0.5)
    bits = np.log2(_TOTAL) - np.log2(np.concatenate([zero, either], axis=1))
    bits[:, -1] = np.minimum(bits[:, -1], _ESCAPE_BITS - np.log2(np.maximum(tops[:, -1], 0.5) / _TOTAL))
    whole = np.clip(np.rint(_PRICE * bits), 0, _RATE_MAX).astype(np.int16)
    return np.ascontiguousarray(np.concatenate([whole[:TOPS_TWIN], whole[TOPS_TWIN:]], axis=1))
