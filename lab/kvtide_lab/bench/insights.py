"""The CacheGen paper's three insights into KV caches (SIGCOMM'24, section 5.1), on any model and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from transformers import DynamicCache

from kvtide.engines.transformers import model_layout
from kvtide_lab.judge.position_judge import PositionJudge
from kvtide_lab.sim.report import new_figure

DISTANCES = (1, 2, 4, 8, 16, 32, 64)
LAYER_GROUPS = 4
ANSWER_TOKENS = 64
# What values are rounded to, in deviations of their channel: coarsely for the loss, finely for entropy.
LOSS_STEP, ENTROPY_STEP = 0.5, 0.25
# Axes of (layers, K and V, heads, tokens, dim) within which all elements share a distribution.
GROUPINGS = {"all": (), "token": (3,), "channel": (1, 2, 4), "layer": (0, 1), "layer and channel": (0, 1, 2, 4)}


class Insights(msgspec.Struct, frozen=True):
    """The three insights on a model's cache of one text.

    delta_variance: of keys and of values, by DISTANCES: the variance of differences between tokens so far apart, over
    that of the elements around their channel's mean. layer_kl: by layers [start, stop): KL in nats of the text that
    goes on when these are rounded to LOSS_STEP of each channel's deviation. entropy_bits: an element rounded to
    ENTROPY_STEP, by what shares a distribution.
    """

    model: str
    tokens: int
    distances: tuple[int, ...]
    delta_variance: dict[str, list[float]]
    layer_kl: list[tuple[int, int, float]]
    entropy_bits: dict[str, float]


def run(model: Any, name: str, ids: Sequence[int], tokens: int) -> Insights:
    """Look at the cache of the first `tokens` ids, a multiple of 64. ValueError for too few ids."""
    judge = PositionJudge(model, model_layout(model, 64), ids, tokens, ANSWER_TOKENS)
    with torch.inference_mode():
        past = model(torch.tensor([list(ids[:tokens])]), use_cache=True, logits_to_keep=1).past_key_values
    kv = torch.stack([torch.cat([layer.keys, layer.values]) for layer in past.layers]).float()
    mean, deviation = kv.mean(3, keepdim=True), kv.std(3, keepdim=True).clamp_min(1e-6)
    unit = ((kv - mean) / deviation).numpy()
    distances = tuple(each for each in DISTANCES if each < tokens)
    deltas = [[_delta_variance(unit[:, part], each) for each in distances] for part in range(2)]
    step = deviation * LOSS_STEP
    rounded = (((kv - mean) / step).round() * step + mean).to(past.layers[0].keys.dtype)
    edges = np.linspace(0, len(kv), min(LAYER_GROUPS, len(kv)) + 1).astype(int).tolist()
    losses = [(start, stop, _kl(judge, past, rounded, start, stop)) for start, stop in pairwise(edges)]
    # One step for all, as one table of all would have.
    symbols = np.rint((kv / (kv.std() * ENTROPY_STEP)).numpy()).astype(np.int64)
    bits = {grouping: _entropy_bits(symbols, axes) for grouping, axes in GROUPINGS.items()}
    return Insights(name, tokens, distances, {"keys": deltas[0], "values": deltas[1]}, losses, bits)


def _delta_variance(unit: NDArray[np.float32], distance: int) -> float:
    return float(np.mean(np.square(unit[:, :, distance:] - unit[:, :, :-distance]))) / float(np.mean(np.square(unit)))


def _kl(judge: PositionJudge, exact: DynamicCache, rounded: torch.Tensor, start: int, stop: int) -> float:
    mixed = DynamicCache()
    for number, layer in enumerate(exact.layers):
        keys, values = rounded[number] if start <= number < stop else (layer.keys[0], layer.values[0])
        mixed.update(keys[None], values[None], number)
    return max(0.0, next(judge.kls_of(mixed, ())))


def _entropy_bits(symbols: NDArray[np.int64], axes: tuple[int, ...]) -> float:
    """Return bits an element if each index of `axes` has a distribution of its own, without its table."""
    rows = np.moveaxis(symbols, axes, range(len(axes))).reshape(
        int(np.prod([symbols.shape[each] for each in axes])), -1
    )
    low, span = int(rows.min()), int(np.ptp(rows)) + 1
    _, counts = np.unique((rows - low) + span * np.arange(len(rows))[:, None], return_counts=True)
    # Few samples look more regular than they are (Miller and Madow).
    missing = (len(counts) - len(rows)) / (2 * math.log(2) * rows.size)
    return math.log2(rows.shape[1]) - float(np.sum(counts * np.log2(counts))) / rows.size + missing


def render(result: Insights) -> Group:
    """Return a table for each insight."""
    deltas = Table("", *map(str, result.distances), title="Variance of differences by distance, of the elements'")
    for part, ratios in result.delta_variance.items():
        deltas.add_row(part, *(f"{each:.2f}" for each in ratios))
    losses = Table("layers", "KL", title=f"Loss by rounded layers, {result.model}, {result.tokens} tokens")
    for start, stop, kl in result.layer_kl:
        losses.add_row(f"{start} to {stop - 1}", f"{kl:.4f}")
    entropy = Table("own distribution by", "bits", title="Entropy of an element")
    for grouping, bits in result.entropy_bits.items():
        entropy.add_row(grouping, f"{bits:.2f}")
    return Group(deltas, losses, entropy)


def plot(result: Insights, path: Path) -> None:
    """Draw the three. ValueError if matplotlib is not installed."""
    figure = new_figure((12, 3.5))
    first, second, third = figure.subplots(1, 3)
    for part, ratios in result.delta_variance.items():
        first.plot(result.distances, ratios, "o-", label=part)
    first.set(xscale="log", xlabel="distance, tokens", ylabel="variance of differences / of elements")
    first.legend()
    second.bar([f"{start}–{stop - 1}" for start, stop, _ in result.layer_kl], [kl for *_, kl in result.layer_kl])
    second.set(xlabel="rounded layers", ylabel="KL, nats")
    third.barh(list(result.entropy_bits), list(result.entropy_bits.values()))
    third.set(xlabel="bits an element")
    figure.savefig(path, dpi=150)
