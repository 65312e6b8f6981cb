"""The encoder as CacheGen's author describes it (the experiment log's snippet): groups of five tokens.

The first token of a group and the differences of the others to it are quantised alike: each token of a layer's keys or
values in steps of its own largest magnitude. Differences have 128 bins up to layer 4, 16 up to layer 24, then 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype, check_bits, values_of
from kvtide.codec.published.cachegen import ChunkwiseCodec
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind

STRIDE = 5
# The first layer that has fewer bins, and so many.
LAYER_BINS = ((0, 128), (4, 16), (24, 12))
# KL divergence of the next token, in nats: SmolLM2-135M, `kvtide-lab bench codec-quality --quick`.
SNIPPET_QUALITY = 0.0126
_LARGEST = {
    KVDtype.FLOAT32: np.finfo(np.float32).max,
    KVDtype.FLOAT16: np.float32(np.finfo(np.float16).max),
    KVDtype.BFLOAT16: np.uint32(0x7F7F0000).view(np.float32),
}


class _VectorBins(ChunkwiseCodec):
    """One section a layer, each token in steps of its largest magnitude; bins by the layer's number, or 128."""

    def __init__(self, is_delta: bool) -> None:
        super().__init__(level=1)
        self._is_delta = is_delta

    def half(self, layout: BlockLayout, layer: int, which: int, level: int) -> int:
        reached = [bins for start, bins in LAYER_BINS if layer >= start]
        return (reached[-1] if self._is_delta else LAYER_BINS[0][1]) // 2 - 1


class SnippetCodec:
    """The snippet as it stands: anchors are the base, all differences one refinement."""

    codec_id = "snippet-1"
    is_lossless = False
    quality = SNIPPET_QUALITY
    profile = None

    def __init__(self) -> None:
        self._anchors, self._deltas = _VectorBins(is_delta=False), _VectorBins(is_delta=True)

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: the block as float32 three times, and what one layer takes."""
        values = layout.raw_bytes // layout.dtype.item_bytes
        return 12 * values + self._deltas.scratch_bytes(replace(layout, dtype=KVDtype.FLOAT32))

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return a section of anchors and one of differences a layer. UnencodableBlock for values not finite."""
        check_bits(bits, meta.layout)
        anchors, deltas = _halves(meta)
        firsts: Any = np.ascontiguousarray(bits[:, :, ::STRIDE])
        sections = _named(self._anchors.encode(anchors, firsts), SectionKind.ANCHOR)
        if deltas is None:
            return sections
        with np.errstate(invalid="ignore", over="ignore"):
            found = values_of(bits, meta.layout.dtype) - _of_group(firsts, meta.layout)
        differences: Any = np.ascontiguousarray(found[:, :, np.arange(meta.layout.tokens) % STRIDE > 0]).view(np.uint32)
        return sections + _named(self._deltas.encode(deltas, differences), SectionKind.DELTA)

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block into `out`. CorruptPayload unless all sections are there and sound."""
        check_bits(out, meta.layout)
        anchors, deltas = _halves(meta)
        firsts: BlockBits = np.empty(anchors.layout.shape, anchors.layout.bits_dtype)
        self._anchors.decode(anchors, _plain(sections, SectionKind.ANCHOR), firsts)
        rest = _plain(sections, SectionKind.DELTA)
        if len(sections) != anchors.layout.layers + len(rest):
            raise CorruptPayload("sections that are neither anchors nor differences")
        if deltas is None:
            if rest:
                raise CorruptPayload("differences in a block that has none")
            out[:] = firsts
            return
        differences: BlockBits = np.empty(deltas.layout.shape, deltas.layout.bits_dtype)
        self._deltas.decode(deltas, rest, differences)
        values = _of_group(firsts, meta.layout)
        with np.errstate(over="ignore"):
            values[:, :, np.arange(meta.layout.tokens) % STRIDE > 0] += differences.view(np.float32)
        out[:] = _bits(values, meta.layout.dtype)
        out[:, :, ::STRIDE] = firsts


def _halves(meta: BlockMeta) -> tuple[BlockMeta, BlockMeta | None]:
    """Return the block of the anchors, and that of the differences if there are any."""
    layout, groups = meta.layout, -(-meta.layout.tokens // STRIDE)
    anchors = replace(meta, start=0, layout=replace(layout, tokens=groups))
    if groups == layout.tokens:
        return anchors, None
    return anchors, replace(anchors, layout=replace(layout, tokens=layout.tokens - groups, dtype=KVDtype.FLOAT32))


def _of_group(firsts: BlockBits, layout: BlockLayout) -> NDArray[np.float32]:
    return np.repeat(values_of(firsts, layout.dtype), STRIDE, axis=2)[:, :, : layout.tokens]


def _named(sections: Sequence[Section], kind: SectionKind) -> list[Section]:
    refinement = int(kind is SectionKind.DELTA)
    return [Section(SectionId(kind, refinement, *section.id[2:]), section.data) for section in sections]


def _plain(sections: Sequence[Section], kind: SectionKind) -> list[Section]:
    chosen = [section for section in sections if section.id[:2] == (kind, int(kind is SectionKind.DELTA))]
    return [Section(SectionId(SectionKind.DATA, 0, *section.id[2:]), section.data) for section in chosen]


def _bits(values: NDArray[np.float32], dtype: KVDtype) -> BlockBits:
    """Return the patterns of values, rounded to nearest, ties to even, and no infinity."""
    held = np.clip(values, -_LARGEST[dtype], _LARGEST[dtype])
    if dtype is not KVDtype.BFLOAT16:
        return held.view(np.uint32) if dtype is KVDtype.FLOAT32 else held.astype(np.float16).view(np.uint16)
    wide = held.view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
