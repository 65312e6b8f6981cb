"""Made-up traces: workloads on which single policies are known to fail. Equal seeds give equal traces.

`templates`: short prompts from few templates, most asked once. `drift`: what is popular changes. `loop`: a scan that
comes round. `sessions`: turns after thinking, some of which never go on. `tenants`: three of these at a time, whose
ways change. `frozen`: templates under a clock that stands still. `documents`: long ones, a question to each. `scans`: a
corpus read from anywhere. Held out: `retrieval`, passages behind one system prompt; `branches`, searches; `nights`,
people by day, a corpus by night; `bursts`, events of an hour.
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


def _documents(rng: random.Random) -> Iterator[TraceSource]:
    """Documents by Zipf's law, a question of one's own to each; every tenth request two of them change places."""
    ranked = list(range(300))
    weights = [1 / (rank + 1) ** 0.9 for rank in ranked]
    for number in itertools.count():
        if number % 10 == 0:
            one, other = rng.randrange(300), rng.randrange(300)
            ranked[one], ranked[other] = ranked[other], ranked[one]
        document = rng.choices(ranked, weights)[0]
        yield TraceSource(2.0 * number, "documents", [*((document, i) for i in range(2 + document % 13)), number])


def _scans(rng: random.Random) -> Iterator[TraceSource]:
    """A corpus read in turn, from where a reader begins to where it gives up, among prompts that many ask for."""
    at, left = 0, 0
    for number in itertools.count():
        if left == 0:
            at, left = rng.randrange(500), rng.randint(50, 700)
        if rng.random() < 0.4:
            chosen: Hashable = ("often", int(rng.paretovariate(1.0)) % 200)
        else:
            at, left, chosen = (at + 1) % 500, left - 1, at
        yield TraceSource(float(number), "scans", [(chosen, i) for i in range(6)])


def _retrieval(rng: random.Random) -> Iterator[TraceSource]:
    """Three passages behind one system prompt, the best one first, about subjects of which some are asked often."""
    at_s = 0.0
    for number in itertools.count():
        at_s += rng.expovariate(0.4)
        subject = int(rng.paretovariate(0.8)) % 150
        found = sorted(rng.sample(range(5), 3)) if rng.random() < 0.7 else [0, 1, 2]
        passages = [(subject, passage, i) for passage in found for i in range(2 + (subject + passage) % 3)]
        yield TraceSource(at_s, "retrieval", ["system", "rules", *passages, number])


def _branches(rng: random.Random) -> Iterator[TraceSource]:
    """Searches that go on from one of their latest nodes, eight at a time; a search of a hundred nodes is over."""
    nodes: list[list[list[Hashable]]] = [[] for _ in range(8)]
    at_s = 0.0
    for number in itertools.count():
        at_s += rng.expovariate(0.2)
        search = rng.randrange(8)
        if not nodes[search] or len(nodes[search]) > 100:
            nodes[search] = [["tools", "how", ("task", number), *((number, i) for i in range(rng.randint(1, 8)))]]
        known = nodes[search]
        start = known[max(0, len(known) - int(rng.paretovariate(0.7)))]
        known.append([*start, *((number, "step", i) for i in range(rng.randint(1, 3)))])
        yield TraceSource(at_s, "branches", known[-1])


def _nights(rng: random.Random) -> Iterator[TraceSource]:
    """Sessions by day, whose people come back next morning; by night a corpus is read, one and a half times."""
    people: list[list[Hashable]] = [["system", ("person", person)] for person in range(80)]
    for number in itertools.count():
        day, at = divmod(number, 800)
        at_s = 86400.0 * day + (40.0 * at if at < 500 else 40000.0 + 20.0 * at)
        if at >= 500:
            yield TraceSource(at_s, "nights", ["batch", *(((at - 500) % 200, i) for i in range(5))])
            continue
        person = min(79, int(rng.expovariate(1 / 12)))
        people[person] = [*people[person], *((number, i) for i in range(rng.randint(1, 3)))]
        if len(people[person]) > 40 or rng.random() < 0.05:
            people[person] = ["system", ("person", person), number]
        yield TraceSource(at_s, "nights", people[person])


def _bursts(rng: random.Random) -> Iterator[TraceSource]:
    """Events that everybody asks about for a while, one in five of them again; between them what nobody repeats."""
    events: list[tuple[float, int]] = []
    at_s = 0.0
    for number in itertools.count():
        at_s += rng.expovariate(0.7)
        if rng.random() < 0.02:
            event = rng.randrange(number + 1) if rng.random() < 0.2 else number
            events = [*events[-9:], (at_s, event)]
        if events and rng.random() < 0.75:
            _, event = rng.choices(events, [0.5 ** ((at_s - then_s) / 600) + 1e-9 for then_s, _ in events])[0]
            chosen: list[Hashable] = [("event", event, i) for i in range(3 + event % 9)]
            yield TraceSource(at_s, "bursts", [*chosen, ("question", int(rng.paretovariate(0.5)))])
        else:
            yield TraceSource(at_s, "bursts", [("alone", number, i) for i in range(rng.randint(2, 9))])


MADE: Mapping[str, Callable[[random.Random], Iterator[TraceSource]]] = MappingProxyType(
    {
        "templates": _templates,
        "drift": _drift,
        "loop": _loop,
        "sessions": _sessions,
        "tenants": _tenants,
        "frozen": _frozen,
        "documents": _documents,
        "scans": _scans,
        "retrieval": _retrieval,
        "branches": _branches,
        "nights": _nights,
        "bursts": _bursts,
    }
)
# Nothing may be chosen on these: the figures that stand are theirs. All others, and all public traces, are tuned on.
HELD_OUT = ("retrieval", "branches", "nights", "bursts")
