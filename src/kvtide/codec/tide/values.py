"""Blocks as float32 with keys before RoPE, and back; and tokens that are kept whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta
from kvtide.codec.rotary import Rotary, RotaryTables
from kvtide.codec.tide.section import Apart
from kvtide.errors import UnencodableBlock

__all__ = ["Floats", "keep_apart", "load_values", "put_apart", "store_values"]

# (layers, 2, tokens, kv_heads, head_dim)
Floats = NDArray[np.float32]

_BYTE_MAX = 127


def load_values(meta: BlockMeta, bits: BlockBits, layer_start: int, rotary: Rotary | None) -> Floats:
    """Return some layers of a block as float32, keys turned back. UnencodableBlock if a value is not finite.

    bits: the layers from `layer_start` on, contiguous.
    """
    out = np.empty(bits.shape, dtype=np.float32)
    code, none = meta.layout.dtype.code, _no_pairs(meta.layout.tokens)
    for i, layer in enumerate(bits):
        tables = rotary.inverse_tables(meta.start, meta.layout.tokens, layer_start + i) if rotary else none
        for half, target, turned in zip(layer, out[i], (tables, none), strict=True):
            args = (rotary.dim_start, rotary.neighbours) if rotary and turned is tables else (0, False)
            _native.rope_load(half.reshape(-1).view(np.uint8), code, *args, *turned, target)
    if not np.isfinite(out).all():
        raise UnencodableBlock("a value is not finite")
    return out


def store_values(meta: BlockMeta, values: Floats, layer_start: int, rotary: Rotary | None, out: BlockBits) -> None:
    """Write some layers as bit patterns, keys turned forth: the inverse of `load_values`."""
    code, none = meta.layout.dtype.code, _no_pairs(meta.layout.tokens)
    for i, layer in enumerate(values):
        tables = rotary.tables(meta.start, meta.layout.tokens, layer_start + i) if rotary else none
        for half, target, turned in zip(layer, out[i], (tables, none), strict=True):
            args = (rotary.dim_start, rotary.neighbours) if rotary and turned is tables else (0, False)
            _native.rope_store(half, *args, *turned, code, target.reshape(-1).view(np.uint8))


def _no_pairs(tokens: int) -> RotaryTables:
    nothing = np.empty((tokens, 0), dtype=np.float32)
    return RotaryTables(nothing, nothing)


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
