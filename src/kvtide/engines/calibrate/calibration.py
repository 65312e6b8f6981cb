"""Fits a tide profile to a model from texts: moments and gradients; counts; then what the model says of the result.

Each text's share is added to a state that is then written to a file, so that a calibration that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.codec import Profile, tide
from kvtide.engines.calibrate.judge import (
    SHARE_TOKENS,
    SHARE_UNITS,
    SHARED_TEXTS,
    LossShares,
    WholeJudge,
    cache_sensitivity,
    coded_prefixes,
    finer_weights,
    loss_shares,
    own_losses,
)
from kvtide.engines.calibrate.texts import TextSplit
from kvtide.engines.transformers import ModelContexts, model_fingerprint

# Texts whose gradients are taken, and whose blocks are counted, at most, spread over all: moments want many more.
SENSED_TEXTS, COUNTED_TEXTS = 64, 64
# A larger state is not written after each text.
_WRITTEN_BYTES = 64 << 20
# Tokens after each text by whose gradients sensitivity is measured, and that quality is judged on.
GRADIENT_TOKENS = 64
JUDGED_TOKENS = 128
# Final steps, in units of the mean scale, and refinements of the objects whose prefixes make the curve.
_CURVE_UNITS = (-64, -55)
_CURVE_REFINEMENTS = 4
# Steps of those prefixes, object by object.
_PREFIX_UNITS = [u + tide.THIRD * (_CURVE_REFINEMENTS - r) for u in _CURVE_UNITS for r in range(_CURVE_REFINEMENTS + 1)]
# Steps of the objects whose levels lie on a trellis.
_TRELLIS_UNITS = range(-60, 21, 13)
# Steps at which texts' gains are measured: between them they change little by little.
_GAIN_UNITS = (-47, -21, 5)
# Fitted texts whose bits held-out ones are compared with: bits differ by 4 % from text to text.
_COMPARED_TEXTS = 2
# Held-out texts that take this much more than fitted ones: more text is wanted.
OVERFIT_RATIO = 1.25
# Below this, more texts bring less than they cost.
WORTH_MORE_TEXTS = 1.02
_SEED = 1
_STATE_VERSION = 10
_Item = TypeVar("_Item")
Progress = Callable[[str, int, int], None]
State = dict[str, NDArray[Any]]


class CurvePoint(msgspec.Struct, frozen=True):
    """The cost of a step and the model's loss with it, on most texts that were not fitted on."""

    step_units: int
    bits_per_element: float
    kl: float


class CalibrationReport(msgspec.Struct, frozen=True):
    """The curve that a quality is looked up in, and how much more bits held-out texts take than fitted ones.

    held_out_over_fitted: None if all were fitted on. texts_wanted: more of them would halve that, 0 if it is small.
    """

    points: list[CurvePoint]
    held_out_texts: int
    held_out_over_fitted: float | None
    is_overfitted: bool
    texts_wanted: int


# Of rounded levels, and of levels along a trellis, as profiles have them.
_Curves = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(eq=False, repr=False)
class TideCalibration:
    """One calibration of a model, kept in `partial` to go on. Its promises are for all groups at one step."""

    model: InitVar[Any]
    _name: str
    _cost: str
    texts: InitVar[TextSplit]
    _block_tokens: int
    _partial: Path
    _unlike: float = 1.0

    def __post_init__(self, model: Any, texts: TextSplit) -> None:
        """texts: those that are long enough count. If none is held out, the curve is that of texts that were fitted on.

        unlike: how many times what held-out texts lose is promised of others.

        ValueError if none is left, or for an unknown cost. UnsupportedModel as in `ModelContexts`, and for keys that
        can't be turned back.
        """
        if self._cost not in tide.COSTS:
            raise ValueError(f"costs are {', '.join(tide.COSTS)}, got {self._cost!r}")
        least = self._block_tokens + JUDGED_TOKENS + 1
        self._texts = TextSplit(*([ids for ids in part if len(ids) >= least] for part in texts))
        if not self._texts.fitted:
            raise ValueError(f"calibration needs at least one full block: a text of {least} tokens")
        self._contexts = ModelContexts(model, self._block_tokens)
        self._rotaries = self._contexts.rotaries()
        self._shapes = self._contexts.shapes
        self._all_rows = self._contexts.all_rows()
        parts = [_STATE_VERSION, self._name, model_fingerprint(model).hex(), self._cost, str(self._shapes), self._texts]
        self._identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def run(self, progress: Progress) -> tuple[list[Profile], CalibrationReport]:
        """Fit, judge, and return a profile for each group of rows, and one of all rows if they have one shape."""
        done = self._read()
        moments = self._moments(done, progress)
        drafts, cost = self._drafts(moments), tide.COSTS[self._cost]
        # Transforms in two stages take minutes to fit once more, and nobody has judged what it brings them.
        if not any(tide.is_staged(cost, shape.layout) for shape in self._shapes):
            finer = finer_weights(self._shares(drafts, done, progress))
            drafts = self._drafts([state | {"finer": each} for state, each in zip(moments, finer, strict=True)])
        counts = self._counts(drafts, done, progress)
        placeholder = drafts[0].arrays["curve"]
        middle = self._finished(drafts, counts, (placeholder, placeholder))
        by_levels, own, ratio = self._curve(middle, done, progress)
        rising = by_levels[-1]
        curves = _curve_array(by_levels[0]), _curve_array(rising)
        profiles = [*self._finished(drafts, counts, curves), *self._joined(drafts, counts, curves)]
        profiles = [each.with_arrays(arrays) for each, arrays in zip(profiles, own, strict=False)]
        if profiles[0].group:
            together = hashlib.sha256(b"".join(each.digest for each in profiles)).digest()
            profiles = [each.with_arrays({"calibration": np.frombuffer(together, dtype=np.uint8)}) for each in profiles]
        is_overfitted = ratio is not None and ratio > OVERFIT_RATIO
        # What a fit knows of its own texts alone shrinks with their number.
        wanted = len(self._texts.fitted) if ratio is not None and ratio > WORTH_MORE_TEXTS else 0
        return profiles, CalibrationReport(rising, len(self._texts.held_out), ratio, is_overfitted, wanted)

    def _drafts(self, moments: Sequence[State]) -> list[Profile]:
        groups = [(shape.layout, state) for shape, state in zip(self._shapes, moments, strict=True)]
        drafts = tide.draft_profiles(self._name, self._cost, groups, self._rotaries, self._all_rows)
        return [
            draft.with_arrays({"group": np.frombuffer(shape.group.encode(), dtype=np.uint8)}) if shape.group else draft
            for shape, draft in zip(self._shapes, drafts, strict=True)
        ]

    def _finished(self, drafts: Sequence[Profile], counts: Sequence[State], curves: _Curves) -> list[Profile]:
        layouts = [shape.layout for shape in self._shapes]
        return [tide.finished_profile(*each, *curves) for each in zip(drafts, layouts, counts, strict=True)]

    def _joined(self, drafts: Sequence[Profile], counts: Sequence[State], curves: _Curves) -> list[Profile]:
        """Return the profile of all rows, for engines that keep them together; none where there can't be one."""
        draft = tide.joined_draft(self._all_rows, drafts) if self._all_rows is not None else None
        if draft is None or self._all_rows is None:
            return []
        summed = {name: np.sum([each[name] for each in counts], axis=0) for name in counts[0]}
        return [tide.finished_profile(draft, self._all_rows.layout, summed, *curves)]

    def _moments(self, done: State, progress: Progress) -> list[State]:
        fitted = self._texts.fitted
        moments = [tide.Moments(shape.layout, tide.COSTS[self._cost]) for shape in self._shapes]
        state = _joined([each.state for each in moments])
        sensed = set(_spread(range(len(fitted)), SENSED_TEXTS))
        for position, ids in self._each("moments", fitted, state, done, progress):
            context = self._contexts.capture(ids[: self._context(ids)])
            for group, rotary, *blocks in zip(moments, self._rotaries, context.metas, context.blocks, strict=True):
                for meta, bits in zip(*blocks, strict=True):
                    group.add(meta, bits, rotary)
            found: Sequence[NDArray[np.float64] | float] = [0.0] * len(moments)
            if position in sensed:
                behind = ids[self._context(ids) :][:GRADIENT_TOKENS]
                generator = torch.Generator().manual_seed(_SEED + position)
                found = cache_sensitivity(self._contexts, context, behind, self._rotaries, generator)
            for group, sensitivity in zip(moments, found, strict=True):
                group.add_text(sensitivity)
        return [each.state for each in moments]

    def _each(
        self, stage: str, texts: Sequence[list[int]], state: State, done: State, progress: Progress
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield a stage's texts that were not done yet, from its state as it was; keep the state after each."""
        for name in state:
            if f"{stage}.{name}" in done:
                state[name][...] = done[f"{stage}.{name}"]
        for position in range(int(done.get(f"{stage}.texts_done", 0)), len(texts)):
            progress(stage, position, len(texts))
            yield position, texts[position]
            self._write(done, stage, state, position + 1, len(texts))
        progress(stage, len(texts), len(texts))

    def _shares(self, drafts: Sequence[Profile], done: State, progress: Progress) -> list[LossShares]:
        """Measure what heads' errors are to the model, with blocks that drafts encode, on texts far apart."""
        shares = [LossShares(*np.zeros((2, each.layout.layers, 2, each.layout.kv_heads))) for each in self._shapes]
        state = _joined([each._asdict() for each in shares])
        codecs = [tide.TideCodec(draft).with_steps(tide.Steps(SHARE_UNITS, 0)) for draft in drafts]
        weights = [codec.model.weight for codec in codecs if codec.model is not None]
        for _, ids in self._each("shares", _spread(self._texts.fitted, SHARED_TEXTS), state, done, progress):
            tokens = self._context(ids, SHARE_TOKENS)
            context, behind = self._contexts.capture(ids[:tokens]), ids[tokens:][: SHARE_TOKENS + 1]
            (coded,) = coded_prefixes(codecs, context)
            found = loss_shares(self._contexts, context, coded.decoded, behind, self._rotaries, weights)
            for sums, each in zip(shares, found, strict=True):
                sums.kl[...] += each.kl
                sums.error[...] += each.error
        return shares

    def _counts(self, drafts: Sequence[Profile], done: State, progress: Progress) -> list[State]:
        counts = [tide.TideCounts(draft) for draft in drafts]
        state = _joined([each.state for each in counts])
        for position, ids in self._each("counts", _spread(self._texts.fitted, COUNTED_TEXTS), state, done, progress):
            context = self._contexts.capture(ids[: self._context(ids)])
            for group, *blocks in zip(counts, context.metas, context.blocks, strict=True):
                # Every other block, in turns: neighbours have much in common.
                for number, (meta, bits) in list(enumerate(zip(*blocks, strict=True)))[position % 2 :: 2]:
                    group.add(meta, bits, position + number)
        return [each.state for each in counts]

    def _curve(
        self, profiles: Sequence[Profile], done: State, progress: Progress
    ) -> tuple[list[list[CurvePoint]], list[State], float | None]:
        """Judge held-out texts: rising points of rounded levels, then of a trellis; own losses; bits over fitted ones'.

        Own losses, and errors over those of the scales, are arrays of profiles: each group's, then that of all rows.
        """
        fitted, held_out = self._texts
        judged, codecs = held_out or fitted, [tide.TideCodec(profile) for profile in profiles]
        all_units = [*_PREFIX_UNITS, *(_TRELLIS_UNITS if codecs[0].steps.is_trellis else ())]
        state: State = {
            "rows": np.zeros((len(judged), len(all_units), 3)),
            "gains": np.zeros((len(judged), len(_GAIN_UNITS), len(codecs))),
            "excess": np.zeros((len(judged), len(_GAIN_UNITS), len(codecs))),
            "fitted": np.zeros(2),
        }
        for position, ids in self._each("curve", judged, state, done, progress):
            for name, found in zip(("rows", "gains", "excess"), self._judged(codecs, ids), strict=True):
                state[name][position] = found
            if held_out and position < min(_COMPARED_TEXTS, len(fitted)):
                state["fitted"] += self._coarsest(codecs, fitted[position])
        all_kls, (bits, _, blocks) = state["rows"][:, :, 1], state["rows"].sum(axis=0).T
        layers = [shape.layout.layers for shape in self._shapes]
        gains = [*np.moveaxis(state["gains"], 2, 0), np.average(state["gains"], axis=2, weights=layers)]
        own, kls = own_losses(gains, _GAIN_UNITS, all_kls)
        # What is promised is the KL that these texts had, so that blocks may have the errors that theirs had.
        most = state["excess"].max(axis=0).clip(1.0, tide.EXCESS_MAX)
        for arrays, excess in zip(own, [*most.T, most.max(axis=1)], strict=True):
            arrays["excess"] = np.stack([_GAIN_UNITS, excess], axis=1).astype(np.float32)
        points = list(map(CurvePoint, all_units, (bits / blocks).tolist(), (self._unlike * kls).tolist()))
        rounded = len(_PREFIX_UNITS)
        by_levels = [_rising(each) for each in (points[:rounded], points[rounded:]) if each]
        if min(map(len, by_levels)) < 2:
            raise ValueError("what the model says of these texts hardly depends on its cache: nothing can be promised")
        coarsest = max(points[:rounded], key=lambda point: point.step_units)
        ratio = float(coarsest.bits_per_element / np.divide(*state["fitted"])) if held_out else None
        return by_levels, own, ratio

    def _judged(self, codecs: Sequence[tide.TideCodec], ids: Sequence[int]) -> tuple[NDArray[np.float64], ...]:
        """Return a row for each point, bits an element times blocks, KL, blocks; and of (steps, groups) gains, means of
        blocks, and errors over those of the scales, the largest of blocks.
        """
        tokens = self._context(ids)
        judge, rows = WholeJudge(self._contexts, ids[: tokens + JUDGED_TOKENS + 1], tokens), []
        blocks = tokens // self._block_tokens
        all_steps = [tide.Steps(units, _CURVE_REFINEMENTS) for units in _CURVE_UNITS]
        if has_trellis := codecs[0].steps.is_trellis:
            all_steps += [tide.Steps(units, 0, is_trellis=True) for units in _TRELLIS_UNITS]
        for steps in all_steps:
            for coded in coded_prefixes([codec.with_steps(steps) for codec in codecs], judge.context):
                rows.append((coded.bits_per_element * blocks, judge.kl(coded.decoded), blocks))
        gains, excess = np.zeros((2, len(_GAIN_UNITS), len(codecs)))
        for at, units in enumerate(_GAIN_UNITS):
            for group, codec in enumerate(codecs):
                at_step = codec.with_steps(tide.Steps(units, 0, has_trellis))
                pairs = zip(judge.context.metas[group], judge.context.blocks[group], strict=True)
                found = np.array([at_step.gain_and_excess(*pair) for pair in pairs])
                gains[at, group], excess[at, group] = found[:, 0].mean(), found[:, 1].max()
        return np.array(rows, dtype=np.float64), gains, excess

    def _coarsest(self, codecs: Sequence[tide.TideCodec], ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the bits an element that a text takes at the coarsest step of the curve, times blocks; and blocks."""
        tokens = self._context(ids)
        at_step = [codec.with_steps(tide.Steps(max(_PREFIX_UNITS), 0)) for codec in codecs]
        (coded,) = coded_prefixes(at_step, self._contexts.capture(ids[:tokens]))
        return tokens // self._block_tokens * np.array([coded.bits_per_element, 1.0])

    def _context(self, ids: Sequence[int], behind: int = JUDGED_TOKENS) -> int:
        """Return the whole blocks of a text that leave tokens to predict behind them, one at least, in tokens."""
        return max(1, (len(ids) - behind - 1) // self._block_tokens) * self._block_tokens

    def _read(self) -> State:
        # A file that was cut, as by a machine that went down, is none.
        with suppress(OSError, EOFError, ValueError, NotImplementedError, BadZipFile), self._partial.open("rb") as file:
            state = dict(np.load(file, allow_pickle=False))
            return state if str(state.get("identity")) == self._identity else {}
        return {}

    def _write(self, done: State, stage: str, state: State, texts: int, last: int) -> None:
        done |= {f"{stage}.{name}": array for name, array in state.items()}
        each = 1 + sum(array.nbytes for array in done.values()) // _WRITTEN_BYTES
        if texts % each and texts < last:
            return
        done |= {f"{stage}.texts_done": np.array(texts), "identity": np.array(self._identity)}
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        # One of its own: another calibration of the model may be writing the same file.
        with TemporaryDirectory(dir=self._partial.parent) as folder:
            np.savez(f"{folder}/state.npz", allow_pickle=False, **done)
            Path(folder, "state.npz").rename(self._partial)


def _curve_array(points: Sequence[CurvePoint]) -> NDArray[np.float32]:
    return np.array([[p.step_units, p.bits_per_element, p.kl] for p in points], dtype=np.float32)


def _spread(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """Return at most so many items, evenly far apart."""
    return items[:: -(-len(items) // most)]


def _joined(states: Sequence[State]) -> State:
    """Return the arrays of all groups, which stay theirs."""
    return {f"{group}.{name}": array for group, state in enumerate(states) for name, array in state.items()}


def _rising(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return the points at which KL is larger than at all finer steps: noise at the fine end must not count."""
    found: list[CurvePoint] = []
    for point in sorted(points, key=lambda point: point.step_units):
        if point.kl > max((other.kl for other in found), default=0.0):
            found.append(point)
    return found
