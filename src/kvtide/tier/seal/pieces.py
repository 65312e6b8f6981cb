"""The bytes of a sealed object: its sizes, its head, and pieces that are each sealed by themselves."""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtide.errors import CorruptPayload
from kvtide.tier.seal.keys import KEY_BYTES, SealingKey
from kvtide.tier.seal.label import HEAD_BYTES, SEALED_CODEC
from kvtide.types import ObjectId, SectionId, SectionKind
from kvtide.wire import pack_around, parse_header

# Plain bytes of a piece. Smaller ones cost calls (16 KiB: a fifth more CPU), larger ones are read for little.
PIECE_BYTES = 64 << 10
PREFIX = struct.Struct("<8s16sQ")
SALT_BYTES = 16
_TAG_BYTES = 16
OVERHEAD = PREFIX.size + _TAG_BYTES
STEP = PIECE_BYTES + OVERHEAD


def sealed_bytes(size: int) -> int:
    """Return how long an object of `size` bytes is once it is sealed."""
    return HEAD_BYTES + size + OVERHEAD * max(1, -(-size // PIECE_BYTES))


def plain_bytes(size: int) -> int:
    """Return how long a sealed object of `size` bytes is when opened; 0 if nothing sealed is so short."""
    pieces = max(1, -(-(size - HEAD_BYTES) // STEP))
    return max(0, size - HEAD_BYTES - OVERHEAD * pieces)


def write_head(sealed: memoryview, plain: memoryview) -> None:
    """Write what servers and disks go by, without the model's name; zeros in front of what is no object."""
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


def open_pieces(seal: Seal, pieces: memoryview, buffer: memoryview, offset: int) -> int:
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
