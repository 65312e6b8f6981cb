"""What a server counts."""

import random
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from kvtide.errors import RequestRefused
from kvtide.outcomes import Choice, Decided, Why
from kvtide.server.http import BodyBuffers
from kvtide.server.metrics import Metrics, SourceCollector
from kvtide.server.quotas import Quotas
from kvtide.server.scheduler import Scheduler, SchedulerSettings
from kvtide.tier.buffers import is_aligned
from kvtide.types import Namespace, TierStats

NAMESPACE = Namespace(b"\x11" * 32)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry, tenants_max=2)


def test_absent_objects_count_by_reason_and_waits_by_length(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.count_read("a")
    for reason in (None, "evicted", "anything"):
        metrics.count_absent("a", reason)
    metrics.count_wait("a", 0.015)
    for result in ("found", "absent", "evicted", "removed"):
        assert registry.get_sample_value("kvtide_object_reads_total", {"result": result, "tenant": "a"}) == 1
    for least, count in (("0.01", 0), ("0.02", 1)):
        assert registry.get_sample_value("kvtide_queue_wait_seconds_bucket", {"le": least, "tenant": "a"}) == count


def test_tenants_beyond_the_bound_share_a_label(registry: CollectorRegistry, metrics: Metrics) -> None:
    for number in range(1000):
        metrics.count(metrics.sent, f"tenant-{number}", 1)
        metrics.count_wait(f"tenant-{number}", 0.1)
    for tenant, count in (("tenant-0", 1), ("tenant-1", 1), ("(others)", 998)):
        assert registry.get_sample_value("kvtide_sent_bytes_total", {"tenant": tenant}) == count
    assert generate_latest(registry).count(b"kvtide_sent_bytes_total{") == 3


def test_namespaces_beyond_the_bound_share_a_label(registry: CollectorRegistry, metrics: Metrics) -> None:
    for number in range(100):
        namespace = Namespace(number.to_bytes(32, "little"))
        metrics.count_decisions("a", namespace, {Decided(Choice.LOAD, Why.IN_TIME): 1})
    metrics.count_decisions("b", NAMESPACE, {Decided(Choice.LOAD, Why.IN_TIME): 1})
    body = generate_latest(registry).decode()
    assert body.count("kvtide_prompt_tokens_total{") == 18
    shared = 'kvtide_prompt_tokens_total{decision="load",namespace="(others)",reason="in_time",tenant="a"} 84.0'
    assert shared in body
    assert shared.replace("(others)", "1" * 12).replace('"a"} 84', '"b"} 1') in body


def test_tiers_and_scheduler_are_read_when_asked(registry: CollectorRegistry) -> None:
    scheduler = Scheduler(SchedulerSettings(slots=3), random.Random(0))
    stats = [TierStats("memory", 2, 500, 1000, 7, 3, 4, 1)]
    sources = SourceCollector(scheduler, Quotas(dict, lambda: 0.0), str)
    sources.tier_stats = stats
    registry.register(sources)
    scheduler.enqueue("a", "a1", 600 << 10, 0.0)
    scheduler.enqueue("a", "a1", 100, 0.0)
    scheduler.grant(0.0)
    body = generate_latest(registry).decode()
    for line in (
        'kvtide_tier_hits_total{tier="memory"} 7.0',
        'kvtide_tier_evictions_total{tier="memory"} 4.0',
        'kvtide_tier_used_bytes{tier="memory"} 500.0',
        'kvtide_send_slots{state="used"} 1.0',
        'kvtide_send_slots{state="free"} 2.0',
        "kvtide_waiting_sends 1.0",
        "kvtide_unsent_bytes 614500.0",
    ):
        assert line in body
    stats[0] = msgspec.structs.replace(stats[0], hits=8)
    assert 'kvtide_tier_hits_total{tier="memory"} 8.0' in generate_latest(registry).decode()


# Buffers for bodies: one cap over all sizes, nothing lost.


def test_buffer_is_aligned_and_used_again() -> None:
    buffers = BodyBuffers(1 << 20)
    first = buffers.take(100_000)
    assert len(first) >= 100_000 and is_aligned(first)
    buffers.give_back(first)
    assert buffers.take(100_000) is first


def test_cap_holds_over_sizes_and_frees_what_nobody_uses() -> None:
    buffers = BodyBuffers(1 << 20)
    small = [buffers.take(64 << 10) for _ in range(16)]
    with pytest.raises(RequestRefused, match="every buffer"):
        buffers.take(1)
    for buffer in small:
        buffers.give_back(buffer)
    assert buffers.take(1 << 20)
    buffers.check()


def test_memory_that_the_machine_refuses_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> memoryview:
        raise MemoryError

    buffers = BodyBuffers(1 << 20)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("kvtide.server.http.shares.aligned_buffer", refuse)
        buffers.take(1 << 20)
    assert buffers.lent_bytes == 0 and buffers.take(1 << 20)


def test_tenant_has_its_share_and_no_more() -> None:
    buffers = BodyBuffers(1 << 20, 256 << 10)
    held = [buffers.take(64 << 10, "a") for _ in range(4)]
    with pytest.raises(RequestRefused, match="of a tenant"):
        buffers.take(1, "a")
    other, nobody = buffers.take(256 << 10, "b"), buffers.take(512 << 10)
    with pytest.raises(RequestRefused, match="every buffer"):
        buffers.take(1, "c")
    for buffer in held:
        buffers.give_back(buffer, "a")
    buffers.give_back(nobody)
    assert other and buffers.take(200 << 10, "a")
    buffers.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 << 20)), max_size=60))
def test_any_order_keeps_the_accounts(steps: list[tuple[bool, int]]) -> None:
    buffers, lent = BodyBuffers(4 << 20), []
    for is_take, size in steps:
        if is_take:
            with suppress(RequestRefused):
                lent.append(buffers.take(size))
                assert len(lent[-1]) >= size
        elif lent:
            buffers.give_back(lent.pop(size % len(lent)))
        buffers.check()
        assert buffers.lent_bytes == sum(map(len, lent))
