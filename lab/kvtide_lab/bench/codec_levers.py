"""Judges each lever of tide: bits at equal KL beside rounding, by ideal code lengths, alone and together.

A lever is a transform behind tide's own, a way to choose levels, or both. Same contexts and judge as `codec-quality`;
tables, transforms and pulls are fitted on other texts, of which profiles may have been fitted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import Profile
from kvtide.codec.tide.model import TideModel, units_of_quality
from kvtide.engines.calibrate.judge import QualityJudge, block_metas, capture_blocks, one_torch_thread
from kvtide.engines.calibrate.loss_shares import SHARED_TEXTS, LossShares, context_tokens, finer_weights, loss_shares
from kvtide.engines.transformers import ModelContexts
from kvtide_lab.bench.codec_bound_channel import TestChannel
from kvtide_lab.bench.codec_quality import Progress, Subject, inputs_of
from kvtide_lab.bench.levers_classes import LoudClasses
from kvtide_lab.bench.levers_levels import BlockCoefficients, LevelChoice, Quantised, coefficients_of
from kvtide_lab.bench.levers_transform import Mixed, Predicted, TokenBlock, Transform
from kvtide_lab.bench.levers_trellis import TrellisLevels
from kvtide_lab.bench.levers_weights import Reweighed
from kvtide_lab.bench.quality_goals import Point, bits_of_points
from kvtide_lab.bench.quality_state import Inputs, Partial

# Steps by the quality that the profile's curve has there; bits at KLS lie on lines between them.
QUALITIES = (4e-3, 7.5e-3, 1.4e-2)
KLS = (4.5e-3, 7.1e-3)
# Tables are fitted at the step in the middle, transforms on all blocks and tables on some of them.
_FITTED_QUALITY, TABLE_BLOCKS = 7e-3, 16
FIT_TOKENS = 1024
PRICE = 0.12
# Of a trellis, in half steps squared; its own is .35.
LOW_PRICE = 0.12
TODAY = "rounded"


class LeverChoice(Protocol):
    """A way to choose levels, fitted on blocks at some steps."""

    def fit(self, blocks: Sequence[BlockCoefficients], units: Sequence[int]) -> LeverChoice:
        """Take lengths and what levels stand for."""
        ...

    def code(self, block: BlockCoefficients, units: int) -> Quantised:
        """Return what a block comes to at a step."""
        ...


class Lever(NamedTuple):
    """A name, what turns coefficients (None: nothing), and what chooses levels."""

    name: str
    transform: Transform | None
    choice: LeverChoice


_Pair = tuple[BlockMeta, BlockBits]


class JudgedLever(msgspec.Struct, frozen=True):
    """One context through one lever at one step. error: squared, of a weighted value."""

    bits: float
    kl: float
    error: float


class LeverRow(msgspec.Struct, frozen=True):
    """One lever at one KL. over_today: bits over those of rounding, None where a line does not reach the KL.

    over_today_equal_error: at the squared error that rounding has at that KL. mflop: products of a token that a
    decoder has more.
    """

    lever: str
    kl: float
    bits: float | None
    over_today: float | None
    over_today_equal_error: float | None
    mflop: float


class CodecLevers(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and how many tokens levers were fitted on."""

    model: str
    profile: str
    contexts: int
    context_tokens: int
    continuation_tokens: int
    fitted_tokens: int
    rows: list[LeverRow]


def levers(model: TideModel) -> list[Lever]:
    """Return rounding, as tide does it, then each lever alone, then together."""
    mixed = Mixed(0, 320)
    return [
        Lever(TODAY, None, LevelChoice(0)),
        Lever("levels by rate and distortion", None, LevelChoice(PRICE)),
        Lever("lengths by what was coded before", None, LoudClasses(0)),
        Lever("trellis of 4 states", None, TrellisLevels(4)),
        Lever("trellis of 8 states", None, TrellisLevels(8)),
        Lever("trellis of 8 states, bits at a third of the price", None, TrellisLevels(8, LOW_PRICE)),
        Lever("320 of each group, two groups mixed", Mixed(2, 320), LevelChoice(0)),
        Lever("320 of each group, all groups mixed", mixed, LevelChoice(0)),
        Lever("weights of heads by what the model says", Reweighed(model), LevelChoice(0)),
        Lever("first layers less what embeddings predict", Predicted(1), LevelChoice(0)),
        Lever("all groups mixed, lengths by what was coded before", mixed, LoudClasses(0)),
        Lever("all groups mixed, trellis of 8 states", mixed, TrellisLevels(8)),
    ]


def partial_of(subject: Subject, profile: Profile, path: Path | None) -> Partial[Inputs, JudgedLever]:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    return Partial(inputs_of(subject, [profile]), JudgedLever, path)


def run(
    subject: Subject,
    profile: Profile,
    fit_on: Sequence[Sequence[int]],
    chosen: Sequence[Lever],
    partial: Partial[Inputs, JudgedLever],
    progress: Progress,
) -> CodecLevers:
    """Fit levers on texts, token ids of whole blocks, then judge what is not in `partial` yet."""
    bench = _Bench(subject, profile)
    missing = [lever for lever in chosen if bench.is_missing(lever, partial)]
    with one_torch_thread():
        if missing:
            bench.fit(fit_on, missing, progress)
            bench.measure(missing, partial, progress)
    rows = rows_of(chosen, lambda lever, units: bench.found(partial, lever, units), bench.units)
    judged = (subject.name, profile.kind, len(subject.ids), *subject.size[1:3], sum(map(len, fit_on)))
    return CodecLevers(*judged, rows)


class _Bench:
    """A profile's coefficients of texts, and a judge for what becomes of them."""

    def __init__(self, subject: Subject, profile: Profile) -> None:
        self._subject = subject
        self._model = TideModel(profile)
        self._loud_units = units_of_quality(self._model.curve, _FITTED_QUALITY)
        self._channel = TestChannel(self._model, self._loud_units)
        self.units = [units_of_quality(self._model.curve, quality) for quality in QUALITIES]
        self._embeddings: NDArray[np.float32] = subject.model.get_input_embeddings().weight.detach().float().numpy()

    def _tokens(self, ids: Sequence[int], meta: BlockMeta, bits: BlockBits) -> TokenBlock:
        found = coefficients_of(self._channel, meta, bits)
        here = np.array(ids[meta.start : meta.start + meta.layout.tokens])[found.order]
        rows = self._embeddings[here]
        rows = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 1e-5)
        return TokenBlock(found, np.ascontiguousarray(rows.T))

    def fit(self, fit_on: Sequence[Sequence[int]], chosen: Sequence[Lever], progress: Progress) -> None:
        """Fit transforms on all blocks, and choices on blocks that are spread over the texts."""
        kept: list[TokenBlock] = []
        transforms = {id(lever.transform): lever.transform for lever in chosen if lever.transform is not None}
        every = max(1, len(fit_on) // TABLE_BLOCKS)
        for number, ids in enumerate(fit_on):
            if number % every and not transforms:
                continue
            progress("texts", number, len(fit_on))
            metas = block_metas(ids, self._subject.layout)
            blocks = capture_blocks(self._subject.model, ids, self._subject.layout)
            found = [self._tokens(ids, *pair) for pair in zip(metas, blocks, strict=True)]
            for transform in transforms.values():
                for block in found:
                    transform.add(block)
            if number % every == 0:
                kept.append(found[-1])
        for transform in transforms.values():
            transform.fit()
            if isinstance(transform, Reweighed):
                today = LevelChoice(0).fit([block.coefficients for block in kept], [self._loud_units])
                transform.weigh(self._finer(fit_on[:: -(-len(fit_on) // SHARED_TEXTS)], today))
        for number, lever in enumerate(chosen):
            progress("levers", number, len(chosen))
            turned = [_turned(lever, block) for block in kept]
            lever.choice.fit(turned, [self._loud_units])

    def _finer(self, texts: Sequence[Sequence[int]], today: LeverChoice) -> NDArray[np.float64]:
        """Return what weights of heads are multiplied by for what the model says of their errors."""
        subject, weight = self._subject, self._model.weight
        contexts = ModelContexts(subject.model, subject.layout.tokens)
        empty = np.zeros((*weight.shape[:2], subject.layout.kv_heads))
        sums = LossShares(empty, empty)
        for ids in texts:
            tokens = context_tokens(ids, subject.layout.tokens)
            context, decoded = contexts.capture(ids[:tokens]), []
            for meta, bits in zip(context.metas[0], context.blocks[0], strict=True):
                block = self._tokens(ids, meta, bits).coefficients
                decoded.append(self._stored(meta, bits, block, today.code(block, self._loud_units).values))
            (found,) = loss_shares(contexts, context, [decoded], ids[tokens:], contexts.rotaries(), [weight])
            sums = LossShares(sums.kl + found.kl, sums.error + found.error)
        return finer_weights([sums])[0]

    def _stored(
        self, meta: BlockMeta, exact: BlockBits, block: BlockCoefficients, values: NDArray[np.float32]
    ) -> BlockBits:
        """Return a block as a decoder would, from coefficients; tokens that are kept apart are exact."""
        out = exact.copy()
        self._channel.store(meta, block.by_token(values), out)
        out[:, :, block.is_apart] = exact[:, :, block.is_apart]
        return out

    def is_missing(self, lever: Lever, partial: Partial[Inputs, JudgedLever]) -> bool:
        """Tell whether some context was not judged through a lever at some step."""
        names = [_name(lever, units) for units in self.units]
        return any(partial.get(name, i) is None for name in names for i in range(len(self._subject.ids)))

    def measure(self, chosen: Sequence[Lever], partial: Partial[Inputs, JudgedLever], progress: Progress) -> None:
        """Judge each context through each lever at each step."""
        contexts = len(self._subject.ids)
        for context, ids in enumerate(self._subject.ids):
            progress("contexts", context, contexts)
            missing = [
                (lever, units)
                for lever in chosen
                for units in self.units
                if partial.get(_name(lever, units), context) is None
            ]
            if not missing:
                continue
            judge = QualityJudge(self._subject.model, self._subject.layout, *self._subject.size[1:])
            judge.add(ids)
            pairs = list(zip(judge.contexts[0].metas, judge.contexts[0].blocks, strict=True))
            blocks = [self._tokens(ids, *pair) for pair in pairs]
            for lever, units in missing:
                partial.put(_name(lever, units), context, [self._judged(judge, pairs, blocks, lever, units)])
        progress("contexts", contexts, contexts)

    def _judged(
        self, judge: QualityJudge, pairs: Sequence[_Pair], blocks: Sequence[TokenBlock], lever: Lever, units: int
    ) -> JudgedLever:
        bits = error = 0.0
        decoded = []
        for (meta, exact), block in zip(pairs, blocks, strict=True):
            coded = lever.choice.code(_turned(lever, block), units)
            values = lever.transform.back(block, coded.values) if lever.transform else coded.values
            coefficients = block.coefficients
            bits += coded.bits + _kept_bits(coefficients.is_apart, exact)
            error += float(np.square(values - coefficients.values).sum())
            decoded.append(self._stored(meta, exact, coefficients, values))
        elements = sum(exact.size for _, exact in pairs)
        return JudgedLever(bits / elements, judge.judge(0, decoded).kl, error / elements)

    def found(self, partial: Partial[Inputs, JudgedLever], lever: Lever, units: int) -> JudgedLever:
        """Return the mean of all contexts."""
        by_context = [partial.get(_name(lever, units), context) for context in range(len(self._subject.ids))]
        judged = [each[0] for each in by_context if each]
        assert len(judged) == len(by_context), "measured before"
        return JudgedLever(*(fmean(getattr(each, name) for each in judged) for name in JudgedLever.__struct_fields__))


def _name(lever: Lever, units: int) -> str:
    return f"{lever.name} at {units}"


def _turned(lever: Lever, block: TokenBlock) -> BlockCoefficients:
    return lever.transform.forth(block) if lever.transform else block.coefficients


def _kept_bits(is_apart: NDArray[np.bool_], bits: BlockBits) -> int:
    """Return the bits of tokens that are kept apart: a byte a value and two a head."""
    layers, two, _, heads, dims = bits.shape
    kept: int = int(is_apart.sum()) * layers * two * heads * (2 + dims)
    return 8 * kept


def rows_of(
    chosen: Sequence[Lever], found: Callable[[Lever, int], JudgedLever], units: Sequence[int]
) -> list[LeverRow]:
    """Return a row for each lever and KL. The first lever is what the others stand beside."""
    points = [[found(lever, each) for each in units] for lever in chosen]
    rows = []
    for kl in KLS:
        today = bits_of_points([Point(each.bits, each.kl) for each in points[0]], kl)
        for lever, mine in zip(chosen, points, strict=True):
            bits = bits_of_points([Point(each.bits, each.kl) for each in mine], kl)
            over = bits / today if bits and today else None
            equal_error = _over_at_error(points[0], mine, today) if today else None
            rows.append(
                LeverRow(lever.name, kl, bits, over, equal_error, lever.transform.mflop if lever.transform else 0)
            )
    return rows


def _over_at_error(today: Sequence[JudgedLever], mine: Sequence[JudgedLever], bits: float) -> float | None:
    """Return this lever's bits over `bits`, at the squared error that today's line has there."""
    falling = sorted(today, key=lambda each: each.bits)
    error = float(np.exp(np.interp(bits, [each.bits for each in falling], np.log([each.error for each in falling]))))
    found = bits_of_points([Point(each.bits, each.error) for each in mine], error)
    return found / bits if found else None
