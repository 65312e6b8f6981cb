"""Tide's distance to an ideal quantiser of its own transform, at equal KL of the model, and what decoding costs.

The same contexts and judge as `codec-quality`. Each context goes through each profile's objects and through its test
channel at a few rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import LosslessCodec, Profile
from kvtide.codec.tide import THIRD, TideCodec
from kvtide.codec.tide.grid import entering
from kvtide.codec.tide.model import TideModel, units_of_quality
from kvtide.engines.calibrate.judge import QualityJudge, one_torch_thread
from kvtide_lab.bench.codec_bound_channel import TestChannel, error_of
from kvtide_lab.bench.codec_quality import QUICK, Progress, Subject, inputs_of
from kvtide_lab.bench.quality_cases import TIDE_QUALITIES, TIDE_QUALITIES_QUICK
from kvtide_lab.bench.quality_goals import Point, bits_of_points
from kvtide_lab.bench.quality_state import Inputs, Partial

# Rates of the channel: the squared error of the step that has such a quality.
CHANNEL_QUALITIES = (6e-4, 1.5e-3, 3.5e-3, 6e-3, 1e-2, 2e-2)
CHANNEL_QUALITIES_QUICK = (1e-3, 4e-3, 1e-2)
# At which KLs bits are compared.
KLS = (1e-3, 4.5e-3, 7.1e-3, 1.2e-2)
# Which components say how loud a token is.
_LOUD_QUALITY = 5e-3
_RESAMPLES = 400


class JudgedPoint(msgspec.Struct, frozen=True):
    """One context through one object or channel. bound: Shannon's lower bound, of channels alone."""

    bits: float
    bound: float | None
    kl: float


class BoundRow(msgspec.Struct, frozen=True):
    """One profile at one step, coded by tide or by the ideal quantiser; the mean of all contexts.

    `bound_bits`: Shannon's lower bound, of the ideal quantiser alone. `decoder_mflop`: products of a token.
    """

    profile: str
    coder: str
    quality: float
    refinements: int
    bits: float
    bound_bits: float | None
    kl: float
    kl_stderr: float
    decoder_mflop: float


class Distance(msgspec.Struct, frozen=True):
    """Bits of tide and of the ideal quantiser at one KL, on lines in (bits, log KL).

    `over_ideal` is the share by which tide exceeds it, its standard error by drawing contexts again and again.
    """

    profile: str
    kl: float
    bits: float
    ideal_bits: float
    bound_bits: float
    over_ideal: float
    over_ideal_stderr: float


class SurfacePoint(msgspec.Struct, frozen=True):
    """Bits, decoder and KL of one way to have a cache. `of_prefill`: the decoder's products over computing it."""

    name: str
    bits: float
    decoder_mflop: float
    of_prefill: float
    kl: float


class CodecBound(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and what they say."""

    model: str
    kv_dtype: str
    contexts: int
    context_tokens: int
    continuation_tokens: int
    kinds: list[str]
    prefill_mflop: float
    distances: list[Distance]
    surface: list[SurfacePoint]
    rows: list[BoundRow]


class BoundCase(NamedTuple):
    """A setting of one profile: tide's objects that end at a refinement of so many, or the channel (`of` is None)."""

    profile: str
    quality: float
    refinements: int
    of: int | None

    @property
    def coder(self) -> str:
        """Return `tide` or `ideal`."""
        return "ideal" if self.of is None else "tide"

    @property
    def id(self) -> str:
        """Return what tells it from all other cases."""
        return f"{self.profile} {self.coder} at {self.quality:g}, refinements {self.refinements} of {self.of}"


def partial_of(subject: Subject, profiles: Sequence[Profile], path: Path | None) -> Partial[Inputs, JudgedPoint]:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    return Partial(inputs_of(subject, profiles), JudgedPoint, path)


def run(
    subject: Subject, profiles: Sequence[Profile], partial: Partial[Inputs, JudgedPoint], progress: Progress
) -> CodecBound:
    """Judge what is not in `partial` yet. ValueError if no profile of tide fits."""
    fitting = [each for each in profiles if each.kind.startswith("tide") and each.fits(subject.layout)]
    if not fitting:
        raise ValueError("no profile of tide fits this model")
    with one_torch_thread():
        _measure(subject, fitting, partial, progress)
    rows, contexts = [], range(len(subject.ids))
    distances: list[Distance] = []
    for profile in fitting:
        model = TideModel(profile)
        found = {case: [_of(partial, case.id, context) for context in contexts] for case in _cases(subject, profile)}
        rows += [_row(model, case, judged) for case, judged in found.items()]
        distances += distances_of(profile.kind, found)
    prefill = prefill_mflop(subject.model, subject.size.context_tokens)
    lossless = fmean(_of(partial, "lossless", context).bits for context in contexts)
    surface = [SurfacePoint("recomputed", 0.0, prefill, 1.0, 0.0), SurfacePoint("lossless", lossless, 0.0, 0.0, 0.0)]
    surface += [
        SurfacePoint(row.profile, row.bits, row.decoder_mflop, row.decoder_mflop / prefill, row.kl)
        for row in rows
        if row.coder == "tide"
    ]
    judged = (subject.name, subject.layout.dtype.value, len(contexts), *subject.size[1:3], subject.kinds)
    return CodecBound(*judged, prefill, distances, surface, rows)


def prefill_mflop(model: Any, tokens: int) -> float:
    """Return the products of computing a token's cache, in millions: layers, and attention over half the context."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.model.layers.parameters())
    heads = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return float(2 * weights + 2 * config.num_hidden_layers * heads * tokens) / 1e6


def decoder_mflop(model: TideModel, units: int) -> float:
    """Return the products of a token's transform at a step, in millions; none where components are values."""
    kept = sum(entering(group.scales, units) for group in model.groups if not group.order.size)
    return 2 * kept * model.groups[0].shape[1] / 1e6


def _cases(subject: Subject, profile: Profile) -> Iterator[BoundCase]:
    is_quick = subject.size == QUICK
    for quality, refinements in TIDE_QUALITIES_QUICK if is_quick else TIDE_QUALITIES:
        for kept in range(refinements + 1):
            yield BoundCase(profile.kind, quality, kept, refinements)
    for quality in CHANNEL_QUALITIES_QUICK if is_quick else CHANNEL_QUALITIES:
        yield BoundCase(profile.kind, quality, 0, None)


def _measure(
    subject: Subject, profiles: Sequence[Profile], partial: Partial[Inputs, JudgedPoint], progress: Progress
) -> None:
    contexts = range(len(subject.ids))
    names = [case.id for profile in profiles for case in _cases(subject, profile)]
    missing = [
        context for context in contexts if any(partial.get(name, context) is None for name in [*names, "lossless"])
    ]
    if not missing:
        return
    models = [TideModel(profile) for profile in profiles]
    channels = [TestChannel(model, units_of_quality(model.curve, _LOUD_QUALITY)) for model in models]
    for context in contexts:
        progress("powers", context, len(contexts))
        judge = _judge(subject, context)
        for channel in channels:
            for meta, bits in _blocks(judge):
                channel.add(meta, bits)
    for done, context in enumerate(missing):
        progress("contexts", done, len(missing))
        judge = _judge(subject, context)
        partial.put("lossless", context, [_lossless(judge)])
        for profile, model, channel in zip(profiles, models, channels, strict=True):
            cases = list(_cases(subject, profile))
            found = [*_through_tide(judge, profile, cases), *_through_channel(judge, model, channel, cases, context)]
            for case, judged in zip(cases, found, strict=True):
                partial.put(case.id, context, [judged])
    progress("contexts", len(missing), len(missing))


def _of(partial: Partial[Inputs, JudgedPoint], name: str, context: int) -> JudgedPoint:
    found = partial.get(name, context)
    assert found, "measured before"
    return found[0]


def _judge(subject: Subject, context: int) -> QualityJudge:
    judge = QualityJudge(subject.model, subject.layout, *subject.size[1:])
    judge.add(subject.ids[context])
    return judge


def _blocks(judge: QualityJudge) -> list[tuple[BlockMeta, BlockBits]]:
    context = judge.contexts[0]
    return list(zip(context.metas, context.blocks, strict=True))


def _bits_of(judge: QualityJudge, stored_bytes: int) -> float:
    return 8 * stored_bytes / sum(bits.size for bits in judge.contexts[0].blocks)


def _lossless(judge: QualityJudge) -> JudgedPoint:
    return JudgedPoint(_bits_of(judge, judge.stored_bytes(0, LosslessCodec())), None, 0.0)


def _through_tide(judge: QualityJudge, profile: Profile, cases: Sequence[BoundCase]) -> Iterator[JudgedPoint]:
    for quality, refinements in dict.fromkeys((case.quality, case.of) for case in cases if case.of is not None):
        for coded in judge.code_prefixes(0, TideCodec(profile, quality, refinements)):
            yield JudgedPoint(_bits_of(judge, coded.stored_bytes), None, judge.judge(0, coded.decoded).kl)


def _through_channel(
    judge: QualityJudge, model: TideModel, channel: TestChannel, cases: Sequence[BoundCase], seed: int
) -> Iterator[JudgedPoint]:
    errors = [error_of(units_of_quality(model.curve, case.quality)) for case in cases if case.of is None]
    for error, found in zip(errors, channel.through(_blocks(judge), errors, np.random.default_rng(seed)), strict=True):
        yield JudgedPoint(channel.ideal_bits(error), found.bound_bits, judge.judge(0, found.blocks).kl)


def _row(model: TideModel, case: BoundCase, judged: Sequence[JudgedPoint]) -> BoundRow:
    kls = [each.kl for each in judged]
    has_trellis = model.trellis is not None and case.of is not None
    units = model.final_units(case.quality, has_trellis) + THIRD * ((case.of or 0) - case.refinements)
    return BoundRow(
        profile=case.profile,
        coder=case.coder,
        quality=case.quality,
        refinements=case.refinements,
        bits=fmean(each.bits for each in judged),
        bound_bits=None if case.of is not None else fmean(each.bound or 0.0 for each in judged),
        kl=fmean(kls),
        kl_stderr=stdev(kls) / math.sqrt(len(kls)) if len(kls) > 1 else 0.0,
        decoder_mflop=decoder_mflop(model, units),
    )


class _Lines(NamedTuple):
    """Bits of tide and of the ideal quantiser, and Shannon's bound, at a KL; None where a line does not reach it."""

    tide: float | None
    ideal: float | None
    bound: float | None


def _lines(found: Mapping[BoundCase, Sequence[JudgedPoint]], contexts: Sequence[int], kl: float) -> _Lines:
    lines: dict[str, list[Point]] = {"tide": [], "ideal": [], "bound": []}
    for case, by_context in found.items():
        judged = [by_context[context] for context in contexts]
        loss = fmean(each.kl for each in judged)
        lines[case.coder].append(Point(fmean(each.bits for each in judged), loss))
        if case.of is None:
            lines["bound"].append(Point(fmean(each.bound or 0.0 for each in judged), loss))
    return _Lines(*(bits_of_points(points, kl) for points in lines.values()))


def distances_of(name: str, found: Mapping[BoundCase, Sequence[JudgedPoint]]) -> Iterator[Distance]:
    """Return the distance of a profile at each of KLS that its rows reach. found: by case, one a context."""
    count = len(next(iter(found.values())))
    rng = np.random.default_rng(count)
    draws = [rng.integers(0, count, count).tolist() for _ in range(_RESAMPLES)]
    for kl in KLS:
        tide, ideal, bound = _lines(found, range(count), kl)
        if tide is None or ideal is None or bound is None:
            continue
        again = [_lines(found, draw, kl) for draw in draws]
        ratios = [each.tide / each.ideal for each in again if each.tide and each.ideal]
        stderr = stdev(ratios) if len(ratios) > 1 else 0.0
        yield Distance(name, kl, tide, ideal, bound, tide / ideal - 1, stderr)
