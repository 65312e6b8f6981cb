"""The simplified CacheGen that LMCache ships: every token scaled by its largest magnitude, no deltas (docs/codec.md).

Unlike the original it has a guard for tokens of zeros, names its bins for any number of layers, and may keep its
distributions in a profile.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockLayout
from kvtide.codec.base import layer_section_ids
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import Distribution, IntegerRuns
from kvtide.codec.published.shared import LayerHead, Part, ProfiledCodec, read_scales
from kvtide.errors import CorruptPayload

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


class ChunkwiseCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile."""

    codec_id = "chunkwise-1"
    group_tokens = 1

    def __init__(self, level: int = 3, coder: int = 0, profile: Profile | None = None) -> None:
        super().__init__(level, _LEVEL_QUALITY, coder, profile)

    def parts(self, layout: BlockLayout) -> list[list[Part]]:
        """Return one section a layer; see ProfiledCodec."""
        runs = IntegerRuns(2, layout.kv_heads * layout.head_dim, layout.tokens)
        return [[Part(id_, range(id_.layer_start, id_.layer_stop), 0, runs)] for id_ in layer_section_ids(layout)]

    def half(self, layout: BlockLayout, layer: int, which: int, level: int) -> int:
        """See `half_bins`."""
        return half_bins(layer, which, layout.layers, level)

    def step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8] | None) -> float:
        """Return any step: there are no deltas."""
        return 1.0

    def name(self, level: int, position: int) -> str:
        """Return the name of a level's distributions."""
        return f"share.{level}"

    def pack_head(self, steps: Sequence[float], scales: bytes, deltas: Distribution | None) -> bytes:
        """Return level and scales; see ProfiledCodec."""
        return _PREFIX.pack(self.level, 0, 0) + scales

    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        """Return what `pack_head` packed; see ProfiledCodec."""
        numbers_start = _PREFIX.size + 2 * 2 * layout.tokens
        if len(data) <= numbers_start:
            raise CorruptPayload(f"layer {layer}: expected more than {numbers_start} bytes, got {len(data)}")
        level, zero, zeros = _PREFIX.unpack_from(data)
        if level not in CHUNKWISE_LEVELS or zero or zeros:
            raise CorruptPayload(f"layer {layer}: chunkwise has no level {level}")
        scales = read_scales(data[_PREFIX.size : numbers_start])
        return LayerHead(level, (1.0, 1.0), scales, None, data[numbers_start:])
