"""CacheGen's codec as in the paper (SIGCOMM'24, sections 5.1 and 5.2); docs/codec.md says what is ours to choose.

Groups of ten tokens; the first is the anchor, at 8 bits of its token's scale; the others are deltas to the decoded
anchor, in steps of a share of their standard deviation, coarser in deeper layers; one distribution for each (layer,
channel).
Anchors and deltas are sections of their own, so that they may travel apart.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import layer_views, sections_of_kinds
from kvtide.codec.integers import IntegerRuns, Integers
from kvtide.codec.profile import Profile
from kvtide.codec.shared import ProfiledCodec, read_scales
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind

__all__ = ["GROUP_TOKENS", "LEVELS", "CachegenCodec", "DeltaSplit", "delta_deviation", "layer_step", "split_deltas"]

GROUP_TOKENS = 10
# Paper, section 5.2: bins of 0.5, 1 and 1.5 (of the standard deviation, in our reading) for the first, middle and last
# third of the layers. Levels scale all three; level 4 has the paper's own.
THIRD_BINS = (0.5, 1.0, 1.5)
LEVELS = {1: 0.125, 2: 0.25, 3: 0.5, 4: 1.0}
STEP_MIN = 1e-30

_PREFIX = struct.Struct("<BBHff")


class DeltaSplit(NamedTuple):
    """One of K and V of a layer: anchors (channels, groups), scales (groups), deltas (channels, tokens - groups)."""

    anchors: Integers
    scales: NDArray[np.uint16]
    deltas: Integers


def layer_step(deviation: float, layer: int, layers: int, level: int) -> float:
    """Return the quantisation step of a layer's deltas from their standard deviation."""
    return max(STEP_MIN, LEVELS[level] * THIRD_BINS[3 * layer // layers] * deviation)


def delta_deviation(values: NDArray[np.uint8], layout: BlockLayout) -> float:
    """Return the standard deviation of all deltas of one K or V layer; inf or nan if a value is not finite."""
    channels = layout.kv_heads * layout.head_dim
    energy = _native.delta_energy(values, layout.dtype.code, layout.tokens, channels, GROUP_TOKENS)
    count = layout.tokens - _groups(layout)
    return math.sqrt(energy / (count * channels)) if count else 1.0


def split_deltas(values: NDArray[np.uint8], layout: BlockLayout, step: float) -> DeltaSplit:
    """Quantise one K or V layer. UnencodableBlock if a value is not finite."""
    channels, groups = layout.kv_heads * layout.head_dim, _groups(layout)
    split = DeltaSplit(
        np.empty((channels, groups), dtype=np.int16),
        np.empty(groups, dtype=np.uint16),
        np.empty((channels, layout.tokens - groups), dtype=np.int16),
    )
    if not math.isfinite(step) or not _native.cachegen_quantise(
        values, layout.dtype.code, GROUP_TOKENS, step, split.anchors, split.scales, split.deltas
    ):
        raise UnencodableBlock("a value is not finite")
    return split


def _groups(layout: BlockLayout) -> int:
    return -(-layout.tokens // GROUP_TOKENS)


class CachegenCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile."""

    codec_id = "cachegen-1"

    def __init__(self, level: int = 3, coder: int = 0, profile: Profile | None = None) -> None:
        super().__init__(level, LEVELS, coder, profile)

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return an anchor and a delta section a layer. UnencodableBlock for values that are not finite."""
        self.check(meta, bits)
        sections = []
        for layer, values in enumerate(layer_views(bits)):
            sections += self._encode_layer(meta.layout, layer, values)
        return sections

    def _encode_layer(self, layout: BlockLayout, layer: int, values: NDArray[np.uint8]) -> list[Section]:
        halves = values.reshape(2, -1)
        steps = [self._step(layout, layer, which, half) for which, half in enumerate(halves)]
        splits = [split_deltas(half, layout, step) for half, step in zip(halves, steps, strict=True)]
        anchors = np.stack([split.anchors for split in splits])
        deltas = np.stack([split.deltas for split in splits])
        scales = b"".join(split.scales.astype("<u2").tobytes() for split in splits)
        anchor_data = scales + self.code("anchor", layer, anchors)
        delta_data = _PREFIX.pack(self._level, 0, 0, *steps) + self.code(f"delta.{self._level}", layer, deltas)
        return [
            Section(SectionId(SectionKind.ANCHOR, 0, layer, layer + 1), anchor_data),
            Section(SectionId(SectionKind.DELTA, 0, layer, layer + 1), delta_data),
        ]

    def _step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8]) -> float:
        if self._profile:
            deviation = float(self._profile.arrays["deviation"][layer, which])
        else:
            deviation = delta_deviation(values, layout)
        # As it is stored: the encoder must use what the decoder will.
        return float(np.float32(layer_step(deviation, layer, layout.layers, self._level)))

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block that anchors and deltas make into `out`."""
        check_bits(out, meta.layout)
        kinds = (SectionKind.ANCHOR, SectionKind.DELTA)
        by_layer = sections_of_kinds(meta.layout, sections, kinds)
        for layer, ((anchor, delta), values) in enumerate(zip(by_layer, layer_views(out), strict=True)):
            self._decode_layer(meta.layout, layer, memoryview(anchor), memoryview(delta), values.reshape(2, -1))

    def _decode_layer(
        self, layout: BlockLayout, layer: int, anchor: memoryview, delta: memoryview, halves: NDArray[np.uint8]
    ) -> None:
        channels, groups = layout.kv_heads * layout.head_dim, _groups(layout)
        scales_bytes = 2 * 2 * groups
        if len(anchor) < scales_bytes or len(delta) < _PREFIX.size:
            raise CorruptPayload(f"layer {layer}: anchors have {len(anchor)} bytes, deltas {len(delta)}")
        scales = read_scales(anchor[:scales_bytes], 2)
        level, zero, zeros, *steps = _PREFIX.unpack_from(delta)
        if level not in LEVELS or zero or zeros or not all(STEP_MIN <= step < math.inf for step in steps):
            raise CorruptPayload(f"layer {layer}: level {level} with steps {steps}")
        anchors = self.uncode("anchor", layer, anchor[scales_bytes:], IntegerRuns(2, channels, groups))
        delta_runs = IntegerRuns(2, channels, layout.tokens - groups)
        deltas = self.uncode(f"delta.{level}", layer, delta[_PREFIX.size :], delta_runs)
        code = layout.dtype.code
        for which, step in enumerate(steps):
            split = (anchors[which], scales[which], deltas[which])
            _native.cachegen_restore(*split, GROUP_TOKENS, step, code, halves[which])
