"""Frequencies of rotary position embeddings (RoPE), for every way that models stretch them to longer contexts.

Computed in float64 and rounded once, so that every machine has the same float32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RopeParameters = Mapping[str, Any]
_Floats = NDArray[np.float64]


class Frequencies(NamedTuple):
    """Radians a token for each pair of dims; what rotated keys are multiplied by; prompts that this holds for.

    `steady_tokens`: a longer prompt makes the engine take other frequencies; 0 if none does.
    """

    values: tuple[float, ...]
    scale: float
    steady_tokens: int


def frequencies_of(parameters: RopeParameters, dims: int, theta: float, context_tokens: int) -> Frequencies:
    """Return the frequencies of `dims` rotated dims.

    parameters: as a model's config has them, `rope_type` (or `type`) among them. context_tokens: the longest context
    that the config names, 0 if it names none. ValueError for an unknown type or a parameter that is missing.
    """
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"RoPE of type {rope_type!r} is not supported, only {sorted(ROPE_TYPES)}")
    if not theta > 0:
        raise ValueError(f"rope_theta must be positive, got {theta!r}")
    try:
        found = ROPE_TYPES[rope_type](parameters, dims, theta, context_tokens)
    except KeyError as error:
        raise ValueError(f"RoPE of type {rope_type!r} needs {error}") from error
    # As float32 has them: what is stored is what was used.
    values = tuple(np.array(found.values, dtype=np.float64).astype(np.float32).tolist())
    if not all(map(math.isfinite, (*values, found.scale))) or not found.scale > 0 or len(values) != dims // 2:
        raise ValueError(f"RoPE parameters {dict(parameters)} don't give {dims // 2} finite frequencies")
    return Frequencies(values, float(np.float32(found.scale)), found.steady_tokens)


def _plain(dims: int, theta: float) -> _Floats:
    return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def _steady(values: _Floats, scale: float = 1.0) -> Frequencies:
    return Frequencies(tuple(values.tolist()), scale, 0)


def _default(_parameters: RopeParameters, dims: int, theta: float, _context_tokens: int) -> Frequencies:
    return _steady(_plain(dims, theta))


def _linear(parameters: RopeParameters, dims: int, theta: float, _context_tokens: int) -> Frequencies:
    return _steady(_plain(dims, theta) / parameters["factor"])


def _dynamic(_parameters: RopeParameters, dims: int, theta: float, context_tokens: int) -> Frequencies:
    # Up to the trained context NTK scaling does nothing; beyond, it depends on the prompt's length.
    return Frequencies(tuple(_plain(dims, theta).tolist()), 1.0, context_tokens)


def _proportional(parameters: RopeParameters, dims: int, theta: float, _context_tokens: int) -> Frequencies:
    # All dims count as rotated, but the pairs behind the share stand still.
    pairs = int(parameters.get("partial_rotary_factor", 1.0) * dims // 2)
    values = np.where(np.arange(dims // 2) < pairs, _plain(dims, theta), 0.0)
    return _steady(values / parameters.get("factor", 1.0))


def _llama3(parameters: RopeParameters, dims: int, theta: float, context_tokens: int) -> Frequencies:
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    values = _plain(dims, theta)
    turns = _trained_tokens(parameters, context_tokens) * values / (2 * math.pi)
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * values / factor + smooth * values
    return _steady(np.where(turns < low, values / factor, np.where(turns > high, values, between)))


def _yarn(parameters: RopeParameters, dims: int, theta: float, context_tokens: int) -> Frequencies:
    trained = _trained_tokens(parameters, context_tokens)
    factor = parameters.get("factor") or context_tokens / trained

    def dim_of(rotations: float) -> float:
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(parameters.get("beta_fast") or 32), dim_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    share = 1 - np.clip((np.arange(dims // 2) - low) / width, 0, 1)
    values = _plain(dims, theta)
    return _steady(values / factor * (1 - share) + values * share, _yarn_scale(parameters, factor))


def _yarn_scale(parameters: RopeParameters, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(weight) / scale(weight_all) if weight and weight_all else scale(1.0)


def _longrope(parameters: RopeParameters, dims: int, theta: float, context_tokens: int) -> Frequencies:
    trained = _trained_tokens(parameters, context_tokens)
    factor = parameters.get("factor") or context_tokens / trained
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    short = np.array(parameters["short_factor"], dtype=np.float64)
    if short.shape != (dims // 2,) or not (short > 0).all():
        raise ValueError(f"longrope's short_factor must be {dims // 2} positive numbers")
    return Frequencies(tuple((_plain(dims, theta) / short).tolist()), float(scale), trained)


def _trained_tokens(parameters: RopeParameters, context_tokens: int) -> int:
    trained = int(parameters.get("original_max_position_embeddings") or context_tokens)
    if trained < 2:
        raise ValueError("scaled RoPE needs original_max_position_embeddings")
    return trained


ROPE_TYPES: Mapping[str, Callable[[RopeParameters, int, float, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
