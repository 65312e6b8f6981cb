"""The one protocol of all codecs, the checks that they share, and the codec that changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.errors import CorruptPayload
from kvtide.types import Section, SectionId, SectionKind


class Codec(Protocol):
    """Turns a block into sections and back. Holds no state that encoding or decoding changes: threads may share it."""

    @property
    def codec_id(self) -> str:
        """Name and format version that objects carry, at most 16 ASCII characters."""

    @property
    def is_lossless(self) -> bool:
        """Decoding gives back every bit."""

    @property
    def quality(self) -> float:
        """KL divergence of the next token, in nats, that blocks are encoded for; 0 for lossless codecs."""

    @property
    def profile(self) -> bytes | None:
        """Digest of the profile that decoding needs, None if it needs none."""

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound on the memory that encoding takes besides the block and the result."""

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return the block's sections.

        bits: (layers, 2, tokens, kv_heads, head_dim), bit patterns, C-contiguous. ValueError if it is not of
        `meta.layout`. UnencodableBlock if the codec can't keep these values.
        """

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block that the sections hold into `out`, of `meta.layout`.

        Sections come verified, in any order. A codec with refinements takes any of them, as long as every layer has its
        base, and uses those that count (docs/codec.md). CorruptPayload if they are not a block of this codec and
        layout; `out` then holds anything. ValueError if `out` is not of this layout.
        """


@runtime_checkable
class EmbeddedCodec(Codec, Protocol):
    """A codec whose objects can be read without some of their sections, at a quality that it knows."""

    def quality_of(self, sections: Sequence[Section]) -> float:
        """Return the quality of a block decoded from these: that of its worst layers. CorruptPayload if it can't be."""

    def quality_without(self, quality: float, refinements: int) -> float:
        """Return the quality of a block that was encoded at `quality` without so many of its last refinements."""

    def losses_by_block(self, losses: Sequence[float], blocks: int, block_tokens: int) -> NDArray[np.float64]:
        """Return what each block of a hit adds to the KL of an answer: (purposes, blocks, refinements + 1).

        losses: the quality with refinement 0, with 0 and 1, and so on, kept by all blocks alike. Purposes: text that
        goes on, and answers that copy. Blocks are those of the hit, oldest first: newest tokens weigh most.
        """


@runtime_checkable
class LevelledCodec(Codec, Protocol):
    """A codec that has blocks stored coarser too, each level an object of its own."""

    @property
    def coarser(self) -> Sequence[Codec]:
        """The coarser levels, the next one first."""


@runtime_checkable
class OrderingCodec(Codec, Protocol):
    """A codec that can store a block's tokens in orders of their own."""

    def ordered(self, orders: NDArray[np.uint16]) -> Codec:
        """Return this codec for one block: `orders[layer, place]` is the token that is stored there."""


@runtime_checkable
class LayeredCodec(Codec, Protocol):
    """A codec whose objects have one section for each layer, which is decoded without the others."""

    def decode_layer(self, layout: BlockLayout, section: Section) -> BlockBits:
        """Return a layer, (2, tokens, kv_heads, head_dim), or a view of the section. CorruptPayload if it is none."""


class ByteReader:
    """Takes pieces of foreign bytes, the length of each checked first; `left` is what comes after them."""

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def take(self, size: int) -> memoryview:
        """Return the next bytes. CorruptPayload if there are fewer."""
        if size > len(self.left):
            raise CorruptPayload(f"{size} bytes expected, {len(self.left)} are left")
        piece, self.left = self.left[:size], self.left[size:]
        return piece

    def take_scales(self, *shape: int) -> NDArray[np.uint16]:
        """Return the next scales, bfloat16 patterns. CorruptPayload unless all are finite and not negative."""
        scales = np.frombuffer(self.take(2 * math.prod(shape)), dtype="<u2").astype(np.uint16).reshape(shape)
        if scales.size and int(scales.max()) >= 0x7F80:
            raise CorruptPayload(f"a scale is not a finite positive bfloat16: {int(scales.max()):#06x}")
        return scales


def layer_views(bits: BlockBits) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous block, without a copy: (layers, bytes)."""
    return bits.reshape(len(bits), -1).view(np.uint8)


@lru_cache(maxsize=64)
def layer_section_ids(layers: int) -> tuple[SectionId, ...]:
    """Return the ids of one base data section a layer."""
    return tuple(SectionId(SectionKind.DATA, 0, layer, layer + 1) for layer in range(layers))


def sections_by_layer(layout: BlockLayout, sections: Sequence[Section]) -> list[Section]:
    """Return the sections in layer order. CorruptPayload unless there is exactly one base section for each layer."""
    ordered = sorted(sections, key=itemgetter(0))
    if tuple(map(itemgetter(0), ordered)) != layer_section_ids(layout.layers):
        raise CorruptPayload(f"expected one section for each of {layout.layers} layers, got {len(sections)}")
    return ordered


class RawCodec(LayeredCodec):
    """Stores every byte as it is."""

    codec_id = "raw-1"
    is_lossless = True
    quality = 0.0
    profile = None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        return 0

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return one section a layer; they are views of `bits`, valid until it changes."""
        check_bits(bits, meta.layout)
        layers = zip(layer_section_ids(meta.layout.layers), layer_views(bits), strict=True)
        return [Section(section_id, layer.data) for section_id, layer in layers]

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        check_bits(out, meta.layout)
        for section, layer in zip(sections_by_layer(meta.layout, sections), out, strict=True):
            layer[:] = self.decode_layer(meta.layout, section)

    def decode_layer(self, layout: BlockLayout, section: Section) -> BlockBits:
        if len(section.data) != layout.layer_bytes:
            found = f"section {section.id} has {len(section.data)} bytes"
            raise CorruptPayload(f"{found}, a layer has {layout.layer_bytes}")
        return np.frombuffer(section.data, layout.bits_dtype).reshape(layout.shape[1:])
