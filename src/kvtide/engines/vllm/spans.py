"""OpenTelemetry's spans of a request's look-up, load and stores, below the request's own span.

Invariant: without the package, or where nobody set up tracing, nothing is made; no token, salt or session is in them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvtide.clock import Clock

_NS = 10**9


class Spans:
    """Makes spans from the times of this process's clock. `is_on` says whether anyone hears of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._api: Any = None
        try:
            self._api = importlib.import_module("opentelemetry.trace")
        except ImportError:
            return
        self._contexts = importlib.import_module("opentelemetry.trace.propagation.tracecontext")

    def add(self, name: str, started_s: float, headers: Mapping[str, str] | None, **values: int | str) -> None:
        """Add a span that ends now. headers: those of the request, which say what span it belongs to."""
        if self._api is None:
            return
        # Whoever sets tracing up may do so after us.
        tracer = self._api.get_tracer("kvtide")
        context = self._contexts.TraceContextTextMapPropagator().extract(headers) if headers else None
        stop_ns = int(self._clock.wall_s() * _NS)
        start_ns = stop_ns - int((self._clock.monotonic_s() - started_s) * _NS)
        attributes = {f"kvtide.{key}": value for key, value in values.items()}
        tracer.start_span(name, context, start_time=start_ns, attributes=attributes).end(stop_ns)
