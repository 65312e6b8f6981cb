"""Load or recompute? Decided before the first byte, from the link's rate and the engine's speed."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from kvtide.plan.base import Request

# A way that needs both link and engine must save so much of the time to be worth it.
_SAVING_MIN = 0.05


class Way(Enum):
    """What to do, and why."""

    LOAD = "loading alone is as fast: the engine is spared"
    RECOMPUTE = "the link would save less than 5 % of recomputing: it is left alone"
    BOTH = "loading from the end while computing from the start is fastest"
    UNKNOWN_LINK = "no rate is known yet: both, as the engine loses nothing by computing meanwhile"


class Decision(NamedTuple):
    """A way, and the seconds until the engine could start by each of them; inf where the rate is unknown or 0."""

    way: Way
    load_s: float
    recompute_s: float
    both_s: float


def decide(request: Request, bytes_per_s: float | None, latency_s: float = 0.0) -> Decision:
    """Choose the way to the earliest start.

    Loading counts what is needed least: bases, or smallest levels. bytes_per_s: expected rate, None if unknown.
    latency_s: until the first byte. ValueError for a negative rate or latency.
    """
    if latency_s < 0 or (bytes_per_s is not None and not bytes_per_s >= 0):
        raise ValueError(f"rate and latency must not be negative, got {bytes_per_s} bytes/s, {latency_s} s")
    recompute_s = request.prefill.seconds(0, request.tokens)
    if bytes_per_s is None:
        return Decision(Way.UNKNOWN_LINK, math.inf, recompute_s, math.inf)
    load_s, both_s = _load_s(request, bytes_per_s, latency_s)
    if both_s > (1 - _SAVING_MIN) * recompute_s:
        way = Way.RECOMPUTE
    elif both_s > (1 - _SAVING_MIN) * load_s:
        way = Way.LOAD
    else:
        way = Way.BOTH
    return Decision(way, load_s, recompute_s, both_s)


def _load_s(request: Request, bytes_per_s: float, latency_s: float) -> tuple[float, float]:
    """Return the seconds of loading all, and those until loading from the end and computing from the start meet."""
    both_s = request.prefill.seconds(0, request.tokens)
    if not bytes_per_s:
        return math.inf, both_s
    load_s = latency_s
    for chunk in reversed(request.chunks):
        load_s += chunk.sizes[0] / bytes_per_s
        both_s = min(both_s, max(load_s, request.prefill.seconds(0, chunk.start)))
    return load_s, both_s
