"""Prompts that importance is tried on: questions on real texts, and needles at depths.

Generators and no data: the same texts and seed give the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import msgspec

from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.selective import SparseSettings
from kvtide_lab.judge.importance_judge import ImportanceJudge, Judged, Question
from kvtide_lab.measuring import Show

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


# What is asked of a prefix for packing it, nothing of it for a needle: two uses are the fewest.
USES = 2


DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
KINDS = {"prose": ("prose", "licence", "change log", "readme", "html"), "code": ("python", "c header", "javascript")}
# Room for the needles of one text.
_NEEDLES_TOKENS = 160


class NeedleRow(msgspec.Struct, frozen=True):
    """Needles in texts of one kind at one depth: how many are named with the whole cache, with a part, with both."""

    kind: str
    depth: float
    needles: int
    found_whole: int
    found_part: int
    found_both: int
    bytes_read_share: float


def needle_rows(
    judge: ImportanceJudge,
    texts: Sequence[Text],
    tokens: int,
    texts_each: int,
    ratio: float,
    tokenize: Tokenize,
    show: Show,
) -> list[NeedleRow]:
    """Return a row for each kind and depth. texts_each: of each kind, with a needle at each depth; no guard."""
    rows, rng = [], random.Random(3)
    for done, kind in enumerate(KINDS):
        show("needles", done, len(KINDS))
        found: list[list[tuple[bool, Judged]]] = [[] for _ in DEPTHS]
        chosen = [text for name in KINDS[kind] for text in texts if text.kind == name]
        for ids, questions in islice(_tasks(chosen, tokens, tokenize, rng), texts_each):
            prefix = judge.add(ids, [Question("open", tokenize(words)) for words in OPEN[:USES]], questions)
            for number, question in enumerate(questions):
                is_whole = tuple(prefix.said[number].answer[: len(question.right)]) == question.right
                part = judge.selected(prefix, number, SparseSettings(ratio, guard=None))
                found[number].append((is_whole, part))
        for depth, each in zip(DEPTHS, found, strict=True):
            if each:
                whole, parts = [is_whole for is_whole, _ in each], [bool(part.is_right) for _, part in each]
                both = sum(map(bool.__and__, whole, parts))
                share = fmean(part.read_bytes / part.whole_bytes for _, part in each)
                rows.append(NeedleRow(kind, depth, len(each), sum(whole), sum(parts), both, share))
    return rows


def _tasks(
    texts: Sequence[Text], tokens: int, tokenize: Tokenize, rng: random.Random
) -> Iterator[tuple[list[int], list[Question]]]:
    """Yield the texts that are long enough, with a needle at each depth, and a question for each."""
    for text in texts:
        content = text.content[: 8 * tokens]
        known = len(tokenize(content))
        if known < tokens:
            continue
        lines, at, towns = content[: len(content) * (tokens - _NEEDLES_TOKENS) // known].splitlines(), 0, []
        room = sum(map(len, lines))
        for town, depth in zip(rng.sample(TOWNS, len(DEPTHS)), DEPTHS, strict=True):
            while sum(map(len, lines[:at])) < depth * room and at < len(lines):
                at += 1
            code = rng.randrange(10_000, 99_999)
            lines.insert(at, f"The pass code of {town} is {code}.")
            towns.append((town, code))
        if len(tokenize("\n".join(lines[: at + 1]))) > tokens:
            continue
        ids = tokenize("\n".join([*lines, content]))[:tokens]
        yield ids, [_question(*each, tokenize) for each in towns]


def _question(town: str, code: int, tokenize: Tokenize) -> Question:
    words = f"\n\nQuestion: What is the pass code of {town}?\nAnswer: The pass code of {town} is"
    return Question("retrieval", tokenize(words), tuple(tokenize(f" {code}")))
