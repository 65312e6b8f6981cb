"""Counts what a drafted profile's blocks code: the second pass of a fit, after which only its curves are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.profile import Profile
from kvtide.codec.tide.coding import apart_tokens, levels_of, list_section, project
from kvtide.codec.tide.fit import COSTS, rounded_tables, table_bytes, trellis_tables
from kvtide.codec.tide.grid import TABLES, THIRD, TOPS, TRELLIS_TABLES, part_sizes, top_tables
from kvtide.codec.tide.model import TideModel, first_trellis, make_trellis
from kvtide.codec.tide.section import Steps, StoredLayers

# Steps that counts are taken at, in units around the mean scale: they fill the tables of all classes.
_COUNT_UNITS = (-36, -24, -12, 0, 12, 24, 36)
_COUNT_REFINEMENTS = 3
# A block counts twice as much as one so many blocks before it, until it counts 2 to that power times the first.
_BLOCKS_TO_DOUBLE, _DOUBLINGS_MAX = 3, 6
_PULLS_SEEN_MIN = 100


class TideCounts:
    """Counts what a draft's tables would code, and how far magnitudes lie from the middle. `state` is all there is.

    Levels along a trellis follow from the tables, which follow from levels: blocks are taken with what those before
    them say, and the first ones count little.
    """

    def __init__(self, draft: Profile) -> None:
        self._model = TideModel(draft)
        self._path = _native.tide_paths()[0]
        self.state: dict[str, NDArray[Any]] = {
            "symbols": np.zeros((TABLES, 32), dtype=np.uint64),
            "pulled": np.zeros((TOPS, 4)),
            "magnitudes": np.zeros((TOPS, 4)),
        }
        if COSTS[draft.kind.removeprefix("tide-")].has_trellis:
            self.state |= {"trellis_blocks": np.zeros(1), "trellis_symbols": np.zeros((TRELLIS_TABLES, 32))}

    def add(self, meta: BlockMeta, bits: BlockBits, number: int) -> None:
        """Take a block; `number` is that of the block, so that blocks take turns with steps."""
        model, has_trellis = self._model, "trellis_blocks" in self.state
        if has_trellis:
            is_first = not self.state["trellis_blocks"][0]
            model.trellis = first_trellis() if is_first else make_trellis(trellis_tables(self.state["trellis_symbols"]))
        apart = apart_tokens(meta, bits)
        for start in range(0, meta.layout.layers, model.section_layers):
            here: Any = bits[start : start + model.section_layers]
            stored = StoredLayers(here, meta.layout.dtype, start, model.turns(meta, is_back=True))
            for refinements in (0, _COUNT_REFINEMENTS):
                units = _COUNT_UNITS[number % len(_COUNT_UNITS)] - THIRD * (refinements // 2)
                self._count(Steps(units, refinements), stored, apart)
                if has_trellis:
                    self._count(Steps(units, refinements, is_trellis=True), stored, apart)
        if has_trellis:
            self.state["trellis_blocks"] += 1

    def _count(self, steps: Steps, stored: StoredLayers, apart: NDArray[np.uint8]) -> None:
        levels = levels_of(self._model, project(self._model, steps, stored, apart, self._path), self._path)
        refinements = range(steps.refinements + 1)
        counts = [list_section(levels, steps, each, self._path)[0].symbol_counts() for each in refinements]
        if steps.is_trellis:
            doublings = min(float(self.state["trellis_blocks"][0]) / _BLOCKS_TO_DOUBLE, _DOUBLINGS_MAX)
            self.state["trellis_symbols"] += 2.0**doublings * np.sum(counts, axis=0)
            return
        self.state["symbols"] += np.sum(counts, axis=0)
        tables = top_tables(levels.rows.scales, levels.loudness.gains, steps.base_units)
        self._pull(tables, levels.values[0], levels.values[-1] / 3.0**steps.refinements)

    def _pull(self, tables: NDArray[np.uint16], steps: NDArray[np.int16], exact: NDArray[np.float64]) -> None:
        magnitude = np.minimum(np.abs(steps), 3)
        place = np.repeat(tables.astype(np.int64), part_sizes(steps.shape[1]), axis=1) * 4 + magnitude
        pulled = (np.abs(steps) - np.sign(steps) * exact) * (magnitude > 0)
        shape = (TOPS, 4)
        self.state["pulled"] += np.bincount(place.reshape(-1), pulled.reshape(-1), TOPS * 4).reshape(shape)
        self.state["magnitudes"] += np.bincount(place.reshape(-1), minlength=TOPS * 4).reshape(shape)


def finished_profile(
    draft: Profile,
    layout: BlockLayout,
    counts: Mapping[str, NDArray[Any]],
    curve: NDArray[np.float32],
    trellis_curve: NDArray[np.float32] | None = None,
) -> Profile:
    """Return the draft with tables of what was counted, and curves: rows of step units, bits, KL, rising."""
    seen = np.maximum(counts["magnitudes"], 1)
    pulls = np.clip(np.rint(16 * counts["pulled"] / seen), -8, 8) * (counts["magnitudes"] >= _PULLS_SEEN_MIN)
    arrays = dict(draft.arrays) | {
        "tables": table_bytes(rounded_tables(counts["symbols"])),
        "pulls": pulls.astype(np.int16),
        "curve": curve.astype(np.float32),
    }
    if "trellis_symbols" in counts:
        measured = curve if trellis_curve is None else trellis_curve
        arrays |= {
            "trellis_tables": table_bytes(trellis_tables(counts["trellis_symbols"])),
            "trellis_curve": measured.astype(np.float32),
        }
    return Profile.make(draft.kind, draft.model, layout, (draft.texts, draft.tokens), arrays)
