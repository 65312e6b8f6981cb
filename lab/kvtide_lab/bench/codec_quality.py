"""Rate against distortion of each codec: bits, and the model's loss with them; every byte counted.

Each context goes through each case by itself, two at a time; what was found is kept, so that a run goes on from it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.block import BlockBits, BlockLayout
from kvtide.codec import Codec, LosslessCodec, Profile
from kvtide.codec.base import RawCodec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, SnippetCodec
from kvtide.codec.published.cachegen import CHUNKWISE_LEVELS, LEVELS
from kvtide.codec.published.integers import CODERS
from kvtide.codec.tide import THIRD, Steps, TideCodec
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.fingerprint import model_fingerprint
from kvtide.errors import UnencodableBlock
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.judge.quality import CacheVerdict, CodedContext, QualityJudge, one_torch_thread
from kvtide_lab.measuring import Show
from kvtide_lab.subjects import LoadedModel, long_enough

# Of cachegen's nine positions in a group: how many single deltas follow the anchors in the rows that are not whole.
SINGLE_DELTAS = (0, 1, 3, 6)


class Case(NamedTuple):
    """One codec at one setting. `refinements`: how many are read, None for all."""

    name: str
    level: int
    coder: str
    profile: str
    codec: Codec
    refinements: int | None = None
    quality: float | None = None

    @property
    def id(self) -> str:
        """Return what tells it from all other cases."""
        asked = "" if self.quality is None else f" at {self.quality:g}"
        steps = self.codec.steps.refinements if isinstance(self.codec, TideCodec) else self.refinements
        refinements = "" if steps is None else f" with {steps} refinements"
        return f"{self.name} level {self.level} {self.coder} {self.profile}{asked}{refinements}"


# What objects of tide are asked for, and how many refinements they get: the last has prefixes of all qualities. Each
# KL of `KL_GOALS` lies between two that are near it, also on texts on which KL is not what it was in calibration.
TIDE_QUALITIES = ((1e-2, 0), (6.8e-3, 0), (4.5e-3, 1), (9e-4, 3))
TIDE_QUALITIES_QUICK = ((1e-2, 0), (4e-3, 1), (9e-4, 1))


Qualities = Sequence[tuple[float, int]]


def cases(profiles: Sequence[Profile], layout: BlockLayout, qualities: Qualities = TIDE_QUALITIES) -> list[Case]:
    """Return every codec, level, coder and place of distributions; shared ones where a profile fits."""
    found = [Case("raw", 0, "none", "none", RawCodec()), Case("lossless", 0, "rans", "none", LosslessCodec())]
    for name, maker, levels in (("cachegen", CachegenCodec, LEVELS), ("chunkwise", ChunkwiseCodec, CHUNKWISE_LEVELS)):
        fitting = next((p for p in profiles if p.kind == name and p.fits(layout)), None)
        for level in levels:
            for profile in (None, fitting) if fitting else (None,):
                for number, coder in enumerate(CODERS):
                    where = "shared" if profile else "payload"
                    found.append(Case(name, level, coder.name, where, maker(level, number, profile)))
    found.append(Case("cachegen-snippet", 0, CODERS[0].name, "payload", SnippetCodec()))
    return found + _anchor_cases(found) + _tide_cases(profiles, layout, qualities)


def chosen(every: Sequence[Case], codecs: Sequence[str]) -> list[Case]:
    """Return the cases of the codecs that are named, all if none is. ValueError for a name that no case has."""
    known = dict.fromkeys(case.name for case in every)
    unknown = [name for name in codecs if name not in known]
    if unknown:
        raise ValueError(f"codecs of this model and these profiles are {', '.join(known)}, got {unknown[0]!r}")
    return [case for case in every if not codecs or case.name in codecs]


def _anchor_cases(found: Sequence[Case]) -> list[Case]:
    # The paper's own bins, the coarsest: beside deltas that are not here, finer ones are bits for nothing.
    whole = [case for case in found if (case.name, case.level, case.coder) == ("cachegen", max(LEVELS), "rans")]
    return [whole[-1]._replace(refinements=refinements) for refinements in SINGLE_DELTAS]


def _tide_cases(profiles: Sequence[Profile], layout: BlockLayout, qualities: Qualities) -> list[Case]:
    return [
        Case(profile.kind, 0, "rans", "shared", TideCodec(profile, quality, refinements), quality=quality)
        for profile in profiles
        if profile.kind.startswith("tide") and profile.fits(layout)
        for quality, refinements in qualities
    ]


KL_GOALS = (1e-3, 5e-3, 1.2e-2)


class Point(msgspec.Struct, frozen=True):
    """A row's cost and the model's loss with it."""

    bits_per_element: float
    kl: float


class BitsAtKl(msgspec.Struct, frozen=True):
    """One codec with one coder and one place of distributions at a KL.

    `bits_per_element` lies on the straight line, in (bits, log KL), through `between`: of the rows of this codec, coder
    and place, at whatever level, quality and refinement, those that no cheaper one is as good as, the nearest on either
    side (the coarser first). Both are None if a side has none. `bits_of_row` are the fewest of a row that is at least
    as good, None if none is.
    """

    codec: str
    coder: str
    profile: str
    kl: float
    bits_per_element: float | None
    bits_of_row: float | None
    between: tuple[Point, Point] | None


def bits_at_kl(rows: Sequence[QualityRow]) -> list[BitsAtKl]:
    """Return an entry for each lossy codec, coder and place of distributions, and each of KL_GOALS."""
    lines = dict.fromkeys((row.codec, row.coder, row.profile) for row in rows if row.kl > 1e-6)
    found = []
    for line in lines:
        points = [Point(row.bits_per_element, row.kl) for row in rows if (row.codec, row.coder, row.profile) == line]
        for kl in KL_GOALS:
            good = [point.bits_per_element for point in points if point.kl <= kl]
            found.append(BitsAtKl(*line, kl, bits_of_points(points, kl), min(good, default=None), _between(points, kl)))
    return found


def bits_of_points(points: Sequence[Point], kl: float) -> float | None:
    """Return the bits at a KL on the line through the points worth having, None beyond its ends."""
    between = _between(points, kl)
    return _bits(*between, kl) if between else None


def _between(points: Sequence[Point], kl: float) -> tuple[Point, Point] | None:
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits_per_element, point.kl)):
        if point.kl > 0 and (not front or point.kl < front[-1].kl):
            front.append(point)
    return next(((coarse, fine) for coarse, fine in pairwise(front) if fine.kl <= kl <= coarse.kl), None)


def _bits(coarse: Point, fine: Point, kl: float) -> float:
    share = math.log(coarse.kl / kl) / math.log(coarse.kl / fine.kl)
    return coarse.bits_per_element + (fine.bits_per_element - coarse.bits_per_element) * share


def bits_of(found: Sequence[BitsAtKl], kl: float, codec: str, profile: str) -> float | None:
    """Return the fewest bits of a codec's coders at one of KL_GOALS, None if no coder has any."""
    bits = [
        each.bits_per_element
        for each in found
        if (each.codec, each.profile, each.kl) == (codec, profile, kl) and each.bits_per_element is not None
    ]
    return min(bits, default=None)


def ratio_to_tide(found: Sequence[BitsAtKl], codec: str, profile: str) -> float | None:
    """Return how many times the bits of `tide-deep` a codec takes at a KL of 5e-3."""
    theirs, ours = bits_of(found, 5e-3, codec, profile), bits_of(found, 5e-3, "tide-deep", "shared")
    return theirs / ours if theirs and ours else None


def embedded_penalty(rows: Sequence[QualityRow]) -> float | None:
    """Return by which share the worst prefix of refinements exceeds a single encoding of its quality."""
    return max((row.over_single for row in rows if row.over_single is not None), default=None)


class QualitySize(NamedTuple):
    """The amount of judging."""

    contexts: int
    context_tokens: int
    continuation: int
    greedy: int


FULL = QualitySize(contexts=12, context_tokens=1536, continuation=128, greedy=32)
QUICK = QualitySize(contexts=1, context_tokens=256, continuation=128, greedy=8)

# Cases that are worked on at once, each by one thread: a pass of the model by two threads takes as long as its slower
# half, and many times that where the machine is busy.
WORKERS = 2

# What texts are compared at.
TEXT_KL = 5e-3


class Inputs(msgspec.Struct, frozen=True):
    """All that decides what `codec-quality` finds, but for the program. Digests in hex; `texts`: one a context."""

    model: str
    kv_dtype: str
    block_tokens: int
    context_tokens: int
    continuation_tokens: int
    greedy_tokens: int
    texts: list[str]
    profiles: list[str]


class Measured(msgspec.Struct, frozen=True):
    """A context's objects that end at one refinement, through one case. Times are of the CPU.

    `single_bytes`: objects of the same step without refinements, of tide only.
    """

    refinements: int
    raw_bytes: int
    stored_bytes: int
    single_bytes: int | None
    encode_s: float
    decode_s: float
    verdict: CacheVerdict


class QualityRow(msgspec.Struct, frozen=True):
    """One codec at one level. `profile` says where the distributions are: shared, payload, or none needed.

    Of a codec with refinements a row may be of objects that end at one of them. Of tide `quality` is what the whole
    object was asked for, `over_single` by how much the row's bits exceed those of an object of the same step without
    refinements; None for less than all refinements of levels along a trellis, which no other object has.
    """

    codec: str
    level: int
    coder: str
    profile: str
    quality: float | None
    refinements: int
    over_single: float | None
    bits_per_element: float
    kl: float
    kl_stderr: float
    ppl_change_pct: float
    top1: float
    greedy_match: float
    size_vs_rans: float | None
    encode_mb_s: float
    decode_mb_s: float


class TextRow(msgspec.Struct, frozen=True):
    """One profile of tide on one text. bits: at a KL of 5e-3, on the line through its points, None beyond its ends.

    kls_over_asked: what whole objects lose over what they were asked for, by quality, the coarsest first.
    """

    codec: str
    text: str
    bits: float | None
    kls_over_asked: list[float]


class CodecQuality(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and what they say.

    `cachegen_over_tide` (shared tables) and `chunkwise_over_tide` (tables in the payload) are bits over those of
    tide-deep at a KL of 5e-3; `embedded_penalty` is the largest `over_single`.
    """

    model: str
    kv_dtype: str
    contexts: int
    context_tokens: int
    continuation_tokens: int
    greedy_tokens: int
    kinds: list[str]
    cachegen_over_tide: float | None
    chunkwise_over_tide: float | None
    embedded_penalty: float | None
    at_kl: list[BitsAtKl]
    by_text: list[TextRow]
    rows: list[QualityRow]


class Subject(NamedTuple):
    """The model and texts that codecs are judged on. ids: of each context and its continuation; names: of the texts."""

    model: Any
    name: str
    layout: BlockLayout
    size: QualitySize
    ids: list[list[int]]
    kinds: list[str]
    names: list[str]


def subject_of(of: LoadedModel, texts: Sequence[Text], size: QualitySize) -> Subject:
    """Take the first texts that are long enough. ValueError if none is."""
    layout = of.layout()
    found = long_enough(of, texts, QualityJudge(of.model, layout, *size[1:]).tokens_needed, size.contexts)
    kinds, names = [text.kind for text, _ in found], [Path(text.name).name for text, _ in found]
    return Subject(of.model, of.folder.name, layout, size, [ids for _, ids in found], kinds, names)


def partial_of(subject: Subject, profiles: Sequence[Profile], path: Path | None) -> Partial[Inputs, Measured]:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    layout, size = subject.layout, subject.size
    inputs = Inputs(
        model=model_fingerprint(subject.model).hex(),
        kv_dtype=layout.dtype.value,
        block_tokens=layout.tokens,
        context_tokens=size.context_tokens,
        continuation_tokens=size.continuation,
        greedy_tokens=size.greedy,
        texts=[ids_digest(ids) for ids in subject.ids],
        profiles=[profile.digest.hex() for profile in profiles],
    )
    return Partial(inputs, Measured, path)


def run(
    subject: Subject, profiles: Sequence[Profile], codecs: Sequence[str], partial: Partial[Inputs, Measured], show: Show
) -> CodecQuality:
    """Judge every case that is not in `partial` yet; of all codecs if none is named.

    ValueError for an unknown name, and for a text that a codec refuses.
    """
    qualities = TIDE_QUALITIES_QUICK if subject.size == QUICK else TIDE_QUALITIES
    every = chosen(cases(profiles, subject.layout, qualities), codecs)
    contexts = range(len(subject.ids))
    missing = [[case for case in every if partial.get(case.id, context) is None] for context in contexts]
    total = len(every) * len(contexts)
    done = total - sum(map(len, missing))
    show("results", done, total)
    with one_torch_thread():
        for context in contexts:
            for case, found in _found(subject, context, missing[context]):
                partial.put(case.id, context, found)
                done += 1
                show("results", done, total)
    rows: list[QualityRow] = []
    for case in every:
        rows += _rows(subject, case, partial, rows)
    at_kl = bits_at_kl(rows)
    ratios = (ratio_to_tide(at_kl, "cachegen", "shared"), ratio_to_tide(at_kl, "chunkwise", "payload"))
    judged = (subject.name, subject.layout.dtype.value, len(contexts), *subject.size[1:], subject.kinds)
    return CodecQuality(*judged, *ratios, embedded_penalty(rows), at_kl, _by_text(subject, every, partial), rows)


def _found(subject: Subject, context: int, missing: Sequence[Case]) -> Iterator[tuple[Case, list[Measured]]]:
    if not missing:
        return
    judging = _Judging(subject, context)
    pool = ThreadPoolExecutor(WORKERS)
    try:
        futures = {pool.submit(judging.measured, case): case for case in missing}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except UnencodableBlock as error:
                raise ValueError(
                    f"{subject.names[context]}, {futures[future].id}: {error}. Such blocks are stored losslessly: "
                    "leave the text out, or calibrate with texts like it"
                ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Judging:
    """One context, its exact cache, and what the model said after each decoded cache so far."""

    def __init__(self, subject: Subject, context: int) -> None:
        self._judge = QualityJudge(subject.model, subject.layout, *subject.size[1:])
        self._judge.add(subject.ids[context])
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, CacheVerdict] = {}
        self._asking: dict[bytes, threading.Lock] = {}

    def measured(self, case: Case) -> list[Measured]:
        """Return what a case comes to: of tide at each refinement at which its objects may end."""
        if not isinstance(case.codec, TideCodec):
            return [self._measured(self._judge.code(0, case.codec, case.refinements))]
        found, steps = [], case.codec.steps
        for coded in self._judge.code_prefixes(0, case.codec):
            missing = steps.refinements - coded.refinements
            single = Steps(steps.final_units + THIRD * missing, 0, steps.is_trellis)
            # A path's levels cut to thirds are those of no other object.
            is_alone = steps.is_trellis and missing > 0
            singles = None if is_alone else self._judge.stored_bytes(0, case.codec.with_steps(single))
            found.append(self._measured(coded, singles))
        return found

    def _measured(self, coded: CodedContext, single_bytes: int | None = None) -> Measured:
        return Measured(
            refinements=coded.refinements,
            raw_bytes=coded.raw_bytes,
            stored_bytes=coded.stored_bytes,
            single_bytes=single_bytes,
            encode_s=coded.encode_s,
            decode_s=coded.decode_s,
            verdict=self._verdict(coded.decoded),
        )

    def _verdict(self, decoded: list[BlockBits]) -> CacheVerdict:
        # Coders differ in size and speed, not in what they give back: of the same bytes the model is asked once.
        digest = blocks_digest(decoded)
        with self._lock:
            asking = self._asking.setdefault(digest, threading.Lock())
        with asking:
            if digest not in self._verdicts:
                self._verdicts[digest] = self._judge.judge(0, decoded)
            return self._verdicts[digest]


def blocks_digest(blocks: Sequence[BlockBits]) -> bytes:
    """Return a digest of every byte of some blocks."""
    digest = hashlib.sha256()
    for bits in blocks:
        digest.update(bits.tobytes())
    return digest.digest()


def _rows(
    subject: Subject, case: Case, partial: Partial[Inputs, Measured], rows: Sequence[QualityRow]
) -> list[QualityRow]:
    """Return a case's rows, one for each refinement at which its objects may end, over all contexts."""
    by_context = [partial.get(case.id, context) or [] for context in range(len(subject.ids))]
    return [_row(subject, case, found, rows) for found in zip(*by_context, strict=True)]


def _by_text(subject: Subject, every: Sequence[Case], partial: Partial[Inputs, Measured]) -> list[TextRow]:
    """Return a row for each text and profile of tide."""
    rows, names = [], dict.fromkeys(case.name for case in every if case.quality is not None)
    for name, (context, text) in product(names, enumerate(subject.names)):
        points: list[Point] = []
        over = []
        for case in (each for each in every if each.name == name):
            for found in partial.get(case.id, context) or []:
                bits = 8 * subject.layout.dtype.item_bytes * found.stored_bytes / found.raw_bytes
                points.append(Point(bits, found.verdict.kl))
            over.append(points[-1].kl / (case.quality or 1.0))
        rows.append(TextRow(name, text, bits_of_points(points, TEXT_KL), over))
    return rows


def _row(subject: Subject, case: Case, found: Sequence[Measured], rows: Sequence[QualityRow]) -> QualityRow:
    raw_bytes, stored_bytes = sum(each.raw_bytes for each in found), sum(each.stored_bytes for each in found)
    bits = 8 * subject.layout.dtype.item_bytes * stored_bytes / raw_bytes
    singles = [each.single_bytes for each in found if each.single_bytes is not None]
    key = (case.name, case.level, case.profile, found[0].refinements, "rans")
    rans = [row for row in rows if (row.codec, row.level, row.profile, row.refinements, row.coder) == key]
    is_tide = case.quality is not None
    verdicts = [each.verdict for each in found]
    kls = [verdict.kl for verdict in verdicts]
    return QualityRow(
        codec=case.name,
        level=case.level,
        coder=case.coder,
        profile=case.profile,
        quality=case.quality,
        refinements=found[0].refinements,
        over_single=stored_bytes / sum(singles) - 1 if singles else None,
        bits_per_element=bits,
        kl=fmean(kls),
        kl_stderr=float(np.std(kls) / math.sqrt(len(kls))),
        ppl_change_pct=100 * (math.exp(fmean(verdict.nll_change for verdict in verdicts)) - 1),
        top1=fmean(verdict.top1 for verdict in verdicts),
        greedy_match=fmean(verdict.greedy_match for verdict in verdicts),
        size_vs_rans=bits / rans[0].bits_per_element if rans and not is_tide else None,
        encode_mb_s=raw_bytes / 1e6 / sum(each.encode_s for each in found),
        decode_mb_s=raw_bytes / 1e6 / sum(each.decode_s for each in found),
    )
