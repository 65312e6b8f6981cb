"""CacheGen's codec as in the paper (SIGCOMM'24, sections 5.1 and 5.2); docs/codec.md says what is ours to choose.

Groups of ten tokens; the first is the anchor, at 8 bits of its token's scale; the others are deltas to the decoded
anchor, in steps of a share of their standard deviation, coarser in deeper layers; one distribution for each (layer,
channel).
Anchors are the base, and the deltas of each position in the group a refinement that needs no other one: a token whose
delta is not here takes its anchor's values.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockLayout
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import CODERS, Distribution, IntegerRuns
from kvtide.codec.published.shared import LayerHead, Part, ProfiledCodec, read_scales
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind

GROUP_TOKENS = 10
ANCHOR_HALF = 127
# Paper, section 5.2: bins of 0.5, 1 and 1.5 (of the standard deviation, in our reading) for the first, middle and last
# third of the layers. Levels scale all three; level 4 has the paper's own.
THIRD_BINS = (0.5, 1.0, 1.5)
LEVELS = {1: 0.125, 2: 0.25, 3: 0.5, 4: 1.0}
# KL divergence of the next token, in nats, by level: SmolLM2-135M, `kvtide-lab bench codec-quality`.
LEVEL_QUALITY = {1: 0.00096, 2: 0.0038, 3: 0.0132, 4: 0.0741}
# What it loses besides, by how many positions have no deltas: level 2, the last positions lacking; 3, 5 and 7 of 9 lie
# between those measured.
LACKING_QUALITY = (0.0, 0.037, 0.070, 0.104, 0.167, 0.231, 0.315, 0.400, 0.459, 0.522)
STEP_MIN = 1e-30
# Layers share the sections of their deltas until a section has this many numbers: what a section costs beside them (200
# bytes) is then below half a percent. And a coder takes this many tables at most.
SECTION_NUMBERS = 1 << 17
SECTION_TABLES_MAX = 1 << 16

# level, coder of the deltas' distributions, zero, steps of K and V, bytes of these distributions
_PREFIX = struct.Struct("<BBHffI")


def layer_step(deviation: float, layer: int, layers: int, level: int) -> float:
    """Return the quantisation step of a layer's deltas from their standard deviation."""
    return max(STEP_MIN, LEVELS[level] * THIRD_BINS[3 * layer // layers] * deviation)


def delta_deviation(values: NDArray[np.uint8], layout: BlockLayout) -> float:
    """Return the standard deviation of all deltas of one K or V layer; inf or nan if a value is not finite."""
    channels = layout.kv_heads * layout.head_dim
    energy = _native.delta_energy(values, layout.dtype.code, layout.tokens, channels, GROUP_TOKENS)
    count = layout.tokens - _groups(layout)
    return math.sqrt(energy / (count * channels)) if count else 1.0


def delta_layers(layout: BlockLayout) -> list[range]:
    """Return the ranges of layers that share the sections of their deltas."""
    tables = 2 * layout.kv_heads * layout.head_dim
    most = max(1, min(SECTION_NUMBERS // (tables * _groups(layout)), SECTION_TABLES_MAX // tables))
    count = -(-layout.layers // most)
    bounds = [layout.layers * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _groups(layout: BlockLayout) -> int:
    return -(-layout.tokens // GROUP_TOKENS)


class CachegenCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile. coarser: levels that blocks are stored in besides."""

    codec_id = "cachegen-2"
    group_tokens = GROUP_TOKENS

    def __init__(
        self, level: int = 3, coder: int = 0, profile: Profile | None = None, coarser: Sequence[CachegenCodec] = ()
    ) -> None:
        super().__init__(level, LEVEL_QUALITY, coder, profile)
        self.coarser = tuple(coarser)

    def parts(self, layout: BlockLayout) -> list[list[Part]]:
        """Return an anchor section a layer, and one for each position of deltas; see ProfiledCodec."""
        channels, found = layout.kv_heads * layout.head_dim, []
        anchors = IntegerRuns(2, channels, _groups(layout))
        for layers in delta_layers(layout):
            parts = [Part(_anchor_id(layer), range(layer, layer + 1), 0, anchors) for layer in layers]
            for position in range(1, min(GROUP_TOKENS, layout.tokens)):
                tokens = len(range(position, layout.tokens, GROUP_TOKENS))
                runs = IntegerRuns(1, 2 * len(layers) * channels, tokens)
                parts.append(Part(_delta_id(position, layers), layers, position, runs))
            found.append(parts)
        return found

    def quality_of(self, sections: Sequence[Section]) -> float:
        """Return what the leading positions whose deltas all layers have make. CorruptPayload without anchors."""
        layers: Counter[int] = Counter()
        for section in sections:
            layers[section.id.refinement] += section.id.layer_stop - section.id.layer_start
        if not layers[0]:
            raise CorruptPayload("expected anchors, got none")
        positions = range(1, GROUP_TOKENS)
        lacking = next((position for position in positions if layers[position] != layers[0]), GROUP_TOKENS)
        return self.quality_without(self.quality, GROUP_TOKENS - lacking)

    def quality_without(self, quality: float, refinements: int) -> float:
        """Return the quality without the deltas of so many positions."""
        return quality + LACKING_QUALITY[refinements]

    def losses_by_block(self, losses: Sequence[float], blocks: int, block_tokens: int) -> NDArray[np.float64]:
        """Return the mean's share of each block: how position counts was not measured for this codec."""
        return np.broadcast_to(np.array(losses) / blocks, (1, blocks, len(losses)))

    def half(self, layout: BlockLayout, layer: int, which: int, level: int) -> int:
        """Return what 8 bits hold."""
        return ANCHOR_HALF

    def step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8] | None) -> float:
        """Return the step, as it is stored: the encoder must use what the decoder will."""
        if self._profile:
            deviation = float(self._profile.arrays["deviation"][layer, which])
        else:
            assert values is not None, "values or a profile"
            deviation = delta_deviation(values, layout)
        return float(np.float32(layer_step(deviation, layer, layout.layers, self.level)))

    def name(self, level: int, position: int) -> str:
        """Return the name of the anchors' or a level's deltas' distributions."""
        return f"delta.{level}" if position else "anchor"

    def pack_head(self, steps: Sequence[float], scales: bytes, deltas: Distribution | None) -> bytes:
        """Return level, steps, scales and the deltas' distributions; see ProfiledCodec."""
        tables = deltas.to_bytes() if deltas else b""
        return _PREFIX.pack(self.level, self.coder if deltas else 0, 0, *steps, len(tables)) + scales + tables

    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        """Return what `pack_head` packed; see ProfiledCodec."""
        scales_stop = _PREFIX.size + 2 * 2 * _groups(layout)
        if len(data) < scales_stop:
            raise CorruptPayload(f"layer {layer}: anchors have {len(data)} bytes")
        level, coder, zeros, k_step, v_step, tables_bytes = _PREFIX.unpack_from(data)
        if level not in LEVELS or zeros or not all(STEP_MIN <= step < math.inf for step in (k_step, v_step)):
            raise CorruptPayload(f"layer {layer}: level {level} with steps {k_step}, {v_step}")
        if coder >= len(CODERS) or tables_bytes > len(data) - scales_stop or (coder and not tables_bytes):
            raise CorruptPayload(f"layer {layer}: {tables_bytes} bytes of distributions for coder {coder}")
        scales = read_scales(data[_PREFIX.size : scales_stop])
        anchors_start = scales_stop + tables_bytes
        own = None
        if tables_bytes:
            count = 2 * layout.kv_heads * layout.head_dim
            own = Distribution.parse(coder, data[scales_stop:anchors_start], count)
        return LayerHead(level, (k_step, v_step), scales, own, data[anchors_start:])


def _anchor_id(layer: int) -> SectionId:
    return SectionId(SectionKind.ANCHOR, 0, layer, layer + 1)


def _delta_id(position: int, layers: range) -> SectionId:
    return SectionId(SectionKind.DELTA, position, layers.start, layers.stop)
