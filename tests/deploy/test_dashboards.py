"""Grafana's dashboard and Prometheus' alerts ask only for metrics and labels that the server has."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.stores import nothing_pinned, opened

from kvtide.clock import ManualClock
from kvtide.outcomes import Choice, Decided, Why
from kvtide.server.metrics import Metrics, Route, SourceCollector
from kvtide.server.quotas import Quota, Quotas
from kvtide.server.scheduler import Scheduler, SchedulerSettings
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId, TierStats

DEPLOY = Path(__file__).parents[2] / "deploy"
# Labels that Prometheus itself adds.
ADDED = {"instance", "job"}


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """Return the labels of every sample that a server which has done something exposes."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.requests.labels(Route.OBJECT, "200").inc()
    metrics.count(metrics.sent, "a", 1)
    metrics.count(metrics.received, "a", 1)
    metrics.count_wait("a", 1.0)
    metrics.count_read("a")
    metrics.count_decisions("a", Namespace(bytes(32)), {Decided(Choice.LOAD, Why.IN_TIME): 1})
    quotas = Quotas(lambda: {"a": Quota(bytes_max=1)}, lambda: 0.0)
    with opened(TierStack([MemoryTier(1 << 20, ManualClock(), nothing_pinned)])) as stack:
        quotas.recount(stack, [], lambda tenant, namespace: 0)
    stored = ObjectId(Namespace(bytes(32)), BlockKey(bytes(32)))
    quotas.placed(NamedId.of(stored, Name("a", stored.namespace, 0)), 0, 1)
    sources = SourceCollector(Scheduler(SchedulerSettings(), random.Random(0)), quotas, str)
    sources.tier_stats = [TierStats("memory", *range(7))]
    registry.register(sources)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def expressions(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def alerts() -> list[str]:
    """Expressions of the alerts, but for Prometheus' own `up`."""
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"] if not rule["expr"].startswith("up{")]


def test_every_expression_names_metrics_that_exist_and_labels_that_they_have(
    dashboard: Any, alerts: list[str], labels_of: dict[str, set[str]]
) -> None:
    for expression in [*expressions(dashboard), *alerts]:
        names = re.findall(r"\bkvtide_\w+", expression)
        assert names and set(names) <= set(labels_of), expression
        known = set.intersection(*(labels_of[name] for name in names)) | ADDED
        used = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
        used |= {label for group in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)[=!]", group)}
        assert used <= known, expression


def test_every_metric_of_the_server_is_shown(dashboard: Any, labels_of: dict[str, set[str]]) -> None:
    shown = " ".join(expressions(dashboard))
    bookkeeping = ("_created", "_sum", "_count")
    unseen = {name for name in labels_of if name not in shown and not name.endswith(bookkeeping)}
    assert unseen == {"kvtide_tier_misses_total"}


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
