"""The cost of roughness by where it lies: the model's KL on mixed caches, beside the profile's loss law.

On texts that no law was fitted on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.block import BlockLayout
from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import PositionLaw, Purpose
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.fingerprint import model_fingerprint
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.judge.law import CURVE_OVER_MEAN, LossLaw
from kvtide_lab.judge.position_judge import Mixture, Patch, PositionJudge
from kvtide_lab.judge.quality import one_torch_thread
from kvtide_lab.measuring import Show
from kvtide_lab.subjects import LoadedModel

# An embedded copy of four levels: what each is of, and the refinements after its base.
QUALITY, REFINEMENTS = 9e-4, 3
EXACT = REFINEMENTS + 1


def passages_of(tokens: int, answer_tokens: int) -> tuple[int, ...]:
    """Return where the copied passages begin, each inside one eighth of a prefix of 1,024 tokens or more."""
    return (tokens // 4, tokens // 8 * 5 if tokens // 8 * 3 >= answer_tokens else tokens // 2)


def flats() -> list[Mixture]:
    """Return one refinement for all, of each."""
    return [Mixture(f"all {kept}", kept) for kept in range(EXACT)]


def only(name: str, start: int, stop: int, kept: int) -> Mixture:
    """Return tokens that keep less than the exact rest."""
    return Mixture(f"{name} {kept}, rest exact", EXACT, (Patch(start, stop, kept),))


def by_eighths(name: str, tokens: int, kept: Sequence[int]) -> Mixture:
    """Return a mixture of eighths."""
    eighth = tokens // 8
    return Mixture(name, EXACT, tuple(Patch(n * eighth, (n + 1) * eighth, each) for n, each in enumerate(kept)))


def trial_mixtures(tokens: int) -> list[Mixture]:
    """Return what the law is tested on: one refinement for all, mixtures that loads make, and random ones."""
    rng = random.Random(tokens)
    found = flats()[1:]
    found += [Mixture(f"newest 256 exact, rest {kept}", kept, (Patch(tokens - 256, tokens, EXACT),)) for kept in (1, 2)]
    found.append(only("last quarter", tokens - tokens // 4, tokens, 0))
    found.append(Mixture("first half 0, rest 1", 1, (Patch(0, tokens // 2, 0),)))
    found.append(Mixture("first half exact, rest 1", EXACT, (Patch(tokens // 2, tokens, 1),)))
    found += [
        by_eighths(f"random {n}", tokens, [rng.choice((1, 2, 3, EXACT) if n else (0, 1, 2, 3)) for _ in range(8)])
        for n in range(3)
    ]
    rising = sorted(rng.choice((1, 2, 3)) for _ in range(8))
    found.append(by_eighths("finer towards the end", tokens, rising))
    return found


# Patches of mixtures are of whole pieces.
PIECE_TOKENS = 64
# Contexts that are worked on at once, each by one thread.
WORKERS = 2
# A row of the law's is good within so much of the model's KL.
CLOSE = 0.25


class PositionSize(NamedTuple):
    """The amount of judging: texts by prefix length."""

    answer_tokens: int
    texts: dict[int, int]


FULL = PositionSize(128, {1024: 6, 2048: 6, 4096: 2})
QUICK = PositionSize(64, {512: 1})


class PositionRow(msgspec.Struct, frozen=True):
    """One mixture after one prefix length with one continuation; the mean of `texts` texts.

    passage: where the copied passage begins, None for text that goes on. law: what the profile's law expects.
    """

    prefix_tokens: int
    mixture: str
    passage: int | None
    texts: int
    kl: float
    kl_stderr: float | None
    law: float


class PositionBench(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and what they say.

    `law_close_goes_on` and `law_close_copies`: shares of rows within CLOSE of the model's KL.
    """

    model: str
    kv_dtype: str
    codec: str
    quality: float
    refinements: int
    answer_tokens: int
    kinds: list[str]
    law_close_goes_on: float | None
    law_close_copies: float | None
    law: tuple[PositionLaw, PositionLaw]
    rows: list[PositionRow]


class PositionInputs(msgspec.Struct, frozen=True):
    """All that decides a measured KL, but for the program, the text and the mixture. Digests in hex."""

    model: str
    block_tokens: int
    answer_tokens: int
    profile: str


class PositionSubject(NamedTuple):
    """The texts that are judged, as ids, and their kinds."""

    model: Any
    name: str
    layout: BlockLayout
    size: PositionSize
    profile: Profile
    ids: list[list[int]]
    kinds: list[str]

    @property
    def codec(self) -> TideCodec:
        """Return what the mixtures are made of."""
        return TideCodec(self.profile, QUALITY, REFINEMENTS)


# KLs of a mixture: text that goes on, then each passage.
Results = Partial[PositionInputs, float]


def subject_of(of: LoadedModel, size: PositionSize, profile: Profile, texts: Sequence[Text]) -> PositionSubject:
    """Take texts that the law was not fitted on."""
    longest = max(size.texts) + size.answer_tokens + 1
    ids = [list(of.tokenize(text.content[: 8 * longest])[:longest]) for text in texts]
    kinds = [text.kind for text in texts]
    return PositionSubject(of.model, of.folder.name, of.layout(), size, profile, ids, kinds)


def partial_of(subject: PositionSubject, path: Path | None) -> Results:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    # Whatever law the profile carries already: it changes nothing that is measured.
    digest = subject.profile.with_arrays({"law": np.empty(0, dtype=np.float32)}).digest.hex()
    model = model_fingerprint(subject.model).hex()
    inputs = PositionInputs(model, subject.layout.tokens, subject.size.answer_tokens, digest)
    return Partial(inputs, float, path)


class _Job(NamedTuple):
    """One text after one prefix length: what is measured there."""

    tokens: int
    ids: list[int]

    def case(self, mixture: Mixture) -> str:
        return f"{self.tokens} {ids_digest(self.ids[: self.tokens])[:16]} {mixture}"


def run(subject: PositionSubject, results: Results, show: Show) -> PositionBench:
    """Measure what is not in `results` yet beside what the profile's law says.

    ValueError without a text that is long enough.
    """
    size = subject.size
    law = LossLaw.of(subject.codec)
    jobs = list(_jobs(subject))
    if not jobs:
        raise ValueError("no text is long enough")
    _measure(subject, jobs, results, show)
    rows = list(_rows(subject, jobs, results, law))
    return PositionBench(
        subject.name,
        subject.layout.dtype.value,
        subject.profile.kind,
        QUALITY,
        REFINEMENTS,
        size.answer_tokens,
        subject.kinds,
        _close([row for row in rows if row.passage is None]),
        _close([row for row in rows if row.passage is not None]),
        law.positions,
        rows,
    )


def _jobs(subject: PositionSubject) -> Iterator[_Job]:
    for tokens, count in subject.size.texts.items():
        long_enough = [ids for ids in subject.ids if len(ids) > tokens + subject.size.answer_tokens]
        yield from (_Job(tokens, ids) for ids in long_enough[:count])


def _measure(subject: PositionSubject, jobs: Sequence[_Job], results: Results, show: Show) -> None:
    missing = [
        (job, [each for each in trial_mixtures(job.tokens) if results.get(job.case(each), 0) is None]) for job in jobs
    ]
    missing = [(job, mixtures) for job, mixtures in missing if mixtures]
    total = sum(len(mixtures) for _, mixtures in missing)
    done = 0
    show("caches", done, total)
    with one_torch_thread(), ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(_judge_job, subject, job, mixtures, results) for job, mixtures in missing]
        for future in as_completed(futures):
            done += future.result()
            show("caches", done, total)


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


def _rows(subject: PositionSubject, jobs: Sequence[_Job], results: Results, law: LossLaw) -> Iterator[PositionRow]:
    answer = subject.size.answer_tokens
    for tokens in dict.fromkeys(job.tokens for job in jobs):
        here = [job for job in jobs if job.tokens == tokens]
        for mixture in trial_mixtures(tokens):
            found = [results.get(job.case(mixture), 0) or [] for job in here]
            kept = mixture.kept(tokens, PIECE_TOKENS)
            for place, passage in enumerate((None, *passages_of(tokens, answer))):
                kls = [each[place] for each in found]
                stderr = stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else None
                if passage is None:
                    said = law.kl(kept, PIECE_TOKENS, Purpose.GOES_ON)
                else:
                    copied = range(passage // PIECE_TOKENS, (passage + answer) // PIECE_TOKENS)
                    said = law.kl(kept, PIECE_TOKENS, Purpose.COPIES, tuple(copied) or None)
                yield PositionRow(tokens, mixture.name, passage, len(kls), fmean(kls), stderr, said / CURVE_OVER_MEAN)


def _close(rows: Sequence[PositionRow]) -> float | None:
    ratios = [row.law / row.kl for row in rows if row.kl > 0]
    return fmean(abs(ratio - 1) <= CLOSE for ratio in ratios) if ratios else None
