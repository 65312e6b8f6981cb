"""Makes questions on real texts: needles to retrieve, lines to recognise among others, and open ones.

A generator and no data: the same texts and seed give the same set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.engines.calibrate.texts import Text
from kvtide_lab.judge.importance_judge import Question

Tokenize = Callable[[str], list[int]]

TOWNS = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Riga", "Lima")
OPEN = (
    "\n\nQuestion: What is this text about?\nAnswer: This text is about",
    "\n\nQuestion: Give one important recommendation from the text above.\nAnswer: One important recommendation is",
    "\n\nSummary of the text in one paragraph:\n",
    "\n\nQuestion: Which names occur in the text?\nAnswer: The names are",
)


class Asked(NamedTuple):
    """A question after the text: what kind, its words, and what a right answer begins with, where that is known."""

    kind: str
    words: str
    answer: str | None


class Task(NamedTuple):
    """A text of a stated number of tokens, questions to learn from, and others to judge on."""

    ids: list[int]
    uses: list[Asked]
    questions: list[Asked]


def make_task(text: str, others: Sequence[str], tokens: int, tokenize: Tokenize, rng: random.Random) -> Task:
    """Return a task of a text with needles in it. ValueError for a text that is too short."""
    towns = rng.sample(TOWNS, 4)
    codes = [rng.randrange(10_000, 99_999) for _ in towns]
    lines = text[: 8 * tokens].splitlines()
    true = [line.strip() for line in lines[: len(lines) // 3] if 30 <= len(line.strip()) <= 60]
    if len(lines) < 8:
        raise ValueError(f"a text of {tokens} tokens with short lines is needed, this one has {len(lines)} lines")
    for town, code in zip(towns, codes, strict=True):
        lines.insert(rng.randrange(len(lines) // 4), f"The pass code of {town} is {code}.")
    ids = tokenize("\n".join(lines))[:tokens]
    if len(ids) < tokens or not true:
        raise ValueError(f"a text of {tokens} tokens with short lines is needed, this one has {len(ids)}")
    needles = [
        Asked(
            "retrieval",
            f"\n\nQuestion: What is the pass code of {town}?\nAnswer: The pass code of {town} is",
            f" {code}",
        )
        for town, code in zip(towns, codes, strict=True)
    ]
    false = [line.strip() for other in others for line in other.splitlines() if 30 <= len(line.strip()) <= 60]
    choices = [_choice(rng, rng.choice(true), rng.sample(false, 2)) for _ in range(2)] if len(false) > 1 else []
    opened = [Asked("open", words, None) for words in rng.sample(OPEN, len(OPEN))]
    return Task(ids, [*opened[:3], *needles[:2], *choices[:1]], [needles[2], *choices[1:], opened[3], needles[3]])


def make_tasks(texts: Sequence[Text], count: int, tokens: int, tokenize: Tokenize) -> list[Task]:
    """Return a task of each of the first texts that are long enough. ValueError if there are none."""
    rng, tasks = random.Random(0), list[Task]()
    for number, text in enumerate(texts):
        others = [other.content for other in texts if other is not text][number % 3 :][:2]
        try:
            tasks.append(make_task(text.content, others, tokens, tokenize, rng))
        except ValueError:
            continue
        if len(tasks) == count:
            return tasks
    if not tasks:
        raise ValueError(f"no text has {tokens} tokens and short lines")
    return tasks


def tokenized(task: Task, tokenize: Tokenize, count: int) -> tuple[list[Question], list[Question]]:
    """Return the uses, and the first `count` questions."""

    def of(asked: Sequence[Asked]) -> list[Question]:
        return [Question(each.kind, tokenize(each.words), tuple(tokenize(each.answer or ""))) for each in asked]

    return of(task.uses), of(task.questions[:count])


def _choice(rng: random.Random, right: str, wrong: list[str]) -> Asked:
    lines = [right, *wrong]
    rng.shuffle(lines)
    letter = "ABC"[lines.index(right)]
    listed = "\n".join(f"{name}) {line}" for name, line in zip("ABC", lines, strict=True))
    return Asked("choice", f"\n\nQuestion: Which line is in the text?\n{listed}\nAnswer:", f" {letter}")


def shuffled(ids: Sequence[int], rng: random.Random) -> list[int]:
    """Return the same tokens in an order by chance: nothing in it means anything."""
    found = list(ids)
    rng.shuffle(found)
    return found


def noisy(ids: Sequence[int], vocabulary: int, needle: Sequence[int], rng: random.Random) -> list[int]:
    """Return noise of the same length with a needle in it."""
    found = [rng.randrange(1000, vocabulary) for _ in ids]
    start = rng.randrange(len(found) // 4, len(found) // 2)
    found[start : start + len(needle)] = needle
    return found[: len(ids)]
