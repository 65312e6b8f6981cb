"""Made-up traces: workloads on which single policies are known to fail. Equal seeds give equal traces.

`templates`: short prompts from few templates, most asked once. `drift`: what is popular changes. `loop`: a scan that
comes round. `sessions`: turns after thinking, some of which never go on. `tenants`: three of these at a time, whose
ways change. `frozen`: templates under a clock that stands still.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType

from kvtide_lab.sim.workload import Trace, TraceSource, build_trace

MADE_PREFIX = "made:"
REQUESTS = 6000
_BLOCK_TOKENS = 256
_SEED = 29


def made_trace(name: str, requests: int = REQUESTS, seed: int = _SEED) -> Trace:
    """Return a made-up trace. ValueError for an unknown name; the message lists the known ones."""
    if name not in MADE:
        raise ValueError(f"unknown made-up trace {name!r}, expected one of {', '.join(MADE)}")
    sources = itertools.islice(MADE[name](random.Random(f"{name} {seed}")), requests)
    return build_trace(MADE_PREFIX + name, _BLOCK_TOKENS, sources)


def _templates(rng: random.Random) -> Iterator[TraceSource]:
    """A request a second: a template by Zipf's law, one of its forms, and a question that few repeat."""
    shapes = [(rng.randint(1, 6), rng.randint(1, 8)) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(shapes))]
    at_s = 0.0
    while True:
        at_s += rng.expovariate(1.0)
        template = rng.choices(range(len(shapes)), weights)[0]
        length, forms = shapes[template]
        form, question = rng.randrange(forms), int(rng.paretovariate(0.6))
        yield TraceSource(at_s, "templates", [*((template, i) for i in range(length)), ("form", form), question])


def _drift(rng: random.Random) -> Iterator[TraceSource]:
    """Prompts by Zipf's law; each hour another part of them is the popular one."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(0.5)
        chosen = int(rng.paretovariate(0.7)) + 40 * int(at_s / 1800)
        yield TraceSource(at_s, "drift", [("shared", chosen % 7), *((chosen, i) for i in range(1 + chosen % 9))])


def _loop(rng: random.Random) -> Iterator[TraceSource]:
    """Four hundred documents read in turn, a few of them read at other times too."""
    for number in itertools.count():
        document = rng.randrange(40) if rng.random() < 0.2 else number % 400
        yield TraceSource(float(number), "loop", [(document, i) for i in range(8)])


def _sessions(rng: random.Random) -> Iterator[TraceSource]:
    """Sessions that start every twelve seconds; questions end soon, work goes on with tools and people between."""
    turns: list[tuple[float, int, list[Hashable], bool]] = []
    start_s = 0.0
    for number in itertools.count():
        while turns and turns[0][0] < start_s:
            at_s, session, blocks, is_work = heapq.heappop(turns)
            yield TraceSource(at_s, "sessions", blocks)
            if rng.random() < (0.9 if is_work else 0.35):
                more = [(session, len(blocks), i) for i in range(rng.randint(1, 3) if is_work else rng.randint(1, 12))]
                gap_s = rng.lognormvariate(2.5 if is_work and rng.random() < 0.8 else 5.0, 0.8)
                heapq.heappush(turns, (at_s + gap_s, session, [*blocks, *more], is_work))
        start_s += rng.expovariate(1 / 12)
        head: list[Hashable] = ["system", ("tools", number % 3)]
        is_work = rng.random() < 0.2
        first = [(number, i) for i in range(rng.randint(2, 10))]
        heapq.heappush(turns, (start_s, number, [*head, *first], is_work))


def _tenants(rng: random.Random) -> Iterator[TraceSource]:
    """Three tenants at a time, of whom each is another kind of load; every two hours they change their ways."""
    kinds = [_sessions, _templates, _loop]
    for hours in itertools.count(step=2):
        loads = [kind(random.Random(rng.random())) for kind in kinds]
        for tenant, load in enumerate(loads):
            part = itertools.takewhile(lambda each: each.at_s < 1200, load)
            yield from (
                TraceSource(3600 * hours + 6 * each.at_s, f"tenant {tenant}", [(hours // 4, tenant), *each.blocks])
                for each in part
            )
        kinds = [*kinds[1:], kinds[0]]


def _frozen(rng: random.Random) -> Iterator[TraceSource]:
    yield from (TraceSource(0.0, each.tenant, each.blocks) for each in _templates(rng))


MADE: Mapping[str, Callable[[random.Random], Iterator[TraceSource]]] = MappingProxyType(
    {
        "templates": _templates,
        "drift": _drift,
        "loop": _loop,
        "sessions": _sessions,
        "tenants": _tenants,
        "frozen": _frozen,
    }
)
