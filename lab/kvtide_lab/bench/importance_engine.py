"""Importance as a user has it: `attach` before a real server behind a shaped link, in part, whole, and as it decides.

Invariant: all three are calls of the same `generate`; what is decided is what the engine did, never a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
import torch

from kvtide.clock import Clock
from kvtide.codec import Profile
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.generation import FirstToken
from kvtide.engines.transformers.selective import SparseSettings
from kvtide_lab.bench.services import kvtide_words, started
from kvtide_lab.bench.shaped import ShapedProxy

# A disk of 200 MB/s and a link of 1 Gbit/s.
RATES = {"disk": 200e6, "link": 125e6}
# Prompts before the second row, each with a question of its own.
USES = 5
_STORE_S_MAX = 300.0


class EngineRow(msgspec.Struct, frozen=True):
    """One prompt over one link, median of the tries. use: `first` hit of its text, or after some others.

    part_s, whole_s: to the first token, by either way. decided, ttft_s: what the engine chose once it knew both, and
    what that took; ratio: over whole_s. front_share: bytes waited for, of the raw cache; behind_share: those that came
    over the link beside or after the answer.
    """

    place: str
    tokens: int
    use: str
    part_s: float
    whole_s: float
    decided: str
    ttft_s: float
    ratio: float
    front_share: float
    behind_share: float


def rows(
    model: Any,
    profiles: Sequence[Profile],
    ids: Sequence[int],
    uses: Sequence[Sequence[int]],
    question: Sequence[int],
    ratio: float,
    tries: int,
    clock: Clock,
) -> list[EngineRow]:
    """Return both rows of each place. uses: the first stores the text, the others come before its second row."""
    found = []
    for place, bytes_s in RATES.items():
        with started(kvtide_words) as service, ShapedProxy(("127.0.0.1", service.port), lambda s: 1e9 * s) as proxy:
            # The guard's verdict is measured elsewhere: all of these are loads in part.
            settings = SparseSettings(ratio, guard=None)

            def attached(proxy: ShapedProxy = proxy, settings: SparseSettings = settings) -> CachedModel:
                return attach(model, f"http://127.0.0.1:{proxy.port}", profiles=profiles, importance=settings)

            with attached() as cached:
                _ask(cached, [*ids, *uses[0]], clock)
                if not cached.flush(_STORE_S_MAX):
                    raise ValueError("the text was not stored in time")
            proxy.restart(lambda s, rate=bytes_s: rate * s)  # type: ignore[misc]
            for use, before in (("first", ()), ("after five", uses[1 : 1 + USES])):
                with attached() as cached:
                    for each in before:
                        _ask(cached, [*ids, *each], clock)
                tried = [_tried(attached(), proxy, [*ids, *question], clock) for _ in range(tries)]
                found.append(_row(place, use, len(ids), tried))
    return found


class _Tried(msgspec.Struct, frozen=True):
    part_s: float
    whole_s: float
    decided: str
    ttft_s: float
    front_share: float
    behind_share: float


def _tried(cached: CachedModel, proxy: ShapedProxy, prompt: Sequence[int], clock: Clock) -> _Tried:
    """Ask three times: an engine tries the part, then the whole, and then takes the faster."""
    before = proxy.passed_bytes
    with cached:
        part_s = _ask(cached, prompt, clock)
        report = cached.last
        assert report is not None and report.selected is not None, f"expected a load in part, got {report}"
        # Closing waits for what is learnt, asking again does not.
        cached.learned(_STORE_S_MAX)
        passed = proxy.passed_bytes - before
        whole_s = _ask(cached, prompt, clock)
        assert cached.last is not None and cached.last.selected is None
        ttft_s = _ask(cached, prompt, clock)
        decided = "whole" if cached.last.selected is None else "part"
    raw = report.selected.whole_bytes
    front = report.selected.read_bytes
    return _Tried(part_s, whole_s, decided, ttft_s, front / raw, max(0, passed - front) / raw)


def _ask(cached: CachedModel, prompt: Sequence[int], clock: Clock) -> float:
    """Return the seconds to the first token."""
    first, began_s = FirstToken(clock), clock.monotonic_s()
    cached.generate(torch.tensor([list(prompt)]), max_new_tokens=1, do_sample=False, stopping_criteria=[first])
    return first.seen_s - began_s


def _row(place: str, use: str, tokens: int, tried: Sequence[_Tried]) -> EngineRow:
    whole_s, ttft_s = median(each.whole_s for each in tried), median(each.ttft_s for each in tried)
    return EngineRow(
        place,
        tokens,
        use,
        median(each.part_s for each in tried),
        whole_s,
        max(("part", "whole"), key=[each.decided for each in tried].count),
        ttft_s,
        ttft_s / whole_s,
        median(each.front_share for each in tried),
        median(each.behind_share for each in tried),
    )
