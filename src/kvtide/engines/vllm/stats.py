"""The connector's counters, as vLLM's log and its `/metrics` show them.

Invariant: names and labels are few and known here; nothing of a prompt, a salt or a session is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtide.clock import Clock
from kvtide.engines.settings import RequestOptions
from kvtide.store import Cache

# A cache is asked for its counters at most so often.
COUNTS_EVERY_S = 1.0
# Of a tier's bytes: what is stored beyond it soon takes the place of something else.
ROOM_SHARE = 0.75
# Tiers of this machine, whose counters are at hand.
LOCAL_TIERS = ("memory", "disk", "device")
# Between a name and the values of its labels, in a key of the counts that travel.
_SEPARATOR = "|"


class Counted(NamedTuple):
    """A counter: what it counts, and the names of its labels."""

    what: str
    labels: tuple[str, ...] = ()


COUNTED: Mapping[str, Counted] = {
    "loads": Counted("Loads that ended."),
    "loaded_tokens": Counted("Tokens that loads brought."),
    "loaded_bytes": Counted("Stored bytes that were read for them."),
    "load_seconds": Counted("Seconds from the order of a load to its end."),
    "failed_loads": Counted("Loads that did not bring all."),
    "rough_loads": Counted("Streamed loads that ended before all refinements were there."),
    "unfit_blocks": Counted("Blocks that the codec's profile does not fit, stored losslessly."),
    "unprofiled_blocks": Counted("Blocks that were stored losslessly for want of a profile."),
    "checked_blocks": Counted("Blocks that were decoded again and kept their profile's promise."),
    "streamed_kl": Counted("Sum of the KL divergences, in nats, at which rough loads ended."),
    "lookups": Counted("Requests that were looked up."),
    "lookup_seconds": Counted("Seconds that requests waited for their look-up."),
    "asked_tokens": Counted("Prompt tokens that were looked up, without those in vLLM's own prefix cache."),
    "hit_tokens": Counted("Tokens of them that were stored and worth loading."),
    "decided_tokens": Counted("Prompt tokens by what was decided about them, and why.", ("choice", "why")),
    "stored_blocks": Counted("Blocks that were stored."),
    "stored_bytes": Counted("Bytes that they take."),
    "dropped_blocks": Counted("Blocks that were not stored: no room in the queue, or a fault."),
    "damaged_blocks": Counted("Blocks that were loaded from those of their sections that were good."),
    "missed_blocks": Counted("Loads that a block ended, by what was wrong with it.", ("reason",)),
    "tier_hits": Counted("Objects that a tier was asked for and had.", ("tier",)),
    "tier_misses": Counted("Objects that a tier was asked for and had not.", ("tier",)),
    "tier_evictions": Counted("Objects that left a tier for others.", ("tier",)),
    "tier_faults": Counted("Times that a tier failed.", ("tier",)),
    "request_options": Counted("Options in requests' kv_transfer_params, used or left out.", ("what",)),
    "proofs": Counted("Starts on a device whose pages were proved, or failed their proof.", ("result",)),
    "proof_seconds": Counted("Seconds that proofs took."),
    "hints_heard": Counted("Pieces of advice about sessions that came to a cache."),
    "hints_ignored": Counted("Those of them that no tier believed or takes."),
}


def counted(name: str, *labels: str) -> str:
    """Return the key of a count."""
    assert len(labels) == len(COUNTED[name].labels), name
    return _SEPARATOR.join((name, *labels))


class CacheCounts:
    """A cache's counters since they were taken last, asked for in a thread. has_blocks: blocks are loaded there."""

    def __init__(self, cache: Cache, clock: Clock, has_blocks: bool) -> None:
        self._cache, self._clock, self._has_blocks = cache, clock, has_blocks
        # Servers and buckets would be asked what they hold.
        self._tiers = [name for name in cache.tiers.tier_names if name.partition("-")[0] in LOCAL_TIERS]
        # When it was counted last: the slowest tier of this machine has room for more than blocks.
        self.has_room = True
        self._before: dict[str, float] = {}
        self._asked_s = -COUNTS_EVERY_S
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="kvtide-counts")
        self._asked: Future[dict[str, float]] | None = None

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._asker.shutdown(wait=False, cancel_futures=True)

    def take(self) -> dict[str, float]:
        """Return what was added, by key; nothing where no answer has come since. Waits for nobody."""
        added: dict[str, float] = {}
        if self._asked is not None and self._asked.done():
            now, before = self._asked.result(), self._before
            added = {key: count - before.get(key, 0) for key, count in now.items() if count != before.get(key, 0)}
            self._before, self._asked = now, None
        now_s = self._clock.monotonic_s()
        if self._asked is None and now_s >= self._asked_s + COUNTS_EVERY_S:
            self._asked_s = now_s
            with suppress(RuntimeError):  # the process may have no more threads
                self._asked = self._asker.submit(self._cache.guarded, "count", self._all, self._before)
        return added

    def _all(self) -> dict[str, float]:
        decided = self._cache.decisions.counts()
        found: dict[str, float] = {counted("decided_tokens", *kind): count for kind, count in decided.items()}
        if self._has_blocks:
            stats = self._cache.stats(self._tiers)
            found["stored_blocks"], found["stored_bytes"] = stats.blocks_stored, stats.bytes_stored
            found["dropped_blocks"], found["damaged_blocks"] = stats.blocks_dropped, stats.blocks_damaged
            found["hints_heard"], found["hints_ignored"] = stats.hints_heard, stats.hints_ignored
            found["unfit_blocks"], found["checked_blocks"] = stats.blocks_unencodable, stats.blocks_checked
            found["unprofiled_blocks"] = stats.blocks_without_profile
            found |= {counted("missed_blocks", reason): count for reason, count in stats.misses.items()}
            for slowest in stats.tiers[-1:]:
                self.has_room = slowest.used_bytes < ROOM_SHARE * slowest.bytes_max
            for tier in stats.tiers:
                for what in ("hits", "misses", "evictions", "faults"):
                    found[counted(f"tier_{what}", tier.name)] = getattr(tier, what)
        return found


def option_counts(options: RequestOptions) -> dict[str, int]:
    """Return what a new request says for itself, by key."""
    used = not (options.may_load and options.may_store) or options.is_latest
    said = {"used": int(used), "hint": int(options.hint is not None), "bad": options.bad}
    return {counted("request_options", what): count for what, count in said.items() if count}


class LoadStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for us
    """Counts of one interval by key: sums, over workers and steps."""

    def reset(self) -> None:
        """Start over."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's, or the next step's."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log shows."""
        return {name: round(count, 4) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class LoadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters `vllm:kvtide_…_total` at vLLM's `/metrics`."""

    def __init__(self, config: Any, types: Any, label_names: list[str], label_values: dict[int, list[object]]) -> None:
        super().__init__(config, types, label_names, label_values)
        self._counters: dict[str, Any] = {}
        make = types[prometheus_client.Counter]
        for name, each in COUNTED.items():
            labels = [*label_names, *each.labels]
            self._counters[name] = make(f"vllm:kvtide_{name}", documentation=each.what, labelnames=labels)
            # Those without labels of their own are there from the start.
            for engine in label_values if not each.labels else ():
                self._counter(name, engine)

    def _counter(self, key: str, engine: int) -> Any:
        name, *labels = key.split(_SEPARATOR)
        values = [*self.per_engine_labelvalues[engine], *labels]
        return self._counters[name].labels(*values) if values else self._counters[name]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for key, count in transfer_stats_data.items():
            self._counter(key, engine_idx).inc(count)
