"""The cost of roughness by where it lies: the model's KL on mixed caches, beside the profile's loss law.

On texts that no law was fitted on; also what spending bytes by the law saves.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Group

from kvtide.block import BlockLayout
from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import LossLaw, PositionLaw, Purpose
from kvtide.engines.calibrate.judge import one_torch_thread
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.watch import model_fingerprint
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.figures import shown, table_of
from kvtide_lab.judge.position_judge import Mixture, Patch, PositionJudge
from kvtide_lab.judge.spending import cheapest, order
from kvtide_lab.measuring import Show

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
# KLs that are asked for; half of the bytes that one refinement for all takes at the first is tried besides.
GOALS = (5e-3, 1e-2, 2e-2)


class Spent(NamedTuple):
    """One way to load one text: bytes, what the law says, and what the model says: text that goes on, copies (mean)."""

    way: str
    size: float
    law: tuple[float, float]
    kls: tuple[float, float]


class SpendRow(msgspec.Struct, frozen=True):
    """One way to load, the mean of `texts` texts; sizes in bits of a float32 element.

    bytes_vs_flat: bytes over those of one refinement for all at the same KL, for the worse purpose, and kl_vs_flat: KL
    over that of one refinement for all in as many bytes, for each. The line through what is measured of one refinement
    for all, in (bytes, log KL), stands for objects of any step. bytes_vs_stored: over the fewest bytes of a refinement
    that is there and as good.
    """

    prefix_tokens: int
    way: str
    texts: int
    bits: float
    kl_goes_on: float
    kl_copies: float
    law_goes_on: float
    law_copies: float
    bytes_vs_flat: float | None
    bytes_vs_stored: float | None
    kl_vs_flat_goes_on: float | None
    kl_vs_flat_copies: float | None


def spent(judge: PositionJudge, law: LossLaw, block_tokens: int, passages: Sequence[int]) -> list[Spent]:
    """Load one context in every way: one refinement for all, by the law at each goal, and by its order at half."""
    sizes, blocks = judge.sizes, len(judge.sizes)
    ways = [(f"all {kept}", [kept] * blocks) for kept in range(len(law.losses))]
    ways += [(f"law at {goal:g}", cheapest(law, sizes, block_tokens, goal)) for goal in GOALS]
    flat_bytes = [float(sum(size[kept] for size in sizes)) for kept in range(len(law.losses))]
    half = np.interp(np.log(GOALS[0]), np.log(law.losses[::-1]), flat_bytes[::-1]) / 2
    ways.append((f"law at half of {GOALS[0]:g}", within(law, sizes, block_tokens, float(half))))
    found = []
    for way, kept in ways:
        patches = tuple(Patch(i * block_tokens, (i + 1) * block_tokens, each) for i, each in enumerate(kept))
        goes_on, *copies = judge.kls(Mixture(way, 0, patches), passages)
        says = (law.kl(kept, block_tokens, Purpose.GOES_ON), law.kl(kept, block_tokens, Purpose.COPIES))
        size = float(sum(size[each] for size, each in zip(sizes, kept, strict=True)))
        found.append(Spent(way, size, says, (goes_on, fmean(copies))))
    return found


def within(law: LossLaw, sizes: Sequence[Sequence[int]], block_tokens: int, size_max: float) -> list[int]:
    """Return what each block keeps when fetching in the law's order ends at so many bytes; all bases are fetched."""
    kept, size = [0] * len(sizes), float(sum(each[0] for each in sizes))
    for block, refinement in order(law, np.mean(sizes, axis=0).tolist(), len(sizes), block_tokens)[len(sizes) :]:
        more = sizes[block][refinement] - sizes[block][refinement - 1]
        if size + more > size_max:
            break
        kept[block], size = refinement, size + more
    return kept


def spend_rows(prefix_tokens: int, elements: int, by_text: Sequence[Sequence[Spent]]) -> list[SpendRow]:
    """Return a row for each way, over texts; the ways of all texts are the same."""
    means = [
        Spent(
            way[0].way,
            fmean(each.size for each in way),
            (fmean(each.law[0] for each in way), fmean(each.law[1] for each in way)),
            (fmean(each.kls[0] for each in way), fmean(each.kls[1] for each in way)),
        )
        for way in zip(*by_text, strict=True)
    ]
    flats = [each for each in means if each.way.startswith("all ")]
    return [_row(prefix_tokens, elements, len(by_text), each, flats) for each in means]


def _row(prefix_tokens: int, elements: int, texts: int, found: Spent, flats: Sequence[Spent]) -> SpendRow:
    is_law = found.way.startswith("law")
    sizes = np.array([flat.size for flat in flats])
    logs = np.log([flat.kls for flat in flats])
    same_kl = [float(np.interp(-np.log(found.kls[i]), -logs[:, i], sizes)) for i in Purpose]
    same_size = [float(np.exp(np.interp(found.size, sizes, logs[:, i]))) for i in Purpose]
    stored = [flat.size for flat in flats if all(flat.kls[i] <= found.kls[i] for i in Purpose)]
    return SpendRow(
        prefix_tokens,
        found.way,
        texts,
        8 * found.size / elements,
        *found.kls,
        *found.law,
        found.size / min(same_kl) if is_law else None,
        found.size / min(stored) if is_law and stored else None,
        found.kls[0] / same_size[0] if is_law else None,
        found.kls[1] / same_size[1] if is_law else None,
    )


# Contexts that are worked on at once, each by one thread.
WORKERS = 2
# A row of the law's is good within so much of the model's KL.
CLOSE = 0.25


class PositionSize(NamedTuple):
    """The amount of judging: texts by prefix length for the law's test, and for spending by it."""

    answer_tokens: int
    held_texts: dict[int, int]
    spend_texts: dict[int, int]


FULL = PositionSize(128, {1024: 6, 2048: 6, 4096: 2}, {2048: 5})
QUICK = PositionSize(64, {512: 1}, {512: 1})


def spending_only(tokens: int, texts: int) -> PositionSize:
    """Return a size that tests nothing: only what is spent by the law."""
    return PositionSize(FULL.answer_tokens, {}, {tokens: texts})


class PositionRow(msgspec.Struct, frozen=True):
    """One mixture after one prefix length with one continuation; the mean of `texts` texts.

    passage: where the copied passage begins, None for text that goes on. law: what the profile's law says.
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
    spending: list[SpendRow]
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
    texts: Sequence[Text],
) -> PositionSubject:
    """Take texts that the law was not fitted on."""
    longest = max([*size.held_texts, *size.spend_texts]) + size.answer_tokens + 1
    ids = [list(tokenize(text.content[: 8 * longest])[:longest]) for text in texts]
    return PositionSubject(model, name, layout, size, profile, ids, [text.kind for text in texts])


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
    """Measure what is not in `results` yet beside what the profile's law says, and spend bytes by that.

    ValueError without a text that is long enough.
    """
    size = subject.size
    law = subject.codec.law
    assert law is not None
    jobs = list(_jobs(subject, size.held_texts))
    if size.held_texts and not jobs:
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
        _spend(subject, law, show),
        rows,
    )


def _jobs(subject: PositionSubject, texts: dict[int, int]) -> Iterator[_Job]:
    for tokens, count in texts.items():
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


def _spend(subject: PositionSubject, law: LossLaw, show: Show) -> list[SpendRow]:
    """Load texts as the law wants. Not kept: every law wants something else."""
    jobs = list(_jobs(subject, subject.size.spend_texts))
    rows: list[SpendRow] = []
    with one_torch_thread(), ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(lambda job: _spent(subject, law, job), jobs))
    show("spending", len(found), len(jobs))
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
                yield PositionRow(tokens, mixture.name, passage, len(kls), fmean(kls), stderr, said)


def _close(rows: Sequence[PositionRow]) -> float | None:
    ratios = [row.law / row.kl for row in rows if row.kl > 0]
    return fmean(abs(ratio - 1) <= CLOSE for ratio in ratios) if ratios else None


def render(result: PositionBench) -> Group:
    """Return the tables that people read: rows beside the law, then what spending by it saves."""
    close = f"law within 25 %: {shown(result.law_close_goes_on)} that go on, {shown(result.law_close_copies)} of copies"
    title = f"{result.model}, {result.codec}, {result.answer_tokens} tokens of answer, held-out texts; {close}"
    return Group(table_of(result.rows, title), table_of(result.spending, "Bytes by the law, held-out texts"))
