"""Counts and KV events of what the scheduler's side sees of requests.

Invariant: nothing is decided here; an engine without it would load and store the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVCacheEvent

from kvtide.clock import Clock
from kvtide.engines.paged import StepCommands, WorkerReport
from kvtide.engines.settings import RequestOptions
from kvtide.engines.vllm.model import ServedRequest
from kvtide.engines.vllm.stats import CacheCounts, counted
from kvtide.store import Cache

if TYPE_CHECKING:
    from kvtide.engines.vllm.events import BlockEvents


class SchedulerWatch:
    """Counts and events of one engine's requests. Not thread-safe: the engine's scheduler calls it."""

    def __init__(self, cache: Cache, clock: Clock, events: BlockEvents | None) -> None:
        self._clock, self._events = clock, events
        self._cache_counts = CacheCounts(cache, clock, has_blocks=False)
        self._counts: Counter[str] = Counter()
        # Since when requests wait for an answer; None once they had it.
        self._asked_s: dict[str, float | None] = {}

    def options(self, options: RequestOptions) -> None:
        """Count what a new request says for itself."""
        used = not (options.may_load and options.may_store) or options.is_latest
        for what, count in (("used", int(used)), ("hint", int(options.hint is not None)), ("bad", options.bad)):
            if count:
                self._counts[counted("request_options", what)] += count

    def asked(self, request: Any) -> None:
        """A request is looked up, maybe not for the first time."""
        self._asked_s.setdefault(request.request_id, self._clock.monotonic_s())

    def answered(self, request: Any, computed_tokens: int, hit_tokens: int) -> None:
        """Its look-up has an answer."""
        started_s = self._asked_s.get(request.request_id)
        if started_s is not None:
            self._asked_s[request.request_id] = None
            asked = len(request.all_token_ids) - computed_tokens
            self._counts.update({"lookups": 1, "asked_tokens": asked, "hit_tokens": hit_tokens})
            self._counts["lookup_seconds"] += self._clock.monotonic_s() - started_s  # type: ignore[assignment]

    def ordered(self, orders: StepCommands, requests: Mapping[str, ServedRequest]) -> None:
        """A step's orders go to the workers."""
        if self._events is None:
            return
        for order in orders.stores:
            # A piece is less than a page, and routers know pages.
            if not order.is_tail:
                self._events.note(requests[order.request].request, [order.block])
        for load in orders.loads:
            if load.request in requests:
                self._events.note(requests[load.request].request, load.blocks)
                self._events.found(load.blocks)

    def heard(self, report: WorkerReport) -> None:
        """Workers report on a step."""
        if self._events is not None:
            self._events.moved(report.moves)
            self._events.lost(report.lost)

    def finished(self, request: str) -> None:
        """A request has ended, whatever became of it."""
        self._asked_s.pop(request, None)

    def reset(self) -> None:
        """Nothing that was stored is found any more."""
        if self._events is not None:
            self._events.reset()

    def close(self) -> None:
        """Count no more. Idempotent."""
        self._cache_counts.close()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what routers are to be told."""
        return self._events.take() if self._events is not None else ()

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        found: dict[str, float] = {**self._counts, **self._cache_counts.take()}
        if self._events is not None:
            found |= self._events.take_counts()
        self._counts.clear()
        return found
