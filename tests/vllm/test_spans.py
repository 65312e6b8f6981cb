"""Spans of OpenTelemetry's own package, below the span that a request came with."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvtide.clock import ManualClock

PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    trace = pytest.importorskip("opentelemetry.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return found


def test_span_has_its_parent_its_duration_and_its_values(exported: Any) -> None:
    from kvtide.engines.vllm.spans import Spans

    clock = ManualClock(100.0)
    spans = Spans(clock)
    clock.advance(0.25)
    spans.add("kvtide.load", 100.0, PARENT, blocks=3, way="aside")
    (span,) = exported.get_finished_spans()
    assert (span.name, span.end_time - span.start_time) == ("kvtide.load", 250_000_000)
    assert (format(span.parent.span_id, "016x"), format(span.context.trace_id, "032x")) == ("b" * 16, "a" * 32)
    assert dict(span.attributes) == {"kvtide.blocks": 3, "kvtide.way": "aside"}


def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtide.engines.vllm.spans import Spans

    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    Spans(ManualClock()).add("kvtide.load", 0.0, PARENT)
