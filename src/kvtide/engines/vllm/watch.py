"""Counts, spans and KV events of what the scheduler's side sees of requests.

Invariant: nothing is decided here; an engine without it would load and store the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import KVCacheEvent

from kvtide.clock import Clock
from kvtide.engines.paged import StepCommands, WorkerReport
from kvtide.engines.settings import RequestOptions
from kvtide.engines.vllm.request import ServedRequest
from kvtide.engines.vllm.spans import Spans
from kvtide.engines.vllm.stats import CacheCounts, counted
from kvtide.store import Cache

if TYPE_CHECKING:
    from kvtide.engines.vllm.events import BlockEvents

# A load between steps, which ends when a worker says so.
_ASIDE = "aside"


class _Ordered(NamedTuple):
    """A load, or one step's stores of a request, until a worker reports on that step or the load."""

    started_s: float
    headers: Mapping[str, str] | None
    values: Mapping[str, int | str]

    @property
    def is_aside(self) -> bool:
        """Tell whether it is a load between steps."""
        return self.values.get("way") == _ASIDE


class SchedulerWatch:
    """Counts, spans and events of one engine's requests. Not thread-safe: the engine's scheduler calls it."""

    def __init__(self, cache: Cache, clock: Clock, events: BlockEvents | None) -> None:
        self._clock, self._events, self._spans = clock, events, Spans(clock)
        self._cache_counts = CacheCounts(cache, clock, has_blocks=False)
        self._counts: Counter[str] = Counter()
        # Since when requests wait for an answer; None once they had it.
        self._asked_s: dict[str, float | None] = {}
        # By request, step and name.
        self._ordered: dict[tuple[str, int, str], _Ordered] = {}

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
        if started_s is None:
            return
        self._asked_s[request.request_id] = None
        asked = len(request.all_token_ids) - computed_tokens
        waited_s = self._clock.monotonic_s() - started_s
        self._counts.update({"lookups": 1, "asked_tokens": asked, "hit_tokens": hit_tokens})
        self._counts["lookup_seconds"] += waited_s  # type: ignore[assignment]  # a sum of floats
        self._spans.add("kvtide.lookup", started_s, request.trace_headers, asked_tokens=asked, hit_tokens=hit_tokens)

    def ordered(self, orders: StepCommands, requests: Mapping[str, ServedRequest]) -> None:
        """A step's orders go to the workers."""
        stores = dict[str, int]()
        for order in orders.stores:
            stores[order.request] = stores.get(order.request, 0) + 1
            # A piece is less than a page, and routers know pages.
            if self._events is not None and not order.is_tail:
                self._events.note(requests[order.request].request, [order.block])
        for name, blocks in stores.items():
            self._add(requests, name, orders.step, "kvtide.store", {"blocks": blocks})
        for load in orders.loads:
            way = "step" if load.is_in_step else _ASIDE
            self._add(requests, load.request, orders.step, "kvtide.load", {"blocks": len(load.blocks), "way": way})
            if self._events is not None and load.request in requests:
                self._events.note(requests[load.request].request, load.blocks)
                self._events.found(load.blocks)

    def _add(
        self, requests: Mapping[str, ServedRequest], request: str, step: int, name: str, values: Mapping[str, int | str]
    ) -> None:
        if request in requests:
            headers = requests[request].request.trace_headers
            self._ordered[request, step, name] = _Ordered(self._clock.monotonic_s(), headers, values)

    def heard(self, report: WorkerReport, loaded: Collection[str]) -> None:
        """Workers report on a step; loaded: requests whose loads between steps have ended."""
        if self._events is not None:
            self._events.moved(report.moves)
            self._events.lost(report.lost)
        for (request, step, name), each in list(self._ordered.items()):
            if request in loaded if each.is_aside else step <= report.step:
                del self._ordered[request, step, name]
                is_whole = "no" if request in report.failed else "yes"
                self._spans.add(name, each.started_s, each.headers, is_whole=is_whole, **each.values)

    def finished(self, request: str) -> None:
        """A request has ended, whatever became of it. What its last step stores is still heard of."""
        self._asked_s.pop(request, None)
        for key in [key for key, each in self._ordered.items() if key[0] == request and each.is_aside]:
            del self._ordered[key]

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
