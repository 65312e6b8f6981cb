"""The server's counters, as Prometheus metrics in a registry that is passed in.

Labels are bounded: tiers, routes and reasons are few, tenants beyond `tenants_max` share one label, and so do each
tenant's namespaces beyond `namespaces_max`. Clients say what a hit is: stores ask too, and a load is several requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtide.outcomes import Decided
from kvtide.server.quotas import Quotas
from kvtide.server.scheduler import Scheduler
from kvtide.types import Namespace, TierStats

# Names that no tenant can have: tokens name tenants by letters, digits, dots and dashes.
OTHER_TENANTS = "(others)"
_NO_TENANT = "(open)"
_OTHER_NAMESPACES = "(others)"
_NO_NAMESPACE = "(none)"
# As many digits of a namespace tell it from the others.
_NAMESPACE_DIGITS = 12
# Why an object that was asked for is not here, as far as tiers remember; whatever else they say is `removed`.
_REMOVED_REASONS = frozenset({"evicted", "corrupt", "expired"})
# From one slice at 100 Gbit/s to the longest wait that a client accepts.
_WAIT_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Route(StrEnum):
    """The kind of a request. OTHER is a path that the server does not have, MALFORMED a head that is none."""

    OBJECT = "object"
    EXISTS = "exists"
    PREFETCH = "prefetch"
    LIST = "list"
    RECORDS = "records"
    HEALTH = "health"
    METRICS = "metrics"
    OTHER = "other"
    MALFORMED = "malformed"


class Metrics:
    """The counters of one server, but for what `SourceCollector` reads. Thread-safe."""

    def __init__(self, registry: CollectorRegistry, tenants_max: int = 64, namespaces_max: int = 16) -> None:
        self._tenants_max, self._namespaces_max, self.registry = tenants_max, namespaces_max, registry
        self._lock = threading.Lock()
        self._tenants: dict[str, str] = {}
        # Each tenant label's namespace labels.
        self._namespaces: dict[str, set[str]] = {}
        counter = partial(Counter, registry=registry)
        self.requests = counter("kvtide_requests", "Requests answered", ["route", "status"])
        reads = "Objects that were read or not here, once each"
        self._reads = counter("kvtide_object_reads", reads, ["tenant", "result"])
        self.sent = counter("kvtide_sent_bytes", "Body bytes sent", ["tenant"])
        self.received = counter("kvtide_received_bytes", "Body bytes received", ["tenant"])
        waits, text = "kvtide_queue_wait_seconds", "Time from a body's queueing to its first slice"
        self._waits = Histogram(waits, text, ["tenant"], buckets=_WAIT_BUCKETS_S, registry=registry)
        tokens = "Tokens of prompts' full blocks that clients loaded or recomputed"
        self._tokens = counter("kvtide_prompt_tokens", tokens, ["tenant", "namespace", "decision", "reason"])
        self.hints = counter("kvtide_hints", "Requests with advice", ["tenant"])
        self.corrupt_objects = counter("kvtide_corrupt_objects", "Objects that failed a check")
        self.connections = Gauge("kvtide_connections", "Open connections", registry=registry)

    def count(self, counter: Counter, tenant: str, count: int = 1) -> None:
        """Add to what a tenant has: `sent`, `received` or `hints`."""
        counter.labels(self.label(tenant)).inc(count)

    def count_read(self, tenant: str) -> None:
        """Count an object whose beginning was sent: once, whatever ranges of it follow."""
        self._reads.labels(self.label(tenant), "found").inc()

    def count_absent(self, tenant: str, reason: str | None) -> None:
        """Count an object that was to be read and is not here, by why it went if that is remembered."""
        why = "absent" if reason is None else reason if reason in _REMOVED_REASONS else "removed"
        self._reads.labels(self.label(tenant), why).inc()

    def count_wait(self, tenant: str, wait_s: float) -> None:
        """Count a body's wait for its first slice."""
        self._waits.labels(self.label(tenant)).observe(wait_s)

    def count_decisions(self, tenant: str, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Count tokens about which a client says that it decided."""
        label, name = self.label(tenant), namespace.hex()[:_NAMESPACE_DIGITS] or _NO_NAMESPACE
        with self._lock:
            names = self._namespaces.setdefault(label, set())
            if name not in names and len(names) >= self._namespaces_max:
                name = _OTHER_NAMESPACES
            names.add(name)
        for (choice, why), count in counts.items():
            self._tokens.labels(label, name, choice, why).inc(count)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show a figure as it is whenever somebody asks for the metrics."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def label(self, tenant: str) -> str:
        """Return the label under which a tenant is counted."""
        with self._lock:
            if tenant not in self._tenants:
                if len(self._tenants) >= self._tenants_max:
                    return OTHER_TENANTS
                self._tenants[tenant] = tenant or _NO_TENANT
            return self._tenants[tenant]


class SourceCollector(Collector):
    """Reads what counts for itself whenever somebody asks for the metrics: scheduler, quotas, and `tier_stats`."""

    def __init__(self, scheduler: Scheduler, quotas: Quotas, label: Callable[[str], str]) -> None:
        self.tier_stats: Sequence[TierStats] = ()
        self._scheduler, self._quotas, self._label = scheduler, quotas, label

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        stats = self.tier_stats
        texts = {"hits": "Reads", "misses": "Failed reads", "evictions": "Evictions", "faults": "Faults"}
        for name, text in texts.items():
            counts = {each.name: getattr(each, name) for each in stats}
            yield _family(CounterMetricFamily, f"kvtide_tier_{name}", f"{text} of a tier", "tier", counts)
        for name, text in {"objects": "Objects", "used_bytes": "Bytes", "bytes_max": "Most bytes"}.items():
            sizes = {each.name: getattr(each, name) for each in stats}
            yield _family(GaugeMetricFamily, f"kvtide_tier_{name}", f"{text} in a tier", "tier", sizes)
        flows, used = self._scheduler.flows(), self._scheduler.slots_used
        slots = {"used": used, "free": self._scheduler.settings.slots - used}
        yield _family(GaugeMetricFamily, "kvtide_send_slots", "Send slots", "state", slots)
        waiting, unsent = sum(flow.waiting for flow in flows), sum(flow.unsent_bytes for flow in flows)
        yield GaugeMetricFamily("kvtide_waiting_sends", "Bodies that wait for a slot", value=waiting)
        yield GaugeMetricFamily("kvtide_unsent_bytes", "Bytes queued and in flight", value=unsent)
        if self._quotas.is_counting:
            yield from self._stored()

    def _stored(self) -> Iterator[Metric]:
        objects, stored = dict[str, float](), dict[str, float]()
        for each in self._quotas.stored():
            label = self._label(each.tenant)
            objects[label] = objects.get(label, 0) + each.objects
            stored[label] = stored.get(label, 0) + each.bytes
        quotas = self._quotas.quotas()
        most = {tenant: quota.bytes_max for tenant, quota in quotas.items() if quota.bytes_max is not None}
        most_objects = {tenant: quota.objects_max for tenant, quota in quotas.items() if quota.objects_max is not None}
        for name, text, values in (
            ("stored_objects", "Objects that a tenant has", objects),
            ("stored_bytes", "Bytes that a tenant has", stored),
            ("quota_bytes", "Bytes that a tenant may have", most),
            ("quota_objects", "Objects that it may have", most_objects),
        ):
            yield _family(GaugeMetricFamily, f"kvtide_tenant_{name}", text, "tenant", values)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    family = kind(name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family
