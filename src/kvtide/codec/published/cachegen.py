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
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.base import layer_views
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import (
    CODERS,
    Distribution,
    IntegerRuns,
    Integers,
    coder_of,
    decode_alike,
    encode_integers,
)
from kvtide.codec.published.shared import ProfiledCodec, read_scales
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.types import Section, SectionId, SectionKind

GROUP_TOKENS = 10
# Paper, section 5.2: bins of 0.5, 1 and 1.5 (of the standard deviation, in our reading) for the first, middle and last
# third of the layers. Levels scale all three; level 4 has the paper's own.
THIRD_BINS = (0.5, 1.0, 1.5)
LEVELS = {1: 0.125, 2: 0.25, 3: 0.5, 4: 1.0}
# KL divergence of the next token, in nats, by level: SmolLM2-135M, `kvtide-lab bench codec-quality`.
LEVEL_QUALITY = {1: 0.00096, 2: 0.0038, 3: 0.0132, 4: 0.0741}
STEP_MIN = 1e-30
# Layers share the sections of their deltas until a section has this many numbers: what a section costs beside them (200
# bytes) is then below half a percent. And a coder takes this many tables at most.
SECTION_NUMBERS = 1 << 17
SECTION_TABLES_MAX = 1 << 16

# level, coder of the deltas' distributions, zero, steps of K and V, bytes of these distributions
_PREFIX = struct.Struct("<BBHffI")


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


def delta_layers(layout: BlockLayout) -> list[range]:
    """Return the ranges of layers that share the sections of their deltas."""
    tables = 2 * layout.kv_heads * layout.head_dim
    most = max(1, min(SECTION_NUMBERS // (tables * _groups(layout)), SECTION_TABLES_MAX // tables))
    count = -(-layout.layers // most)
    bounds = [layout.layers * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _positions(layout: BlockLayout) -> range:
    """Return the positions in a group, from 1 on, that some token has."""
    return range(1, min(GROUP_TOKENS, layout.tokens))


def _tokens_at(layout: BlockLayout, position: int) -> int:
    return len(range(position, layout.tokens, GROUP_TOKENS))


def _groups(layout: BlockLayout) -> int:
    return -(-layout.tokens // GROUP_TOKENS)


class _Base(NamedTuple):
    """A layer's anchor section, read: level, anchors (2, channels, groups), scales (2, groups), steps of K and V.

    `distribution` is that of the deltas, None if they take the profile's.
    """

    level: int
    anchors: Integers
    scales: NDArray[np.uint16]
    steps: tuple[float, float]
    distribution: Distribution | None


class CachegenCodec(ProfiledCodec):
    """The codec; see ProfiledCodec for level, coder and profile. coarser: levels that blocks are stored in besides."""

    codec_id = "cachegen-2"

    def __init__(
        self, level: int = 3, coder: int = 0, profile: Profile | None = None, coarser: Sequence[CachegenCodec] = ()
    ) -> None:
        super().__init__(level, LEVEL_QUALITY, coder, profile)
        self.coarser = tuple(coarser)

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: what one layer takes, and the deltas of all layers that share sections, twice."""
        shared_layers = max(len(layers) for layers in delta_layers(layout))
        return super().scratch_bytes(layout) + 4 * shared_layers * layout.layer_bytes // layout.dtype.item_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return an anchor section a layer, then the deltas. UnencodableBlock for values that are not finite."""
        self.check(meta, bits)
        views = list(layer_views(bits))
        anchors: list[Section] = []
        deltas: list[Section] = []
        for layers in delta_layers(meta.layout):
            by_layer: list[Integers] = []
            fitted: list[Distribution] = []
            for layer in layers:
                section, numbers, own = self._encode_layer(meta.layout, layer, views[layer])
                anchors.append(section)
                by_layer.append(numbers)
                fitted += own
            deltas += self._encode_deltas(meta.layout, layers, np.concatenate(by_layer), fitted)
        return anchors + deltas

    def _encode_layer(
        self, layout: BlockLayout, layer: int, values: NDArray[np.uint8]
    ) -> tuple[Section, Integers, list[Distribution]]:
        """Return the anchor section, the deltas (2 * channels, deltas), and their distribution unless it is shared."""
        halves = values.reshape(2, -1)
        steps = [self._step(layout, layer, which, half) for which, half in enumerate(halves)]
        splits = [split_deltas(half, layout, step) for half, step in zip(halves, steps, strict=True)]
        anchors = np.stack([split.anchors for split in splits])
        deltas = np.concatenate([split.deltas for split in splits])
        scales = b"".join(split.scales.astype("<u2").tobytes() for split in splits)
        own = [] if self.profile or not deltas.size else [self.fit(deltas)]
        tables = own[0].to_bytes() if own else b""
        prefix = _PREFIX.pack(self._level, self._coder if own else 0, 0, *steps, len(tables))
        data = b"".join((prefix, scales, tables, self.code("anchor", layer, anchors)))
        return Section(_anchor_id(layer), data), deltas, own

    def _encode_deltas(
        self, layout: BlockLayout, layers: range, deltas: Integers, fitted: list[Distribution]
    ) -> Iterator[Section]:
        if not deltas.size:
            return
        shared = self.shared(f"delta.{self._level}", layers, self._coder)
        distribution = shared or Distribution.join(fitted, self._coder)
        for position in _positions(layout):
            numbers = np.ascontiguousarray(deltas[None, :, position - 1 :: GROUP_TOKENS - 1])
            data = encode_integers(numbers, IntegerRuns(*numbers.shape), distribution, is_shared=True)
            yield Section(_delta_id(position, layers), data)

    def _step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8]) -> float:
        if self._profile:
            deviation = float(self._profile.arrays["deviation"][layer, which])
        else:
            deviation = delta_deviation(values, layout)
        # As it is stored: the encoder must use what the decoder will.
        return float(np.float32(layer_step(deviation, layer, layout.layers, self._level)))

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block that all anchors and any deltas make into `out`; where a delta lacks, the anchor's values."""
        self.check_out(meta, out)
        by_id = _by_id(meta.layout, sections)
        views = list(layer_views(out))
        for layers in delta_layers(meta.layout):
            bases = [self._read_base(meta.layout, layer, by_id[_anchor_id(layer)]) for layer in layers]
            deltas = self._read_deltas(meta.layout, layers, bases, by_id)
            for layer, base, numbers in zip(layers, bases, deltas, strict=True):
                for which, values in enumerate(views[layer].reshape(2, -1)):
                    split = (base.anchors[which], base.scales[which], numbers[which])
                    code = meta.layout.dtype.code
                    _native.cachegen_restore(*split, GROUP_TOKENS, base.steps[which], code, values)

    def _read_base(self, layout: BlockLayout, layer: int, data: memoryview) -> _Base:
        channels, groups = layout.kv_heads * layout.head_dim, _groups(layout)
        scales_stop = _PREFIX.size + 2 * 2 * groups
        if len(data) < scales_stop:
            raise CorruptPayload(f"layer {layer}: anchors have {len(data)} bytes")
        level, coder, zeros, k_step, v_step, tables_bytes = _PREFIX.unpack_from(data)
        if level not in LEVELS or zeros or not all(STEP_MIN <= step < math.inf for step in (k_step, v_step)):
            raise CorruptPayload(f"layer {layer}: level {level} with steps {k_step}, {v_step}")
        if coder >= len(CODERS) or tables_bytes > len(data) - scales_stop or (coder and not tables_bytes):
            raise CorruptPayload(f"layer {layer}: {tables_bytes} bytes of distributions for coder {coder}")
        scales = read_scales(data[_PREFIX.size : scales_stop], 2)
        anchors_start = scales_stop + tables_bytes
        own = None
        if tables_bytes:
            own = Distribution.parse(coder, data[scales_stop:anchors_start], 2 * channels)
        anchors = self.uncode("anchor", layer, data[anchors_start:], IntegerRuns(2, channels, groups))
        return _Base(level, anchors, scales, (k_step, v_step), own)

    def _read_deltas(
        self, layout: BlockLayout, layers: range, bases: list[_Base], by_id: dict[SectionId, memoryview]
    ) -> Integers:
        """Return the deltas of these layers, (layers, 2, channels, deltas), 0 where they are not here."""
        channels, groups = layout.kv_heads * layout.head_dim, _groups(layout)
        count = layout.tokens - groups
        deltas = np.zeros((len(layers), 2, channels, count), dtype=np.int16)
        rows = deltas.reshape(len(layers) * 2 * channels, count)
        own = [base.distribution for base in bases if base.distribution]
        if (
            len({base.level for base in bases}) > 1
            or len(own) not in {0, len(bases)}
            or len({d.coder for d in own}) > 1
        ):
            raise CorruptPayload(f"layers {layers} do not agree on level, coder and place of distributions")
        joined = Distribution.join(own, own[0].coder) if own else None
        here = {position: by_id.get(_delta_id(position, layers)) for position in _positions(layout)}
        # Behind the last whole group fewer tokens are left: positions have one of two counts.
        for symbols in {groups - 1, groups}:
            alike = {at: data for at, data in here.items() if data is not None and _tokens_at(layout, at) == symbols}
            if alike:
                pieces = list(alike.values())
                distribution = joined or self.shared(f"delta.{bases[0].level}", layers, coder_of(pieces[0]))
                found = decode_alike(pieces, IntegerRuns(1, len(rows), symbols), distribution)
                for position, numbers in zip(alike, found, strict=True):
                    rows[:, position - 1 :: GROUP_TOKENS - 1] = numbers[0]
        return deltas


def _anchor_id(layer: int) -> SectionId:
    return SectionId(SectionKind.ANCHOR, 0, layer, layer + 1)


def _delta_id(position: int, layers: range) -> SectionId:
    return SectionId(SectionKind.DELTA, position, layers.start, layers.stop)


def _by_id(layout: BlockLayout, sections: Sequence[Section]) -> dict[SectionId, memoryview]:
    """Return the sections by id. CorruptPayload unless all are of this layout, none twice, every anchor among them."""
    found = {section.id: memoryview(section.data) for section in sections}
    anchors = {_anchor_id(layer) for layer in range(layout.layers)}
    deltas = {_delta_id(position, layers) for position in _positions(layout) for layers in delta_layers(layout)}
    if len(found) != len(sections) or not anchors <= found.keys() <= anchors | deltas:
        raise CorruptPayload(
            f"expected anchors of {layout.layers} layers and some of {len(deltas)} sections of deltas, each once, "
            f"got {len(sections)} sections"
        )
    return found
