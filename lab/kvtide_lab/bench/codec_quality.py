"""Rate against distortion of each codec: bits, and the model's loss with them; every byte counted.

Each context goes through each case by itself, two at a time; what was found is kept, so that a run goes on from it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.block import BlockBits, BlockLayout
from kvtide.codec import Profile
from kvtide.codec.tide import THIRD, Steps, TideCodec
from kvtide.engines.calibrate.judge import CacheVerdict, CodedContext, QualityJudge, one_torch_thread
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.watch import model_fingerprint
from kvtide.errors import UnencodableBlock
from kvtide_lab.bench.quality_cases import TIDE_QUALITIES, TIDE_QUALITIES_QUICK, Case, cases, chosen
from kvtide_lab.bench.quality_goals import (
    BitsAtKl,
    Point,
    bits_at_kl,
    bits_of_points,
    embedded_penalty,
    ratio_to_tide,
)
from kvtide_lab.bench.quality_state import Inputs, Measured, Partial, ids_digest


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

# Called with what is being done, and how much of it.
Progress = Callable[[str, int, int], None]


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


def subject_of(
    model: Any,
    name: str,
    tokenize: Callable[[str], list[int]],
    layout: BlockLayout,
    texts: Sequence[Text],
    size: QualitySize,
) -> Subject:
    """Take the first texts that are long enough. ValueError if none is."""
    needed = QualityJudge(model, layout, *size[1:]).tokens_needed
    subject = Subject(model, name, layout, size, [], [], [])
    for text in texts:
        ids = tokenize(text.content[: 8 * needed]) if len(subject.ids) < size.contexts else []
        if len(ids) >= needed:
            subject.ids.append(list(ids[:needed]))
            subject.kinds.append(text.kind)
            subject.names.append(Path(text.name).name)
    if not subject.ids:
        raise ValueError(f"no text has the {needed} tokens that a context and its continuation need")
    return subject


def partial_of(subject: Subject, profiles: Sequence[Profile], path: Path | None) -> Partial[Inputs, Measured]:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    return Partial(inputs_of(subject, profiles), Measured, path)


def inputs_of(subject: Subject, profiles: Sequence[Profile]) -> Inputs:
    """Return all that decides what is found of a subject."""
    layout, size = subject.layout, subject.size
    return Inputs(
        model=model_fingerprint(subject.model).hex(),
        kv_dtype=layout.dtype.value,
        block_tokens=layout.tokens,
        context_tokens=size.context_tokens,
        continuation_tokens=size.continuation,
        greedy_tokens=size.greedy,
        texts=[ids_digest(ids) for ids in subject.ids],
        profiles=[profile.digest.hex() for profile in profiles],
    )


def run(
    subject: Subject,
    profiles: Sequence[Profile],
    codecs: Sequence[str],
    partial: Partial[Inputs, Measured],
    progress: Progress,
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
    progress("results", done, total)
    with one_torch_thread():
        for context in contexts:
            for case, found in _found(subject, context, missing[context]):
                partial.put(case.id, context, found)
                done += 1
                progress("results", done, total)
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
