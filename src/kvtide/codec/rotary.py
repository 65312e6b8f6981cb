"""Takes keys back to before their rotary position embedding, and forth again.

A key alone hardly changes from token to token, a rotated one does with its position: codecs want the former. Whatever
the frequencies are, turning forth undoes turning back: a model that rotates otherwise than its config says costs
bytes, not correctness. Frequencies are computed in float64 and rounded once, so that every machine has the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import HEAD_DIM_MAX, LAYERS_MAX, KVDtype
from kvtide.errors import CorruptPayload

KINDS_MAX = 64
# Bit patterns, as in a block.
BitRows = NDArray[np.uint16] | NDArray[np.uint32]

_VERSION = 1
# version, pairs, dim_start, dim_stop, kinds, layers
_HEADER = struct.Struct("<BBHHHH")


class RotaryTables(NamedTuple):
    """Scaled cosines and sines, (tokens, pairs): they turn (a, b) into (a cos - b sin, b cos + a sin)."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotation of the keys that it caches: dims `[dim_start, dim_stop)` of each head, in pairs.

    kinds: frequencies that layers may have. layer_kinds: which of them each layer has; none if all have the first.
    ValueError if these don't fit each other.
    """

    pairs: Pairs
    dim_start: int
    dim_stop: int
    kinds: tuple[Frequencies, ...]
    layer_kinds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.dim_start < self.dim_stop <= HEAD_DIM_MAX or (self.dim_stop - self.dim_start) % 2:
            raise ValueError(f"rotated dims must be pairs in a head, got {self.dim_start} to {self.dim_stop}")
        if not 1 <= len(self.kinds) <= KINDS_MAX or len(self.layer_kinds) > LAYERS_MAX:
            raise ValueError(f"expected 1 to {KINDS_MAX} kinds and at most {LAYERS_MAX} layers")
        for kind in self.kinds:
            is_finite = all(map(math.isfinite, (*kind.values, kind.scale)))
            if len(kind.values) != self.pair_count or not is_finite or kind.scale <= 0:
                raise ValueError(f"expected {self.pair_count} finite frequencies and a positive scale, got {kind}")
        if not all(0 <= kind < len(self.kinds) for kind in self.layer_kinds):
            raise ValueError(f"layers may be of {len(self.kinds)} kinds, got {self.layer_kinds}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], chosen: Sequence[int] = ()) -> Rotary | None:
        """Return what a model's config says of its cached keys, None if they are not rotated.

        chosen: the layers that count, in this order, numbered from 0 in what is returned; none for all. config: as
        `config.json` or transformers' `to_dict()` has it, of version 4 (`rope_scaling`) or 5 (`rope_parameters`); of a
        model with parts, its text part counts. Of a model with latent attention the cached row is the latent, then the
        rotated part. ValueError with the reason for what is not supported.
        """
        config = config.get("text_config") or config
        name = str(config.get("model_type"))
        if name in UNROTATED_FAMILIES or config.get("alibi"):
            return None
        if name == _GRANITE_HYBRID and config.get("position_embedding_type") != "rope":
            return None
        if name not in FAMILIES:
            raise ValueError(f"not known how models of type {name!r} rotate their keys, only of {sorted(FAMILIES)}")
        family = FAMILIES[name]
        by_name = _parameters_by_name(name, config)
        layers = _layer_names(name, config, next(iter(by_name)))
        if chosen:
            layers = [layers[layer] for layer in chosen] if layers else []
            # What other layers turn by does not matter.
            by_name = {each: found for each, found in by_name.items() if each in layers} or by_name
        config = _config_of_layers(config, chosen)
        kinds = [_frequencies(config, family, parameters) for parameters in by_name.values()]
        pairs_count = len(kinds[0].values)
        if any(len(kind.values) != pairs_count for kind in kinds):
            raise ValueError("layers that rotate different numbers of dims are not supported")
        kinds.append(Frequencies((0.0,) * pairs_count, 1.0, 0))
        names = [*by_name, _STILL]
        if unknown := set(layers) - set(names):
            raise ValueError(f"layers of type {sorted(unknown)} have no RoPE parameters")
        if set(layers) <= {names[0]}:
            kinds, layers = kinds[:1], []
        dim_start = int(config["kv_lora_rank"]) if _is_latent(config) else 0
        layer_kinds = tuple(names.index(layer) for layer in layers)
        return cls(family.pairs, dim_start, dim_start + 2 * pairs_count, tuple(kinds), layer_kinds)

    @property
    def pair_count(self) -> int:
        """Return the number of pairs of dims in a head that turn."""
        return (self.dim_stop - self.dim_start) // 2

    def frequencies(self, layer: int) -> Frequencies:
        """Return a layer's frequencies. ValueError for a layer that the model does not have."""
        if not self.layer_kinds:
            return self.kinds[0]
        if not 0 <= layer < len(self.layer_kinds):
            raise ValueError(f"layer must be from 0 to {len(self.layer_kinds) - 1}, got {layer}")
        return self.kinds[self.layer_kinds[layer]]

    def tables(self, start: int, tokens: int, layer: int = 0) -> RotaryTables:
        """Return the tables of positions `[start, start + tokens)`. Angles are float32 products, as of models."""
        scale = self.frequencies(layer).scale
        return self._tables(start, tokens, layer, scale, scale)

    def inverse_tables(self, start: int, tokens: int, layer: int = 0) -> RotaryTables:
        """Return the tables that turn keys back to where those of `tables` found them."""
        scale = 1 / self.frequencies(layer).scale
        return self._tables(start, tokens, layer, scale, -scale)

    def _tables(self, start: int, tokens: int, layer: int, cos_scale: float, sin_scale: float) -> RotaryTables:
        positions = np.arange(start, start + tokens, dtype=np.int64).astype(np.float32)
        frequencies = np.array(self.frequencies(layer).values, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        cos, sin = np.cos(angles) * cos_scale, np.sin(angles) * sin_scale
        return RotaryTables(cos.astype(np.float32), sin.astype(np.float32))

    def load(self, keys: BitRows, dtype: KVDtype, tables: RotaryTables) -> NDArray[np.float32]:
        """Return keys as float32, turned by `tables`: by `inverse_tables`, they are as before RoPE.

        keys: (tokens, kv_heads, head_dim), bit patterns of `dtype`, contiguous: K of one layer of a block.
        """
        out = np.empty(keys.shape, dtype=np.float32)
        _native.rope_load(keys.reshape(-1).view(np.uint8), dtype.code, self.dim_start, self.neighbours, *tables, out)
        return out

    @property
    def neighbours(self) -> bool:
        """Tell whether the dims of a pair stand side by side."""
        return self.pairs is Pairs.NEIGHBOURS

    def to_bytes(self) -> bytes:
        """Return the form that `parse` reads (docs/format.md)."""
        dims = (self.dim_start, self.dim_stop)
        parts = [_HEADER.pack(_VERSION, self.pairs, *dims, len(self.kinds), len(self.layer_kinds))]
        parts.append(bytes(self.layer_kinds))
        for values, scale, steady_tokens in self.kinds:
            parts.append(struct.pack(f"<If{len(values)}f", steady_tokens, scale, *values))
        return b"".join(parts)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Rotary:
        """Return what `to_bytes` wrote. CorruptPayload for anything else."""
        if len(data) < _HEADER.size:
            raise CorruptPayload(f"rotary parameters have at least {_HEADER.size} bytes, got {len(data)}")
        version, pairs, dim_start, dim_stop, kind_count, layers = _HEADER.unpack_from(data)
        kind = struct.Struct(f"<If{max(0, dim_stop - dim_start) // 2}f")
        kinds_start = _HEADER.size + layers
        if version != _VERSION or len(data) != kinds_start + kind_count * kind.size:
            raise CorruptPayload(f"{len(data)} bytes are not rotary parameters of version {_VERSION}")
        kinds = []
        for offset in range(kinds_start, len(data), kind.size):
            steady_tokens, scale, *values = kind.unpack_from(data, offset)
            kinds.append(Frequencies(tuple(values), scale, steady_tokens))
        try:
            return cls(Pairs(pairs), dim_start, dim_stop, tuple(kinds), tuple(data[_HEADER.size : kinds_start]))
        except ValueError as error:
            raise CorruptPayload(f"rotary parameters: {error}") from error


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
    """Return the frequencies of `dims` rotated dims. ValueError for an unknown type or a parameter that is missing.

    parameters: as a model's config has them. context_tokens: the longest context that it names, 0 if it names none.
    """
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not theta > 0:
        raise ValueError(f"rope_theta must be positive, got {theta!r}")
    values: _Floats = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    scale, steady_tokens = 1.0, 0
    try:
        match rope_type:
            case "default":
                pass
            case "linear":
                values = values / parameters["factor"]
            case "dynamic":
                # Up to the trained context NTK scaling does nothing; beyond, it depends on the prompt's length.
                steady_tokens = context_tokens
            case "proportional":
                # All dims count as rotated, but the pairs after the share stand still.
                pairs = int(parameters.get("partial_rotary_factor", 1.0) * dims // 2)
                values = np.where(np.arange(dims // 2) < pairs, values, 0.0) / parameters.get("factor", 1.0)
            case "llama3":
                values = _llama3(parameters, values, _trained_tokens(parameters, context_tokens))
            case "yarn":
                values, scale = _yarn(parameters, values, theta, context_tokens)
            case "longrope":
                steady_tokens = _trained_tokens(parameters, context_tokens)
                values, scale = _longrope(parameters, values, context_tokens)
            case _:
                raise ValueError(f"RoPE of type {rope_type!r} is not supported, only {sorted(ROPE_TYPES)}")
    except KeyError as error:
        raise ValueError(f"RoPE of type {rope_type!r} needs {error}") from error
    # As float32 has them: what is stored is what was used.
    return Frequencies(tuple(values.astype(np.float32).tolist()), float(np.float32(scale)), steady_tokens)


def _llama3(parameters: RopeParameters, values: _Floats, trained: int) -> _Floats:
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = trained * values / (2 * math.pi)
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * values / factor + smooth * values
    return np.where(turns < low, values / factor, np.where(turns > high, values, between))


def _yarn(parameters: RopeParameters, values: _Floats, theta: float, context_tokens: int) -> tuple[_Floats, float]:
    trained, dims = _trained_tokens(parameters, context_tokens), 2 * len(values)
    factor = parameters.get("factor") or context_tokens / trained

    def dim_of(rotations: float) -> float:
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(parameters.get("beta_fast") or 32), dim_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    share = 1 - np.clip((np.arange(dims // 2) - low) / width, 0, 1)
    return values / factor * (1 - share) + values * share, _yarn_scale(parameters, factor)


def _yarn_scale(parameters: RopeParameters, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(weight) / scale(weight_all) if weight and weight_all else scale(1.0)


def _longrope(parameters: RopeParameters, values: _Floats, context_tokens: int) -> tuple[_Floats, float]:
    trained = _trained_tokens(parameters, context_tokens)
    factor = parameters.get("factor") or context_tokens / trained
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    short = np.array(parameters["short_factor"], dtype=np.float64)
    if short.shape != values.shape or not (short > 0).all():
        raise ValueError(f"longrope's short_factor must be {len(values)} positive numbers")
    return values / short, float(scale)


def _trained_tokens(parameters: RopeParameters, context_tokens: int) -> int:
    trained = int(parameters.get("original_max_position_embeddings") or context_tokens)
    if trained < 2:
        raise ValueError("scaled RoPE needs original_max_position_embeddings")
    return trained


ROPE_TYPES = frozenset({"default", "linear", "dynamic", "proportional", "llama3", "yarn", "longrope"})


class Pairs(IntEnum):
    """The two dims that turn together. The numbers are stored."""

    HALVES = 0  # i and i + rotated / 2, as Llama and GPT-NeoX
    NEIGHBOURS = 1  # 2 i and 2 i + 1, as GPT-J


class _Family(NamedTuple):
    """Defaults of a family's config classes, for what configs leave unsaid."""

    pairs: Pairs = Pairs.HALVES
    theta: float = 10_000.0
    share: float = 1.0


_NEIGHBOURS = Pairs.NEIGHBOURS
# Most of its models turn nothing: it rotates where its config says so.
_GRANITE_HYBRID = "granitemoehybrid"
# By `model_type`; tests hold each one against the family's own code.
FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"), _Family()),
    **dict.fromkeys(("gemma3_text", "phi3", "olmo", "olmo2", "granite", "starcoder2", "falcon"), _Family()),
    "mixtral": _Family(theta=1_000_000.0),
    "smollm3": _Family(theta=2_000_000.0),
    "gpt_oss": _Family(theta=150_000.0),
    "gpt_neox": _Family(share=0.25),
    "stablelm": _Family(share=0.25),
    **dict.fromkeys(("phi", "persimmon", "nemotron"), _Family(share=0.5)),
    "gptj": _Family(_NEIGHBOURS),
    "codegen": _Family(_NEIGHBOURS),
    "cohere": _Family(_NEIGHBOURS, theta=500_000.0),
    "cohere2": _Family(_NEIGHBOURS),
    "glm": _Family(_NEIGHBOURS, share=0.5),
    "glm4": _Family(_NEIGHBOURS, share=0.5),
    "helium": _Family(_NEIGHBOURS, theta=100_000.0),
    "ernie4_5": _Family(_NEIGHBOURS, theta=500_000.0),
    # Latent attention. Version 3 puts neighbours into halves before it keeps them.
    "deepseek_v2": _Family(_NEIGHBOURS),
    "deepseek_v3": _Family(),
    # Windows or chunks beside full attention.
    "gemma4_text": _Family(),
    "olmo3": _Family(theta=500_000.0),
    "llama4_text": _Family(_NEIGHBOURS, theta=500_000.0),
    # Layers of attention beside those with states.
    "qwen3_next": _Family(share=0.25),
    "lfm2": _Family(theta=1_000_000.0),
    "falcon_h1": _Family(),
    _GRANITE_HYBRID: _Family(),
}
# Learned positions, ALiBi or none: nothing is done to keys.
UNROTATED_FAMILIES = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "mpt", "kimi_linear", "nemotron_h"})
# Names of layers by how they attend, as configs have them; some families state frequencies for each.
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Our name for layers whose keys stay as they are.
_STILL = "still"


def _config_of_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> Mapping[str, Any]:
    """Return the config with the head of these layers, of all for none. ValueError if they differ."""
    own = {int(layer): found for layer, found in (config.get("per_layer_config") or {}).items()}
    usual = config.get("head_dim")
    layers = chosen or range(int(config.get("num_hidden_layers") or 0))
    head_dims = {own.get(layer, {}).get("head_dim", usual) for layer in layers} or {usual}
    if len(head_dims) > 1:
        raise ValueError(f"layers with heads of different sizes are not supported, got {sorted(head_dims)}")
    return {**config, "head_dim": head_dims.pop()}


def _parameters_by_name(family: str, config: Mapping[str, Any]) -> dict[str, RopeParameters]:
    """Return the parameters of each type of layer; under one name if all layers share them."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "mrope_section" in given:
        raise ValueError("RoPE over the axes of images (mrope_section) is not supported")
    nested = {name: found for name, found in sorted(given.items()) if isinstance(found, Mapping)}
    if nested or family not in {"gemma3_text", "gemma4_text", "olmo3"}:
        return nested or {_FULL: given}
    if family == "gemma4_text":
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
        return {_FULL: full, _SLIDING: {"rope_theta": 10_000.0}}
    if family == "olmo3":
        # Windows are never scaled.
        return {_FULL: given, _SLIDING: {}}
    # Before version 5: sliding layers have a base of their own and are never scaled.
    local = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    return {_FULL: {"rope_theta": config.get("rope_theta", 1_000_000.0), **given}, _SLIDING: local}


def _layer_names(family: str, config: Mapping[str, Any], uniform: str) -> list[str]:
    """Return each layer's name; all `uniform` if it does not matter which layer it is."""
    layers = int(config.get("num_hidden_layers") or 0)
    if family in {"smollm3", "llama4_text"}:
        every = config.get("no_rope_layer_interval", 4)
        is_rotated = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
        return [uniform if rotated else _STILL for rotated in is_rotated]
    if family in {"gemma4_text", "olmo3"}:
        return list(config.get("layer_types") or [])
    if family not in {"gemma3_text", "cohere2"}:
        return []
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    every = every or {"gemma3_text": 6, "cohere2": 4}[family]
    types = config.get("layer_types") or [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    if family == "cohere2":
        return [uniform if layer_type == _SLIDING else _STILL for layer_type in types]
    return list(types)


def _frequencies(config: Mapping[str, Any], family: _Family, parameters: RopeParameters) -> Frequencies:
    theta = parameters.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or family.theta
    scaling = dict(parameters)
    if (trained := config.get("original_max_position_embeddings")) is not None:
        scaling["original_max_position_embeddings"] = trained
    context_tokens = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    dims = _rotated_dims(config, family, parameters)
    return frequencies_of(scaling, dims, float(theta), context_tokens)


def _rotated_dims(config: Mapping[str, Any], family: _Family, parameters: RopeParameters) -> int:
    """Return how many dims of a key turn. ValueError if the config does not say, or they are not pairs of the head."""
    if _is_latent(config):
        dims = head_dim = int(config["qk_rope_head_dim"])
    elif "rotary_dim" in config:
        head_dim, dims = _head_dim(config), config["rotary_dim"] or 0
    else:
        head_dim = _head_dim(config)
        share = parameters.get("partial_rotary_factor")
        for name in ("partial_rotary_factor", "rotary_pct"):
            share = config.get(name) if share is None else share
        is_padded = parameters.get("rope_type") == "proportional"
        dims = head_dim if is_padded else int(head_dim * (family.share if share is None else share))
    if dims % 2 or not 2 <= dims <= head_dim:
        raise ValueError(f"rotated dims must be even and from 2 to {head_dim}, got {dims}")
    return dims


def _is_latent(config: Mapping[str, Any]) -> bool:
    return config.get("kv_lora_rank") is not None


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not hidden or not heads:
        raise ValueError("the config states neither head_dim nor hidden_size and num_attention_heads")
    return int(hidden // heads)
