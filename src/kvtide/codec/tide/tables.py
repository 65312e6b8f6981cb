"""Entropy tables of counts. A table that saw little leans on its neighbours; whatever a value is, it has a code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.codec.entropy import RansCoder, RansTables
from kvtide.codec.tide.grid import CONTEXTS, STATE_CONTEXTS, STATE_DIGITS, STATE_TOPS, TOPS

_COUNT_MAX = 1 << 40


def rounded_tables(symbols: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the frequencies of rounded levels' tables, or those of thirds."""
    counts = symbols.astype(np.float64)
    tops, digits = _leaning(counts[:TOPS]), _leaning(counts[TOPS:].reshape(-1, CONTEXTS, 32))
    return _frequencies(tops, digits)


def trellis_tables(symbols: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return the frequencies of all tables of levels along a trellis."""
    thirds, tops, digits = np.split(symbols, [STATE_TOPS, STATE_DIGITS])
    by_quantiser = [_leaning(each) for each in np.split(tops, 2)]
    by_context = [_leaning(each.reshape(-1, STATE_CONTEXTS, 32)) for each in np.split(digits, 2)]
    states = _frequencies(np.concatenate(by_quantiser), np.concatenate(by_context))
    return np.concatenate([rounded_tables(thirds), states])


def table_bytes(frequencies: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return tables as profiles have them."""
    return np.frombuffer(RansTables(frequencies).to_bytes(), dtype=np.uint8)


def _frequencies(tops: NDArray[np.float64], digits: NDArray[np.float64]) -> NDArray[np.uint16]:
    digits = digits + np.where(np.arange(32) < 3, 1.0, 0.0)
    whole = np.rint(64 * np.concatenate([(tops + 0.02).reshape(-1, 32), digits.reshape(-1, 32)]))
    return RansCoder().build(np.minimum(whole, float(_COUNT_MAX)).astype(np.uint64)).frequencies


def _leaning(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts with a few of the classes beside each, more where a class saw little."""
    total = counts.sum(axis=-1, keepdims=True) + 1
    shares = counts / total
    beside = (np.roll(shares, 1, axis=0) + np.roll(shares, -1, axis=0)) / 2
    leaning: NDArray[np.float64] = counts + beside * np.minimum(50.0, 2000.0 / total)
    return leaning
