"""Blocks as float32 with keys before RoPE, and back; and tokens that are kept whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta, KVDtype
from kvtide.codec.rope_scaling import Frequencies
from kvtide.codec.rotary import Rotary, RotaryTables
from kvtide.codec.tide.section import Apart
from kvtide.errors import UnencodableBlock

__all__ = ["Floats", "Turns", "keep_apart", "load_values", "put_apart", "store_values"]

# (layers, 2, tokens, kv_heads, head_dim)
Floats = NDArray[np.float32]

_BYTE_MAX = 127


class Turns:
    """How keys of a block's tokens turn, forth or back: tables are made once for all layers that turn alike."""

    def __init__(self, meta: BlockMeta, rotary: Rotary | None, is_back: bool) -> None:
        """is_back: to before RoPE."""
        self._meta = meta
        self._rotary = rotary
        self._is_back = is_back
        nothing = np.empty((meta.layout.tokens, 0), dtype=np.float32)
        self._none = (0, False, *RotaryTables(nothing, nothing))
        self._tables: dict[Frequencies, RotaryTables] = {}

    def of(self, layer: int, which: int) -> tuple[int, bool, NDArray[np.float32], NDArray[np.float32]]:
        """Return what the native kernels take for K (0) or V (1): first dim, pairing, cosines, sines."""
        if self._rotary is None or which:
            return self._none
        key = self._rotary.frequencies(layer)
        if key not in self._tables:
            make = self._rotary.inverse_tables if self._is_back else self._rotary.tables
            self._tables[key] = make(self._meta.start, self._meta.layout.tokens, layer)
        return (self._rotary.dim_start, self._rotary.neighbours, *self._tables[key])


def load_values(bits: BlockBits, dtype: KVDtype, layer_start: int, turns: Turns) -> Floats:
    """Return some layers of a block as float32, keys turned. UnencodableBlock if a value is not finite.

    bits: the layers from `layer_start` on, contiguous.
    """
    out = np.empty(bits.shape, dtype=np.float32)
    for layer, which in np.ndindex(bits.shape[:2]):
        dim_start, neighbours, cos, sin = turns.of(layer_start + layer, which)
        half = bits[layer, which].reshape(-1).view(np.uint8)
        _native.rope_load(half, dtype.code, dim_start, neighbours, cos, sin, out[layer, which])
    if not np.isfinite(out).all():
        raise UnencodableBlock("a value is not finite")
    return out


def store_values(values: Floats, dtype: KVDtype, layer_start: int, turns: Turns, out: BlockBits) -> None:
    """Write some layers as bit patterns, keys turned: the inverse of `load_values`."""
    for layer, which in np.ndindex(out.shape[:2]):
        turn = turns.of(layer_start + layer, which)
        _native.rope_store(values[layer, which], *turn, dtype.code, out[layer, which].reshape(-1).view(np.uint8))


def keep_apart(values: Floats, positions: NDArray[np.uint16]) -> Apart:
    """Return the tokens at these positions as they are kept. UnencodableBlock if a value is too large for bfloat16."""
    tokens = values[:, :, positions]
    peaks = np.abs(tokens).max(axis=-1, initial=0.0) / np.float32(_BYTE_MAX)
    scales = (peaks.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    if scales.size and int(scales.max()) >= 0x7F80:
        raise UnencodableBlock("a value is too large")
    steps = np.maximum(_from_bfloat(scales), np.float32(1e-38))[..., None]
    return Apart(positions, scales.astype(np.uint16), np.rint(tokens / steps).astype(np.int8))


def put_apart(apart: Apart, values: Floats) -> None:
    """Write the tokens where they belong."""
    values[:, :, apart.positions] = apart.values * _from_bfloat(apart.scales)[..., None]


def _from_bfloat(bits: NDArray[np.unsignedinteger]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
