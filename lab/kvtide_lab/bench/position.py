"""The cost of roughness by where it lies: the model's KL on mixed caches, and the loss law that follows.

Some texts are fitted on; others, held out, say how far the law is off, and what spending bytes by it saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.block import BlockLayout
from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import LossLaw, PositionLaw, law_table
from kvtide.engines.calibrate.judge import one_torch_thread
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.watch import model_fingerprint
from kvtide_lab.bench.position_cases import (
    QUALITY,
    REFINEMENTS,
    fit_mixtures,
    flats,
    map_mixtures,
    passages_of,
    trial_mixtures,
)
from kvtide_lab.bench.position_fit import PIECE_TOKENS, LossPoint, fitted
from kvtide_lab.bench.position_spend import SpendRow, Spent, spend_rows, spent
from kvtide_lab.bench.quality_state import Partial, ids_digest
from kvtide_lab.judge.position_judge import Mixture, PositionJudge

# Contexts that are worked on at once, each by one thread.
WORKERS = 2
# A row of the law's is good within so much of the model's KL.
CLOSE = 0.25
# What all others are compared with, text by text.
REFERENCE = flats()[1]

# Called with what is being done, and how much of it.
Progress = Callable[[str, int, int], None]


class PositionSize(NamedTuple):
    """The amount of judging: texts by prefix length for the map, the fit, the law's test, and spending by it."""

    answer_tokens: int
    map_texts: dict[int, int]
    fit_texts: dict[int, int]
    held_texts: dict[int, int]
    spend_texts: dict[int, int]


FULL = PositionSize(128, {1024: 2}, {512: 5, 1024: 5, 2048: 4, 4096: 2}, {1024: 6, 2048: 6, 4096: 2}, {2048: 5})
QUICK = PositionSize(64, {}, {512: 1}, {512: 1}, {512: 1})


def spending_only(tokens: int, texts: int) -> PositionSize:
    """Return a size that fits nothing: what is spent by the law that the profile has."""
    return PositionSize(FULL.answer_tokens, {}, {}, {}, {tokens: texts})


class PositionRow(msgspec.Struct, frozen=True):
    """One mixture after one prefix length with one continuation; the mean of `texts` texts.

    stage: map, fit, or held (texts that the law has not seen). passage: where the copied passage begins, None for text
    that goes on. law: what the law says, None where layers differ.
    """

    stage: str
    prefix_tokens: int
    mixture: str
    passage: int | None
    texts: int
    kl: float
    kl_stderr: float | None
    law: float | None


class PositionBench(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and what they say.

    `law_close_goes_on` and `law_close_copies`: shares of held-out rows within CLOSE of the model's KL.
    """

    model: str
    kv_dtype: str
    codec: str
    quality: float
    refinements: int
    answer_tokens: int
    fit_kinds: list[str]
    held_kinds: list[str]
    law_close_goes_on: float | None
    law_close_copies: float | None
    law: tuple[PositionLaw, PositionLaw]
    spending: list[SpendRow]
    rows: list[PositionRow]


class PositionInputs(msgspec.Struct, frozen=True):
    """All that decides a measured KL, but for the program, the text and the mixture. Digests in hex."""

    model: str
    block_tokens: int
    answer_tokens: int
    profile: str


class PositionSubject(NamedTuple):
    """The texts that are judged, as ids to fit on and held out, and their kinds."""

    model: Any
    name: str
    layout: BlockLayout
    size: PositionSize
    profile: Profile
    fit: list[list[int]]
    held: list[list[int]]
    kinds: tuple[list[str], list[str]]

    @property
    def codec(self) -> TideCodec:
        """Return what the mixtures are made of."""
        return TideCodec(self.profile, QUALITY, REFINEMENTS)


# KLs of a mixture: text that goes on, then each passage.
Results = Partial[PositionInputs, float]


def one_of_each_kind_first(texts: Sequence[Text]) -> list[Text]:
    """Return texts so that a few of the first are of many kinds."""
    seen: dict[str, int] = {}
    turns = [seen.update({text.kind: seen.get(text.kind, 0) + 1}) or seen[text.kind] for text in texts]
    return [text for _, text in sorted(zip(turns, texts, strict=True), key=lambda pair: pair[0])]


def subject_of(
    model: Any,
    name: str,
    tokenize: Callable[[str], list[int]],
    layout: BlockLayout,
    size: PositionSize,
    profile: Profile,
    texts: tuple[Sequence[Text], Sequence[Text]],
) -> PositionSubject:
    """Take texts to fit on, and others that are held out."""
    longest = max([*size.fit_texts, *size.held_texts, *size.spend_texts]) + size.answer_tokens + 1
    fit, held = ([list(tokenize(text.content[: 8 * longest])[:longest]) for text in each] for each in texts)
    kinds = ([text.kind for text in texts[0]], [text.kind for text in texts[1]])
    return PositionSubject(model, name, layout, size, profile, fit, held, kinds)


def partial_of(subject: PositionSubject, path: Path | None) -> Results:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    # Whatever law the profile carries already: it changes nothing that is measured.
    digest = subject.profile.with_arrays({"law": np.empty(0, dtype=np.float32)}).digest.hex()
    model = model_fingerprint(subject.model).hex()
    inputs = PositionInputs(model, subject.layout.tokens, subject.size.answer_tokens, digest)
    return Partial(inputs, float, path)


class _Job(NamedTuple):
    """One text after one prefix length: what is measured there."""

    stage: str
    tokens: int
    ids: list[int]
    mixtures: list[Mixture]
    context: int

    def case(self, mixture: Mixture) -> str:
        return f"{self.tokens} {ids_digest(self.ids[: self.tokens])[:16]} {mixture}"


def run(subject: PositionSubject, results: Results, progress: Progress) -> PositionBench:
    """Measure what is not in `results` yet, fit the law and test it. ValueError without a text that is long enough."""
    size = subject.size
    law = subject.codec.law
    assert law is not None
    layers = subject.layout.layers
    jobs = [
        *_jobs(subject, "map", subject.fit, size.map_texts, lambda tokens: [REFERENCE, *map_mixtures(tokens, layers)])
    ]
    jobs += _jobs(subject, "fit", subject.fit, size.fit_texts, fit_mixtures)
    jobs += _jobs(subject, "held", subject.held, size.held_texts, trial_mixtures)
    if size.fit_texts and not {"fit", "held"} <= {job.stage for job in jobs}:
        raise ValueError("no text to fit on, or none that is held out, is long enough")
    _measure(subject, jobs, results, progress)
    if size.fit_texts:
        law = fitted(law, [point for row, point in _points(subject, jobs, results) if row.stage != "held" and point])
    rows = [
        msgspec.structs.replace(row, law=point.predicted(law) if point else None)
        for row, point in _points(subject, jobs, results)
    ]
    spending = _spend(subject, law, progress)
    return PositionBench(
        subject.name,
        subject.layout.dtype.value,
        subject.profile.kind,
        QUALITY,
        REFINEMENTS,
        size.answer_tokens,
        *subject.kinds,
        _close([row for row in rows if row.stage == "held" and row.passage is None]),
        _close([row for row in rows if row.stage == "held" and row.passage is not None]),
        law.positions,
        spending,
        rows,
    )


def with_law(profile: Profile, law: Sequence[PositionLaw]) -> Profile:
    """Return a profile that carries a law."""
    return profile.with_arrays({"law": law_table(law)})


def _jobs(
    subject: PositionSubject,
    stage: str,
    ids: list[list[int]],
    texts: dict[int, int],
    mixtures: Callable[[int], list[Mixture]],
) -> Iterator[_Job]:
    for tokens, count in texts.items():
        long_enough = [i for i, each in enumerate(ids) if len(each) > tokens + subject.size.answer_tokens]
        for context in long_enough[:count]:
            yield _Job(stage, tokens, ids[context], mixtures(tokens), context)


def _measure(subject: PositionSubject, jobs: Sequence[_Job], results: Results, progress: Progress) -> None:
    missing = [(job, [each for each in job.mixtures if results.get(job.case(each), 0) is None]) for job in jobs]
    missing = [(job, mixtures) for job, mixtures in missing if mixtures]
    total = sum(len(mixtures) for _, mixtures in missing)
    done = 0
    progress("caches", done, total)
    with one_torch_thread(), ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(_judge_job, subject, job, mixtures, results) for job, mixtures in missing]
        for future in as_completed(futures):
            done += future.result()
            progress("caches", done, total)


_PUTTING = threading.Lock()


def _judge_job(subject: PositionSubject, job: _Job, mixtures: Sequence[Mixture], results: Results) -> int:
    judge = PositionJudge(subject.model, subject.layout, job.ids, job.tokens, subject.size.answer_tokens)
    judge.code(subject.codec)
    passages = passages_of(job.tokens, subject.size.answer_tokens)
    for mixture in mixtures:
        found = list(judge.kls(mixture, passages))
        with _PUTTING:
            results.put(job.case(mixture), 0, found)
    return len(mixtures)


def _spend(subject: PositionSubject, law: LossLaw, progress: Progress) -> list[SpendRow]:
    """Load held-out texts as the fitted law wants. Not kept: every fit wants something else."""
    jobs = list(_jobs(subject, "spend", subject.held, subject.size.spend_texts, lambda tokens: []))
    rows: list[SpendRow] = []
    with one_torch_thread(), ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(lambda job: _spent(subject, law, job), jobs))
    progress("spending", len(found), len(jobs))
    for tokens in subject.size.spend_texts:
        by_text = [each for job, each in zip(jobs, found, strict=True) if job.tokens == tokens]
        elements = tokens * subject.layout.raw_bytes // subject.layout.tokens // subject.layout.dtype.item_bytes
        rows += spend_rows(tokens, elements, by_text) if by_text else []
    return rows


def _spent(subject: PositionSubject, law: LossLaw, job: _Job) -> list[Spent]:
    answer, block_tokens = subject.size.answer_tokens, subject.layout.tokens
    judge = PositionJudge(subject.model, subject.layout, job.ids, job.tokens, answer)
    judge.code(subject.codec)
    return spent(judge, law, block_tokens, passages_of(job.tokens, answer))


def _points(
    subject: PositionSubject, jobs: Sequence[_Job], results: Results
) -> Iterator[tuple[PositionRow, LossPoint | None]]:
    """Yield each row, without the law's word, and its point; None where layers differ.

    Texts differ more than mixtures do, and not all are long enough for each length. So a point's KL is what the
    mixture has over REFERENCE on the same texts, times the mean of REFERENCE over all texts to fit on.
    """
    groups: dict[tuple[str, int, Mixture], list[tuple[list[float], list[float]]]] = {}
    usual: dict[str, list[float]] = {}
    for job in jobs:
        reference = _found(results, job, REFERENCE)
        if job.stage == "fit":
            usual[job.case(REFERENCE)] = reference
        for mixture in job.mixtures:
            groups.setdefault((job.stage, job.tokens, mixture), []).append((_found(results, job, mixture), reference))
    if not usual:
        return
    level = [fmean(found[0] for found in usual.values()), fmean(kl for found in usual.values() for kl in found[1:])]
    answer = subject.size.answer_tokens
    for (stage, tokens, mixture), by_text in groups.items():
        whole = not any(patch.layers for patch in mixture.patches)
        for place, passage in enumerate((None, *passages_of(tokens, answer))):
            kls = [found[place] for found, _ in by_text]
            stderr = stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else None
            row = PositionRow(stage, tokens, mixture.name, passage, len(kls), fmean(kls), stderr, None)
            copied = passage is not None and range(passage // PIECE_TOKENS, (passage + answer) // PIECE_TOKENS)
            kept = tuple(mixture.kept(tokens, PIECE_TOKENS)) if whole else ()
            kl = sum(kls) / sum(reference[place] for _, reference in by_text) * level[passage is not None]
            yield row, LossPoint(kept, tuple(copied) if copied else None, kl) if whole else None


def _found(results: Results, job: _Job, mixture: Mixture) -> list[float]:
    found = results.get(job.case(mixture), 0)
    assert found is not None, "measured before"
    return found


def _close(rows: Sequence[PositionRow]) -> float | None:
    ratios = [row.law / row.kl for row in rows if row.law is not None and row.kl > 0]
    return fmean(abs(ratio - 1) <= CLOSE for ratio in ratios) if ratios else None
