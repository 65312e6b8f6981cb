"""The cost of roughness by where it lies: the model's KL on mixed caches, and the loss law that follows.

Some texts are fitted on; others, held out, say how far the law is off, and what spending bytes by it saves.
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
from numpy.typing import NDArray
from rich.console import Group

from kvtide.block import BlockLayout
from kvtide.codec import Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import DEFAULT_POSITIONS, LossLaw, PositionLaw, Purpose, law_of, law_table
from kvtide.engines.calibrate.judge import one_torch_thread
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.watch import model_fingerprint
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.figures import table_of
from kvtide_lab.judge.position_judge import Mixture, Patch, PositionJudge
from kvtide_lab.judge.spending import cheapest, order
from kvtide_lab.measuring import Show

# An embedded copy of four levels: what each is of, and the refinements after its base.
QUALITY, REFINEMENTS = 9e-4, 3
EXACT = REFINEMENTS + 1
NEWEST = (64, 128, 256, 512)
SINK_TOKENS = 256


def passages_of(tokens: int, answer_tokens: int) -> tuple[int, ...]:
    """Return where the copied passages begin, each inside one eighth of a prefix of 1,024 tokens or more."""
    return (tokens // 4, tokens // 8 * 5 if tokens // 8 * 3 >= answer_tokens else tokens // 2)


def flats() -> list[Mixture]:
    """Return one refinement for all, of each."""
    return [Mixture(f"all {kept}", kept) for kept in range(EXACT)]


def only(name: str, start: int, stop: int, kept: int) -> Mixture:
    """Return tokens that keep less than the exact rest."""
    return Mixture(f"{name} {kept}, rest exact", EXACT, (Patch(start, stop, kept),))


def fit_mixtures(tokens: int) -> list[Mixture]:
    """Return what the law is fitted on: one refinement for all, ranges by themselves, and all but the newest."""
    found = flats()
    for kept in (1, 2):
        found += [only(f"newest {n}", tokens - n, tokens, kept) for n in (64, 256, tokens // 2)]
    found.append(only("newest 256", tokens - 256, tokens, 0))
    for kept in (0, 1, 2):
        found.append(Mixture(f"newest 256 exact, rest {kept}", kept, (Patch(tokens - 256, tokens, EXACT),)))
    passage, *_ = passages_of(tokens, tokens // 8)
    found += [only("first quarter", 0, tokens // 4, 1), only("passage", passage, passage + tokens // 8, 1)]
    return found


def map_mixtures(tokens: int) -> list[Mixture]:
    """Return eighths, the newest and the first tokens at each refinement, which the law is fitted on too."""
    eighth = tokens // 8
    ranges = [(f"eighth {n}", n * eighth, (n + 1) * eighth) for n in range(8)]
    ranges += [(f"newest {n}", tokens - n, tokens) for n in NEWEST if n < tokens]
    ranges += [("sinks", 0, min(SINK_TOKENS, tokens // 2))]
    return [only(*each, kept) for kept in range(REFINEMENTS) for each in ranges]


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
# Smaller losses are noise beside what anybody asks for.
KL_MIN = 2e-5
# E-folds from the default that count as much as one e-fold of a row: of a weight, and of the powers fine to coarse.
_WEIGHT_SPREAD, _POWER_SPREADS = 2.0, (0.1, 0.5, 1.0)
_STEPS = 15
_Floats = NDArray[np.float64]


class LossPoint(NamedTuple):
    """A measured KL, the mean of texts. kept: by pieces of PIECE_TOKENS; passages: pieces that were copied, or None."""

    kept: tuple[int, ...]
    passages: tuple[int, ...] | None
    kl: float

    @property
    def purpose(self) -> Purpose:
        """Return what followed."""
        return Purpose.GOES_ON if self.passages is None else Purpose.COPIES

    def predicted(self, law: LossLaw) -> float:
        """Return what a law says of it."""
        return law.kl(self.kept, PIECE_TOKENS, self.purpose, self.passages)


def fitted(law: LossLaw, points: Sequence[LossPoint]) -> LossLaw:
    """Return a law of the same losses with positions that fit the points of each purpose."""
    goes_on, copies = (
        _fitted(law, purpose, [point for point in points if point.purpose is purpose and point.kl > KL_MIN])
        for purpose in Purpose
    )
    return LossLaw((goes_on, copies), law.losses)


def _fitted(law: LossLaw, purpose: Purpose, points: Sequence[LossPoint]) -> PositionLaw:
    """Return the positions for one purpose, by damped Gauss-Newton steps in logarithms."""
    prior = np.log(np.maximum(law_table(DEFAULT_POSITIONS)[purpose, 1:].astype(np.float64), 1e-12))
    spread = np.array([_WEIGHT_SPREAD] * (len(prior) - 9) + 3 * list(_POWER_SPREADS))
    wanted = np.log([point.kl for point in points])

    def rest(at: _Floats) -> _Floats:
        made = LossLaw((_law(purpose, at),) * 2, law.losses)
        logs = np.log([point.predicted(made) for point in points]) - wanted
        # A row that is far off counts by its size, not by its square.
        robust = np.sign(logs) * np.sqrt(2 * (np.sqrt(1 + np.square(logs)) - 1))
        return np.concatenate([robust, (at - prior) / spread])

    at, damping = prior, 1.0
    value = rest(at)
    for _ in range(_STEPS if points else 0):
        slopes = np.stack([(rest(at + step) - value) / 1e-4 for step in np.eye(len(at)) * 1e-4], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ value)
        there = rest(at + step)
        is_better = there @ there < value @ value
        damping *= 0.3 if is_better else 4.0
        if is_better:
            at, value = at + step, there
    return _law(purpose, at)


def _law(purpose: Purpose, logs: _Floats) -> PositionLaw:
    sink, passage, *others = np.exp(logs).tolist()
    return law_of((sink, passage if purpose is Purpose.COPIES else 0.0, *others))


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
# What all others are compared with, text by text.
REFERENCE = flats()[1]


class PositionSize(NamedTuple):
    """The amount of judging: texts by prefix length for single ranges, the fit, the law's test, and spending."""

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
    that goes on.
    """

    stage: str
    prefix_tokens: int
    mixture: str
    passage: int | None
    texts: int
    kl: float
    kl_stderr: float | None
    law: float


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


def run(subject: PositionSubject, results: Results, show: Show) -> PositionBench:
    """Measure what is not in `results` yet, fit the law and test it. ValueError without a text that is long enough."""
    size = subject.size
    law = subject.codec.law
    assert law is not None
    jobs = [*_jobs(subject, "map", subject.fit, size.map_texts, lambda tokens: [REFERENCE, *map_mixtures(tokens)])]
    jobs += _jobs(subject, "fit", subject.fit, size.fit_texts, fit_mixtures)
    jobs += _jobs(subject, "held", subject.held, size.held_texts, trial_mixtures)
    if size.fit_texts and not {"fit", "held"} <= {job.stage for job in jobs}:
        raise ValueError("no text to fit on, or none that is held out, is long enough")
    _measure(subject, jobs, results, show)
    points = list(_points(subject, jobs, results))
    if size.fit_texts:
        law = fitted(law, [point for row, point in points if row.stage != "held"])
    rows = [msgspec.structs.replace(row, law=point.predicted(law)) for row, point in points]
    spending = _spend(subject, law, show)
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


def _measure(subject: PositionSubject, jobs: Sequence[_Job], results: Results, show: Show) -> None:
    missing = [(job, [each for each in job.mixtures if results.get(job.case(each), 0) is None]) for job in jobs]
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
    """Load held-out texts as the fitted law wants. Not kept: every fit wants something else."""
    jobs = list(_jobs(subject, "spend", subject.held, subject.size.spend_texts, lambda tokens: []))
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


def _points(
    subject: PositionSubject, jobs: Sequence[_Job], results: Results
) -> Iterator[tuple[PositionRow, LossPoint]]:
    """Yield each row, without the law's word, and its point.

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
        kept = tuple(mixture.kept(tokens, PIECE_TOKENS))
        for place, passage in enumerate((None, *passages_of(tokens, answer))):
            kls = [found[place] for found, _ in by_text]
            stderr = stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else None
            row = PositionRow(stage, tokens, mixture.name, passage, len(kls), fmean(kls), stderr, 0.0)
            copied = passage is not None and range(passage // PIECE_TOKENS, (passage + answer) // PIECE_TOKENS)
            kl = sum(kls) / sum(reference[place] for _, reference in by_text) * level[passage is not None]
            yield row, LossPoint(kept, tuple(copied) if copied else None, kl)


def _found(results: Results, job: _Job, mixture: Mixture) -> list[float]:
    found = results.get(job.case(mixture), 0)
    assert found is not None, "measured before"
    return found


def _close(rows: Sequence[PositionRow]) -> float | None:
    ratios = [row.law / row.kl for row in rows if row.kl > 0]
    return fmean(abs(ratio - 1) <= CLOSE for ratio in ratios) if ratios else None


def render(result: PositionBench) -> Group:
    """Return the tables that people read: held-out rows beside the law, then what spending by it saves."""
    close = f"within 25 %: {_share(result.law_close_goes_on)} that go on, {_share(result.law_close_copies)} of copies"
    title = f"{result.model}, {result.codec}, {result.answer_tokens} tokens of answer, held-out texts; {close}"
    rows = table_of(("prefix", "cache", "answer", "texts", "KL", "±", "law", "law / KL"), title=title, left=("cache",))
    for row in result.rows:
        if row.stage == "held":
            answer = "goes on" if row.passage is None else f"copies from {row.passage}"
            spread = "" if row.kl_stderr is None else f"{row.kl_stderr:.4f}"
            figures = (f"{row.kl:.4f}", spread, f"{row.law:.4f}", f"{row.law / row.kl:.2f}" if row.kl > 0 else "")
            rows.add_row(str(row.prefix_tokens), row.mixture, answer, str(row.texts), *figures)
    columns = ("prefix", "load", "bits", "KL goes on", "copies", "bytes_vs_flat", "vs stored", "KL vs flat: goes on")
    spending = table_of((*columns, "copies"), title="Bytes by the law, held-out texts", left=("load",))
    for way in result.spending:
        ratios = (way.bytes_vs_flat, way.bytes_vs_stored, way.kl_vs_flat_goes_on, way.kl_vs_flat_copies)
        kls = (f"{way.kl_goes_on:.4f}", f"{way.kl_copies:.4f}")
        shown = ("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        spending.add_row(str(way.prefix_tokens), way.way, f"{way.bits:.3f}", *kls, *shown)
    return Group(rows, spending)


def _share(share: float | None) -> str:
    return "none" if share is None else f"{share:.0%}"
