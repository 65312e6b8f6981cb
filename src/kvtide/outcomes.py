"""Engines' decisions about the tokens of prompts, with reasons: values, a text of them, and a counter.

Invariant: there are few kinds, so that counts of all of them stay small wherever they are kept or sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from kvtide.types import Namespace

__all__ = ["Choice", "Decided", "DecisionCounter", "Why", "decisions_text", "parse_decisions"]

DECISIONS_TEXT_MAX = 1024
_COUNT_MAX = 10**9


class Choice(StrEnum):
    """The decision about the tokens of a full block of a prompt. ABANDONED: a load that was begun and not finished."""

    LOAD = "load"
    RECOMPUTE = "recompute"
    ABANDONED = "abandoned"


class Why(StrEnum):
    """The reason for a decision."""

    IN_TIME = "in_time"
    LINK_FASTER = "link_faster"
    BOTH_ENDS = "both_ends"
    UNKNOWN_LINK = "unknown_link"
    LINK_SLOWER = "link_slower"
    DEADLINE = "deadline"
    NOT_THERE = "not_there"
    ABSENT = "absent"

    @property
    def meaning(self) -> str:
        """Return the reason in words."""
        return _MEANINGS[self]


_MEANINGS: Mapping[Why, str] = MappingProxyType(
    {
        Why.IN_TIME: "came before recomputing would have ended",
        Why.LINK_FASTER: "loading alone was as fast",
        Why.BOTH_ENDS: "loading and computing met",
        Why.UNKNOWN_LINK: "nobody knew the link: both ends at once",
        Why.LINK_SLOWER: "loading would not have been faster",
        Why.DEADLINE: "the deadline passed",
        Why.NOT_THERE: "gone, damaged, or its store did not answer",
        Why.ABSENT: "nothing was stored",
    }
)


class Decided(NamedTuple):
    """A kind of decision."""

    choice: Choice
    why: Why


def decisions_text(counts: Mapping[Decided, int]) -> str:
    """Return the text of counts of tokens, as `parse_decisions` reads it: `load:in_time=3072,recompute:absent=512`."""
    return ",".join(
        f"{choice}:{why}={min(count, _COUNT_MAX)}" for (choice, why), count in sorted(counts.items()) if count
    )


def parse_decisions(text: str) -> dict[Decided, int]:
    """Return the counts in a text. ValueError if it is too long or anything in it is not of the form."""
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
    """Counts tokens of prompts by what was decided about them, those to be told by namespace. Thread-safe."""

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
        """Count tokens of which nothing was stored; less than none are none."""
        self.add(Choice.RECOMPUTE, Why.ABSENT, max(0, tokens), namespace)

    def counts(self) -> dict[Decided, int]:
        """Return all that was counted."""
        with self._lock:
            return dict(self._counts)

    def tell(self, listener: Callable[[Namespace, Mapping[Decided, int]], None]) -> None:
        """Tell what was counted of each namespace since this was called last; whatever becomes of it, once."""
        with self._lock:
            unsent, self._unsent = self._unsent, {}
        for namespace, counts in unsent.items():
            listener(namespace, counts)
