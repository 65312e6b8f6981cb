"""Loads of which a share of the tokens comes exactly and the rest rough, where that is faster than all of it.

Invariant: an engine's pages are complete; who asks is told whether any of them is rough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.engines.ways import RestoreWay, Ways
from kvtide.store import Cache
from kvtide.store.load import LoadReport
from kvtide.store.load.sparse import Sparse


class PartReport(NamedTuple):
    """A load's report, and whether some of what it brought is rough."""

    load: LoadReport
    is_rough: bool


class PartLoads:
    """Loads of one engine, in part or whole by what either took here. Any thread may load."""

    def __init__(self, cache: Cache, share: float, clock: Clock) -> None:
        """share: of each block's tokens, those to be exact."""
        self._cache = cache
        self._share = share
        self._clock = clock
        self._ways = Ways()

    def load(
        self,
        metas: Sequence[BlockMeta],
        sink: Callable[[int, BlockBits], None],
        deadline_s: float,
        whole: Callable[[int], LoadReport],
    ) -> PartReport:
        """Load blocks, with their leading chunks exact where they are stored so, which do not wait to be stored.

        sink: gets those, and may get some behind them. whole: loads the blocks from a number on, exactly.
        """
        started_s, is_near = self._clock.monotonic_s(), self._cache.is_near([metas[0].id])
        part = LoadReport(0, 0, None)
        if self._ways.choose(is_near, started_s) is RestoreWay.PART:
            sparse = Sparse(sink, int(self._share * metas[0].layout.tokens), rest_follows=True)
            with closing(sparse):
                part = self._cache.load(metas, sparse, deadline_s)
        report = part
        if part.blocks < len(metas):
            report = whole(part.blocks)
            both = (report.blocks + part.blocks, report.stored_bytes + part.stored_bytes)
            report = report._replace(blocks=both[0], stored_bytes=both[1])
        if part.blocks in (0, len(metas)) and report.reason is None:
            way, now_s = RestoreWay.PART if part.blocks else RestoreWay.WHOLE, self._clock.monotonic_s()
            self._ways.note(way, is_near, len(metas) * metas[0].layout.tokens, now_s - started_s, now_s)
        return PartReport(report, part.blocks > 0)
