"""The object format, version 2 (docs/format.md): what a tier stores for a block.

Invariant: nothing of an object is handed out before its checksum, its id and every length have been checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import NamedTuple, Self

import numpy as np
import xxhash

from kvtide.block import BlockLayout, BlockMeta, KVDtype
from kvtide.errors import CorruptPayload
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace, ObjectId, Section, SectionId, SectionKind

HEADER_BYTES = 256
ENTRY_BYTES = 48
SECTIONS_MAX = 8192
OBJECT_BYTES_MAX = 8 << 30
# Room that any codec may take beyond the raw bytes: headers of sections that did not compress, and a rough base beside
# exact values.
OVERHEAD_BYTES_PER_SECTION = 4096
OVERHEAD_PART = 8

_MAGIC = b"\x89KVTIDE\n"
_VERSION = 2
_CODEC_BYTES = 16
_NAMESPACE_OFFSET = 48
_LABEL_BYTES = 48
_CHECKSUM_OFFSET = 240
_HEADER = struct.Struct("<8sHHI32s32s32s16s32sIIIIIBBHQ48s")
_ENTRY = struct.Struct("<BBHHHQQQ16s")
# An entry's first eight bytes name the section, the others say where it is.
_ENTRY_NAME = struct.Struct("<BBHHH")
_ENTRY_PLACE = struct.Struct("<8sQQQ16s")
_NO_PROFILE = bytes(32)
# Quality is stored as a power of two from 2^-40 on, in steps of a thousandth of an octave.
_QUALITY_STEPS = 1024
_QUALITY_OCTAVES = 40
_KINDS = tuple(SectionKind)
# The order of sections in an object.
_order = attrgetter("refinement", "layer_start", "kind")

assert _HEADER.size == _CHECKSUM_OFFSET
assert _ENTRY.size == _ENTRY_PLACE.size == ENTRY_BYTES
assert tuple(range(len(_KINDS))) == _KINDS


class SectionEntry(NamedTuple):
    """One row of an object's section table: the section's place in the object, and the checksum of its bytes."""

    id: SectionId
    offset: int
    size: int
    checksum: bytes

    def to_bytes(self) -> bytes:
        """Return the entry as it is stored."""
        kind, refinement, layer_start, layer_stop = self.id
        return _ENTRY.pack(kind, 0, refinement, layer_start, layer_stop, self.offset, self.size, 0, self.checksum)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> SectionEntry:
        """Return a stored entry. CorruptPayload for an unknown kind, reserved bytes that are set, or no layers."""
        kind, zero, refinement, layer_start, layer_stop, offset, size, reserved, checksum = _ENTRY.unpack(data)
        if kind not in SectionKind.__members__.values() or zero or reserved:
            raise CorruptPayload(f"a section is of unknown kind {kind} or has reserved bytes set")
        section_id = SectionId(SectionKind(kind), refinement, layer_start, layer_stop)
        if layer_start >= layer_stop:
            raise CorruptPayload(f"section {section_id} has no layers")
        return cls(section_id, offset, size, checksum)

    def cut(self, data: memoryview, start: int, object_id: ObjectId) -> Section:
        """Return the section out of bytes from `start` of its object on. CorruptPayload if cut or damaged."""
        found = data[self.offset - start : self.offset - start + self.size]
        if len(found) != self.size:
            raise CorruptPayload(f"{object_id}: section {self.id} has {self.size} bytes, {len(found)} are here")
        if xxhash.xxh3_128_digest(found) != self.checksum:
            raise CorruptPayload(f"{object_id}: checksum of section {self.id} does not match")
        return Section(self.id, found)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A checked header and section table over bytes; `quality` is the KL it was stored for, 0 for exact."""

    meta: BlockMeta
    codec_id: str
    profile: bytes | None
    quality: float
    object_bytes: int
    version_tag: bytes
    entries: Sequence[SectionEntry]
    _data: memoryview

    @property
    def head(self) -> bytes:
        """Return header and section table as they are stored."""
        return bytes(self._data[: self.entries[0].offset])

    def check_place(self, meta: BlockMeta) -> None:
        """CorruptPayload unless the object is of a block of this layout, at this place in its prompt."""
        if (self.meta.layout, self.meta.start, self.meta.parent) != (meta.layout, meta.start, meta.parent):
            raise CorruptPayload(f"{meta.id}: expected {meta.layout} at {meta.start}, got {self.meta}")

    @property
    def section_ids(self) -> tuple[SectionId, ...]:
        """Return the ids of all sections in stored order."""
        return tuple(entry.id for entry in self.entries)

    def sections(self) -> list[Section]:
        """Return all sections, views, each verified. CorruptPayload if one is cut or damaged."""
        return [entry.cut(self._data, 0, self.meta.id) for entry in self.entries]

    def good_sections(self) -> list[Section]:
        """Return the sections whose bytes are all there and those that were stored."""
        found = []
        for entry in self.entries:
            with suppress(CorruptPayload):
                found.append(entry.cut(self._data, 0, self.meta.id))
        return found


def object_bytes_max(layout: BlockLayout) -> int:
    """Return a bound on the stored bytes of a block: no codec may exceed raw, an eighth for a base, and the table."""
    overhead = layout.raw_bytes // OVERHEAD_PART + layout.layers * (ENTRY_BYTES + OVERHEAD_BYTES_PER_SECTION)
    return min(HEADER_BYTES + layout.raw_bytes + overhead, OBJECT_BYTES_MAX)


def pack_object(
    meta: BlockMeta,
    codec_id: str,
    sections: Sequence[Section],
    profile: bytes | None = None,
    quality: float = 0.0,
    room_of: Callable[[int], bytearray | memoryview] = bytearray,
) -> bytearray | memoryview:
    """Return the object's bytes.

    Sections are put in stored order. quality: as in `StoredObject`; rounded up by at most 0.07 %. room_of: returns
    memory of a size, with anything in it. ValueError for none or too many sections, two with one id, or a codec id that
    is not 1 to 16 ASCII characters.
    """
    codec_bytes = codec_id.encode("ascii", errors="replace")
    if not 1 <= len(codec_bytes) <= _CODEC_BYTES or not codec_id.isascii():
        raise ValueError(f"codec id must be 1 to {_CODEC_BYTES} ASCII characters, got {codec_id!r}")
    if not 1 <= len(sections) <= SECTIONS_MAX:
        raise ValueError(f"an object has 1 to {SECTIONS_MAX} sections, got {len(sections)}")
    by_place, object_bytes = dict[tuple[int, int, int], Section](), head_bytes(len(sections))
    for section in sections:
        by_place[_order(section.id)] = section
        object_bytes += len(section.data)
    if len(by_place) != len(sections):
        raise ValueError("two sections of one object have the same id")
    packed, offset = room_of(object_bytes), head_bytes(len(sections))
    packed[:offset] = bytes(offset)
    # Copies by numpy leave the interpreter's lock to the engine.
    room = np.frombuffer(packed, np.uint8)
    for position, (_, (section_id, data)) in enumerate(sorted(by_place.items())):
        entry = SectionEntry(section_id, offset, len(data), xxhash.xxh3_128_digest(data))
        entry_offset = HEADER_BYTES + position * ENTRY_BYTES
        packed[entry_offset : entry_offset + ENTRY_BYTES] = entry.to_bytes()
        room[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        offset += len(data)
    assert offset == object_bytes
    quality_code = _quality_code(quality) if quality else 0
    _pack_header(packed, meta, codec_bytes, len(sections), profile or _NO_PROFILE, quality_code)
    return packed


def pack_around(
    packed: memoryview, meta: BlockMeta, codec_id: str, section_id: SectionId, quality: float = 0.0
) -> None:
    """Make an object of one section whose bytes lie after `head_bytes(1)` already: write what comes before them."""
    body = packed[head_bytes(1) :]
    entry = SectionEntry(section_id, head_bytes(1), len(body), xxhash.xxh3_128_digest(body))
    packed[HEADER_BYTES : head_bytes(1)] = entry.to_bytes()
    _pack_header(packed, meta, codec_id.encode("ascii"), 1, _NO_PROFILE, _quality_code(quality) if quality else 0)


def _quality_code(quality: float) -> int:
    assert quality > 0
    return min(max(math.ceil(_QUALITY_STEPS * (math.log2(quality) + _QUALITY_OCTAVES)), 1), 0xFFFF)


def _quality_of(code: int) -> float:
    return 2.0 ** (code / _QUALITY_STEPS - _QUALITY_OCTAVES) if code else 0.0


def _pack_header(
    packed: bytearray | memoryview, meta: BlockMeta, codec: bytes, section_count: int, profile: bytes, quality_code: int
) -> None:
    layout = meta.layout
    # Names of folders may hold what is no text.
    label = meta.model.encode(errors="replace")[:_LABEL_BYTES].decode(errors="ignore").encode()
    names = (meta.id.key, meta.id.namespace, meta.parent, codec, profile)
    shape = (layout.layers, layout.tokens, layout.kv_heads, layout.head_dim, meta.start, layout.dtype.code)
    prefix = (_MAGIC, _VERSION, HEADER_BYTES, section_count)
    _HEADER.pack_into(packed, 0, *prefix, *names, *shape, 0, quality_code, len(packed), label)
    packed[_CHECKSUM_OFFSET:HEADER_BYTES] = _header_checksum(memoryview(packed), section_count)


def _header_checksum(data: memoryview, section_count: int) -> bytes:
    digest = xxhash.xxh3_128(data[:_CHECKSUM_OFFSET])
    digest.update(data[HEADER_BYTES : head_bytes(section_count)])
    return digest.digest()


class ObjectLabel(NamedTuple):
    """The fields of an object's header that listings need, as they stand there."""

    codec: bytes = bytes(_CODEC_BYTES)
    parent: bytes = bytes(DIGEST_BYTES)
    start: int = 0

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the label in an object's header, unchecked; zeros if these bytes are no object."""
        if len(data) < HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
            return cls()
        fields = _HEADER.unpack_from(data)
        return cls(codec=fields[7], parent=fields[6], start=fields[13])


def object_quality(head: bytes | bytearray | memoryview, lost_profiles: Container[bytes] = ()) -> float:
    """Return the quality that an object's first bytes state, unchecked.

    inf if they are no object of this version, or name a profile that is lost.
    """
    fields = _HEADER.unpack_from(head) if len(head) >= HEADER_BYTES else ()
    is_ours = fields[:3] == (_MAGIC, _VERSION, HEADER_BYTES) and fields[8] not in lost_profiles
    return _quality_of(fields[-3]) if is_ours else math.inf


def object_bytes(head: bytes | bytearray) -> int:
    """Return how long an object says it is in its first bytes, unchecked but for the format's bound; 0 if it can't."""
    size: int = _HEADER.unpack_from(head)[-2] if len(head) >= HEADER_BYTES else 0
    return min(size, OBJECT_BYTES_MAX)


def version_tag(head: bytes) -> bytes:
    """Return the version tag in an object's first bytes, unchecked; zeros if they are too few."""
    return head[_CHECKSUM_OFFSET:HEADER_BYTES].ljust(HEADER_BYTES - _CHECKSUM_OFFSET, b"\0")


def embedded_namespace(head: bytes) -> Namespace:
    """Return the namespace in an object's first bytes, unchecked; shorter than a digest if they are too few."""
    return Namespace(head[_NAMESPACE_OFFSET : _NAMESPACE_OFFSET + DIGEST_BYTES])


def parse_object(data: bytes | bytearray | memoryview, expected: ObjectId | None = None) -> StoredObject:
    """Check a whole object and return it. CorruptPayload if anything is off, bytes missing or too many included."""
    stored = parse_header(data, expected)
    if stored.object_bytes != len(data):
        raise CorruptPayload(f"{stored.meta.id}: object has {stored.object_bytes} bytes, {len(data)} came")
    return stored


def head_bytes(section_count: int) -> int:
    """Return how long header and section table of so many sections are."""
    return HEADER_BYTES + ENTRY_BYTES * section_count


def header_and_table_bytes(data: bytes | bytearray | memoryview) -> int:
    """Return how long header and section table are, by what may be an object's begin; at most the format's bound."""
    if len(data) < HEADER_BYTES:
        return HEADER_BYTES
    section_count: int = _HEADER.unpack_from(data)[3]
    return head_bytes(min(section_count, SECTIONS_MAX))


def parse_header(data: bytes | bytearray | memoryview, expected: ObjectId | None = None) -> StoredObject:
    """Check header and table of an object that may be cut behind them. CorruptPayload for anything off."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise CorruptPayload(f"an object has at least {HEADER_BYTES} bytes, got {len(view)}")
    magic, version, header_bytes, section_count, *fields = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptPayload(f"not a kvtide object: it begins with {magic!r}")
    if (version, header_bytes) != (_VERSION, HEADER_BYTES):
        raise CorruptPayload(f"object version {version} with a {header_bytes}-byte header; this code reads {_VERSION}")
    if not 1 <= section_count <= SECTIONS_MAX:
        raise CorruptPayload(f"an object has 1 to {SECTIONS_MAX} sections, this one says {section_count}")
    if len(view) < head_bytes(section_count):
        raise CorruptPayload(f"section table is cut: {section_count} sections, {len(view)} bytes")
    version_tag = bytes(view[_CHECKSUM_OFFSET:HEADER_BYTES])
    if _header_checksum(view, section_count) != version_tag:
        raise CorruptPayload("checksum of the object's header does not match")
    key, namespace, parent, codec, profile, layers, tokens, kv_heads, head_dim = fields[:9]
    start, dtype_code, padding, quality_code, object_bytes, label = fields[9:]
    object_id = ObjectId(Namespace(namespace), BlockKey(key))
    if expected is not None and object_id != expected:
        raise CorruptPayload(f"asked for {expected}, the bytes are those of {object_id}")
    # Who asked may have named its id.
    object_id = expected or object_id
    if padding:
        raise CorruptPayload(f"{object_id}: a reserved byte of the header is not zero")
    try:
        layout = _layout(layers, tokens, kv_heads, head_dim, dtype_code)
        meta = BlockMeta(object_id, BlockKey(parent), start, layout, label.rstrip(b"\0").decode())
        codec_id = codec.rstrip(b"\0").decode("ascii")
    except ValueError as error:
        raise CorruptPayload(f"{object_id}: {error}") from error
    return StoredObject(
        meta=meta,
        codec_id=codec_id,
        profile=None if profile == _NO_PROFILE else profile,
        quality=_quality_of(quality_code),
        object_bytes=object_bytes,
        version_tag=version_tag,
        entries=_parse_entries(view, section_count, layers, object_bytes, object_id),
        _data=view,
    )


# A store's objects share a few layouts and tables: checking the same one again costs as much as hashing 64 KiB.
@lru_cache(maxsize=64)
def _layout(layers: int, tokens: int, kv_heads: int, head_dim: int, dtype_code: int) -> BlockLayout:
    return BlockLayout(layers, tokens, kv_heads, head_dim, KVDtype.from_code(dtype_code))


def _parse_entries(
    view: memoryview, section_count: int, layers: int, object_bytes: int, object_id: ObjectId
) -> list[SectionEntry]:
    """Check the table and return it. Kept flat: for small objects it costs as much as hashing the bytes."""
    table = view[HEADER_BYTES : head_bytes(section_count)]
    places = list(_ENTRY_PLACE.iter_unpack(table))
    try:
        ids = _section_ids(b"".join(map(itemgetter(0), places)), layers)
    except ValueError as error:
        raise CorruptPayload(f"{object_id}: {error}") from error
    entries: list[SectionEntry] = []
    next_offset = HEADER_BYTES + len(table)
    for section_id, (_, offset, size, reserved, checksum) in zip(ids, places, strict=True):
        if offset != next_offset or reserved:
            raise CorruptPayload(f"{object_id}: section {len(entries)} leaves a gap or has reserved bytes set")
        next_offset = offset + size
        entries.append(SectionEntry(section_id, offset, size, checksum))
    if next_offset != object_bytes or object_bytes > OBJECT_BYTES_MAX:
        raise CorruptPayload(f"{object_id}: sections end at {next_offset}, the object at {object_bytes}")
    return entries


@lru_cache(maxsize=64)
def _section_ids(names: bytes, layers: int) -> tuple[SectionId, ...]:
    """Return the ids that a table's entries begin with. ValueError if one is impossible or they are out of order."""
    ids: list[SectionId] = []
    for kind, zero, refinement, start, stop in _ENTRY_NAME.iter_unpack(names):
        if kind >= len(_KINDS) or zero:
            raise ValueError(f"section {len(ids)} is of unknown kind {kind} or has reserved bytes set")
        section_id = SectionId(_KINDS[kind], refinement, start, stop)
        if not start < stop <= layers:
            raise ValueError(f"section {len(ids)}, layers {start} to {stop}, is outside {layers}")
        if ids and _order(section_id) <= _order(ids[-1]):
            raise ValueError(f"section {len(ids)} is out of order")
        ids.append(section_id)
    return tuple(ids)
