"""CacheGen's codec as in the paper (SIGCOMM'24, sections 5.1 and 5.2); docs/codec.md says what is ours to choose.

Groups of ten tokens; the first is the anchor, at 8 bits of its token's scale; the others are deltas to the decoded
anchor, in steps of a share of their standard deviation, coarser in deeper layers; one distribution for each (layer,
channel), from a profile or else in the payload. Anchors are the base, and the deltas of each position in the group a
refinement that needs no other one: a token whose delta is not here takes its anchor's values.

`ChunkwiseCodec` is the simplified one that LMCache ships: every token scaled by its largest magnitude, no deltas.
Unlike the original it has a guard for tokens of zeros, names its bins for any number of layers, and may keep its
distributions in a profile. `ProfileFitter` fits the profiles of both from blocks of a model's cache, in bounded memory.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import ByteReader, layer_section_ids, layer_views
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import (
    CODERS,
    VALUE_MAX,
    CodedIntegers,
    Distribution,
    IntegerRuns,
    Integers,
    decode_alike,
    encode_integers,
    fit_distribution,
    value_counts,
)
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind


class Split(NamedTuple):
    """One of K and V of a layer: anchors (channels, groups), scales (groups), deltas (channels, tokens - groups)."""

    anchors: Integers
    scales: NDArray[np.uint16]
    deltas: Integers


def split(values: NDArray[np.uint8], layout: BlockLayout, group_tokens: int, half: int, step: float = 1.0) -> Split:
    """Quantise one K or V layer: anchors from -half to half. UnencodableBlock if a value is not finite."""
    channels, groups = layout.kv_heads * layout.head_dim, -(-layout.tokens // group_tokens)
    anchors, scales = np.empty((channels, groups), dtype=np.int16), np.empty(groups, dtype=np.uint16)
    found = Split(anchors, scales, np.empty((channels, layout.tokens - groups), dtype=np.int16))
    how = (layout.dtype.code, group_tokens, half, step)
    if not math.isfinite(step) or not _native.quantise_groups(values, *how, *found):
        raise UnencodableBlock("a value is not finite")
    return found


class SectionPart(NamedTuple):
    """The numbers of one section: of which layers, at which position in their groups (0: anchors), how they lie."""

    id: SectionId
    layers: range
    position: int
    runs: IntegerRuns


class LayerHead(NamedTuple):
    """The prefix of a layer's anchors. `deltas`: the deltas' own distributions, None if they are shared."""

    level: int
    steps: tuple[float, float]
    scales: NDArray[np.uint16]  # (2, groups)
    deltas: Distribution | None
    anchors: memoryview


class CodedPart(NamedTuple):
    """A part's coded numbers, and what they are coded under."""

    part: SectionPart
    coded: CodedIntegers
    distribution: Distribution


class CodedLayers(NamedTuple):
    """Layers that share sections: their heads, and the parts that are here, anchors first."""

    layers: range
    heads: list[LayerHead]
    parts: list[CodedPart]


class ProfiledCodec(ABC):
    """Base of codecs that encode at one level with one coder, and decode every level and coder of their profile.

    Without a profile each section carries its distributions. A profile's tables take about 1.5 KB of memory for each
    (layer, channel) once they are used.
    """

    is_lossless = False
    codec_id: str
    group_tokens: int
    # The quality of each level, as measured on a model (docs/benchmarks.md), to rank them by.
    levels: Mapping[int, float]

    def __init__(self, level: int = 3, coder: int = 0, profile: Profile | None = None) -> None:
        if level not in self.levels:
            raise ValueError(f"this codec has the levels {sorted(self.levels)}, got {level!r}")
        if coder not in range(len(CODERS)):
            raise ValueError(f"coders are numbered 0 to {len(CODERS) - 1}, got {coder!r}")
        self.quality = self.levels[level]
        self.level = level
        self.coder = coder
        self._profile = profile
        # The profile's tables, made when first asked for. A race makes the same one twice, which does no harm.
        self._shared: dict[tuple[str, range, int], Distribution] = {}

    @property
    def profile(self) -> bytes | None:
        """Return the digest of the profile that payloads need, or None."""
        return self._profile.digest if self._profile else None

    def fits(self, layout: BlockLayout) -> bool:
        """Tell whether the profile, if there is one, is of a model of this shape."""
        return self._profile is None or self._profile.fits(layout)

    @abstractmethod
    def parts(self, layout: BlockLayout) -> list[list[SectionPart]]:
        """Return a block's sections: lists of layers that share some, the anchors of each layer first."""

    @abstractmethod
    def half(self, layout: BlockLayout, layer: int, which: int, level: int) -> int:
        """Return the largest anchor of K (`which` 0) or V (1) of a layer."""

    @abstractmethod
    def name(self, level: int, position: int) -> str:
        """Return the name of the distributions at a position."""

    @abstractmethod
    def pack_head(self, steps: Sequence[float], scales: bytes, deltas: Distribution | None) -> bytes:
        """Return the bytes in front of a layer's anchors; see LayerHead."""

    @abstractmethod
    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        """Return what `pack_head` packed, and the anchors. CorruptPayload if it is not that."""

    def step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8] | None) -> float:
        """Return the step of deltas, a float32; any where there are none. Without a profile `values` are needed."""
        return 1.0

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: what one layer takes, and deltas and tables of all layers that share sections, twice."""
        layers = max((len(part.layers) for parts in self.parts(layout) for part in parts if part.position), default=0)
        values = (16 + 4 * layers) * layout.layer_bytes // layout.dtype.item_bytes
        each = 0 if self._profile else _COUNTS_BYTES + 2 * max(layers, 1) * _TABLE_BYTES[self.coder]
        return values + 2 * layout.kv_heads * layout.head_dim * each

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return the anchors' sections, then the deltas'. UnencodableBlock for values that are not finite."""
        check_bits(bits, meta.layout)
        if self._profile and not self.fits(meta.layout):
            raise UnencodableBlock(f"the profile is of {self._profile.model}, whose shape is another")
        views = layer_views(bits)
        anchors: list[Section] = []
        deltas: list[Section] = []
        for parts in self.parts(meta.layout):
            # Nothing is kept of the layers before.
            own, joined = list[Distribution](), None
            firsts = [part for part in parts if not part.position]
            layers = [self._encode_layer(meta.layout, part, views[part.layers.start], own) for part in firsts]
            anchors += [section for section, _ in layers]
            if parts[-1].position:
                numbers = np.concatenate([numbers for _, numbers in layers])
                joined = Distribution.join(own, self.coder) if own else None
                deltas += [self._encode_deltas(part, numbers, joined) for part in parts if part.position]
        return anchors + deltas

    def _encode_layer(
        self, layout: BlockLayout, part: SectionPart, values: NDArray[np.uint8], own: list[Distribution]
    ) -> tuple[Section, Integers]:
        """Return the anchors' section and the deltas (2 * channels, deltas); their distribution goes to `own`."""
        layer, halves = part.layers.start, values.reshape(2, -1)
        steps = [self.step(layout, layer, which, half) for which, half in enumerate(halves)]
        splits = [
            split(half, layout, self.group_tokens, self.half(layout, layer, which, self.level), steps[which])
            for which, half in enumerate(halves)
        ]
        deltas = np.concatenate([each.deltas for each in splits])
        if deltas.size and not self._profile:
            own.append(self._fitted(deltas))
        scales = b"".join(each.scales.astype("<u2").tobytes() for each in splits)
        anchors = np.stack([each.anchors for each in splits])
        shared = self.shared(part, self.level, self.coder)
        distribution = shared or self._fitted(anchors.reshape(part.runs.distributions, -1))
        coded = encode_integers(anchors, part.runs, distribution, is_shared=shared is not None)
        return Section(part.id, self.pack_head(steps, scales, own[-1] if own else None) + coded), deltas

    def _encode_deltas(self, part: SectionPart, deltas: Integers, own: Distribution | None) -> Section:
        distribution = own or self.shared(part, self.level, self.coder)
        assert distribution is not None, "a profile, or distributions of the block's own"
        numbers = np.ascontiguousarray(deltas[None, :, part.position - 1 :: self.group_tokens - 1])
        return Section(part.id, encode_integers(numbers, part.runs, distribution, is_shared=True))

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block that all anchors and any deltas make into `out`; where a delta lacks, the anchor's values."""
        check_bits(out, meta.layout)
        views = layer_views(out)
        for found in self.coded(meta.layout, sections):
            self._restore(meta.layout, found, views[found.layers.start : found.layers.stop])

    def coded(self, layout: BlockLayout, sections: Sequence[Section]) -> Iterator[CodedLayers]:
        """Cut sections up, without decoding. CorruptPayload unless every anchor is among them, and no other twice."""
        if self._profile and not self.fits(layout):
            raise CorruptPayload(f"the payload names a profile of {self._profile.model}, whose shape is another")
        by_id, all_parts = {section.id: memoryview(section.data) for section in sections}, self.parts(layout)
        expected = {part.id: part.position for parts in all_parts for part in parts}
        anchors = {id_ for id_, position in expected.items() if not position}
        if len(by_id) != len(sections) or not anchors <= by_id.keys() <= expected.keys():
            wanted = f"anchors of {layout.layers} layers and some of {len(expected) - len(anchors)} sections of deltas"
            raise CorruptPayload(f"expected {wanted}, each once, got {len(sections)} sections")
        for parts in all_parts:
            yield self._coded_layers(layout, [(part, by_id[part.id]) for part in parts if part.id in by_id])

    def _coded_layers(self, layout: BlockLayout, parts: Sequence[tuple[SectionPart, memoryview]]) -> CodedLayers:
        heads: list[LayerHead] = []
        found: list[CodedPart] = []
        for part, data in parts:
            if part.position:
                break
            heads.append(self.parse_head(layout, part.layers.start, data))
            coded = CodedIntegers.parse(heads[-1].anchors, part.runs.streams)
            shared = None if coded.tables else self.shared(part, heads[-1].level, coded.coder)
            found.append(CodedPart(part, coded, coded.distribution(part.runs, shared)))
        own = [head.deltas for head in heads if head.deltas]
        layers = range(parts[0][0].layers.start, parts[0][0].layers.start + len(heads))
        kinds = {(head.level, head.deltas.coder if head.deltas else None) for head in heads}
        if len(kinds) > 1:
            raise CorruptPayload(f"{layers} do not agree on level, coder and place of distributions")
        joined = Distribution.join(own, own[0].coder) if own else None
        for part, data in parts[len(heads) :]:
            coded = CodedIntegers.parse(data, part.runs.streams)
            shared = joined or self.shared(part, heads[0].level, coded.coder)
            if coded.tables is not None:
                raise CorruptPayload("deltas have no distributions of their own")
            found.append(CodedPart(part, coded, coded.distribution(part.runs, shared)))
        return CodedLayers(layers, heads, found)

    def _restore(self, layout: BlockLayout, found: CodedLayers, views: NDArray[np.uint8]) -> None:
        channels, groups = layout.kv_heads * layout.head_dim, -(-layout.tokens // self.group_tokens)
        anchors: list[Integers] = []
        rows = np.zeros((len(views) * 2 * channels, layout.tokens - groups), dtype=np.int16)
        deltas = rows.reshape(len(views), 2, channels, layout.tokens - groups)
        # Parts under the same tables are decoded side by side.
        for _, alike in groupby(found.parts, key=lambda each: (id(each.distribution), each.part.runs)):
            parts = list(alike)
            numbers = decode_alike([each.coded for each in parts], parts[0].part.runs, parts[0].distribution)
            for (part, _, _), each in zip(parts, numbers, strict=True):
                if part.position:
                    rows[:, part.position - 1 :: self.group_tokens - 1] = each[0]
                else:
                    anchors.append(each)
        for i, (layer, head) in enumerate(zip(found.layers, found.heads, strict=True)):
            for which, values in enumerate(views[i].reshape(2, -1)):
                numbers_of = (anchors[i][which], head.scales[which], deltas[i, which])
                how = (self.group_tokens, self.half(layout, layer, which, head.level), head.steps[which])
                _native.restore_groups(*numbers_of, *how, layout.dtype.code, values)

    def shared(self, part: SectionPart, level: int, coder: int) -> Distribution | None:
        """Return the profile's distributions of a part, None without a profile. CorruptPayload if that has none."""
        if self._profile is None:
            return None
        key = (self.name(level, part.position), part.layers, coder)
        if key not in self._shared:
            self._shared[key] = Distribution.join(_stored(self._profile, key[0], part.layers), coder)
        return self._shared[key]

    def _fitted(self, values: Integers) -> Distribution:
        return fit_distribution(value_counts(values), self.coder, is_open=False)


def _stored(profile: Profile, name: str, wanted: range) -> list[Distribution]:
    """Return what a profile keeps of these layers under a name, of the rANS coder."""
    layers, runs = profile.layers, 2 * profile.kv_heads * profile.head_dim
    found = [profile.arrays.get(f"{name}.{each}", _NOTHING) for each in ("shift", "tables", "tables_bytes")]
    (shifts, tables, sizes), types = found, [each.dtype.str for each in found]
    is_of_runs = types == ["|u1", "|u1", "<u4"] and shifts.shape == (layers, runs) and sizes.shape == (layers,)
    if not is_of_runs or int(sizes.sum()) != tables.size:
        raise CorruptPayload(f"the profile has no distributions {name!r} of {layers} layers of {runs} channels")
    reader = ByteReader(memoryview(tables.tobytes()))
    by_layer = [reader.take(size) for size in sizes.tolist()]
    return [Distribution.parse(0, memoryview(shifts[i].tobytes() + by_layer[i]), runs) for i in wanted]


_NOTHING = np.empty(0)
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
# What a channel's counts take, and a table of each coder, with what is needed to make them.
_COUNTS_BYTES, _TABLE_BYTES = 10 << 10, (5 << 9, 9 << 10)

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
    """Return the quantisation step of a layer's deltas from their standard deviation, as it is stored: a float32."""
    return float(np.float32(max(STEP_MIN, LEVELS[level] * THIRD_BINS[3 * layer // layers] * deviation)))


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
    return [range(*pair) for pair in pairwise(layout.layers * i // count for i in range(count + 1))]


def _groups(layout: BlockLayout) -> int:
    return -(-layout.tokens // GROUP_TOKENS)


class CachegenCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile. coarser: levels that blocks are stored in besides."""

    codec_id = "cachegen-2"
    group_tokens = GROUP_TOKENS
    levels = LEVEL_QUALITY

    def __init__(
        self, level: int = 3, coder: int = 0, profile: Profile | None = None, coarser: Sequence[CachegenCodec] = ()
    ) -> None:
        super().__init__(level, coder, profile)
        self.coarser = tuple(coarser)

    def parts(self, layout: BlockLayout) -> list[list[SectionPart]]:
        channels, found = layout.kv_heads * layout.head_dim, []
        anchors = IntegerRuns(2, channels, _groups(layout))
        for layers in delta_layers(layout):
            ids = [SectionId(SectionKind.ANCHOR, 0, layer, layer + 1) for layer in layers]
            parts = [SectionPart(id_, range(id_.layer_start, id_.layer_stop), 0, anchors) for id_ in ids]
            for position in range(1, min(GROUP_TOKENS, layout.tokens)):
                tokens = len(range(position, layout.tokens, GROUP_TOKENS))
                id_ = SectionId(SectionKind.DELTA, position, layers.start, layers.stop)
                parts.append(SectionPart(id_, layers, position, IntegerRuns(1, 2 * len(layers) * channels, tokens)))
            found.append(parts)
        return found

    def quality_of(self, sections: Sequence[Section]) -> float:
        """Return what the level and the leading positions whose deltas all layers have make. CorruptPayload if cut."""
        layers: Counter[int] = Counter()
        for id_, _ in sections:
            layers[id_.refinement] += id_.layer_stop - id_.layer_start
        levels = {self.levels.get(int.from_bytes(data[:1])) for id_, data in sections if not id_.refinement}
        if len(levels) != 1 or (quality := levels.pop()) is None:
            raise CorruptPayload("expected anchors of one level, got others or none")
        lacking = next((each for each in range(1, GROUP_TOKENS) if layers[each] != layers[0]), GROUP_TOKENS)
        return self.quality_without(quality, GROUP_TOKENS - lacking)

    def quality_without(self, quality: float, refinements: int) -> float:
        """Return the quality without the deltas of so many positions."""
        return quality + LACKING_QUALITY[refinements]

    def losses_by_block(self, losses: Sequence[float], blocks: int, block_tokens: int) -> NDArray[np.float64]:
        """Return the mean's share of each block: how position counts was not measured for this codec."""
        return np.broadcast_to(np.array(losses) / blocks, (1, blocks, len(losses)))

    def half(self, layout: BlockLayout, layer: int, which: int, level: int) -> int:
        return ANCHOR_HALF

    def step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8] | None) -> float:
        """Return the step as it is stored: the encoder must use what the decoder will."""
        if self._profile:
            deviations = self._profile.arrays.get("deviation", _NOTHING)
            if deviations.shape != (layout.layers, 2):
                found = f"deviations of {deviations.shape}"
                raise UnencodableBlock(f"the profile has {found}, not of {layout.layers} layers")
            deviation = float(deviations[layer, which])
        else:
            assert values is not None, "values or a profile"
            deviation = delta_deviation(values, layout)
        return layer_step(deviation, layer, layout.layers, self.level)

    def name(self, level: int, position: int) -> str:
        return f"delta.{level}" if position else "anchor"

    def pack_head(self, steps: Sequence[float], scales: bytes, deltas: Distribution | None) -> bytes:
        tables = deltas.to_bytes() if deltas else b""
        return _PREFIX.pack(self.level, self.coder if deltas else 0, 0, *steps, len(tables)) + scales + tables

    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        reader = ByteReader(data)
        level, coder, zeros, k_step, v_step, tables_bytes = _PREFIX.unpack(reader.take(_PREFIX.size))
        scales = reader.take_scales(2, _groups(layout))
        if level not in LEVELS or zeros or not all(STEP_MIN <= step < math.inf for step in (k_step, v_step)):
            raise CorruptPayload(f"layer {layer}: level {level} with steps {k_step}, {v_step}")
        if coder >= len(CODERS) or tables_bytes > len(reader.left) or (coder and not tables_bytes):
            raise CorruptPayload(f"layer {layer}: {tables_bytes} bytes of distributions for coder {coder}")
        own, tables = None, reader.take(tables_bytes)
        if tables_bytes:
            own = Distribution.parse(coder, tables, 2 * layout.kv_heads * layout.head_dim)
        return LayerHead(level, (k_step, v_step), scales, own, reader.left)


class ChunkwiseCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile."""

    codec_id = "chunkwise-1"
    group_tokens = 1
    levels = _CHUNKWISE_QUALITY

    def parts(self, layout: BlockLayout) -> list[list[SectionPart]]:
        runs = IntegerRuns(2, layout.kv_heads * layout.head_dim, layout.tokens)
        ids = layer_section_ids(layout.layers)
        return [[SectionPart(id_, range(id_.layer_start, id_.layer_stop), 0, runs)] for id_ in ids]

    def half(self, layout: BlockLayout, layer: int, which: int, level: int) -> int:
        """Return the largest symbol: bins b give -(b/2 - 1) … b/2 - 1."""
        fine, coarse = CHUNKWISE_LEVELS[level]
        is_fine = layout.layers < FEW_LAYERS or layer < round(FINE_SHARES[which] * layout.layers)
        return (fine if is_fine else coarse) // 2 - 1

    def name(self, level: int, position: int) -> str:
        return f"share.{level}"

    def pack_head(self, steps: Sequence[float], scales: bytes, deltas: Distribution | None) -> bytes:
        return _CHUNKWISE_PREFIX.pack(self.level, 0, 0) + scales

    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        reader = ByteReader(data)
        level, zero, zeros = _CHUNKWISE_PREFIX.unpack(reader.take(_CHUNKWISE_PREFIX.size))
        if level not in CHUNKWISE_LEVELS or zero or zeros:
            raise CorruptPayload(f"layer {layer}: chunkwise has no level {level}")
        scales = reader.take_scales(2, layout.tokens)
        return LayerHead(level, (1.0, 1.0), scales, None, reader.left)


class ProfileFitter:
    """Counts what a codec would code, block by block, and makes tables of the counts in the end.

    Steps follow the standard deviations of the first text's blocks, which must be given to `scale` before `add`.
    """

    KINDS = ("cachegen", "chunkwise")

    def __init__(self, kind: str, model: str, layout: BlockLayout) -> None:
        if kind not in self.KINDS:
            raise ValueError(f"profiles are made for {', '.join(self.KINDS)}, got {kind!r}")
        self._layout = layout
        self.deviation: NDArray[np.float32] = np.zeros((layout.layers, 2), dtype=np.float32)
        self._kind = kind
        self._model = model
        self._blocks = 0
        self._counts: dict[str, NDArray[np.uint32]] = {}

    def scale(self, blocks: list[BlockBits]) -> None:
        """Set the steps from the root mean square of these blocks' deviations. ValueError for none."""
        if not blocks:
            raise ValueError("calibration needs at least one full block, got none")
        squares = np.zeros((self._layout.layers, 2))
        for bits in blocks:
            for place, half in _halves(bits):
                squares[place] += delta_deviation(half, self._layout) ** 2
        self.deviation = np.sqrt(squares / len(blocks)).astype(np.float32)

    def add(self, bits: BlockBits) -> None:
        """Count a block. ValueError if it is not of the layout; UnencodableBlock if a value is not finite."""
        check_bits(bits, self._layout)
        assert self.deviation.any(), "scale before add"
        for place, half in _halves(bits):
            for name, numbers in self._split(*place, half):
                shape = (self._layout.layers, 2, len(numbers), 2 * VALUE_MAX + 1)
                if name not in self._counts:
                    self._counts[name] = np.zeros(shape, dtype=np.uint32)
                self._counts[name][place] += value_counts(numbers).astype(np.uint32)
        self._blocks += 1

    def _split(self, layer: int, which: int, half: NDArray[np.uint8]) -> Iterator[tuple[str, Integers]]:
        """Yield distributions by name, and numbers of one of K and V of a layer under each: (channels, symbols)."""
        layout = self._layout
        if self._kind == "chunkwise":
            for level in CHUNKWISE_LEVELS:
                largest = ChunkwiseCodec().half(layout, layer, which, level)
                yield f"share.{level}", split(half, layout, 1, largest).anchors
            return
        for level in LEVELS:
            step = layer_step(float(self.deviation[layer, which]), layer, layout.layers, level)
            found = split(half, layout, GROUP_TOKENS, ANCHOR_HALF, step)
            yield f"delta.{level}", found.deltas
        yield "anchor", found.anchors

    def profile(self, texts: int) -> Profile:
        """Return the profile of all blocks counted. ValueError if there were none."""
        if not self._blocks:
            raise ValueError("calibration needs at least one full block, got none")
        arrays: dict[str, NDArray[Any]] = {"deviation": self.deviation}
        for name, counts in self._counts.items():
            by_layer = [each.reshape(-1, each.shape[-1]).astype(np.uint64) for each in counts]
            fitted = [fit_distribution(each, 0, is_open=True) for each in by_layer]
            tables = [each.tables.to_bytes() for each in fitted]
            arrays[f"{name}.shift"] = np.stack([each.shifts for each in fitted])
            arrays[f"{name}.tables"] = np.frombuffer(b"".join(tables), dtype=np.uint8)
            arrays[f"{name}.tables_bytes"] = np.array(list(map(len, tables)), dtype=np.uint32)
        tokens = self._blocks * self._layout.tokens
        return Profile.make(self._kind, self._model, self._layout, (texts, tokens), arrays)


def _halves(bits: BlockBits) -> Iterator[tuple[tuple[int, int], NDArray[np.uint8]]]:
    """Yield the bytes of K and V of each layer, each with its place (layer, 0 or 1)."""
    for i, half in enumerate(bits.reshape(2 * len(bits), -1).view(np.uint8)):
        yield divmod(i, 2), half
