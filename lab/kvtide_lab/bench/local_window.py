"""An experiment: the cache predicted by the model itself under a sliding window, and tide of the residual alone.

The reader has the tokens, so that the prediction costs no bytes: one pass in which each token sees the first tokens of
the prompt and the newest WINDOW ones. It follows from tokens alone, never from decoded values, and does not drift.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from transformers import DynamicCache

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Profile
from kvtide.codec.tide import APART_TOKENS, COSTS, Moments, TideCodec, draft_profile
from kvtide.codec.tide.encoder import encode_range
from kvtide.codec.tide.fit import DEVIATION_POWER, SENSITIVITY_POWER
from kvtide.codec.tide.grid import UNITS
from kvtide.codec.tide.model import TideModel, units_of_quality
from kvtide.codec.tide.section import Steps, StoredLayers
from kvtide.engines.calibrate.judge import QualityJudge, block_metas, capture_blocks, one_torch_thread
from kvtide.engines.transformers import block_bits
from kvtide.types import Section, SectionId, SectionKind
from kvtide.wire import pack_object
from kvtide_lab.bench.codec_quality import Progress, Subject
from kvtide_lab.bench.quality_goals import Point, bits_of_points

# The first tokens of a prompt draw attention from all others: without them a window's pass is that of another text.
SINKS = APART_TOKENS
WINDOWS = (32, 64, 128, 256)
# Steps, by the quality that they have where nothing is predicted.
QUALITIES = (2.5e-3, 6e-3, 1.2e-2, 2.5e-2)
KL_EQUAL = 4.5e-3


def window_mask(tokens: int, window: int) -> torch.Tensor:
    """Return what is added to attention's scores: 0 for the newest `window` tokens and the first ones."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    is_seen = (key <= query) & ((query - key < window) | (key < SINKS))
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~is_seen, torch.finfo(torch.float32).min)


def predicted_blocks(model: Any, ids: Sequence[int], layout: BlockLayout, window: int) -> list[BlockBits]:
    """Return the full blocks of the cache under a window."""
    past = DynamicCache(config=model.config)
    places = torch.arange(len(ids))[None]
    mask = window_mask(len(ids), window).to(model.dtype)
    with torch.inference_mode():
        model(torch.tensor([ids]), attention_mask=mask, position_ids=places, past_key_values=past, logits_to_keep=1)
    return [block_bits(past, meta) for meta in block_metas(ids, layout)]


def _up_to(blocks: Sequence[BlockBits], layers: int) -> list[BlockBits]:
    """Return predictions that say nothing of later layers: their residual is the cache."""
    found = [bits.copy() for bits in blocks]
    for bits in found:
        bits[layers:] = 0
    return found


def residual(exact: BlockBits, predicted: BlockBits) -> BlockBits:
    """Return float32 bits of what a prediction lacks."""
    return (exact.view(np.float32) - predicted.view(np.float32)).view(np.uint32)


class LocalProfile(NamedTuple):
    """A profile of residuals, and the units by which its steps are above those of the profile it came from."""

    profile: Profile
    shift_units: float


def residual_profile(deep: Profile, layout: BlockLayout, sums: Mapping[str, NDArray[Any]]) -> LocalProfile:
    """Return a profile of residuals with the weights, tables and pulls of `deep`. sums: `Moments.state` of residuals.

    Weights stay because what a layer's error costs does not depend on how it came about.
    """
    model = TideModel(deep)
    weight = model.weight.astype(np.float64)
    tokens = float(sums["tokens"][0])
    mean, square = sums["sum"] / tokens, np.diagonal(sums["square"], axis1=1, axis2=2) / tokens
    variance = np.maximum(square - mean**2, 1e-20).reshape(weight.shape)
    # The sensitivity from which `draft_profile` gets these weights.
    middle = np.median(weight, axis=-1, keepdims=True)
    line = weight / middle
    spread = (variance * line**2).mean(axis=-1, keepdims=True)
    felt = (middle * spread ** (-DEVIATION_POWER / 2)) ** (1 / SENSITIVITY_POWER)
    sums = dict(sums) | {"sensitivity": felt / spread * variance * line**4, "texts": np.ones(1)}
    draft = draft_profile(deep.model, layout, deep.kind.removeprefix("tide-"), model.rotary, sums)
    shift = UNITS * float(np.log2(TideModel(draft).weight / model.weight).mean())
    return LocalProfile(draft.with_arrays({name: deep.arrays[name] for name in ("tables", "pulls", "curve")}), shift)


class RestoredWindow(NamedTuple):
    """A context's blocks, predicted and corrected; whole objects counted."""

    blocks: list[BlockBits]
    stored_bytes: int


class LocalTide:
    """Codes residuals at a step, whatever the profile promises: the first block's may be zero."""

    def __init__(self, profile: Profile) -> None:
        self._codec = TideCodec(profile)
        self._model = TideModel(profile)

    def through(
        self, metas: Sequence[BlockMeta], exact: Sequence[BlockBits], predicted: Sequence[BlockBits], units: int
    ) -> RestoredWindow:
        """Return a context coded and restored, without refinements."""
        path, steps = _native.tide_paths()[0], Steps(units, 0)
        found: list[BlockBits] = []
        stored_bytes = 0
        for meta, bits, guess in zip(metas, exact, predicted, strict=True):
            lacking = residual(bits, guess)
            sections: list[Section] = []
            turns = self._model.turns(meta, is_back=True)
            for start in range(0, meta.layout.layers, self._model.section_layers):
                stop = start + self._model.section_layers
                stored = StoredLayers(lacking[start:stop], meta.layout.dtype, start, turns)
                coded = encode_range(self._model, path, steps, meta, stored)
                sections.append(Section(SectionId(SectionKind.DATA, 0, start, stop), coded.sections[0]))
            stored_bytes += len(pack_object(meta, self._codec.codec_id, sections, self._codec.profile))
            out = np.empty_like(bits)
            self._codec.decode(meta, sections, out)
            found.append((out.view(np.float32) + guess.view(np.float32)).view(np.uint32))
        return RestoredWindow(found, stored_bytes)


class WindowWay(NamedTuple):
    """A window of so many tokens, and how many of the first layers it predicts; others are coded as they are."""

    window: int
    layers: int


def ways_of(layout: BlockLayout, windows: Sequence[int]) -> list[WindowWay]:
    """Return nothing predicted, each window for all layers, and the second window for the first 5 and 10."""
    some = [WindowWay(windows[1], layers) for layers in (5, 10) if layers < layout.layers] if len(windows) > 1 else []
    return [WindowWay(windows[0], 0), *(WindowWay(window, layout.layers) for window in windows), *some]


class LocalRow(msgspec.Struct, frozen=True):
    """One way at the step of one quality, no refinements; the mean of all contexts."""

    window: int
    layers: int
    quality: float
    bits: float
    kl: float
    kl_stderr: float


class LocalWindow(msgspec.Struct, frozen=True):
    """All rows, and bits at KL_EQUAL by way, over those of nothing predicted.

    `pass_of_prefill`: CPU time of the window's pass, masked by a matrix, over that of the exact one, by window.
    """

    model: str
    contexts: int
    context_tokens: int
    fitted_texts: int
    bits_at_kl: dict[str, float | None]
    over_plain: dict[str, float | None]
    pass_of_prefill: dict[int, float]
    rows: list[LocalRow]


def run(
    subject: Subject, deep: Profile, fit_on: Sequence[Sequence[int]], windows: Sequence[int], progress: Progress
) -> LocalWindow:
    """Fit a residual profile for each way on some texts, and judge it on the subject's contexts."""
    ways = ways_of(subject.layout, windows)
    curve = TideModel(deep).curve
    found: dict[tuple[WindowWay, float], list[tuple[float, float]]] = {(way, q): [] for way in ways for q in QUALITIES}
    passes: dict[int, list[float]] = {window: [] for window in windows}
    with one_torch_thread():
        local = _fitted(subject, deep, fit_on, ways, progress)
        coders = {way: LocalTide(each.profile) for way, each in local.items()}
        for number, ids in enumerate(subject.ids):
            progress("contexts", number, len(subject.ids))
            judge = QualityJudge(subject.model, subject.layout, *subject.size[1:])
            judge.add(ids)
            metas, exact = judge.contexts[0].metas, judge.contexts[0].blocks
            predicted, shares = _predictions(subject, ids[: subject.size.context_tokens], windows)
            for window, share in shares.items():
                passes[window].append(share)
            for (way, quality), measured in found.items():
                units = round(units_of_quality(curve, quality) + local[way].shift_units)
                restored = coders[way].through(metas, exact, _up_to(predicted[way.window], way.layers), units)
                bits = 8 * restored.stored_bytes / sum(block.size for block in exact)
                measured.append((bits, judge.judge(0, restored.blocks).kl))
        progress("contexts", len(subject.ids), len(subject.ids))
    rows = [_row(*case, points) for case, points in found.items()]
    at_kl = {_name(way): bits_of_points([_point(row) for row in rows if _is_of(row, way)], KL_EQUAL) for way in ways}
    plain = at_kl[_name(ways[0])]
    over = {name: bits / plain if bits and plain else None for name, bits in at_kl.items()}
    costs = {window: median(shares) for window, shares in passes.items()}
    judged = (subject.name, len(subject.ids), subject.size.context_tokens, len(fit_on))
    return LocalWindow(*judged, at_kl, over, costs, rows)


def _fitted(
    subject: Subject, deep: Profile, fit_on: Sequence[Sequence[int]], ways: Sequence[WindowWay], progress: Progress
) -> dict[WindowWay, LocalProfile]:
    layout, rotary = subject.layout, TideModel(deep).rotary
    moments = {way: Moments(layout, COSTS[deep.kind.removeprefix("tide-")]) for way in ways}
    for number, ids in enumerate(fit_on):
        progress("fitting", number, len(fit_on))
        exact = capture_blocks(subject.model, ids, layout)
        predicted, _ = _predictions(subject, ids, sorted({way.window for way in ways}))
        for way in ways:
            for meta, bits, guess in zip(
                block_metas(ids, layout), exact, _up_to(predicted[way.window], way.layers), strict=True
            ):
                moments[way].add(meta, residual(bits, guess), rotary)
    return {way: residual_profile(deep, layout, each.state) for way, each in moments.items()}


def _predictions(
    subject: Subject, ids: Sequence[int], windows: Sequence[int]
) -> tuple[dict[int, list[BlockBits]], dict[int, float]]:
    """Return the prediction of each window, and its CPU time over that of the exact pass."""
    start = time.thread_time()
    capture_blocks(subject.model, ids, subject.layout)
    exact_s = time.thread_time() - start
    predicted, shares = {}, {}
    for window in windows:
        start = time.thread_time()
        predicted[window] = predicted_blocks(subject.model, ids, subject.layout, window)
        shares[window] = (time.thread_time() - start) / exact_s
    return predicted, shares


def _name(way: WindowWay) -> str:
    return f"window {way.window}, {way.layers} layers" if way.layers else "nothing predicted"


def _is_of(row: LocalRow, way: WindowWay) -> bool:
    return (row.window, row.layers) == way


def _point(row: LocalRow) -> Point:
    return Point(row.bits, row.kl)


def _row(way: WindowWay, quality: float, measured: Sequence[tuple[float, float]]) -> LocalRow:
    bits, kls = zip(*measured, strict=True)
    spread = stdev(kls) / math.sqrt(len(kls)) if len(kls) > 1 else 0.0
    return LocalRow(way.window, way.layers, quality, fmean(bits), fmean(kls), spread)


def render(result: LocalWindow) -> Table:
    """Return the table that people read."""
    title = (
        f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, fitted on {result.fitted_texts}"
    )
    table = Table(
        "window", "layers", "bits", "KL", "±", f"bits at {KL_EQUAL:g}", "over plain", "pass of prefill", title=title
    )
    for row in result.rows:
        name = _name(WindowWay(row.window, row.layers))
        at_kl, over = result.bits_at_kl[name], result.over_plain[name]
        table.add_row(
            str(row.window if row.layers else ""),
            str(row.layers),
            *(f"{row.bits:.3f}", f"{row.kl:.5f}", f"{row.kl_stderr:.5f}"),
            *("" if figure is None else f"{figure:.3f}" for figure in (at_kl, over)),
            f"{result.pass_of_prefill[row.window]:.2f}" if row.layers else "",
        )
    return table
