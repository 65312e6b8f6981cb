"""Counts of a worker's loads and stores, by name and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtide.engines.paged.loads import PageLoad
from kvtide.store.load import LoadReport


class WorkerCounts:
    """Counts since they were last taken. Not thread-safe.

    Of ended loads: loads, tokens, bytes, seconds, those that were rough; of each group, its blocks by result; and
    blocks that a profile did not fit, that had none, or that were checked.
    """

    def __init__(self) -> None:
        # By name and labels.
        self._counts: dict[tuple[str, ...], float] = {}
        # Totals of blocks and their profiles that were told.
        self._told: Counter[str] = Counter()

    def add(self, **counts: float) -> None:
        """Add to counts by name."""
        for name, count in counts.items():
            self._counts[name,] = self._counts.get((name,), 0) + count

    def add_group(self, group: str, what: str, blocks: int = 1, size: int = 0) -> None:
        """Add blocks of a group (rows, pieces of them as tail, states) by outcome, and bytes read."""
        for key, count in ((("group_blocks", group, what), blocks), (("group_bytes", group), size)):
            if count:
                self._counts[key] = self._counts.get(key, 0) + count

    def add_load(self, load: PageLoad, report: LoadReport, has_states: bool) -> None:
        """Add a load that ended, and what it brought of each group."""
        is_whole = load.is_whole(report.blocks)
        self.add(loads=1, loaded_bytes=report.stored_bytes, failed_loads=not is_whole)
        self.add_group("rows", "loaded", report.blocks, report.stored_bytes - load.state_bytes)
        self.add_group("tail", "loaded", load.pieces)
        if is_whole:
            self.add_group("states", "loaded", int(has_states), load.state_bytes)
            return
        has_rows = report.blocks == len(load.order.blocks)
        self.add_group("states" if load.missed_states else "tail" if has_rows else "rows", "missed")

    def take(self, totals: Mapping[str, int]) -> dict[tuple[str, ...], float]:
        """Return what was added since the last call, and by how much `totals` have grown."""
        found, self._counts = self._counts, {}
        found |= {(name,): count - self._told[name] for name, count in totals.items() if count > self._told[name]}
        self._told = Counter(totals)
        return found
