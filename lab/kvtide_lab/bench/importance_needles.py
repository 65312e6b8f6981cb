"""Needles in real prose and code, at five depths: named with a part of the cache as often as with everything?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import fmean

import msgspec

from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.selective import SparseSettings
from kvtide_lab.bench.importance_set import OPEN, TOWNS, Tokenize
from kvtide_lab.judge.importance_judge import ImportanceJudge, Judged, Question

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
KINDS = {"prose": ("prose", "licence", "change log", "readme", "html"), "code": ("python", "c header", "javascript")}
# Room for the needles of one text.
_NEEDLES_TOKENS = 160
# What a block is packed by: none of it asks for a needle.
_USES = 2
Progress = Callable[[str, int, int], None]


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
    progress: Progress,
) -> list[NeedleRow]:
    """Return a row for each kind and depth. texts_each: of each kind, with a needle at each depth; no guard."""
    rows, rng = [], random.Random(3)
    for done, kind in enumerate(KINDS):
        progress("needles", done, len(KINDS))
        found: list[list[tuple[bool, Judged]]] = [[] for _ in DEPTHS]
        chosen = [text for name in KINDS[kind] for text in texts if text.kind == name]
        for ids, questions in islice(_tasks(chosen, tokens, tokenize, rng), texts_each):
            prefix = judge.add(ids, [Question("open", tokenize(words)) for words in OPEN[:_USES]], questions)
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
