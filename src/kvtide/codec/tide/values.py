"""Blocks as float32 with keys before RoPE, and back; and tokens that are kept whole."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta, KVDtype
from kvtide.codec.rotary import Frequencies, Rotary, RotaryTables
from kvtide.codec.tide.section import Apart
from kvtide.errors import UnencodableBlock

# (layers, 2, tokens, kv_heads, head_dim)
Floats = NDArray[np.float32]

_BYTE_MAX = 127
# 2^120: 127 of it, turned by RoPE, are a finite float32.
_SCALE_BITS_MAX = 0x7B80


# As native kernels take them: cosines and sines of (kinds, tokens, pairs), the kind of each layer, first dim, pairing.
NativeTurns = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8], int, bool]


class KeyRotation:
    """The rotation of a block's keys, forth or back: tables are made once for all layers that turn alike."""

    def __init__(self, meta: BlockMeta, rotary: Rotary | None, is_back: bool) -> None:
        """is_back: to before RoPE."""
        layers, tokens = meta.layout.layers, meta.layout.tokens
        self._kinds = np.zeros(layers, dtype=np.uint8)
        if rotary is None:
            nothing = np.empty((1, tokens, 0), dtype=np.float32)
            self._tables, self._dims = RotaryTables(nothing, nothing), (0, False)
            return
        make = rotary.inverse_tables if is_back else rotary.tables
        found: dict[Frequencies, int] = {}
        tables: list[RotaryTables] = []
        for layer in range(layers):
            kind = found.setdefault(rotary.frequencies(layer), len(found))
            self._kinds[layer] = kind
            if kind == len(tables):
                tables.append(make(meta.start, tokens, layer))
        self._tables = RotaryTables(*(np.stack(part) for part in zip(*tables, strict=True)))
        self._dims = (rotary.dim_start, rotary.neighbours)

    def of(self, layers: slice) -> NativeTurns:
        """Return what the native kernels take for some layers."""
        return (*self._tables, self._kinds[layers], *self._dims)

    def at(self, tokens: NDArray[np.int64]) -> KeyRotation:
        """Return how keys of some tokens turn."""
        found = copy(self)
        found._tables = RotaryTables(*(np.ascontiguousarray(table[:, tokens]) for table in self._tables))
        return found

    def keys_of(self, layer: int) -> tuple[int, bool, NDArray[np.float32], NDArray[np.float32]]:
        """Return what `rope_load` takes for the keys of one layer."""
        cos, sin = (table[self._kinds[layer]] for table in self._tables)
        return (*self._dims, cos, sin)


class StoredLayers(NamedTuple):
    """Some layers of a block as they are stored, from `layer_start` on, contiguous, and how their keys turn."""

    bits: BlockBits
    dtype: KVDtype
    layer_start: int
    turns: KeyRotation

    def of(self, layers: slice) -> StoredLayers:
        """Return some of these layers, by their numbers in the model."""
        here = self.bits[layers.start - self.layer_start : layers.stop - self.layer_start]
        return self._replace(bits=here, layer_start=layers.start)

    def at(self, tokens: NDArray[np.int64]) -> StoredLayers:
        """Return a place, not yet written, for some tokens of these layers."""
        layers, two, _, *heads = self.bits.shape
        bits = np.empty((layers, two, len(tokens), *heads), dtype=self.bits.dtype)
        return self._replace(bits=bits, turns=self.turns.at(tokens))

    @property
    def as_bytes(self) -> NDArray[np.uint8]:
        """Return the bits as bytes, not a copy."""
        return self.bits.reshape(-1).view(np.uint8)

    @property
    def native_turns(self) -> NativeTurns:
        """Return how the keys of these layers turn."""
        return self.turns.of(slice(self.layer_start, self.layer_start + len(self.bits)))


def load_values(stored: StoredLayers) -> Floats:
    """Return layers as float32, keys turned. UnencodableBlock if a value is not finite."""
    out = np.empty(stored.bits.shape, dtype=np.float32)
    for layer in range(len(out)):
        dim_start, neighbours, cos, sin = stored.turns.keys_of(stored.layer_start + layer)
        for which, (cosines, sines) in enumerate(((cos, sin), (cos[:, :0], sin[:, :0]))):
            half = stored.bits[layer, which].reshape(-1).view(np.uint8)
            turn = (dim_start, neighbours, np.ascontiguousarray(cosines), np.ascontiguousarray(sines))
            _native.rope_load(half, stored.dtype.code, *turn, out[layer, which])
    if not np.isfinite(out).all():
        raise UnencodableBlock("a value is not finite")
    return out


def keep_apart(stored: StoredLayers, positions: NDArray[np.uint16]) -> Apart:
    """Return the tokens at these positions as they are kept. UnencodableBlock if a value is too large for bfloat16."""
    layers, _, _, *heads = stored.bits.shape
    # As most blocks do.
    if not len(positions):
        nothing = np.empty((layers, 2, 0, *heads), dtype=np.int8)
        return Apart(positions, np.empty(nothing.shape[:-1], dtype=np.uint16), nothing)
    return kept_tokens(load_values(stored)[:, :, positions], positions)


def kept_tokens(tokens: Floats, positions: NDArray[np.uint16]) -> Apart:
    """Return tokens, keys before RoPE, as they are kept. UnencodableBlock if a value is too large for bfloat16."""
    peaks = np.abs(tokens).max(axis=-1, initial=0.0) / np.float32(_BYTE_MAX)
    scales = (peaks.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    if scales.size and int(scales.max()) >= _SCALE_BITS_MAX:
        raise UnencodableBlock("a value is too large")
    steps = np.maximum((scales << np.uint32(16)).view(np.float32), np.float32(1e-38))[..., None]
    return Apart(positions, scales.astype(np.uint16), np.rint(tokens / steps).astype(np.int8))
