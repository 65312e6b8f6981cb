"""Takes keys back to before their rotary position embedding, and forth again.

A key alone hardly changes from token to token, a rotated one does with its position: codecs want the former. Whatever
the frequencies are, turning forth undoes turning back: those that are not the model's cost bytes, not correctness.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import HEAD_DIM_MAX, LAYERS_MAX, BlockBits, KVDtype
from kvtide.errors import CorruptPayload

KINDS_MAX = 64

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

    def load(self, keys: BlockBits, dtype: KVDtype, tables: RotaryTables) -> NDArray[np.float32]:
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
        head = _HEADER.pack(_VERSION, self.pairs, *dims, len(self.kinds), len(self.layer_kinds))
        kinds = [struct.pack(f"<If{len(values)}f", steady, scale, *values) for values, scale, steady in self.kinds]
        return b"".join([head, bytes(self.layer_kinds), *kinds])

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
        found = kind.iter_unpack(data[kinds_start:])
        kinds = tuple(Frequencies(tuple(values), scale, steady) for steady, scale, *values in found)
        try:
            return cls(Pairs(pairs), dim_start, dim_stop, kinds, tuple(data[_HEADER.size : kinds_start]))
        except ValueError as error:
            raise CorruptPayload(f"rotary parameters: {error}") from error


class Frequencies(NamedTuple):
    """Radians a token for each pair of dims; what rotated keys are multiplied by; prompts that this holds for.

    `steady_tokens`: a longer prompt makes the engine take other frequencies; 0 if none does.
    """

    values: tuple[float, ...]
    scale: float
    steady_tokens: int


class Pairs(IntEnum):
    """The two dims that turn together. The numbers are stored."""

    HALVES = 0  # i and i + rotated / 2, as Llama and GPT-NeoX
    NEIGHBOURS = 1  # 2 i and 2 i + 1, as GPT-J
