"""The simplified CacheGen that LMCache ships: every token scaled by its largest magnitude, no deltas (docs/codec.md).

Unlike the original it has a guard for tokens of zeros, names its bins for any number of layers, and may keep its
distributions in a profile.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.base import layer_views, sections_by_layer
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import IntegerRuns, Integers
from kvtide.codec.published.shared import ProfiledCodec, read_scales
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind

# Bins of the finer and of the coarser layers. Level 3 has those of LMCache 0.5.6: of 32 layers, the first 10 of K and
# the first 2 of V are finer.
CHUNKWISE_LEVELS = {1: (128, 64), 2: (64, 32), 3: (32, 16)}
# KL divergence of the next token at each level, in nats: as cachegen's.
_LEVEL_QUALITY = {1: 0.0028, 2: 0.0122, 3: 0.0647}
FINE_SHARES = (10 / 32, 2 / 32)
FEW_LAYERS = 10

_PREFIX = struct.Struct("<BBH")


def half_bins(layer: int, which: int, layers: int, level: int) -> int:
    """Return the largest symbol of K (`which` 0) or V (1) of a layer: bins b give -(b/2 - 1) … b/2 - 1."""
    fine, coarse = CHUNKWISE_LEVELS[level]
    is_fine = layers < FEW_LAYERS or layer < round(FINE_SHARES[which] * layers)
    return (fine if is_fine else coarse) // 2 - 1


def share_of_scale(values: NDArray[np.uint8], layout: BlockLayout, half: int) -> tuple[Integers, NDArray[np.uint16]]:
    """Return symbols (channels, tokens) and scales (tokens) of K or V of a layer. UnencodableBlock if not finite."""
    channels = layout.kv_heads * layout.head_dim
    symbols = np.empty((channels, layout.tokens), dtype=np.int16)
    scales = np.empty(layout.tokens, dtype=np.uint16)
    if not _native.chunkwise_quantise(values, layout.dtype.code, half, symbols, scales):
        raise UnencodableBlock("a value is not finite")
    return symbols, scales


class ChunkwiseCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile."""

    codec_id = "chunkwise-1"

    def __init__(self, level: int = 3, coder: int = 0, profile: Profile | None = None) -> None:
        super().__init__(level, _LEVEL_QUALITY, coder, profile)

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return one section a layer. UnencodableBlock for values that are not finite."""
        self.check(meta, bits)
        return [
            Section(SectionId(SectionKind.DATA, 0, layer, layer + 1), self._encode_layer(meta.layout, layer, values))
            for layer, values in enumerate(layer_views(bits))
        ]

    def _encode_layer(self, layout: BlockLayout, layer: int, values: NDArray[np.uint8]) -> bytes:
        coded = [
            share_of_scale(half, layout, half_bins(layer, which, layout.layers, self._level))
            for which, half in enumerate(values.reshape(2, -1))
        ]
        symbols = np.stack([symbols for symbols, _ in coded])
        scales = b"".join(scales.astype("<u2").tobytes() for _, scales in coded)
        return _PREFIX.pack(self._level, 0, 0) + scales + self.code(f"share.{self._level}", layer, symbols)

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block that the sections make into `out`."""
        self.check_out(meta, out)
        ordered = sections_by_layer(meta.layout, sections)
        for layer, (section, values) in enumerate(zip(ordered, layer_views(out), strict=True)):
            self._decode_layer(meta.layout, layer, memoryview(section.data), values.reshape(2, -1))

    def _decode_layer(self, layout: BlockLayout, layer: int, data: memoryview, halves: NDArray[np.uint8]) -> None:
        numbers_start = _PREFIX.size + 2 * 2 * layout.tokens
        if len(data) <= numbers_start:
            raise CorruptPayload(f"layer {layer}: expected more than {numbers_start} bytes, got {len(data)}")
        level, zero, zeros = _PREFIX.unpack_from(data)
        if level not in CHUNKWISE_LEVELS or zero or zeros:
            raise CorruptPayload(f"layer {layer}: chunkwise has no level {level}")
        scales = read_scales(data[_PREFIX.size : numbers_start], 2)
        runs = IntegerRuns(2, layout.kv_heads * layout.head_dim, layout.tokens)
        symbols = self.uncode(f"share.{level}", layer, data[numbers_start:], runs)
        for which in (0, 1):
            half = half_bins(layer, which, layout.layers, level)
            _native.chunkwise_restore(symbols[which], scales[which], half, layout.dtype.code, halves[which])
