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
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import PAGESIZE
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.index import ListedBlock
from kvtide.outcomes import Decided
from kvtide.tier.base import (
    Batched,
    Buffer,
    Checked,
    Evicting,
    Fill,
    Forcible,
    Noting,
    ObjectInfo,
    Offer,
    Ordered,
    Recorded,
    Replacing,
    Tier,
    WrappedTier,
)
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.seal.keys import KEY_BYTES, Keyring, SealingKey
from kvtide.tier.seal.label import HEAD_BYTES, SEALED_CODEC
from kvtide.tier.source import Take, read_range
from kvtide.types import NamedId, Namespace, ObjectId, SectionId, SectionKind, TierStats
from kvtide.wire import pack_around, parse_header

_log = logging.getLogger(__name__)

# Plain bytes of a piece. Smaller ones cost calls (16 KiB: a fifth more CPU), larger ones are read for little.
PIECE_BYTES = 64 << 10
# Ids that could not be opened, so that they are misses at once and are stored again.
UNOPENED_MAX = 4096
# Buffers kept for the next reads and writes; at most so many threads go on without taking fresh memory.
SCRATCHES_MAX = 8
_PREFIX = struct.Struct("<8s16sQ")
_SALT_BYTES = 16
_TAG_BYTES = 16
_OVERHEAD = _PREFIX.size + _TAG_BYTES
_STEP = PIECE_BYTES + _OVERHEAD


def sealed_bytes(size: int) -> int:
    """Return how long an object of `size` bytes is once it is sealed."""
    return HEAD_BYTES + size + _OVERHEAD * max(1, -(-size // PIECE_BYTES))


def plain_bytes(size: int) -> int:
    """Return how long a sealed object of `size` bytes is when opened; 0 if nothing sealed is so short."""
    pieces = max(1, -(-(size - HEAD_BYTES) // _STEP))
    return max(0, size - HEAD_BYTES - _OVERHEAD * pieces)


def _write_head(sealed: memoryview, plain: memoryview) -> None:
    """Write what servers and disks go by, without the model's name; zeros in front of what is no object."""
    try:
        stored = parse_header(plain)
    except CorruptPayload:
        sealed[:HEAD_BYTES] = bytes(HEAD_BYTES)
        return
    meta = dataclasses.replace(stored.meta, model="")
    pack_around(sealed, meta, SEALED_CODEC, SectionId(SectionKind.DATA, 0, 0, meta.layout.layers), stored.quality)


class _Prefix(NamedTuple):
    key_id: bytes
    salt: bytes
    size: int


class _Seal(NamedTuple):
    """The common parts of all pieces of one written object: prefix, associated data, cipher."""

    prefix: bytes
    bound: bytes
    cipher: AESGCM
    size: int

    @classmethod
    def of(cls, key: SealingKey, salt: bytes, size: int, object_id: ObjectId) -> _Seal:
        """Derive the cipher of one writing: a salt is never used twice, so that piece numbers can be nonces."""
        prefix, name = _PREFIX.pack(key.id, salt, size), b"".join(object_id)
        derived = HKDF(SHA256(), KEY_BYTES, salt, b"kvtide-seal-1" + name).derive(key.secret)
        return cls(prefix, name + prefix, AESGCM(derived), size)

    def close(self, number: int, plain: memoryview, into: memoryview) -> None:
        """Seal a piece into so many bytes and `_OVERHEAD`."""
        into[: len(self.prefix)] = self.prefix
        self.cipher.encrypt_into(number.to_bytes(12, "big"), plain, self.bound, into[len(self.prefix) :])

    def open(self, number: int, piece: memoryview, into: memoryview) -> None:
        """Open a piece into the bytes that it must have; zeros if it is not the one that was sealed."""
        if len(piece) == len(into) + _OVERHEAD and piece[: len(self.prefix)] == self.prefix:
            try:
                self.cipher.decrypt_into(number.to_bytes(12, "big"), piece[len(self.prefix) :], self.bound, into)
                return
            except InvalidTag:
                pass
        into[:] = bytes(len(into))


def _open_pieces(seal: _Seal, pieces: memoryview, buffer: memoryview, offset: int) -> int:
    """Open pieces, from the one that holds `offset` on, into the buffer; return how many bytes the range has."""
    stop = max(offset, min(offset + len(buffer), seal.size))
    for number in range(offset // PIECE_BYTES, -(-stop // PIECE_BYTES) if stop > offset else 0):
        piece, pieces = pieces[:_STEP], pieces[_STEP:]
        begin, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, seal.size)
        if offset <= begin and end <= stop:
            seal.open(number, piece, buffer[begin - offset : end - offset])
            continue
        opened = memoryview(bytearray(end - begin))
        seal.open(number, piece, opened)
        low, high = max(begin, offset), min(end, stop)
        buffer[low - offset : high - offset] = opened[low - begin : high - begin]
    return stop - offset


class SealedTier(WrappedTier):
    """Seals what goes into a tier by the newest key, and opens what comes out by any of the ring's.

    What no key of ours has sealed is a miss; it is replaced when the block is stored again. What is damaged is read as
    zeros, for whoever checks it.
    """

    def __init__(self, tier: Tier, ring: Keyring) -> None:
        super().__init__(tier)
        self._ring = ring
        # Whether a stack should send here only what the tiers in front of this one evict.
        self.takes_evicted = getattr(tier, "takes_evicted", False)
        if isinstance(tier, Forcible):
            self.looks_in_regions = tier.looks_in_regions
        if isinstance(tier, Evicting):
            self.offer_to = self._offer_opened
        self._lock = threading.Lock()
        # By the id of the key that is not here.
        self._unopened: OrderedDict[ObjectId, bytes] = OrderedDict()
        self._hits = self._misses = 0
        self._is_told = False
        self._scratches: list[memoryview] = []

    # Opening

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read the pieces that the range touches, and open them."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        came = self._read(object_id, buffer, offset) if len(buffer) else 0 if self.contains(object_id) else None
        with self._lock:
            self._hits += came is not None
            self._misses += came is None
        return came

    def _read(self, object_id: ObjectId, buffer: memoryview, offset: int) -> int | None:
        first, stop = offset // PIECE_BYTES, -(-(offset + len(buffer)) // PIECE_BYTES)
        begin = HEAD_BYTES + first * _STEP
        # Direct reads begin at a page.
        start = begin // PAGESIZE * PAGESIZE
        with self._scratch(HEAD_BYTES + stop * _STEP - start) as view:
            came = self.tier.get_into(object_id, view, start)
            return None if came is None else self._open_range(object_id, view[begin - start : came], buffer, offset)

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
        if len(pieces) < _OVERHEAD:
            # After the end, or what is cut within its first piece: the reader gets too few bytes.
            return 0
        seal = self._seal_of(object_id, pieces)
        return None if seal is None else _open_pieces(seal, pieces, buffer, offset)

    def _seal_of(self, object_id: ObjectId, piece: memoryview) -> _Seal | None:
        """Return the seal of what begins with this piece; None, and noted, if none of our keys made it."""
        key_id, salt, size = _Prefix._make(_PREFIX.unpack_from(piece))
        key = self._ring.find(key_id)
        if key is None:
            self._note_unopened(object_id, key_id)
            return None
        return _Seal.of(key, salt, size, object_id)

    def read_range(self, object_id: ObjectId, start: int, stop: int, take: Take) -> bool:
        """Hand over a range as it comes, a piece as soon as it is whole."""
        first, end = start // PIECE_BYTES, -(-stop // PIECE_BYTES)
        held, at, seal, is_wanted = bytearray(), start, None, True

        def open_held() -> bool:
            nonlocal at, seal, is_wanted
            piece = memoryview(bytes(held[:_STEP]))
            del held[:_STEP]
            seal = seal or (self._seal_of(object_id, piece) if len(piece) >= _OVERHEAD else None)
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
            while len(held) >= _STEP:
                if not open_held():
                    return False
            is_wanted = bool(part) or take(part)
            return is_wanted

        read_range(self.tier, object_id, HEAD_BYTES + first * _STEP, HEAD_BYTES + end * _STEP, taking)
        # The last piece of an object is shorter: only its end shows that it is whole.
        if held and is_wanted and at < stop:
            open_held()
        return at >= stop or not is_wanted

    def _note_unopened(self, object_id: ObjectId, key_id: bytes) -> None:
        with self._lock:
            is_first, self._is_told = not self._is_told, True
            self._unopened[object_id] = key_id
            while len(self._unopened) > UNOPENED_MAX:
                self._unopened.popitem(last=False)
        if is_first:
            _log.warning(
                "%s: %s is sealed by key %s, which %s lacks: a miss, further ones are only counted; see kvtide doctor",
                self.name,
                object_id,
                key_id.hex(),
                self._ring,
            )

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
        """Seal another form of an object; False if the wrapped tier replaces none."""
        if not isinstance(self.tier, Replacing):
            return False
        with self._sealed(object_id, buffer) as sealed:
            return self.tier.replace(object_id, sealed)

    @contextmanager
    def _sealed(self, object_id: ObjectId, buffer: Buffer) -> Iterator[memoryview]:
        tenant = object_id.name.tenant if isinstance(object_id, NamedId) else ""
        key = self._ring.newest(tenant)
        if key is None:
            raise TierUnavailable(f"{self._ring} has no key for tenant {tenant!r}")
        plain = memoryview(buffer)
        seal = _Seal.of(key, os.urandom(_SALT_BYTES), len(plain), object_id)
        with self._scratch(sealed_bytes(len(plain))) as sealed:
            for number in range(max(1, -(-len(plain) // PIECE_BYTES))):
                piece = plain[number * PIECE_BYTES :][:PIECE_BYTES]
                seal.close(number, piece, sealed[HEAD_BYTES + number * _STEP :][: len(piece) + _OVERHEAD])
            _write_head(sealed, plain)
            yield sealed

    # What the wrapped tier says, in plain sizes and without what can't be opened

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the wrapped tier; what could not be opened is not here."""
        return not self._is_unopened(object_id) and self.tier.contains(object_id)

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        """Ask the wrapped tier, at once if it can tell."""
        tier = self.tier
        found = tier.contains_each(object_ids) if isinstance(tier, Batched) else map(tier.contains, object_ids)
        return [is_here and not self._is_unopened(each) for each, is_here in zip(object_ids, found, strict=True)]

    def count_leading(self, object_ids: Sequence[ObjectId]) -> int:
        """Ask the wrapped tier, at once if it can tell."""
        tier = self.tier
        unopened = (number for number, each in enumerate(object_ids) if self._is_unopened(each))
        asked = object_ids[: next(unopened, len(object_ids))]
        if isinstance(tier, Batched):
            return tier.count_leading(asked)
        return next((number for number, each in enumerate(asked) if not tier.contains(each)), len(asked))

    def objects(self) -> Iterator[ObjectInfo]:
        """List the wrapped tier, with the sizes that objects have when they are opened."""
        return (info._replace(size=plain_bytes(info.size)) for info in self.tier.objects())

    def records(self) -> Iterator[ListedBlock]:
        """List what outlives the process; nothing where the wrapped tier can't."""
        return self.tier.records() if isinstance(self.tier, Recorded) else iter(())

    def stats(self) -> TierStats:
        """Return the wrapped tier's counters, bytes as they lie there; what could not be opened is no hit."""
        return msgspec.structs.replace(self.tier.stats(), hits=self._hits, misses=self._misses)

    @property
    def hears_requests(self) -> bool:
        """Tell whether requests matter to the wrapped tier."""
        return isinstance(self.tier, Ordered) and self.tier.hears_requests

    def note_request(self, object_ids: Sequence[ObjectId]) -> None:
        """Tell the wrapped tier what a prompt asks for."""
        if isinstance(self.tier, Ordered):
            self.tier.note_request(object_ids)

    def note_decisions(self, namespace: Namespace, counts: Mapping[Decided, int]) -> None:
        """Tell the wrapped tier what engines decided."""
        if isinstance(self.tier, Noting):
            self.tier.note_decisions(namespace, counts)

    def _offer_opened(self, offer: Offer) -> None:
        """Offer what the wrapped tier evicts as it was before it was sealed."""

        def opened(object_id: ObjectId, size: int, fill: Fill) -> None:
            def fill_opened(view: memoryview) -> bool:
                sealed = memoryview(bytearray(size))
                return fill(sealed) and self._open_range(object_id, sealed[HEAD_BYTES:], view, 0) == len(view)

            offer(object_id, plain_bytes(size), fill_opened)

        assert isinstance(self.tier, Evicting)
        self.tier.offer_to(opened)

    def check(self) -> None:
        """AssertionError if more is kept than may be, or the wrapped tier's accounting is off."""
        assert len(self._scratches) <= SCRATCHES_MAX
        assert len(self._unopened) <= UNOPENED_MAX
        if isinstance(self.tier, Checked):
            self.tier.check()
