"""Prompts that guards refuse: ordinary ones, which should pass, and adversarial ones, which should not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.selective import Rest, SparseSettings
from kvtide.importance.probe import FirstHeads, HeadsAgree
from kvtide_lab.bench.importance_set import make_tasks, noisy, shuffled, tokenized
from kvtide_lab.judge.importance_judge import ImportanceJudge, Judged, JudgedPrefix, Question

# What is asked of a prefix for packing it: two uses are the fewest.
USES = 2
TEXT = "text"
Progress = Callable[[str, int, int], None]
Tokenize = Callable[[str], list[int]]


class GuardSize(NamedTuple):
    """On what guards are tried: texts, seeds of each kind of adversarial prompt, questions on each of them.

    tokens: lengths besides the context's; longer ones are left out.
    """

    texts: int
    seeds: int
    questions: int
    tokens: tuple[int, ...]


class GuardRow(msgspec.Struct, frozen=True):
    """A guard on one kind of prompt of one length: the share that fell back, and what that is worth and costs.

    prompts: how many there were, questions counted. rest: the outcome of what is not selected, `drop` as in the
    paper or `base`, the engine's default. kl, bytes_read_share: means, fallbacks included; kl_fallback: the worst of
    the fallbacks, None if there were none. ttft_s: median. fallback_bytes_share, fallback_reads, fallback_over_whole:
    bytes of the raw cache, ranges, and time to the first token over that of a whole load of the same prompt; None
    without fallbacks.
    """

    prompt: str
    tokens: int
    guard: str
    rest: str
    prompts: int
    fallback_share: float
    kl: float
    kl_fallback: float | None
    bytes_read_share: float
    ttft_s: float
    fallback_bytes_share: float | None
    fallback_reads: float | None
    fallback_over_whole: float | None


class _Case(NamedTuple):
    settings: SparseSettings
    is_packed: bool
    has_base: bool
    probes: bool


def guard_rows(
    judge: ImportanceJudge,
    texts: Sequence[Text],
    ordinary: Sequence[JudgedPrefix],
    tokens: int,
    ratio: float,
    size: GuardSize,
    tokenize: Tokenize,
    vocabulary: int,
    progress: Progress,
) -> list[GuardRow]:
    """Return a row for each length, kind of prompt and guard: the paper's, ours, and ours as engines use it.

    ordinary: prefixes of `tokens`, which need not be made again.
    """
    cases = [
        _Case(SparseSettings(ratio, FirstHeads(), HeadsAgree(), Rest.DROP, by_chunks=False), False, False, True),
        _Case(SparseSettings(ratio, rest=Rest.DROP, by_chunks=False), False, True, False),
        _Case(SparseSettings(ratio), True, True, False),
    ]
    lengths = sorted({tokens, *(each for each in size.tokens if each < tokens)})
    rows = []
    for number, length in enumerate(lengths):
        progress("guards", number, len(lengths))
        for kind, prompts in _prompts(judge, texts, length, size, tokenize, vocabulary):
            found = ordinary if kind == TEXT and length == tokens else list(prompts)
            rows += [_row(judge, kind, length, found, case) for case in cases]
    return rows


def _prompts(
    judge: ImportanceJudge, texts: Sequence[Text], tokens: int, size: GuardSize, tokenize: Tokenize, vocabulary: int
) -> Iterator[tuple[str, Iterator[JudgedPrefix]]]:
    tasks = make_tasks(texts, size.texts, tokens, tokenize)
    asked = [tokenized(task, tokenize, size.questions) for task in tasks]

    def disturbed(seed: int) -> JudgedPrefix:
        number = seed % len(tasks)
        uses, questions = asked[number]
        return judge.add(shuffled(tasks[number].ids, random.Random(seed)), uses[:USES], questions)

    def noise(seed: int) -> JudgedPrefix:
        rng = random.Random(seed)
        code = rng.randrange(10_000, 99_999)
        ids = noisy(tasks[0].ids, vocabulary, tokenize(f" The pass code of Bergen is {code}. "), rng)
        words = "\n\nWhat is the pass code of Bergen?\nThe pass code of Bergen is"
        uses, questions = asked[seed % len(asked)]
        return judge.add(ids, uses[:USES], [Question("retrieval", tokenize(words)), *questions[1:]])

    yield (
        TEXT,
        (judge.add(task.ids, uses[:USES], questions) for task, (uses, questions) in zip(tasks, asked, strict=True)),
    )
    yield "shuffled text", (disturbed(seed) for seed in range(size.seeds))
    yield "needle in noise", (noise(seed) for seed in range(size.seeds))


def _row(judge: ImportanceJudge, kind: str, tokens: int, prefixes: Sequence[JudgedPrefix], case: _Case) -> GuardRow:
    settings = case.settings
    asked = [(prefix, number) for prefix in prefixes for number in range(len(prefix.questions))]
    judged = [judge.selected(*each, settings, case.is_packed, case.has_base, case.probes) for each in asked]
    whole = [(each, judge.whole(*at)) for each, at in zip(judged, asked, strict=True) if _is_back(each)]
    back = [each for each, _ in whole]
    assert settings.guard is not None
    return GuardRow(
        kind,
        tokens,
        settings.guard.name,
        settings.rest.value,
        len(judged),
        fallback_share=len(back) / len(judged),
        kl=fmean(each.kl for each in judged),
        kl_fallback=max((each.kl for each in back), default=None),
        bytes_read_share=fmean(each.read_bytes / each.whole_bytes for each in judged),
        ttft_s=median(each.ttft_s for each in judged),
        fallback_bytes_share=fmean(each.read_bytes / each.whole_bytes for each in back) if back else None,
        fallback_reads=fmean(each.selected.reads for each in back if each.selected) if back else None,
        fallback_over_whole=median(each.ttft_s / other.ttft_s for each, other in whole) if whole else None,
    )


def _is_back(judged: Judged) -> bool:
    return judged.selected is not None and judged.selected.is_fallback
