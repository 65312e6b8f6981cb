"""Engines' decisions about the tokens of prompts, with reasons: values, a text of them, and a counter.

Invariant: there are few kinds, so that counts of all of them stay small wherever they are kept or sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

from kvtide.types import Namespace

DECISIONS_TEXT_MAX = 1024
_COUNT_MAX = 10**9


class Choice(StrEnum):
    """The decision about the tokens of a full block of a prompt. ABANDONED: a load that was begun and not finished."""

    LOAD = "load"
    RECOMPUTE = "recompute"
    ABANDONED = "abandoned"


class Why(StrEnum):
    """The reason for a decision, and its `meaning` in words."""

    IN_TIME = "in_time", "came before recomputing would have ended"
    LINK_FASTER = "link_faster", "loading alone was as fast"
    BOTH_ENDS = "both_ends", "loading and computing met"
    UNKNOWN_LINK = "unknown_link", "nobody knew the link: both ends at once"
    LINK_SLOWER = "link_slower", "loading would not have been faster"
    DEADLINE = "deadline", "the deadline passed"
    NOT_THERE = "not_there", "gone, damaged, or its store did not answer"
    ABSENT = "absent", "nothing was stored"

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Why:
        """Keep the words beside the value."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member


class Decided(NamedTuple):
    """A kind of decision."""

    choice: Choice
    why: Why


def decisions_text(counts: Mapping[Decided, int]) -> str:
    """Counts of tokens as `parse_decisions` reads them: `load:in_time=3072,recompute:absent=512`."""
    return ",".join(
        f"{choice}:{why}={min(count, _COUNT_MAX)}" for (choice, why), count in sorted(counts.items()) if count
    )


def parse_decisions(text: str) -> dict[Decided, int]:
    """The counts in a text. ValueError if it is too long or not of that form."""
    if len(text) > DECISIONS_TEXT_MAX:
        raise ValueError(f"decisions take at most {DECISIONS_TEXT_MAX} characters, got {len(text)}")
    counts: Counter[Decided] = Counter()
    for part in text.split(","):
        kind, _, count = part.partition("=")
        choice, _, why = kind.partition(":")
        if not (count.isascii() and count.isdecimal() and len(count) <= 10 and 1 <= int(count) <= _COUNT_MAX):
            raise ValueError(f"expected choice:why=count, got {part[:60]!r}")
        counts[Decided(Choice(choice), Why(why))] += int(count)
    return dict(counts)


class DecisionCounter:
    """Counts tokens of prompts by what was decided about them, in all and to be told by namespace. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Decided] = Counter()
        self._unsent: dict[Namespace, Counter[Decided]] = {}

    def add(self, choice: Choice, why: Why, tokens: int, namespace: Namespace) -> None:
        """Count tokens of a namespace. ValueError for a negative number."""
        if tokens < 0:
            raise ValueError(f"a decision is about 0 tokens or more, got {tokens}")
        if tokens:
            with self._lock:
                self._counts[Decided(choice, why)] += tokens
                self._unsent.setdefault(namespace, Counter())[Decided(choice, why)] += tokens

    def add_absent(self, tokens: int, namespace: Namespace) -> None:
        """Count tokens of which nothing was stored; a negative number counts as 0."""
        self.add(Choice.RECOMPUTE, Why.ABSENT, max(0, tokens), namespace)

    def counts(self) -> dict[Decided, int]:
        """All that was counted."""
        with self._lock:
            return dict(self._counts)

    def tell(self, listener: Callable[[Namespace, Mapping[Decided, int]], None]) -> None:
        """Tell, once, what was counted of each namespace since this was called last."""
        with self._lock:
            unsent, self._unsent = self._unsent, {}
        for namespace, counts in unsent.items():
            listener(namespace, counts)
