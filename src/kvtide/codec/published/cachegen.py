"""CacheGen's codec as in the paper (SIGCOMM'24, sections 5.1 and 5.2); docs/codec.md says what is ours to choose.

Groups of ten tokens; the first is the anchor, at 8 bits of its token's scale; the others are deltas to the decoded
anchor, in steps of a share of their standard deviation, coarser in deeper layers; one distribution for each (layer,
channel).
Anchors are the base, and the deltas of each position in the group a refinement that needs no other one: a token whose
delta is not here takes its anchor's values.

`ChunkwiseCodec` is the simplified one that LMCache ships: every token scaled by its largest magnitude, no deltas.
Unlike the original it has a guard for tokens of zeros, names its bins for any number of layers, and may keep its
distributions in a profile. `ProfileFitter` fits the profiles of both from blocks of a model's cache, in bounded memory.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, check_bits
from kvtide.codec.base import layer_section_ids, layer_views
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import (
    CODERS,
    VALUE_MAX,
    Distribution,
    IntegerRuns,
    Integers,
    fit_distribution,
    value_counts,
)
from kvtide.codec.published.shared import LayerHead, ProfiledCodec, SectionPart, distribution_arrays, read_scales, split
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


# Bins of the finer and of the coarser layers. Level 3 has those of LMCache 0.5.6: of 32 layers, the first 10 of K and
# the first 2 of V are finer.
CHUNKWISE_LEVELS = {1: (128, 64), 2: (64, 32), 3: (32, 16)}
# KL divergence of the next token at each level, in nats: as cachegen's.
_CHUNKWISE_QUALITY = {1: 0.0028, 2: 0.0122, 3: 0.0647}
FINE_SHARES = (10 / 32, 2 / 32)
FEW_LAYERS = 10
_CHUNKWISE_PREFIX = struct.Struct("<BBH")


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

    def parts(self, layout: BlockLayout) -> list[list[SectionPart]]:
        """Return an anchor section a layer, and one for each position of deltas; see ProfiledCodec."""
        channels, found = layout.kv_heads * layout.head_dim, []
        anchors = IntegerRuns(2, channels, _groups(layout))
        for layers in delta_layers(layout):
            parts = [SectionPart(_anchor_id(layer), range(layer, layer + 1), 0, anchors) for layer in layers]
            for position in range(1, min(GROUP_TOKENS, layout.tokens)):
                tokens = len(range(position, layout.tokens, GROUP_TOKENS))
                runs = IntegerRuns(1, 2 * len(layers) * channels, tokens)
                parts.append(SectionPart(_delta_id(position, layers), layers, position, runs))
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
        super().__init__(level, _CHUNKWISE_QUALITY, coder, profile)

    def parts(self, layout: BlockLayout) -> list[list[SectionPart]]:
        """Return one section a layer; see ProfiledCodec."""
        runs = IntegerRuns(2, layout.kv_heads * layout.head_dim, layout.tokens)
        return [
            [SectionPart(id_, range(id_.layer_start, id_.layer_stop), 0, runs)] for id_ in layer_section_ids(layout)
        ]

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
        return _CHUNKWISE_PREFIX.pack(self.level, 0, 0) + scales

    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        """Return what `pack_head` packed; see ProfiledCodec."""
        numbers_start = _CHUNKWISE_PREFIX.size + 2 * 2 * layout.tokens
        if len(data) <= numbers_start:
            raise CorruptPayload(f"layer {layer}: expected more than {numbers_start} bytes, got {len(data)}")
        level, zero, zeros = _CHUNKWISE_PREFIX.unpack_from(data)
        if level not in CHUNKWISE_LEVELS or zero or zeros:
            raise CorruptPayload(f"layer {layer}: chunkwise has no level {level}")
        scales = read_scales(data[_CHUNKWISE_PREFIX.size : numbers_start])
        return LayerHead(level, (1.0, 1.0), scales, None, data[numbers_start:])


# Yields (name of the distribution, numbers of one of K and V of a layer: (channels, symbols)).
_Splitter = Callable[["ProfileFitter", int, int, NDArray[np.uint8]], Iterator[tuple[str, Integers]]]


def _cachegen(
    fitter: ProfileFitter, layer: int, which: int, values: NDArray[np.uint8]
) -> Iterator[tuple[str, Integers]]:
    layout = fitter.layout
    deviation = float(fitter.deviation[layer, which])
    for level in LEVELS:
        step = float(np.float32(layer_step(deviation, layer, layout.layers, level)))
        found = split(values, layout, GROUP_TOKENS, ANCHOR_HALF, step)
        yield f"delta.{level}", found.deltas
    yield "anchor", found.anchors


def _chunkwise(
    fitter: ProfileFitter, layer: int, which: int, values: NDArray[np.uint8]
) -> Iterator[tuple[str, Integers]]:
    layout = fitter.layout
    for level in CHUNKWISE_LEVELS:
        yield f"share.{level}", split(values, layout, 1, half_bins(layer, which, layout.layers, level)).anchors


_SPLITTERS: dict[str, _Splitter] = {"cachegen": _cachegen, "chunkwise": _chunkwise}
PROFILE_KINDS = tuple(_SPLITTERS)


class ProfileFitter:
    """Counts what a codec would code, block by block, and makes tables of the counts in the end.

    Steps follow the standard deviations of the first text's blocks, which must be given to `scale` before `add`.
    """

    def __init__(self, kind: str, model: str, layout: BlockLayout) -> None:
        if kind not in _SPLITTERS:
            raise ValueError(f"profiles are made for {', '.join(_SPLITTERS)}, got {kind!r}")
        self.layout = layout
        self.deviation: NDArray[np.float32] = np.zeros((layout.layers, 2), dtype=np.float32)
        self._kind = kind
        self._model = model
        self._blocks = 0
        self._counts: dict[str, NDArray[np.uint32]] = {}

    def scale(self, blocks: list[BlockBits]) -> None:
        """Set the steps from the root mean square of these blocks' deviations. ValueError for none."""
        if not blocks:
            raise ValueError("calibration needs at least one full block, got none")
        squares = np.zeros((self.layout.layers, 2))
        for bits in blocks:
            for layer, values in enumerate(layer_views(bits)):
                for which, half in enumerate(values.reshape(2, -1)):
                    squares[layer, which] += delta_deviation(half, self.layout) ** 2
        self.deviation = np.sqrt(squares / len(blocks)).astype(np.float32)

    def add(self, bits: BlockBits) -> None:
        """Count a block. ValueError if it is not of the layout; UnencodableBlock if a value is not finite."""
        check_bits(bits, self.layout)
        assert self.deviation.any(), "scale before add"
        for layer, values in enumerate(layer_views(bits)):
            for which, half in enumerate(values.reshape(2, -1)):
                for name, numbers in _SPLITTERS[self._kind](self, layer, which, half):
                    self._count(name, layer, which, numbers)
        self._blocks += 1

    def _count(self, name: str, layer: int, which: int, numbers: Integers) -> None:
        shape = (self.layout.layers, 2, len(numbers), 2 * VALUE_MAX + 1)
        if name not in self._counts:
            self._counts[name] = np.zeros(shape, dtype=np.uint32)
        self._counts[name][layer, which] += value_counts(numbers).astype(np.uint32)

    def profile(self, texts: int) -> Profile:
        """Return the profile of all blocks counted. ValueError if there were none."""
        if not self._blocks:
            raise ValueError("calibration needs at least one full block, got none")
        arrays: dict[str, NDArray[Any]] = {"deviation": self.deviation}
        for name, counts in self._counts.items():
            by_layer = [
                fit_distribution(layer.reshape(-1, layer.shape[-1]).astype(np.uint64), 0, is_open=True)
                for layer in counts
            ]
            arrays |= distribution_arrays(name, by_layer)
        tokens = self._blocks * self.layout.tokens
        return Profile.make(self._kind, self._model, self.layout, (texts, tokens), arrays)
