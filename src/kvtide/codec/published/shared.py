"""Both published codecs: tokens in groups, the first as shares of its scale, the others as deltas to it.

Groups of one token have no deltas. Distributions come from a profile, or else stand in the payload.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import layer_views
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import (
    CODERS,
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
from kvtide.types import Section, SectionId


def distribution_arrays(name: str, by_layer: Sequence[Distribution]) -> dict[str, NDArray[Any]]:
    """Return the arrays under which a profile keeps one distribution set a layer. They must be of the rANS coder."""
    tables = [distribution.tables.to_bytes() for distribution in by_layer]
    return {
        f"{name}.shift": np.stack([distribution.shifts for distribution in by_layer]),
        f"{name}.tables": np.frombuffer(b"".join(tables), dtype=np.uint8),
        f"{name}.tables_bytes": np.array([len(table) for table in tables], dtype=np.uint32),
    }


class SharedDistributions:
    """Builds a profile's tables when they are first asked for, and keeps them. Threads may share it.

    A profile holds rANS frequencies; the prefix coder's code lengths follow from them.
    """

    def __init__(self, profile: Profile) -> None:
        self._arrays: Mapping[str, NDArray[Any]] = profile.arrays
        self._layers = profile.layers
        # A race makes the same table twice, which does no harm.
        self._built: dict[tuple[str, range, int], Distribution] = {}

    def get(self, name: str, layers: range, coder: int) -> Distribution:
        """Return the distributions of these layers. CorruptPayload if the profile has none of this name."""
        key = (name, layers, coder)
        if key not in self._built:
            self._built[key] = Distribution.join([self._stored(name, layer) for layer in layers], coder)
        return self._built[key]

    def _stored(self, name: str, layer: int) -> Distribution:
        try:
            shifts = self._arrays[f"{name}.shift"]
            tables, sizes = self._arrays[f"{name}.tables"], self._arrays[f"{name}.tables_bytes"]
        except KeyError as error:
            raise CorruptPayload(f"the profile has no distributions {name!r}") from error
        if shifts.ndim != 2 or len(shifts) != self._layers or sizes.shape != (self._layers,):
            raise CorruptPayload(f"the profile's distributions {name!r} are not of {self._layers} layers")
        stops = np.cumsum(sizes, dtype=np.uint64)
        if int(stops[-1]) != tables.size:
            raise CorruptPayload(f"the profile's tables {name!r} have {tables.size} bytes, {int(stops[-1])} expected")
        stop = int(stops[layer])
        data = shifts[layer].tobytes() + tables[stop - int(sizes[layer]) : stop].tobytes()
        return Distribution.parse(0, memoryview(data), shifts.shape[1])


class Split(NamedTuple):
    """One of K and V of a layer: anchors (channels, groups), scales (groups), deltas (channels, tokens - groups)."""

    anchors: Integers
    scales: NDArray[np.uint16]
    deltas: Integers


def split(values: NDArray[np.uint8], layout: BlockLayout, group_tokens: int, half: int, step: float = 1.0) -> Split:
    """Quantise one K or V layer: anchors from -half to half. UnencodableBlock if a value is not finite."""
    channels, groups = layout.kv_heads * layout.head_dim, -(-layout.tokens // group_tokens)
    found = Split(
        np.empty((channels, groups), dtype=np.int16),
        np.empty(groups, dtype=np.uint16),
        np.empty((channels, layout.tokens - groups), dtype=np.int16),
    )
    if not math.isfinite(step) or not _native.quantise_groups(
        values, layout.dtype.code, group_tokens, half, step, found.anchors, found.scales, found.deltas
    ):
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

    def __init__(self, level: int, levels: Mapping[int, float], coder: int, profile: Profile | None) -> None:
        """levels: the quality of each level, as measured on a model (docs/benchmarks.md), to rank them by."""
        if level not in levels:
            raise ValueError(f"this codec has the levels {sorted(levels)}, got {level!r}")
        if coder not in range(len(CODERS)):
            raise ValueError(f"coders are numbered 0 to {len(CODERS) - 1}, got {coder!r}")
        self.quality = levels[level]
        self.level = level
        self.coder = coder
        self._profile = profile
        self._shared = SharedDistributions(profile) if profile else None

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
    def step(self, layout: BlockLayout, layer: int, which: int, values: NDArray[np.uint8] | None) -> float:
        """Return the step of deltas, a float32. `values` of K or V are needed without a profile."""

    @abstractmethod
    def name(self, level: int, position: int) -> str:
        """Return the name of the distributions at a position."""

    @abstractmethod
    def pack_head(self, steps: Sequence[float], scales: bytes, deltas: Distribution | None) -> bytes:
        """Return what stands in front of a layer's anchors; see LayerHead."""

    @abstractmethod
    def parse_head(self, layout: BlockLayout, layer: int, data: memoryview) -> LayerHead:
        """Return what `pack_head` packed, and the anchors. CorruptPayload if it is not that."""

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: what one layer takes, and the deltas of all layers that share sections, twice."""
        layers = [len(part.layers) for parts in self.parts(layout) for part in parts if part.position]
        return (16 + 4 * max(layers, default=0)) * layout.layer_bytes // layout.dtype.item_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return the anchors' sections, then the deltas'. UnencodableBlock for values that are not finite."""
        check_bits(bits, meta.layout)
        if self._profile and not self.fits(meta.layout):
            raise UnencodableBlock(f"the profile is of {self._profile.model}, whose shape is another")
        views = list(layer_views(bits))
        anchors: list[Section] = []
        deltas: list[Section] = []
        for parts in self.parts(meta.layout):
            own: list[Distribution] = []
            layers = [
                self._encode_layer(meta.layout, part, views[part.layers.start], own)
                for part in parts
                if not part.position
            ]
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
        views = list(layer_views(out))
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
            raise CorruptPayload(
                f"expected anchors of {layout.layers} layers and some of {len(expected) - len(anchors)} sections of "
                f"deltas, each once, got {len(sections)} sections"
            )
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
            if coded.tables is not None or shared is None:
                raise CorruptPayload("deltas need distributions that are not here")
            found.append(CodedPart(part, coded, coded.distribution(part.runs, shared)))
        return CodedLayers(layers, heads, found)

    def _restore(self, layout: BlockLayout, found: CodedLayers, views: Sequence[NDArray[np.uint8]]) -> None:
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
        """Return the profile's distributions of a part, None without a profile."""
        return self._shared.get(self.name(level, part.position), part.layers, coder) if self._shared else None

    def _fitted(self, values: Integers) -> Distribution:
        """Return the distributions that code the rows of `values` best, and nothing else."""
        return fit_distribution(value_counts(values), self.coder, is_open=False)


def read_scales(data: memoryview) -> NDArray[np.uint16]:
    """Return scales, bfloat16 patterns, of K and V. CorruptPayload unless all are finite and not negative."""
    scales = np.frombuffer(data, dtype="<u2").astype(np.uint16).reshape(2, -1)
    if scales.size and int(scales.max()) >= 0x7F80:
        raise CorruptPayload(f"a scale is not a finite positive bfloat16: {int(scales.max()):#06x}")
    return scales
