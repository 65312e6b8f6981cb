"""Profiles in a store: notes that no prompt can name, carried by every tier as blocks are.

A profile's bytes lie in pieces under its digest, and each model has numbered records that say which profile it got or
lost. Nothing is ever changed: a later record is what counts. Invariant: a profile is handed out only if its bytes have
the digest that was asked for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from operator import attrgetter

import msgspec

from kvtide.codec import Profile
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.store.notes import PROFILE_CODEC, VERSION_CODEC, read_note, write_note
from kvtide.tier import Tier
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace, ObjectId

# Every tier that takes blocks takes pieces; larger profiles are kept in files.
PIECE_BYTES = 8 << 20
STORED_PROFILE_BYTES_MAX = 512 << 20
VERSIONS_MAX = 1024
VERSION_BYTES_MAX = 2048
PROFILES = Namespace(hashlib.sha256(b"kvtide profiles").digest())
# A piece begins with the bytes of the whole profile.
_TOTAL = struct.Struct("<Q")
_WHEN_MADE = attrgetter("made_s", "number")


class ProfileVersion(msgspec.Struct, frozen=True):
    """The profile that a model got, or lost (`is_removed`), as its record of this number. name and digest are hex."""

    name: str
    kind: str
    number: int
    digest: str
    profile_bytes: int
    model: str
    texts: int
    tokens: int
    made_s: float
    is_removed: bool = False
    # What the profiles of all groups of a model share, in hex; empty for that of a model's only group.
    calibration: str = ""


def profile_name(fingerprint: bytes, tenant_salt: bytes) -> bytes:
    """Return the name that a tenant's profiles of a model with this fingerprint have: nobody names another's."""
    salt = len(tenant_salt).to_bytes(4, "little") + tenant_salt
    return hashlib.sha256(b"kvtide profiles of " + salt + fingerprint).digest()


def group_name(name: bytes, group: str) -> bytes:
    """Return the name of one group of layers of a model of this name; of its only one (no text) the model's own."""
    return hashlib.sha256(b"kvtide group of " + name + group.encode()).digest() if group else name


class ProfileStore:
    """The profiles in one tier or stack of tiers. TierUnavailable from every method if the tier can't serve."""

    def __init__(self, tier: Tier, may_remove: bool = True) -> None:
        """may_remove: reading removes what is damaged, so that it is put again."""
        self._tier = tier
        self._may_remove = may_remove
        # Pieces that came of a profile whose others did not, so that the next try goes on.
        self._partial = b""
        self._pieces: dict[ObjectId, bytes] = {}

    def versions(self, name: bytes, kind: str, group: str = "") -> list[ProfileVersion]:
        """Return the records of a model, or of one of its groups, in the order in which they were made."""
        ids = (_version_id(group_name(name, group), kind, number) for number in range(VERSIONS_MAX))
        return sorted(filter(None, takewhile(bool, map(self._version, ids))), key=_WHEN_MADE)

    def read(self, digest: bytes) -> Profile | None:
        """Return the profile of a digest, None if it is not whole here; what came is kept for the next call."""
        if digest != self._partial:
            self._partial, self._pieces = digest, {}
        data = bytearray()
        for piece_id in self._ids(digest):
            piece = self._piece(piece_id)
            if piece is None:
                return None
            data += piece[_TOTAL.size :]
        self._pieces.clear()
        with suppress(CorruptPayload):
            if data and (profile := Profile.parse(bytes(data))).digest == digest:
                return profile
        if data and self._may_remove:
            self._delete(digest, "corrupt")
        return None

    def use(self, digest: bytes, profile_bytes: int) -> bool:
        """Use the pieces of a profile, for what leaves by age to stay. False if it is not whole here."""
        return all(
            self._tier.get_into(each, memoryview(bytearray(1))) is not None
            for each in _piece_ids(digest, profile_bytes)
        )

    def put(self, profile: Profile, names: Sequence[bytes], made_s: float) -> None:
        """Store a profile and make it the newest of these models, of the group that it is of.

        ValueError if it is too large for a store. TierUnavailable if the tier did not take it. Of two at once for one
        model the last one counts.
        """
        data, digest = profile.to_bytes(), profile.digest
        if len(data) > STORED_PROFILE_BYTES_MAX:
            raise ValueError(f"a store takes profiles of {STORED_PROFILE_BYTES_MAX} bytes, this one has {len(data)}")
        if self.read(digest) is None:
            for number, piece_id in enumerate(_piece_ids(digest, len(data))):
                part = data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
                write_note(self._tier, piece_id, PROFILE_CODEC, _TOTAL.pack(len(data)) + part)
            if self.read(digest) is None:
                raise TierUnavailable(f"the store did not take the profile's {len(data)} bytes")
        for name in names:
            mine, calibrated_on = group_name(name, profile.group).hex(), (profile.texts, profile.tokens)
            facts = (mine, profile.kind, 0, digest.hex(), len(data), profile.model, *calibrated_on, made_s)
            self._record(ProfileVersion(*facts, calibration=profile.calibration.hex()))

    def remove(self, digest: bytes, made_s: float) -> int:
        """Remove a profile's bytes, and have the models that got it know. Return how many models that are."""
        latest = {(each.name, each.kind): each for each in self.all() if each.digest == digest.hex()}
        held = [each for each in latest.values() if not each.is_removed]
        for each in held:
            self._record(msgspec.structs.replace(each, made_s=made_s, is_removed=True))
        self._delete(digest, "removed")
        return len(held)

    def _record(self, version: ProfileVersion) -> None:
        """Put a version after those that the model has, unless the last one says the same."""
        name = bytes.fromhex(version.name)
        known = self.versions(name, version.kind)
        if known and (known[-1].digest, known[-1].is_removed) == (version.digest, version.is_removed):
            return
        number = max((each.number for each in known), default=-1) + 1
        # Clocks differ: a later record is never older.
        made_s = max([version.made_s, *(each.made_s for each in known)])
        data = msgspec.json.encode(msgspec.structs.replace(version, number=number, made_s=made_s))
        if not write_note(self._tier, _version_id(name, version.kind, number), VERSION_CODEC, data):
            raise TierUnavailable(f"the store did not take record {number} of the model's profiles")

    def all(self) -> list[ProfileVersion]:
        """Return all records of all models, in the order in which they were made. Lists the whole store."""
        ids = [info.id for info in self._tier.objects() if info.id.namespace == PROFILES]
        return sorted(filter(None, map(self._version, ids)), key=_WHEN_MADE)

    def _ids(self, digest: bytes) -> list[ObjectId]:
        """Return the ids of all pieces, none if the first is not here."""
        first = self._piece(_piece_id(digest, 0))
        total = _TOTAL.unpack_from(first)[0] if first is not None else 0
        return _piece_ids(digest, total) if total <= STORED_PROFILE_BYTES_MAX else []

    def _delete(self, digest: bytes, reason: str) -> None:
        for piece_id in self._ids(digest):
            self._tier.delete(piece_id, reason)
        self._pieces.clear()

    def _piece(self, piece_id: ObjectId) -> bytes | None:
        if piece_id not in self._pieces:
            try:
                piece = read_note(self._tier, piece_id, PROFILE_CODEC, _TOTAL.size + PIECE_BYTES)
                if piece is not None and len(piece) >= _TOTAL.size:
                    self._pieces[piece_id] = piece
            except CorruptPayload:
                if self._may_remove:
                    self._tier.delete(piece_id, "corrupt")
        return self._pieces.get(piece_id)

    def _version(self, object_id: ObjectId) -> ProfileVersion | None:
        # Pieces are listed too.
        with suppress(CorruptPayload, msgspec.DecodeError, ValueError):
            if (data := read_note(self._tier, object_id, VERSION_CODEC, VERSION_BYTES_MAX)) is not None:
                version = msgspec.json.decode(data, type=ProfileVersion)
                # Its name and number are those that were asked for, as of an object.
                own_id = _version_id(bytes.fromhex(version.name), version.kind, version.number)
                if len(bytes.fromhex(version.digest)) == DIGEST_BYTES and own_id == object_id:
                    return version
        return None


def newest_of(versions: Sequence[ProfileVersion]) -> Iterator[ProfileVersion]:
    """Yield the versions that were not removed later, newest first."""
    settled: set[str] = set()
    for version in reversed(versions):
        if version.digest not in settled:
            settled.add(version.digest)
            if not version.is_removed:
                yield version


def _version_id(name: bytes, kind: str, number: int) -> ObjectId:
    return ObjectId(PROFILES, BlockKey(hashlib.sha256(name + f"{kind} {number}".encode()).digest()))


def _piece_id(digest: bytes, number: int) -> ObjectId:
    return ObjectId(PROFILES, BlockKey(hashlib.sha256(digest + number.to_bytes(4, "little")).digest()))


def _piece_ids(digest: bytes, total: int) -> list[ObjectId]:
    return [_piece_id(digest, number) for number in range(-(-min(total, STORED_PROFILE_BYTES_MAX) // PIECE_BYTES))]
