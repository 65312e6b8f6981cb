"""A tier whose objects are encrypted before they reach it (docs/format.md, "Sealed objects").

What lies in the tier below is an object of codec `sealed-1`: a header that servers and disks can read, then pieces,
each sealed by itself, so that a range opens alone. Invariant: a plain byte is handed out only if its piece was sealed
by one of our keys, for this id and this place in the object; others are zeros, which the reader's checksums refuse.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from mmap import PAGESIZE
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.evict import Hint, Recent, States
from kvtide.outcomes import Decided
from kvtide.tier.base import Buffer, CountingTier, Fill, ObjectInfo, Offer, RangeRead, Take, Tier, WrappedTier
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.seal.keys import HEAD_BYTES, KEY_BYTES, SEALED_CODEC, Keyring, SealingKey
from kvtide.tier.source import read_ranges
from kvtide.types import BlockKey, NamedId, Namespace, ObjectId, SectionId, SectionKind, TierStats
from kvtide.wire import pack_around, parse_header

_log = logging.getLogger(__name__)

# Plain bytes of a piece. Smaller ones cost calls (16 KiB: a fifth more CPU), larger ones are read for little.
PIECE_BYTES = 64 << 10
PREFIX = struct.Struct("<8s16sQ")
SALT_BYTES = 16
_TAG_BYTES = 16
OVERHEAD = PREFIX.size + _TAG_BYTES
STEP = PIECE_BYTES + OVERHEAD
# Ids that could not be opened, so that they are misses at once and are stored again.
UNOPENED_MAX = 4096
# Buffers kept for the next reads and writes; at most so many threads go on without taking fresh memory.
SCRATCHES_MAX = 8
# Larger objects on a disk are read in parts of so many pieces, the next while one is opened. Smaller parts cost more
# CPU (each reads the record's header again), larger ones leave the disk waiting. At most so many reads go on ahead.
AHEAD_PIECES = 64
AHEAD_MAX = SCRATCHES_MAX // 2


class SealedTier(WrappedTier, CountingTier):
    """Seals what goes into a tier by the newest key, and opens what comes out by any of the ring's.

    What no key of ours has sealed is a miss; it is replaced when the block is stored again. What is damaged is read as
    zeros, for whoever checks it.
    """

    def __init__(self, tier: Tier, ring: Keyring) -> None:
        super().__init__(tier)
        CountingTier.__init__(self)
        self._ring = ring
        self.is_batched = self.can_replace = True
        self.takes_evicted, self.takes_advice = tier.takes_evicted, tier.takes_advice
        self.looks_in_regions, self.hears_requests = tier.looks_in_regions, tier.hears_requests
        # By the id of the key that is not here.
        self._unopened: Recent[ObjectId, bytes] = Recent(UNOPENED_MAX)
        self._is_told = False
        self._scratches: list[memoryview] = []
        self._workers = partial(ThreadPoolExecutor, AHEAD_MAX, thread_name_prefix="kvtide-unseal")
        self._ahead = self._workers()

    def close(self) -> None:
        ahead, self._ahead = self._ahead, self._workers()
        ahead.shutdown()
        super().close()

    # Opening

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        if not len(buffer):
            came = 0 if self.contains(object_id) else None
        elif offset == 0 and len(buffer) > AHEAD_PIECES * PIECE_BYTES and self.tier.can_lend:
            came = self._read_ahead(object_id, buffer)
        else:
            came = self._read(object_id, buffer, offset)
        self._note(is_hit=came is not None)
        return came

    def _read(self, object_id: ObjectId, buffer: memoryview, offset: int) -> int | None:
        first, stop = _touched(offset, len(buffer))
        with self._scratch(_room(stop - first)) as view:
            pieces = self._pieces(object_id, first, stop, view)
            return None if pieces is None else self._open_range(object_id, pieces, buffer, offset)

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read the pieces that the ranges touch, those of several ranges once, and open them."""
        spans = list[tuple[int, int]]()
        for offset, buffer in ranges:
            first, stop = _touched(offset, len(buffer))
            if spans and first <= spans[-1][1]:
                first = spans.pop()[0]
            spans.append((first, stop))
        with self._scratch(STEP * sum(stop - first for first, stop in spans)) as room:
            reads, rest = list[RangeRead](), room
            for first, stop in spans:
                size = STEP * (stop - first)
                reads.append(RangeRead(HEAD_BYTES + first * STEP, rest[:size]))
                rest = rest[size:]
            came, sizes = read_ranges(self.tier, object_id, reads), list[int | None]()
            for offset, buffer in ranges if came else ():
                piece = offset // PIECE_BYTES
                number = next(n for n, (_, stop) in enumerate(spans) if piece < stop)
                pieces = reads[number].buffer[: came[number] if came else 0][(piece - spans[number][0]) * STEP :]
                sizes.append(self._open_range(object_id, pieces, buffer, offset))
        found = [size for size in sizes if size is not None]
        is_hit = len(found) == len(ranges)
        self._note(is_hit)
        return found if is_hit else None

    def _pieces(self, object_id: ObjectId, first: int, stop: int, view: memoryview) -> memoryview | None:
        """Read pieces [first, stop), as far as there are so many."""
        begin = HEAD_BYTES + first * STEP
        # Direct reads begin at a page.
        start = begin // PAGESIZE * PAGESIZE
        came = self.tier.get_into(object_id, view[: HEAD_BYTES + stop * STEP - start], start)
        return None if came is None else view[begin - start : came]

    def _read_ahead(self, object_id: ObjectId, buffer: memoryview) -> int | None:
        """Read a large object from a disk: while a part is opened the next one comes."""
        step = AHEAD_PIECES * PIECE_BYTES
        with self._scratch(_room(AHEAD_PIECES)) as one, self._scratch(_room(AHEAD_PIECES)) as other:
            pieces = self._pieces(object_id, 0, AHEAD_PIECES, one)
            if pieces is None or len(pieces) < OVERHEAD:
                return None if pieces is None else 0
            if (seal := self._seal_of(object_id, pieces)) is None:
                return None
            size = min(len(buffer), seal.size)
            for start, view in zip(range(0, size, step), cycle((other, one)), strict=False):
                first, stop = start // PIECE_BYTES + AHEAD_PIECES, min(start + step, size)
                if stop == size:
                    return start + _open_pieces(seal, pieces, buffer[start:stop], start)
                try:
                    coming = self._ahead.submit(self._pieces, object_id, first, first + AHEAD_PIECES, view)
                except RuntimeError as error:
                    raise TierUnavailable(f"{self.name} is being closed") from error
                try:
                    _open_pieces(seal, pieces, buffer[start:stop], start)
                finally:
                    # The memory is in use until then.
                    wait([coming])
                pieces = coming.result()
                if pieces is None or pieces[: len(seal.prefix)] != seal.prefix:
                    # It left, was written again or is damaged: one read of all of it tells.
                    break
        return self._read(object_id, buffer, 0)

    @contextmanager
    def _scratch(self, size: int) -> Iterator[memoryview]:
        with self._lock:
            found = next((number for number, each in enumerate(self._scratches) if len(each) >= size), None)
            scratch = None if found is None else self._scratches.pop(found)
        scratch = aligned_buffer(size) if scratch is None else scratch
        try:
            yield scratch[:size]
        finally:
            with self._lock:
                self._scratches = [scratch, *self._scratches[: SCRATCHES_MAX - 1]]

    def _open_range(self, object_id: ObjectId, pieces: memoryview, buffer: memoryview, offset: int) -> int | None:
        """Open pieces, from the one that holds `offset` on, into the buffer; return how many bytes the range has."""
        if len(pieces) < OVERHEAD:
            # After the end, or what is cut within its first piece: the reader gets too few bytes.
            return 0
        seal = self._seal_of(object_id, pieces)
        return None if seal is None else _open_pieces(seal, pieces, buffer, offset)

    def _seal_of(self, object_id: ObjectId, piece: memoryview) -> Seal | None:
        """Return the seal of what begins with this piece; None, and noted, if none of our keys made it."""
        key_id, salt, size = PREFIX.unpack_from(piece)
        if (key := self._ring.find(key_id)) is None:
            self._note_unopened(object_id, key_id)
            return None
        return Seal.of(key, salt, size, object_id)

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range as it comes, a piece as soon as it is whole."""
        first, end = _touched(start, stop - start)
        held, at, seal, is_wanted = bytearray(), start, None, True

        def open_held() -> bool:
            nonlocal at, seal, is_wanted
            piece = memoryview(bytes(held[:STEP]))
            del held[:STEP]
            seal = seal or (self._seal_of(object_id, piece) if len(piece) >= OVERHEAD else None)
            if seal is None:
                return False
            opened = memoryview(bytearray(min(stop, (at // PIECE_BYTES + 1) * PIECE_BYTES) - at))
            came = _open_pieces(seal, piece, opened, at)
            at += came
            is_wanted = take(opened[:came])
            return is_wanted and at < stop

        def taking(part: memoryview) -> bool:
            nonlocal is_wanted
            held.extend(part)
            while len(held) >= STEP:
                if not open_held():
                    return False
            is_wanted = bool(part) or take(part)
            return is_wanted

        self.tier.read_range(object_id, HEAD_BYTES + first * STEP, HEAD_BYTES + end * STEP, taking)
        # The last piece of an object is shorter: only its end shows that it is whole.
        if held and is_wanted and at < stop:
            open_held()
        return at >= stop or not is_wanted

    def _note_unopened(self, object_id: ObjectId, key_id: bytes) -> None:
        with self._lock:
            is_first, self._is_told = not self._is_told, True
            self._unopened[object_id] = key_id
        if is_first:
            why = "%s: %s is sealed by key %s, which %s lacks: a miss, further ones are only counted; see kvtide doctor"
            _log.warning(why, self.name, object_id, key_id.hex(), self._ring)

    def _is_unopened(self, object_id: ObjectId) -> bool:
        """Tell whether an object could not be opened, nor can be by keys that came since."""
        key_id = self._unopened.get(object_id)
        return key_id is not None and self._ring.find(key_id) is None

    # Sealing

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Seal an object and store it. TierUnavailable if there is no key for its tenant."""
        with self._sealed(object_id, buffer) as sealed:
            if self._is_unopened(object_id):
                self.tier.delete(object_id, "unopened")
            with self._lock:
                self._unopened.pop(object_id, None)
            return self.tier.put_from(object_id, sealed)

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        if not self.tier.can_replace:
            return False
        with self._sealed(object_id, buffer) as sealed:
            is_replaced = self.tier.replace(object_id, sealed)
        if is_replaced:
            with self._lock:
                self._unopened.pop(object_id, None)
        return is_replaced

    @contextmanager
    def _sealed(self, object_id: ObjectId, buffer: Buffer) -> Iterator[memoryview]:
        tenant = object_id.name.tenant if isinstance(object_id, NamedId) else ""
        if (key := self._ring.newest(tenant)) is None:
            raise TierUnavailable(f"{self._ring} has no key for tenant {tenant!r}")
        plain = memoryview(buffer)
        seal = Seal.of(key, os.urandom(SALT_BYTES), len(plain), object_id)
        with self._scratch(sealed_bytes(len(plain))) as sealed:
            for number in range(max(1, -(-len(plain) // PIECE_BYTES))):
                piece = plain[number * PIECE_BYTES :][:PIECE_BYTES]
                seal.close(number, piece, sealed[HEAD_BYTES + number * STEP :][: len(piece) + OVERHEAD])
            _write_head(sealed, plain)
            yield sealed

    # What the wrapped tier says, in plain sizes and without what can't be opened

    def contains(self, object_id: ObjectId) -> bool:
        return not self._is_unopened(object_id) and self.tier.contains(object_id)

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        found = self.tier.contains_each(object_ids)
        return [is_here and not self._is_unopened(each) for each, is_here in zip(object_ids, found, strict=True)]

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        unopened = (number for number, each in enumerate(object_ids) if self._is_unopened(each))
        return self.tier.count_leading(object_ids[: next(unopened, len(object_ids))])

    def objects(self) -> Iterator[ObjectInfo]:
        return (info._replace(size=_plain_bytes(info.size)) for info in self.tier.objects())

    def parents(self) -> Iterator[tuple[ObjectId, BlockKey]]:
        return self.tier.parents()

    def stats(self) -> TierStats:
        """Return the wrapped tier's counters, bytes as they lie there; what could not be opened is no hit."""
        return msgspec.structs.replace(self.tier.stats(), hits=self._hits, misses=self._misses)

    def note_request(self, object_ids: Sequence[ObjectId], hint: Hint | None = None, states: States = ()) -> bool:
        return self.tier.note_request(object_ids, hint, states)

    def advise(self, object_ids: Sequence[ObjectId], hint: Hint) -> None:
        self.tier.advise(object_ids, hint)

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        self.tier.note_decisions(namespace, counts)

    def offer_to(self, offer: Offer) -> None:
        """Offer what the wrapped tier evicts as it was before it was sealed."""

        def opened(object_id: ObjectId, size: int, fill: Fill) -> None:
            def fill_opened(view: memoryview) -> bool:
                sealed = memoryview(bytearray(size))
                return fill(sealed) and self._open_range(object_id, sealed[HEAD_BYTES:], view, 0) == len(view)

            offer(object_id, _plain_bytes(size), fill_opened)

        self.tier.offer_to(opened)

    def check(self) -> None:
        assert len(self._scratches) <= SCRATCHES_MAX
        assert len(self._unopened) <= UNOPENED_MAX
        self.tier.check()


def _room(pieces: int) -> int:
    """Return the bytes of memory that pieces are read into, wherever the first one begins."""
    return HEAD_BYTES + pieces * STEP + PAGESIZE


def _touched(offset: int, size: int) -> tuple[int, int]:
    """Return the pieces [first, stop) that a range of plain bytes lies in."""
    return offset // PIECE_BYTES, -(-(offset + size) // PIECE_BYTES)


def sealed_bytes(size: int) -> int:
    """Return the sealed size of an object of `size` bytes."""
    return HEAD_BYTES + size + OVERHEAD * max(1, -(-size // PIECE_BYTES))


def _plain_bytes(size: int) -> int:
    """Return the plain size of a sealed object of `size` bytes; 0 if nothing sealed is so short."""
    pieces = max(1, -(-(size - HEAD_BYTES) // STEP))
    return max(0, size - HEAD_BYTES - OVERHEAD * pieces)


def _write_head(sealed: memoryview, plain: memoryview) -> None:
    """Write the header that servers and disks read, without the model's name; zeros in front of what is no object."""
    try:
        stored = parse_header(plain)
    except CorruptPayload:
        sealed[:HEAD_BYTES] = bytes(HEAD_BYTES)
        return
    meta = dataclasses.replace(stored.meta, model="")
    pack_around(sealed, meta, SEALED_CODEC, SectionId(SectionKind.DATA, 0, 0, meta.layout.layers), stored.quality)


class Seal(NamedTuple):
    """The common parts of all pieces of one written object: prefix, associated data, cipher."""

    prefix: bytes
    bound: bytes
    cipher: AESGCM
    size: int

    @classmethod
    def of(cls, key: SealingKey, salt: bytes, size: int, object_id: ObjectId) -> Seal:
        """Derive the cipher of one writing: a salt is never used twice, so that piece numbers can be nonces."""
        prefix, name = PREFIX.pack(key.id, salt, size), b"".join(object_id)
        derived = HKDF(SHA256(), KEY_BYTES, salt, b"kvtide-seal-1" + name).derive(key.secret)
        return cls(prefix, name + prefix, AESGCM(derived), size)

    def close(self, number: int, plain: memoryview, into: memoryview) -> None:
        """Seal a piece into so many bytes and `OVERHEAD`."""
        into[: len(self.prefix)] = self.prefix
        self.cipher.encrypt_into(number.to_bytes(12, "big"), plain, self.bound, into[len(self.prefix) :])

    def open(self, number: int, piece: memoryview, into: memoryview) -> None:
        """Open a piece into the bytes that it must have; zeros if it is not the one that was sealed."""
        if len(piece) == len(into) + OVERHEAD and piece[: len(self.prefix)] == self.prefix:
            try:
                self.cipher.decrypt_into(number.to_bytes(12, "big"), piece[len(self.prefix) :], self.bound, into)
                return
            except InvalidTag:
                pass
        into[:] = bytes(len(into))


def _open_pieces(seal: Seal, pieces: memoryview, buffer: memoryview, offset: int) -> int:
    """Open pieces, from the one that holds `offset` on, into the buffer; return how many bytes the range has."""
    stop = max(offset, min(offset + len(buffer), seal.size))
    for number in range(offset // PIECE_BYTES, -(-stop // PIECE_BYTES) if stop > offset else 0):
        piece, pieces = pieces[:STEP], pieces[STEP:]
        begin, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, seal.size)
        if offset <= begin and end <= stop:
            seal.open(number, piece, buffer[begin - offset : end - offset])
            continue
        opened = memoryview(bytearray(end - begin))
        seal.open(number, piece, opened)
        low, high = max(begin, offset), min(end, stop)
        buffer[low - offset : high - offset] = opened[low - begin : high - begin]
    return stop - offset
