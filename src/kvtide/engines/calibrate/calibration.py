"""Fits a tide profile to a model from texts: moments and gradients; counts; then what the model says of the result.

Each text's share is added to a state that is then written to a file, so that a calibration that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import Profile
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import (
    APART_TOKENS,
    COSTS,
    THIRD,
    Moments,
    Steps,
    TideCodec,
    TideCounts,
    draft_profile,
    finished_profile,
)
from kvtide.engines.calibrate.judge import QualityJudge, block_metas
from kvtide.engines.transformers import block_bits
from kvtide.errors import UnsupportedModel

# Labels drawn from the model's own distribution, as the Fisher information wants it.
_SAMPLES = 2


# Tokens after each text by whose gradients sensitivity is measured, and that quality is judged on.
GRADIENT_TOKENS = 64
JUDGED_TOKENS = 128
# One text in six is not fitted on but judged on.
HELD_OUT_EVERY = 6
# Final steps, in units of the mean scale, and refinements of the objects whose prefixes make the curve.
_CURVE_UNITS = (-64, -55)
_CURVE_REFINEMENTS = 4
# Held-out texts that take this much more than fitted ones: more text is wanted.
OVERFIT_RATIO = 1.25
# Below this, more texts bring less than they cost.
WORTH_MORE_TEXTS = 1.02
_SEED = 1
_STATE_VERSION = 2
Progress = Callable[[str, int, int], None]
State = dict[str, NDArray[Any]]


def cache_sensitivity(
    model: Any,
    past: DynamicCache,
    continuation: Sequence[int],
    rotary: Rotary | None,
    generator: torch.Generator,
) -> NDArray[np.float64]:
    """Return the mean squared gradient of sampled tokens' log-likelihood by cached values: (layers, 2, channels).

    Keys are those before RoPE. past: a cache of the text before `continuation`; it is not changed. The first tokens,
    which tide keeps whole, are left out. The model's weights are told not to ask for gradients.
    """
    leaves: list[torch.Tensor] = []
    copy = DynamicCache(config=model.config)
    for source, target in zip(past.layers, copy.layers, strict=True):
        keys, values = (tensor.detach().clone().requires_grad_(True) for tensor in (source.keys, source.values))
        target.lazy_initialization(keys, values)
        target.keys, target.values = keys, values
        leaves += [keys, values]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    logits = model(torch.tensor([continuation]), past_key_values=copy, use_cache=True).logits[0].float()
    likelihood = logits.log_softmax(-1)
    total: list[NDArray[np.float64]] = [np.zeros(1)] * len(leaves)
    for sample in range(_SAMPLES):
        drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
        loss = likelihood.gather(-1, drawn).sum()
        gradients = torch.autograd.grad(loss, leaves, retain_graph=sample + 1 < _SAMPLES)
        for i, gradient in enumerate(gradients):
            total[i] = total[i] + _square(gradient, None if i % 2 else rotary, i // 2)
    return np.stack(total).reshape(len(past.layers), 2, -1) / _SAMPLES


def _square(gradient: torch.Tensor, rotary: Rotary | None, layer: int) -> NDArray[np.float64]:
    """Return the mean square of a gradient by channel, turned back as the keys are."""
    by_token = gradient[0].float().transpose(0, 1).contiguous().numpy()
    if rotary is not None:
        turned = rotary.inverse_tables(0, len(by_token), layer)
        by_token = rotary.load(by_token.view(np.uint32), KVDtype.FLOAT32, turned)
    squares: NDArray[np.float64] = (by_token[APART_TOKENS:].astype(np.float64) ** 2).mean(axis=0).reshape(-1)
    return squares


class CurvePoint(msgspec.Struct, frozen=True):
    """The cost of a step and the model's loss with it, on most texts that were not fitted on."""

    step_units: int
    bits_per_element: float
    kl: float


class CalibrationReport(msgspec.Struct, frozen=True):
    """The curve, and how much more bits held-out texts take than fitted ones; None if all texts were fitted on.

    texts_wanted: more of them would halve that, 0 if it is small already.
    """

    points: list[CurvePoint]
    held_out_texts: int
    held_out_over_fitted: float | None
    is_overfitted: bool
    texts_wanted: int


class _Job(NamedTuple):
    name: str
    cost: str
    layout: BlockLayout


class TideCalibration:
    """One calibration of one model. `partial` is where its state is kept until it is done."""

    def __init__(
        self, model: Any, name: str, cost: str, texts: Sequence[Sequence[int]], layout: BlockLayout, partial: Path
    ) -> None:
        """texts: token ids; those too short for a block and what is judged after it are left out.

        ValueError if none is left, or for an unknown cost. UnsupportedModel for keys that can't be turned back.
        """
        if cost not in COSTS:
            raise ValueError(f"costs are {', '.join(COSTS)}, got {cost!r}")
        least = layout.tokens + JUDGED_TOKENS + 1
        self._texts = [list(ids) for ids in texts if len(ids) >= least]
        if not self._texts:
            raise ValueError(f"calibration needs at least one full block: a text of {least} tokens")
        try:
            self._rotary = Rotary.from_config(model.config.to_dict())
        except ValueError as error:
            raise UnsupportedModel(f"keys can't be turned back: {error}") from error
        self._model = model
        self._job = _Job(name, cost, layout)
        self._partial = partial
        is_enough = len(self._texts) >= HELD_OUT_EVERY
        held_out = range(HELD_OUT_EVERY - 1, len(self._texts), HELD_OUT_EVERY) if is_enough else range(0)
        self._held_out = list(held_out)
        self._fitted = [i for i in range(len(self._texts)) if i not in held_out]

    def run(self, progress: Progress) -> tuple[Profile, CalibrationReport]:
        """Fit and judge; `progress` is told of each text. The partial state is removed at the end."""
        done = self._read()
        moments = self._moments(done, progress)
        name, cost, layout = self._job
        draft = draft_profile(name, layout, cost, self._rotary, moments)
        counts = self._counts(draft, done, progress)
        middle = finished_profile(draft, layout, counts, draft.arrays["curve"])
        points, ratio = self._curve(middle, done, progress)
        rising = _rising(points)
        curve = np.array([[p.step_units, p.bits_per_element, p.kl] for p in rising], dtype=np.float32)
        profile = finished_profile(draft, layout, counts, curve)
        self._partial.unlink(missing_ok=True)
        is_overfitted = ratio is not None and ratio > OVERFIT_RATIO
        # What a fit knows of its own texts alone shrinks with their number.
        wanted = len(self._fitted) if ratio is not None and ratio > WORTH_MORE_TEXTS else 0
        return profile, CalibrationReport(rising, len(self._held_out), ratio, is_overfitted, wanted)

    def _moments(self, done: State, progress: Progress) -> State:
        layout = self._job.layout
        moments = Moments(layout, COSTS[self._job.cost])
        _restore(done, "moments", moments.state)
        for position in range(_texts_done(done, "moments"), len(self._fitted)):
            progress("moments", position, len(self._fitted))
            ids = self._texts[self._fitted[position]]
            metas = block_metas(ids[: self._context(ids)], layout)
            past = self._prefill(ids[: self._context(ids)])
            for meta in metas:
                moments.add(meta, block_bits(past, meta), self._rotary)
            behind = ids[self._context(ids) :][:GRADIENT_TOKENS]
            generator = torch.Generator().manual_seed(_SEED + position)
            moments.add_sensitivity(cache_sensitivity(self._model, past, behind, self._rotary, generator))
            self._write(done, "moments", moments.state, position + 1)
        progress("moments", len(self._fitted), len(self._fitted))
        return moments.state

    def _counts(self, draft: Profile, done: State, progress: Progress) -> State:
        counts = TideCounts(draft)
        _restore(done, "counts", counts.state)
        for position in range(_texts_done(done, "counts"), len(self._fitted)):
            progress("counts", position, len(self._fitted))
            ids = self._texts[self._fitted[position]][: self._context(self._texts[self._fitted[position]])]
            past, metas = self._prefill(ids), block_metas(ids, self._job.layout)
            # Every other block, in turns: neighbours have much in common.
            for number, meta in list(enumerate(metas))[position % 2 :: 2]:
                counts.add(meta, block_bits(past, meta), position + number)
            self._write(done, "counts", counts.state, position + 1)
        progress("counts", len(self._fitted), len(self._fitted))
        return counts.state

    def _curve(self, profile: Profile, done: State, progress: Progress) -> tuple[list[CurvePoint], float | None]:
        """Judge prefixes of objects on held-out texts, and compare their size with that of as many fitted ones."""
        judged = self._held_out or self._fitted
        rows = len(_CURVE_UNITS) * (_CURVE_REFINEMENTS + 1)
        state: State = {"sums": np.zeros((rows, 3)), "squares": np.zeros(rows), "fitted": np.zeros(2)}
        _restore(done, "curve", state)
        for position in range(_texts_done(done, "curve"), len(judged)):
            progress("curve", position, len(judged))
            found = self._judged(profile, self._texts[judged[position]], is_said=True)
            state["sums"] += found
            state["squares"] += found[:, 1] ** 2
            if self._held_out:
                fitted = self._judged(profile, self._texts[self._fitted[position]], is_said=False)
                state["fitted"] += fitted[len(fitted) // 2, [0, 2]]
            self._write(done, "curve", state, position + 1)
        progress("curve", len(judged), len(judged))
        sums, kls = state["sums"], _upper_means(state["sums"][:, 1], state["squares"], len(judged))
        points = [
            CurvePoint(units, float(bits / blocks), kl)
            for units, (bits, _, blocks), kl in zip(_curve_units(), sums, kls, strict=True)
        ]
        middle, fitted_sums = sums[len(sums) // 2], state["fitted"]
        ratio = float(middle[0] / middle[2] / (fitted_sums[0] / fitted_sums[1])) if self._held_out else None
        return sorted(points, key=lambda point: point.step_units), ratio

    def _judged(self, profile: Profile, ids: Sequence[int], is_said: bool) -> NDArray[np.float64]:
        """Return a row for each point of the curve: bits an element, KL, times blocks; and blocks."""
        judge = QualityJudge(self._model, self._job.layout, self._context(ids), JUDGED_TOKENS, 1)
        judge.add(ids)
        codec, rows = TideCodec(profile), []
        for units in _CURVE_UNITS:
            at_steps = codec.with_steps(Steps(units, _CURVE_REFINEMENTS))
            for coded in judge.code_prefixes(0, at_steps):
                bits = 8 * self._job.layout.dtype.item_bytes * coded.stored_bytes / coded.raw_bytes
                kl = judge.judge(0, coded.decoded).kl if is_said else 0.0
                rows.append((bits * len(coded.decoded), kl, len(coded.decoded)))
        return np.array(rows, dtype=np.float64)

    def _context(self, ids: Sequence[int]) -> int:
        blocks = (len(ids) - JUDGED_TOKENS - 1) // self._job.layout.tokens
        return blocks * self._job.layout.tokens

    def _prefill(self, ids: Sequence[int]) -> DynamicCache:
        past = DynamicCache(config=self._model.config)
        with torch.no_grad():
            self._model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
        return past

    @property
    def _identity(self) -> str:
        parts = [_STATE_VERSION, self._job.name, self._job.cost, str(self._job.layout), self._texts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _read(self) -> State:
        """Return the state of a calibration that was stopped, nothing if there is none or it is of another one."""
        if not self._partial.exists():
            return {}
        with np.load(self._partial, allow_pickle=False) as stored:
            state = dict(stored)
        return state if str(state.get("identity")) == self._identity else {}

    def _write(self, done: State, stage: str, state: State, texts: int) -> None:
        done |= {f"{stage}.{name}": array for name, array in state.items()}
        done |= {f"{stage}.texts_done": np.array(texts), "identity": np.array(self._identity)}
        aside = self._partial.with_name(f"{self._partial.name}.new")
        with aside.open("wb") as file:
            np.savez(file, allow_pickle=False, **done)
        aside.rename(self._partial)


def _upper_means(sums: NDArray[np.float64], squares: NDArray[np.float64], count: int) -> list[float]:
    """Return values that five texts of six don't exceed, from so many texts: a standard deviation above their means.

    Few texts know neither well: the deviation is widened, 1.7 times for two texts, 1.3 for four, 1.1 for ten.
    """
    means, few = sums / count, max(1, count - 1)
    variances = np.maximum(squares / count - means**2, 0.0) * count / few
    found: list[float] = (means + np.sqrt(variances * (count + 1) / few)).tolist()
    return found


def _curve_units() -> list[int]:
    return [units + THIRD * (_CURVE_REFINEMENTS - r) for units in _CURVE_UNITS for r in range(_CURVE_REFINEMENTS + 1)]


def _texts_done(done: State, stage: str) -> int:
    return int(done.get(f"{stage}.texts_done", 0))


def _restore(done: State, stage: str, state: State) -> None:
    for name in state:
        if f"{stage}.{name}" in done:
            state[name][...] = done[f"{stage}.{name}"]


def _rising(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return the points at which KL is larger than at all finer steps: noise at the fine end must not count."""
    found: list[CurvePoint] = []
    for point in points:
        if point.kl > max((other.kl for other in found), default=0.0):
            found.append(point)
    return found
