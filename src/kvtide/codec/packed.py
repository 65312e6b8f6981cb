"""The codecs `packed-1` and `impress-1`: every bit of a block, in chunks of tokens that belong together.

Over a rough base of all tokens, or over the exact keys of the heads that choose chunks.

Invariant: with all sections a block decodes to exactly its bits, whatever the order its tokens are stored in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import OrderingCodec, layer_section_ids
from kvtide.codec.profile import Profile
from kvtide.codec.tide import TideCodec
from kvtide.errors import CorruptPayload, UnencodableBlock
from kvtide.importance import CHUNK_TOKENS, Orders, is_order
from kvtide.plan.base import cut
from kvtide.types import Section, SectionId, SectionKind

# KL that the base alone is to have: about 1.3 bits a value, enough for choosing and a good stand-in for the rest.
BASE_QUALITY = 2e-2
_REPACKS_MAX = 65535

_PREFIX = struct.Struct("<HH")
_HEADS = struct.Struct("<H")


class PackedBase(NamedTuple):
    """The order of stored tokens. probe: exact keys that chunks lack, (layers, tokens, first KV heads, head_dim)."""

    chunk_tokens: int
    repacks: int
    orders: Orders
    probe: BlockBits | None = None

    def chunk(self, layer: int, number: int) -> NDArray[np.uint16]:
        """Return the logical tokens of a layer's chunk, as they are stored."""
        start = number * self.chunk_tokens
        return self.orders[layer, start : start + self.chunk_tokens]

    @property
    def is_ordered(self) -> bool:
        """The leading chunks hold what matters: tokens don't lie as they come."""
        return bool((self.orders != np.arange(self.orders.shape[1])).any())


class PackedCodec(OrderingCodec):
    """Exact blocks whose tokens are stored in an order of their own; parts of them decode too."""

    codec_id = "packed-1"
    is_lossless = True
    quality = 0.0

    def __init__(
        self, profile: Profile | None = None, quality: float = BASE_QUALITY, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        """quality: KL that the base alone is to have, as of `TideCodec`. Without a profile only whole blocks decode."""
        if not 1 <= chunk_tokens <= 65535:
            raise ValueError(f"a chunk has 1 to 65535 tokens, got {chunk_tokens}")
        self._base: TideCodec | ProbeKeys = TideCodec(profile, quality, 0)
        self._chunk_tokens = chunk_tokens
        self._orders: Orders | None = None

    def ordered(self, orders: Orders) -> PackedCodec:
        if not is_order(orders):
            raise ValueError(f"expected every token once a layer, got {orders.shape}")
        found = copy(self)
        found._orders = orders
        return found

    @property
    def profile(self) -> bytes | None:
        return self._base.profile

    @property
    def has_base(self) -> bool:
        """Parts of blocks decode."""
        return self.profile is not None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        return self._base.scratch_bytes(layout) + layout.raw_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return base and chunks, tokens as they come unless `ordered` said otherwise. UnencodableBlock as of tide."""
        check_bits(bits, meta.layout)
        bases = self._base.encode(meta, bits)
        layers, tokens = meta.layout.layers, meta.layout.tokens
        assert tokens <= 65536
        orders = np.tile(np.arange(tokens, dtype=np.uint16), (layers, 1)) if self._orders is None else self._orders
        assert orders.shape == (layers, tokens)
        probe = bits[:, 0, :, : self._base.kv_heads] if isinstance(self._base, ProbeKeys) else None
        return _joined(bases, PackedBase(self._chunk_tokens, 0, orders, probe), bits)

    def repack(self, meta: BlockMeta, sections: Sequence[Section], orders: Orders) -> list[Section]:
        """Return a whole block's sections with its tokens in other orders; the base stays.

        CorruptPayload if sections are missing or not of this block; ValueError for orders that are none.
        """
        if orders.shape != (meta.layout.layers, meta.layout.tokens) or not is_order(orders):
            raise ValueError(f"expected an order of {meta.layout.tokens} tokens a layer, got {orders.shape}")
        bits: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        base, bases = self._split(meta, sections)
        if _put_chunks(meta, base, sections, bits) < meta.layout.layers * meta.layout.tokens:
            raise CorruptPayload(f"{meta.id}: chunks are missing, it can't be packed again")
        repacks = min(base.repacks + 1, _REPACKS_MAX)
        return _joined(bases, base._replace(repacks=repacks, orders=orders), bits)

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write the block: exact where chunks are here, else as the base has it."""
        check_bits(out, meta.layout)
        base, bases = self._split(meta, sections)
        chunks = meta.layout.layers * len(cut(meta.layout.tokens, base.chunk_tokens))
        if len(sections) - len(bases) < chunks:
            self._base.decode(meta, bases, out)
        _put_chunks(meta, base, sections, out)

    def layout_of(self, meta: BlockMeta, sections: Sequence[Section]) -> PackedBase:
        """Return how tokens are stored. CorruptPayload as for `decode`."""
        return self._split(meta, sections)[0]

    def _split(self, meta: BlockMeta, sections: Sequence[Section]) -> tuple[PackedBase, list[Section]]:
        """Return how tokens are stored, and the base as tide has it. CorruptPayload if it is not whole."""
        layers, tokens, layer = meta.layout.layers, meta.layout.tokens, 0
        orders, bases, said = np.empty((layers, tokens), dtype=np.uint16), [], set()
        for id_, data in sorted((each for each in sections if each.id.refinement == 0), key=lambda each: each.id):
            size = _PREFIX.size + 2 * tokens * (id_.layer_stop - id_.layer_start)
            is_next = id_.kind is SectionKind.DATA and id_.layer_start == layer and id_.layer_stop <= layers
            if not is_next or len(data) < size:
                raise CorruptPayload(f"{meta.id}: {id_} is no base of layers from {layer} on, or has {len(data)} bytes")
            view = memoryview(data)
            said.add(_PREFIX.unpack_from(view))
            orders[layer : id_.layer_stop] = np.frombuffer(view[_PREFIX.size : size], dtype="<u2").reshape(-1, tokens)
            bases.append(Section(id_, view[size:]))
            layer = id_.layer_stop
        if layer != layers or len(said) != 1 or not is_order(orders):
            raise CorruptPayload(f"{meta.id}: bases end at layer {layer} of {layers}, say {said}, or hold no orders")
        chunk_tokens, repacks = said.pop()
        if not chunk_tokens:
            raise CorruptPayload(f"{meta.id}: chunks of no tokens")
        probe = self._base.keys(meta, bases) if isinstance(self._base, ProbeKeys) else None
        return PackedBase(chunk_tokens, repacks, orders, probe), bases


class ProbeKeys:
    """The exact keys of the first KV heads of each layer, as the base of a block. The rest decodes to zeros."""

    profile = None

    def __init__(self, kv_heads: int) -> None:
        self.kv_heads = kv_heads

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound on a copy of the keys."""
        return layout.raw_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return a section for each layer. UnencodableBlock for a block of fewer heads."""
        mine, theirs = self.kv_heads, meta.layout.kv_heads
        if mine > theirs:
            raise UnencodableBlock(f"impress reads keys of {mine} KV heads to choose, of {theirs}")
        said, layers = _HEADS.pack(mine), zip(layer_section_ids(len(bits)), bits, strict=True)
        return [Section(section_id, said + layer[0, :, :mine].tobytes()) for section_id, layer in layers]

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write keys, and zeros for all else. CorruptPayload as of `keys`."""
        keys = self.keys(meta, sections)
        out[:] = 0
        out[:, 0, :, : keys.shape[2]] = keys

    def keys(self, meta: BlockMeta, sections: Sequence[Section]) -> BlockBits:
        """Return (layers, tokens, KV heads, head_dim). CorruptPayload if they are of different heads, or cut."""
        layout = meta.layout
        said = {_HEADS.unpack_from(data)[0] for _, data in sections if len(data) >= _HEADS.size}
        heads = said.pop() if len(said) == 1 and len(sections) == layout.layers else 0
        size = _HEADS.size + layout.tokens * heads * layout.head_dim * layout.dtype.item_bytes
        if not 0 < heads <= layout.kv_heads or any(len(data) != size for _, data in sections):
            raise CorruptPayload(f"{meta.id}: {len(sections)} sections of probe keys are of {heads} heads, or cut")
        found = [np.frombuffer(data, np.uint8)[_HEADS.size :].view(layout.bits_dtype) for _, data in sections]
        return np.stack(found).reshape(layout.layers, layout.tokens, heads, layout.head_dim)


class ImpressCodec(PackedCodec):
    """IMPRESS: keys of the heads that choose lie apart, the rest in chunks. It needs no profile."""

    codec_id = "impress-1"
    has_base = True

    def __init__(self, kv_heads: int = 1, chunk_tokens: int = CHUNK_TOKENS) -> None:
        """kv_heads: whose keys lie apart, the first ones."""
        super().__init__(None, chunk_tokens=chunk_tokens)
        if kv_heads < 1:
            raise ValueError(f"keys of at least one head are read to choose, got {kv_heads}")
        self._base = ProbeKeys(kv_heads)


def _joined(bases: Sequence[Section], base: PackedBase, bits: BlockBits) -> list[Section]:
    prefix = _PREFIX.pack(base.chunk_tokens, base.repacks)
    sections = [
        Section(id_, b"".join([prefix, base.orders[id_.layer_start : id_.layer_stop].astype("<u2").tobytes(), data]))
        for id_, data in bases
    ]
    apart = 0 if base.probe is None else base.probe.shape[2]
    for layer, order in enumerate(base.orders):
        stored = bits[layer][:, order]
        for number, (start, stop) in enumerate(cut(len(order), base.chunk_tokens)):
            section_id = SectionId(SectionKind.DELTA, 1 + number, layer, layer + 1)
            keys, values = stored[:, start:stop]
            sections.append(Section(section_id, keys[:, apart:].tobytes() + values.tobytes()))
    return sections


def _put_chunks(meta: BlockMeta, base: PackedBase, sections: Sequence[Section], out: BlockBits) -> int:
    """Write the chunks that are here; return how many tokens of all layers they have."""
    seen: set[SectionId] = set()
    written = 0
    for section in sections:
        id_ = section.id
        if id_.refinement == 0:
            continue
        is_ours = id_.kind is SectionKind.DELTA and id_.layer_stop == id_.layer_start + 1 <= meta.layout.layers
        if not is_ours or id_ in seen:
            raise CorruptPayload(f"{meta.id}: {id_} is no chunk, or here twice")
        seen.add(id_)
        written += put_chunk(meta, base, section, out[id_.layer_start])
    return written


def put_chunk(meta: BlockMeta, base: PackedBase, section: Section, layer_out: BlockBits) -> int:
    """Write a chunk's tokens to its layer, (2, tokens, kv_heads, head_dim); return how many. CorruptPayload."""
    tokens, found = chunk_bits(meta, base, section)
    layer_out[:, tokens] = found
    return len(tokens)


def chunk_bits(meta: BlockMeta, base: PackedBase, section: Section) -> tuple[NDArray[np.uint16], BlockBits]:
    """Return a chunk's tokens and bits, (2, tokens, kv_heads, head_dim). CorruptPayload for one of another size."""
    tokens, layout = base.chunk(section.id.layer_start, section.id.refinement - 1), meta.layout
    found, count, heads, head_dim = np.frombuffer(section.data, np.uint8), len(tokens), layout.kv_heads, layout.head_dim
    apart, row_bytes = 0 if base.probe is None else base.probe.shape[2], head_dim * layout.dtype.item_bytes
    if not count or found.size != count * (2 * heads - apart) * row_bytes:
        raise CorruptPayload(f"{meta.id}: {section.id} has {found.size} bytes for {count} tokens")
    if base.probe is None:
        return tokens, found.view(layout.bits_dtype).reshape(2, count, heads, head_dim)
    bits: BlockBits = np.empty((2, count, heads, head_dim), dtype=layout.bits_dtype)
    keys, values = np.split(found, [count * (heads - apart) * row_bytes])
    bits[0, :, :apart] = base.probe[section.id.layer_start, tokens]
    bits[0, :, apart:] = keys.view(bits.dtype).reshape(count, heads - apart, head_dim)
    bits[1] = values.view(bits.dtype).reshape(count, heads, head_dim)
    return tokens, bits
