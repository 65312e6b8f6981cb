"""Advice that clients could add to a trace's requests: true, useless or false.

`ends`: each client says which request is its session's last; it knows its own plans, so that this looks ahead in the
trace. `retain`: the time within which nine of ten sessions of that turn have gone on so far; the past alone.
`lies`: `ends` turned round. `turncoat`: true in the first half of the trace, then turned round.
Invariant: a session's next turn is the first later request of its tenant that has all of its blocks but perhaps the
last, and is longer.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence

from kvtide.evict import Hint
from kvtide.types import BlockKey
from kvtide_lab.sim.workload import Trace

HINTS = ("ends", "retain", "lies", "turncoat")
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
