"""The profiles that a cache takes from its store, and which of them encodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import AwaitingCodec, Codec, LosslessCodec, Profile, PromisingCodec
from kvtide.errors import UnencodableBlock
from kvtide.store.load import LoadAccess
from kvtide.tier.breaker import until
from kvtide.types import Section
from kvtide.wire import SECTIONS_MAX, head_bytes, object_bytes_max

if TYPE_CHECKING:
    from kvtide.store.profiles import ProfileStore, ProfileVersion

_log = logging.getLogger(__name__)

# While a profile is missing; once it is here, for a newer one and so that it stays. Both are bounds from below.
LOOK_S = 30.0
RENEW_S = 600.0
# The start waits no longer for a store that is slow; the storing thread then goes on where it ended.
START_S_MAX = 2.0
LOOK_S_MAX = 20.0
# Profiles that are kept.
FOUND_MAX = 16
# Decoding takes less than encoding, so that this costs the storing thread some two percent.
CHECK_EVERY = 32


class ProfileFollower:
    """The profiles that a cache takes from its store. Safe to use from several threads; one looks at a time.

    Another thread may put codecs with other profiles in the place of those that encode at any time, so who needs one
    twice takes it once. Lossless as long as a codec awaits its first profiles.
    """

    def __init__(self, access: LoadAccess, codec: Codec | AwaitingCodec) -> None:
        self._access = access
        self._awaiting = codec if isinstance(codec, AwaitingCodec) else None
        # One for each group of layers, or one for all.
        self._codecs: tuple[Codec, ...] = () if isinstance(codec, AwaitingCodec) else (codec,)
        # Whether blocks are stored losslessly for want of a profile.
        self.is_waiting = False
        # By group; the first block of each is checked.
        self._unchecked: dict[int, int] = {}
        # Made by the first look; most caches never look.
        self._store: ProfileStore | None = None
        self._looking = threading.Lock()
        self._name = b""
        self._hint = ""
        self._next_s = 0.0
        self._is_told = False
        # Those that were found, and their sizes. Using them keeps them in the store as long as their blocks.
        self._found: dict[bytes, tuple[Profile, int]] = {}
        self._next_unknown_s = 0.0
        # Digests that blocks named, and the latest look for these did not find: somebody removed the profile.
        self.lost: set[bytes] = set()
        if self._awaiting is not None:
            self._use(self._awaiting, self._awaiting.first)

    def _use(self, awaiting: AwaitingCodec, profiles: Sequence[Profile]) -> None:
        self._codecs = tuple(map(awaiting.make, profiles)) or (LosslessCodec(),)
        self.is_waiting = self.codec.profile is None

    @property
    def codec(self) -> Codec:
        """Return what encodes from now on, of several groups of layers the first."""
        return self._codecs[0]

    def newest_codec(self, group: int) -> Codec:
        """Look for a profile if it is time, and return what encodes a group of layers from now on."""
        if self._name or self._access.registry.unknown:
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
            if not isinstance(codec, LosslessCodec):
                size = head_bytes(len(sections)) + sum(len(each.data) for each in sections)
                if size > object_bytes_max(meta.layout) or len(sections) > SECTIONS_MAX:
                    raise UnencodableBlock(f"{len(sections)} sections take more than an object may")
            if isinstance(codec, PromisingCodec):
                self._unchecked[group] = self._unchecked.get(group, CHECK_EVERY) + 1
                if self._unchecked[group] >= CHECK_EVERY:
                    codec.check_decoded(meta, bits, sections)
                    self._unchecked[group] = 0
                    self._access.counts.add("blocks_checked")
        except UnencodableBlock as error:
            level = logging.WARNING if self._access.counts.add("blocks_unencodable") == 1 else logging.DEBUG
            _log.log(level, "%s can't keep block %s, stored losslessly: %s", codec.codec_id, meta.id, error)
            return None
        if self.is_waiting and not is_exact:
            self._access.counts.add("blocks_without_profile")
        return sections

    def seek(self, fingerprint: bytes, tenant_salt: bytes, hint: str) -> None:
        """Use the newest profile of a model from now on, and look for it now, for at most START_S_MAX. Raises nothing.

        hint: the command that would make one, for the log.
        """
        if self._awaiting is None:
            return
        from kvtide.store.profiles import profile_name

        name = profile_name(fingerprint, tenant_salt)
        self._name, self._hint, self._is_told, self._next_s = name, hint, False, 0.0
        # What was found before is another model's.
        self._use(self._awaiting, self._awaiting.first)
        self.look(START_S_MAX)

    def look(self, s_max: float = LOOK_S_MAX) -> None:
        """Look if it is time, for at most `s_max` seconds. Raises nothing."""
        now_s = self._access.clock.monotonic_s()
        is_due = bool(self._name) and now_s >= self._next_s
        is_unknown = bool(self._access.registry.unknown) and now_s >= self._next_unknown_s
        if not (is_due or is_unknown) or not self._looking.acquire(blocking=False):
            return
        try:
            from kvtide.store.profiles import ProfileStore

            with until(now_s + s_max):
                self._store = store = self._store or ProfileStore(self._access.tiers)
                if is_due and self._awaiting is not None:
                    self._next_s = now_s + LOOK_S
                    self._access.guarded("look for a profile", partial(self._look, store, self._awaiting), None)
                if is_unknown:
                    self._next_unknown_s = now_s + LOOK_S
                    self._access.guarded("look for an old profile", partial(self._look_for_unknown, store), None)
        finally:
            self._looking.release()

    def _look(self, store: ProfileStore, awaiting: AwaitingCodec) -> None:
        name = self._name
        groups = [store.versions(name, awaiting.profile_kind, shape.group) for shape in awaiting.shapes]
        used, profiles = {codec.profile for codec in self._codecs}, self._newest(store, awaiting, groups)
        if profiles:
            if used != {profile.digest for profile in profiles}:
                self._use(awaiting, profiles)
                _log.info("blocks are encoded with profiles %s from now on", [each.digest.hex() for each in profiles])
            for profile, versions in zip(profiles, groups, strict=True):
                if not store.use(profile.digest, self._found[profile.digest][1]):
                    store.put(profile, [name], versions[-1].made_s)
            self._next_s = self._access.clock.monotonic_s() + RENEW_S
        elif any(bytes.fromhex(each.digest) in used for versions in groups for each in versions):
            # One was removed.
            self._use(awaiting, awaiting.first)
        elif self.is_waiting and not self._is_told:
            self._is_told = True
            _log.warning("blocks are stored losslessly until the store has a profile of this model: %s", self._hint)
        for found, size in self._found.values():
            store.use(found.digest, size)
        if self._name != name:
            # `seek` came meanwhile, for another model.
            self._use(awaiting, awaiting.first)
            self._next_s = 0.0

    def _newest(
        self, store: ProfileStore, awaiting: AwaitingCodec, groups: Sequence[Sequence[ProfileVersion]]
    ) -> list[Profile]:
        """Return the newest profiles of one calibration that can be used, one for each group's versions, or nothing."""
        from kvtide.store.profiles import newest_of

        registry, codec_id = self._access.registry, awaiting.make(None).codec_id
        first, *others = [list(newest_of(versions)) for versions in groups]
        for version in first:
            same = (next((each for each in more if each.calibration == version.calibration), None) for more in others)
            read = [self._read(store, bytes.fromhex(each.digest)) for each in (version, *same) if each is not None]
            profiles = [each for each in read if each is not None and registry.get(codec_id, each.digest) is not None]
            if awaiting.takes(profiles):
                return profiles
        return []

    def _look_for_unknown(self, store: ProfileStore) -> None:
        self.lost = {each for each in list(self._access.registry.unknown) if self._read(store, each) is None}
        # The next object that names one brings it back.
        self._access.registry.unknown.clear()

    def _read(self, store: ProfileStore, digest: bytes) -> Profile | None:
        is_new = digest not in self._found and len(self._found) < FOUND_MAX
        if is_new and (profile := store.read(digest)) is not None:
            self._found[digest] = (profile, len(profile.to_bytes()))
            self._access.registry.add(profile)
        return self._found[digest][0] if digest in self._found else None
