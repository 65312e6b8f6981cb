"""Profiles in a store: notes that no prompt can name, carried by every tier as blocks are.

A profile's bytes lie in pieces under its digest, and each model has numbered records that say which profile it got or
lost. Nothing is ever changed: a later record is what counts. Invariant: a profile is handed out only if its bytes have
the digest that was asked for.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import AwaitingCodec, Codec, CodecRegistry, LosslessCodec, Profile, PromisingCodec
from kvtide.errors import CorruptPayload, TierUnavailable, UnencodableBlock
from kvtide.store.notes import PROFILE_CODEC, VERSION_CODEC, read_note, write_note
from kvtide.tier import Tier
from kvtide.tier.breaker import until
from kvtide.tier.faults import Counts, FaultGuard
from kvtide.tier.stack import TierStack
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace, ObjectId, Section

# Every tier that takes blocks takes pieces; larger profiles are kept in files.
PIECE_BYTES = 8 << 20
STORED_PROFILE_BYTES_MAX = 512 << 20
VERSIONS_MAX = 1024
VERSION_BYTES_MAX = 2048
PROFILES = Namespace(hashlib.sha256(b"kvtide profiles").digest())
# A piece begins with the bytes of the whole profile.
_TOTAL = struct.Struct("<Q")


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

    def versions(self, name: bytes, kind: str) -> list[ProfileVersion]:
        """Return the records of a model, or of a group by its `group_name`, in the order in which they were made."""
        found: list[ProfileVersion] = []
        while len(found) < VERSIONS_MAX:
            version = self._version(_version_id(name, kind, len(found)))
            if version is None:
                break
            found.append(version)
        return sorted(found, key=lambda each: (each.made_s, each.number))

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
        try:
            profile = Profile.parse(bytes(data)) if data else None
        except CorruptPayload:
            profile = None
        if data and self._may_remove and (profile is None or profile.digest != digest):
            self._delete(digest, "corrupt")
        return profile if profile is not None and profile.digest == digest else None

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
        found = [version for object_id in ids if (version := self._version(object_id)) is not None]
        return sorted(found, key=lambda each: (each.made_s, each.number))

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
            except CorruptPayload:
                if self._may_remove:
                    self._tier.delete(piece_id, "corrupt")
                return None
            if piece is None or len(piece) < _TOTAL.size:
                return None
            self._pieces[piece_id] = piece
        return self._pieces[piece_id]

    def _version(self, object_id: ObjectId) -> ProfileVersion | None:
        try:
            data = read_note(self._tier, object_id, VERSION_CODEC, VERSION_BYTES_MAX)
            version = msgspec.json.decode(data, type=ProfileVersion) if data is not None else None
            if version is None or len(bytes.fromhex(version.digest)) != DIGEST_BYTES:
                return None
            # Its name and number are those that were asked for, as of an object.
            own_id = _version_id(bytes.fromhex(version.name), version.kind, version.number)
            return version if own_id == object_id else None
        except (CorruptPayload, msgspec.DecodeError, ValueError):
            # Pieces are listed too.
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
    return [_piece_id(digest, number) for number in range(-(-total // PIECE_BYTES))]


_log = logging.getLogger(__name__)

# While a profile is missing; once it is here, for a newer one and so that it stays. Both are bounds from below.
LOOK_S = 30.0
RENEW_S = 600.0
# The start waits no longer for a store that is slow; the storing thread then goes on where it ended.
START_S_MAX = 2.0
LOOK_S_MAX = 20.0
# Profiles that are kept, and digests that were looked for.
FOUND_MAX = 16
# Decoding takes less than encoding, so that this costs the storing thread some two percent.
CHECK_EVERY = 32
ASKED_MAX = 1024


class ProfileFollower:
    """The profiles that a cache takes from its store. Safe to use from several threads; one looks at a time.

    Another thread may put codecs with other profiles in the place of those that encode at any time, so who needs one
    twice takes it once. Lossless as long as a codec awaits its first profiles.
    """

    def __init__(
        self,
        tiers: TierStack,
        codec: Codec | AwaitingCodec,
        registry: CodecRegistry,
        clock: Clock,
        guard: FaultGuard,
        counts: Counts,
    ) -> None:
        self._awaiting = codec if isinstance(codec, AwaitingCodec) else None
        # One for each group of layers, or one for all.
        self._codecs = self._with(codec.first) if isinstance(codec, AwaitingCodec) else (codec,)
        # Whether blocks are stored losslessly for want of a profile.
        self.is_waiting = self._awaiting is not None and self.codec.profile is None
        self._guard = guard
        self._counts = counts
        # By group; the first block of each is checked.
        self._unchecked: dict[int, int] = {}
        self._registry = registry
        self._clock = clock
        self._store = ProfileStore(tiers)
        self._looking = threading.Lock()
        self._name = b""
        self._hint = ""
        self._next_s = 0.0
        self._is_told = False
        # Those that were found, and their sizes. Using them keeps them in the store as long as their blocks.
        self._found: dict[bytes, tuple[Profile, int]] = {}
        self._asked_s: dict[bytes, float] = {}

    def _with(self, profiles: Sequence[Profile]) -> tuple[Codec, ...]:
        assert self._awaiting is not None
        return tuple(map(self._awaiting.make, profiles)) or (LosslessCodec(),)

    def _use(self, profiles: Sequence[Profile]) -> None:
        self._codecs = self._with(profiles)
        self.is_waiting = self.codec.profile is None

    @property
    def codec(self) -> Codec:
        """Return what encodes from now on, of several groups of layers the first."""
        return self._codecs[0]

    def newest_codec(self, group: int) -> Codec:
        """Look for a profile if it is time, and return what encodes a group of layers from now on."""
        if self._name or self._registry.unknown:
            self.look()
        codecs = self._codecs
        if len(codecs) == 1:
            return codecs[0]
        # A model that was changed has groups that nobody has fitted.
        return codecs[group] if group < len(codecs) else LosslessCodec()

    def encode(
        self, codec: Codec, meta: BlockMeta, bits: BlockBits, group: int, is_exact: bool
    ) -> list[Section] | None:
        """Return a block's sections, None if the codec can't keep it, which is counted. For the storing thread alone.

        One block in CHECK_EVERY is decoded again and held to its promise, and each after one that broke it.
        """
        try:
            sections = codec.encode(meta, bits)
            if isinstance(codec, PromisingCodec):
                self._unchecked[group] = self._unchecked.get(group, CHECK_EVERY) + 1
                if self._unchecked[group] >= CHECK_EVERY:
                    codec.check_decoded(meta, bits, sections)
                    self._unchecked[group] = 0
                    self._counts.add("checked_blocks")
        except UnencodableBlock as error:
            level = logging.WARNING if self._counts.add("unfit_blocks") == 1 else logging.DEBUG
            _log.log(level, "%s can't keep block %s, stored losslessly: %s", codec.codec_id, meta.id, error)
            return None
        if self.is_waiting and not is_exact:
            self._counts.add("unprofiled_blocks")
        return sections

    def totals(self) -> dict[str, int]:
        """Return blocks that were decoded again and kept the promise, that don't fit, and that had no profile."""
        counts = self._counts.all()
        return {name: counts[name] for name in ("checked_blocks", "unfit_blocks", "unprofiled_blocks")}

    def seek(self, name: bytes, hint: str) -> None:
        """Use the newest profile of a model from now on, and look for it now, for at most START_S_MAX. Raises nothing.

        hint: the command that would make one, for the log.
        """
        if self._awaiting is None:
            return
        self._name, self._hint, self._is_told, self._next_s = name, hint, False, 0.0
        # What was found before is another model's.
        self._use(self._awaiting.first)
        self.look(START_S_MAX)

    def look(self, s_max: float = LOOK_S_MAX) -> None:
        """Look if it is time, for at most `s_max` seconds. Raises nothing."""
        now_s = self._clock.monotonic_s()
        is_due = bool(self._name) and now_s >= self._next_s
        if not (is_due or self._registry.unknown) or not self._looking.acquire(blocking=False):
            return
        try:
            with until(now_s + s_max):
                if is_due and self._awaiting is not None:
                    self._next_s = now_s + LOOK_S
                    self._guard("look for a profile", partial(self._look, self._awaiting), None)
                self._guard("look for an old profile", partial(self._look_for_unknown, now_s), None)
        finally:
            self._looking.release()

    def _look(self, awaiting: AwaitingCodec) -> None:
        name = self._name
        groups = [
            self._store.versions(group_name(name, shape.group), awaiting.profile_kind) for shape in awaiting.shapes
        ]
        used, profiles = {codec.profile for codec in self._codecs}, self._newest(awaiting, groups)
        if profiles:
            if used != {profile.digest for profile in profiles}:
                self._use(profiles)
                _log.info("blocks are encoded with profiles %s from now on", [each.digest.hex() for each in profiles])
            for profile, versions in zip(profiles, groups, strict=True):
                if not self._store.use(profile.digest, self._found[profile.digest][1]):
                    self._store.put(profile, [name], versions[-1].made_s)
            self._next_s = self._clock.monotonic_s() + RENEW_S
        elif any(bytes.fromhex(each.digest) in used for versions in groups for each in versions):
            # One was removed.
            self._use(awaiting.first)
        elif self.is_waiting and not self._is_told:
            self._is_told = True
            _log.warning("blocks are stored losslessly until the store has a profile of this model: %s", self._hint)
        for found, size in self._found.values():
            self._store.use(found.digest, size)
        if self._name != name:
            # `seek` came meanwhile, for another model.
            self._use(awaiting.first)
            self._next_s = 0.0

    def _newest(self, awaiting: AwaitingCodec, groups: Sequence[Sequence[ProfileVersion]]) -> list[Profile]:
        """Return the newest profiles of one calibration, one for each group's versions, nothing if there are none."""
        first, *others = [list(newest_of(versions)) for versions in groups]
        for version in first:
            same = (next((each for each in more if each.calibration == version.calibration), None) for more in others)
            read = [self._read(bytes.fromhex(each.digest)) for each in (version, *same) if each is not None]
            profiles = [each for each in read if each is not None]
            if awaiting.takes(profiles):
                return profiles
        return []

    def _look_for_unknown(self, now_s: float) -> None:
        for digest in list(self._registry.unknown):
            if now_s - self._asked_s.get(digest, -LOOK_S) >= LOOK_S:
                self._asked_s[digest] = now_s
                self._read(digest)
        # The next object that names one brings it back.
        self._registry.unknown.clear()
        while len(self._asked_s) > ASKED_MAX:
            del self._asked_s[next(iter(self._asked_s))]

    def _read(self, digest: bytes) -> Profile | None:
        is_new = digest not in self._found and len(self._found) < FOUND_MAX
        if is_new and (profile := self._store.read(digest)) is not None:
            self._found[digest] = (profile, len(profile.to_bytes()))
            self._registry.add(profile)
        return self._found[digest][0] if digest in self._found else None
