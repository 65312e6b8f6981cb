"""The connector's counters: added once, labelled, and never a reason to wait."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import Gauge, Histogram

from kvtide.clock import ManualClock
from kvtide.engines.vllm.stats import CacheCounts, LoadMetrics, LoadStats, counted
from kvtide.outcomes import Choice, Decided, Why
from kvtide.types import TierStats
from kvtide_lab.bench.services import wait_until


class Counting:
    """A cache that counts, on memory and a server; `asked` are the tiers that were."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.stored, self.may_answer = 0, threading.Event()
        self.may_answer.set()
        self.tiers = SimpleNamespace(tier_names=["memory", "http"])
        self.found: list[TierStats] = []
        self.decisions = SimpleNamespace(counts=lambda: {Decided(Choice.LOAD, Why.IN_TIME): 128})

    def guarded(self, verb: str, action: Any, fallback: Any) -> Any:
        self.may_answer.wait(20)
        return action()

    def stats(self, names: list[str]) -> Any:
        self.asked.append(names)
        counts = {"blocks_stored": self.stored, "misses": {"corrupt": 1}, "tiers": self.found}
        zeros = "bytes_stored blocks_dropped blocks_damaged blocks_unencodable hints_heard hints_ignored blocks_checked"
        return SimpleNamespace(**dict.fromkeys([*zeros.split(), "blocks_without_profile"], 0), **counts)


def _taken(counts: Any) -> dict[str, float]:
    """Take counts as the engine's steps do, until an answer has come."""
    found: list[dict[str, float]] = []
    wait_until(lambda: found.append(counts.take()) or any(found), "an answer")
    return found[-1]


@pytest.fixture
def cache() -> Counting:
    return Counting()


def test_counts_are_added_once_and_no_server_is_asked(cache: Counting) -> None:
    clock = ManualClock()
    counts = CacheCounts(cache, clock, has_blocks=True)  # type: ignore[arg-type]
    cache.stored = 3
    assert _taken(counts) == {"decided_tokens|load|in_time": 128, "stored_blocks": 3, "missed_blocks|corrupt": 1}
    cache.stored = 5
    clock.advance(2.0)
    assert _taken(counts) == {"stored_blocks": 2}
    assert cache.asked == [["memory"]] * 2
    counts.close()


@pytest.mark.parametrize(("used", "has_room"), [(75, False), (74, True)])
def test_slowest_tier_of_this_machine_says_whether_there_is_room(cache: Counting, used: int, has_room: bool) -> None:
    zeros = [0] * 4
    cache.found = [TierStats("memory", 9, 99, 99, *zeros), TierStats("disk", 1, used, 100, *zeros)]
    counts = CacheCounts(cache, ManualClock(), has_blocks=True)  # type: ignore[arg-type]
    _taken(counts)
    assert counts.has_room == has_room
    counts.close()


def test_engine_does_not_wait_for_a_store_that_is_silent(cache: Counting) -> None:
    cache.may_answer.clear()
    counts = CacheCounts(cache, ManualClock(), has_blocks=True)  # type: ignore[arg-type]
    assert [counts.take() for _ in range(3)] == [{}, {}, {}]
    cache.may_answer.set()
    assert _taken(counts)["missed_blocks|corrupt"] == 1
    counts.close()


def test_metrics_have_labels_of_their_own_beside_vllm_s() -> None:
    registry = CollectorRegistry()
    types = {
        kind: lambda *words, kind=kind, **named: kind(*words, registry=registry, **named)
        for kind in (Counter, Gauge, Histogram)
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = LoadMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    decided = counted("decided_tokens", "load", "in_time")
    both = LoadStats({"loads": 1, "tier_hits|disk": 2}).aggregate(LoadStats({"tier_hits|disk": 3, decided: 1}))
    metrics.observe(both.to_dict(), 1)
    assert registry.get_sample_value("vllm:kvtide_loads_total", {"model_name": "m", "engine": "0"}) == 0
    labels = {"model_name": "m", "engine": "1", "tier": "disk"}
    assert registry.get_sample_value("vllm:kvtide_tier_hits_total", labels) == 5
    labels = {"model_name": "m", "engine": "1", "choice": "load", "why": "in_time"}
    assert registry.get_sample_value("vllm:kvtide_decided_tokens_total", labels) == 1
    assert both.reduce() == {"loads": 1, "tier_hits|disk": 5, "decided_tokens|load|in_time": 1}
