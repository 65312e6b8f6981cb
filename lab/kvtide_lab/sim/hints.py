"""Words that clients could add to a trace: advice, true, useless or false, and the facts that its requests have.

`ends`: each client says which request is its session's last; it knows its own plans, so that this looks ahead in the
trace. `retain`: the time within which nine of ten sessions of that turn have gone on so far; the past alone.
`lies`: `ends` turned round. `turncoat`: true in the first half of the trace, then turned round.
A fact, such as the role that spoke last, is a class of which a policy learns as of advice. `turn` and `left` need
sessions with names: the number of the turn; and, when a session goes on elsewhere, where it was before.
Invariant: a session's next turn is the first later request of its tenant that has all of its blocks but perhaps the
last, and is longer.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvtide.evict import Hint
from kvtide.types import BlockKey
from kvtide_lab.sim.workload import Trace

HINTS = ("ends", "retain", "lies", "turncoat")
FACTS = ("role", "template", "depth", "pause", "answer", "turn", "left")
# Classes of a fact that are told apart, the first ones of the trace; the marks of facts begin above those of advice.
_CLASSES_MAX = 8
_FACT_MARK = 32
LEFT_MARK = 31
_GAPS_MIN = 10
_RETAINED_SHARE = 0.9


def hints_of(trace: Trace, kind: str) -> list[Hint]:
    """Return each request's advice. ValueError for an unknown kind."""
    if kind not in HINTS:
        raise ValueError(f"unknown kind of hints {kind!r}, expected one of {', '.join(HINTS)}")
    before = _turns_before(trace)
    if kind == "retain":
        return _retained(trace, before)
    goes_on = {at for at in before if at is not None}
    half = len(before) // 2
    turned = [kind == "lies" or (kind == "turncoat" and at >= half) for at in range(len(before))]
    return [Hint(is_last=(at in goes_on) == turned[at]) for at in range(len(before))]


class Said(NamedTuple):
    """Advice or a fact that comes with a request: a mark, and the end of what its session has left behind."""

    mark: int = 0
    left: BlockKey | None = None


def said_of(trace: Trace, kind: str) -> list[Said]:
    """Return what each request says, advice or a fact. ValueError for an unknown kind or one that the trace lacks."""
    if kind in HINTS:
        return [Said(hint.mark) for hint in hints_of(trace, kind)]
    if kind not in FACTS:
        raise ValueError(f"unknown kind of hints {kind!r}, expected one of {', '.join((*HINTS, *FACTS))}")
    if not carries(trace, kind):
        raise ValueError(f"{trace.name} does not say {kind}")
    return _left(trace) if kind == "left" else _classed(trace, kind)


def carries(trace: Trace, fact: str) -> bool:
    """Tell whether a trace's requests say a fact, and not all the same; of sessions one is enough."""
    if fact in ("turn", "left"):
        return all("session" in request.facts for request in trace.requests)
    return len({request.facts.get(fact) for request in trace.requests}) > 1


def _left(trace: Trace) -> list[Said]:
    ends: dict[tuple[str, str], list[BlockKey]] = {}
    said = []
    for _, tenant, keys, facts in trace.requests:
        before = ends.get((tenant, facts["session"]))
        is_left = before is not None and before != keys[: len(before)]
        said.append(Said(left=before[-1] if before is not None and is_left else None))
        ends[tenant, facts["session"]] = keys
    return said


def _classed(trace: Trace, fact: str) -> list[Said]:
    classes: dict[str, int] = {}
    turns: Counter[str] = Counter()
    said = []
    for _, _, _, facts in trace.requests:
        if fact == "turn":
            name = f"{turns[facts['session']].bit_length()}"
            turns[facts["session"]] += 1
        else:
            name = facts.get(fact, "")
        number = classes.setdefault(name, min(len(classes), _CLASSES_MAX - 1))
        said.append(Said(_FACT_MARK + number))
    return said


def _turns_before(trace: Trace) -> list[int | None]:
    """Return, for each request, the number of the request that it goes on from."""
    ends: dict[BlockKey, int] = {}
    before: list[int | None] = []
    for number, request in enumerate(trace.requests):
        before.append(_taken(ends, request.keys))
        # The next turn may lack the last block, which this one may have filled in part.
        ends[request.keys[max(0, len(request.keys) - 2)]] = number
    return before


def _taken(ends: dict[BlockKey, int], keys: Sequence[BlockKey]) -> int | None:
    for key in reversed(keys[:-2]):
        if key in ends:
            return ends.pop(key)
    return None


def _retained(trace: Trace, before: Sequence[int | None]) -> list[Hint]:
    gaps_s: defaultdict[int, list[float]] = defaultdict(list)
    turns: list[int] = []
    hints = []
    for number, earlier in enumerate(before):
        turn = 0
        if earlier is not None:
            turn = turns[earlier] + 1
            insort(gaps_s[turn], trace.requests[number].at_s - trace.requests[earlier].at_s)
        turns.append(turn)
        known = gaps_s[turn + 1]
        retain_s = known[int(_RETAINED_SHARE * len(known))] if len(known) >= _GAPS_MIN else None
        hints.append(Hint(retain_s=retain_s))
    return hints
