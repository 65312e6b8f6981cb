"""Finds the codec that an object names, and makes the one that a user asks for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec.base import Codec, RawCodec
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.profile import Profile
from kvtide.errors import CorruptPayload
from kvtide.types import Section

_log = logging.getLogger(__name__)


@runtime_checkable
class PromisingCodec(Codec, Protocol):
    """A codec that can tell of an encoded block whether it keeps what was promised of it."""

    def check_decoded(self, meta: BlockMeta, bits: BlockBits, sections: Sequence[Section]) -> None:
        """Decode the sections and compare. UnencodableBlock if they are further from the block than is promised."""


class ProfileShape(NamedTuple):
    """Blocks that a profile can be of: their layout, and their group as `Profile.group` has it."""

    layout: BlockLayout
    group: str = ""

    def takes(self, profile: Profile) -> bool:
        """Tell whether a profile is of these blocks."""
        return profile.fits(self.layout) and profile.group == self.group


class AwaitingCodec(NamedTuple):
    """A codec whose profiles may come later than `first`; without them it can encode nothing.

    shapes: of each group of layers, one for a plain model; each has a profile of its own, all from one calibration.
    make: returns the codec with a profile, or without one, to ask what blocks will be like. first: one for each shape,
    or none.
    """

    profile_kind: str
    shapes: tuple[ProfileShape, ...]
    make: Callable[[Profile | None], Codec]
    first: tuple[Profile, ...]

    @property
    def is_lossless(self) -> bool:
        """Blocks keep every bit with a profile."""
        return self.make(None).is_lossless

    @property
    def quality(self) -> float:
        """The KL divergence that was asked for."""
        return self.make(None).quality

    def takes(self, profiles: Sequence[Profile]) -> bool:
        """Tell whether profiles are of this kind and of one calibration, one for each shape."""
        return (
            len(profiles) == len(self.shapes)
            and all(shape.takes(profile) for shape, profile in zip(self.shapes, profiles, strict=True))
            and {profile.kind for profile in profiles} == {self.profile_kind}
            and len({profile.calibration for profile in profiles}) == 1
        )

    def through(self, wrap: Callable[[Codec], Codec]) -> AwaitingCodec:
        """Return this one with each of its codecs wrapped, as by a device that encodes."""
        return self._replace(make=lambda profile: wrap(self.make(profile)))


class _Kind(NamedTuple):
    """Codecs of one name. spec: what users write. maker: takes a profile and the arguments, or raises ValueError."""

    codec_id: str
    profile_kind: str | None
    spec: str
    maker: Callable[..., Codec]

    def make(self, arguments: Sequence[str], profile: Profile | None) -> Codec:
        try:
            if len(arguments) > self.spec.count(":"):
                raise ValueError("too many arguments")
            return self.maker(profile, *arguments)
        except ValueError as error:
            raise ValueError(f"codec {self.spec}, got {':'.join(arguments)!r}: {error}") from error


def _cachegen(profile: Profile | None, levels: str = "3", coder: str = "rans") -> Codec:
    from kvtide.codec.published import CachegenCodec, coder_named

    finest, dash, coarsest = levels.partition("-")
    first, last, number = int(finest), int(coarsest if dash else finest), coder_named(coder)
    coarser = [CachegenCodec(level, number, profile) for level in range(first + 1, last + 1)]
    if dash and not coarser:
        raise ValueError("levels are from the finest to the coarsest, as 1-4")
    return CachegenCodec(first, number, profile, coarser)


def _chunkwise(profile: Profile | None, level: str = "3", coder: str = "rans") -> Codec:
    from kvtide.codec.published import ChunkwiseCodec, coder_named

    return ChunkwiseCodec(int(level), coder_named(coder), profile)


def _of(module: str, name: str, *kinds: type, has_profile: bool = True) -> Callable[..., Codec]:
    """Return what makes a codec of the arguments that are given; the codec knows what the others are."""

    def make(profile: Profile | None, *texts: str) -> Codec:
        made: Any = getattr(import_module(f"kvtide.codec.{module}"), name)
        numbers = (kind(text) for kind, text in zip(kinds, texts, strict=False))
        return cast(Codec, made(profile, *numbers) if has_profile else made(*numbers))

    return make


_tide = _of("tide", "TideCodec", float, int)
_packed = _of("packed", "PackedCodec", float, int)
_impress = _of("packed", "ImpressCodec", int, int, has_profile=False)
_snippet = _of("published", "SnippetCodec", has_profile=False)


# Codecs by the name that a user gives. Each is imported when it is first made.
_KINDS = {
    "raw": _Kind(RawCodec.codec_id, None, "raw", lambda profile: RawCodec()),
    "lossless": _Kind(LosslessCodec.codec_id, None, "lossless", lambda profile: LosslessCodec()),
    "cachegen": _Kind("cachegen-2", "cachegen", "cachegen[:level[-level][:coder]]", _cachegen),
    "cachegen-snippet": _Kind("snippet-1", None, "cachegen-snippet", _snippet),
    "chunkwise": _Kind("chunkwise-1", "chunkwise", "chunkwise[:level[:coder]]", _chunkwise),
    "impress": _Kind("impress-1", None, "impress[:KV heads[:chunk tokens]]", _impress),
    "packed": _Kind("packed-1", "tide-layer", "packed[:quality[:chunk tokens]]", _packed),
    "tide": _Kind("tide-1", "tide-layer", "tide[:quality[:refinements]]", _tide),
    "tide-light": _Kind("tide-1", "tide-light", "tide-light[:quality[:refinements]]", _tide),
    "tide-deep": _Kind("tide-1", "tide-deep", "tide-deep[:quality[:refinements]]", _tide),
}
# These can't do without a profile.
_PROFILED = {"tide-1", "packed-1"}
# Digests that are remembered until somebody looks for them.
UNKNOWN_MAX = 16


class CodecRegistry:
    """Knows every codec that ships, and the profiles that it was given."""

    def __init__(self, profiles: Sequence[Profile] = ()) -> None:
        self._profiles = {profile.digest: profile for profile in profiles}
        # Digests that objects named lately and nobody gave; appends are atomic.
        self.unknown: deque[bytes] = deque(maxlen=UNKNOWN_MAX)
        # What decodes: one for each id and profile, made when first asked for. A race makes one twice, harmlessly.
        self._decoders: dict[tuple[str, bytes | None], Codec | None] = {}

    def add(self, profile: Profile) -> None:
        """Know one more profile from now on."""
        self._profiles[profile.digest] = profile

    def get(self, codec_id: str, profile: bytes | None) -> Codec | None:
        """Return what decodes objects of this codec id and profile digest, or None: the object is then a miss."""
        if (codec_id, profile) in self._decoders:
            return self._decoders[codec_id, profile]
        kind = next((kind for kind in _KINDS.values() if kind.codec_id == codec_id), None)
        if kind is None or (profile is not None and kind.profile_kind is None):
            return None
        if profile is not None and profile not in self._profiles:
            if profile not in self.unknown:
                self.unknown.append(profile)
            return None
        found: Codec | None = None
        try:
            found = kind.make((), self._profiles[profile] if profile else None)
            assert found.codec_id == codec_id
        except CorruptPayload as error:
            # It may be of a later version than this one, and the objects that name it are sound.
            _log.warning("profile %s can't be used: %s", profile.hex() if profile else "", error)
        self._decoders[codec_id, profile] = found
        return found

    def make(self, spec: str, layout: BlockLayout | None = None) -> Codec:
        """Return the codec that a user asks for: with the first profile of its kind that fits the layout.

        spec: `cachegen[:level[-level][:coder]]`, `tide[:quality[:refinements]]`, a name alone. Without a profile that
        fits the published codecs keep their tables in each payload. ValueError for an unknown name, for arguments that
        the codec does not take, and for tide and packed where the layout is given and no profile fits.
        """
        kind, arguments = _parsed(spec)
        fitting = None
        if layout is not None:
            known = (each for each in self._profiles.values() if each.kind == kind.profile_kind)
            fitting = next(filter(ProfileShape(layout).takes, known), None)
            if kind.codec_id in _PROFILED and fitting is None:
                raise ValueError(f"codec {spec!r} needs a profile of this model: make one with `kvtide calibrate`")
        return kind.make(arguments, fitting)

    def make_by_group(self, spec: str, shapes: Sequence[ProfileShape]) -> Codec | AwaitingCodec:
        """Return the codec as `make` does, for a model with groups of these shapes, one at least.

        tide and packed take profiles that are found later; what takes no profile by group is made for the first one.
        ValueError as in `make`.
        """
        kind, arguments = _parsed(spec)
        if kind.codec_id not in _PROFILED or kind.profile_kind is None:
            return self.make(spec, shapes[0].layout)
        awaiting = AwaitingCodec(kind.profile_kind, tuple(shapes), partial(kind.make, arguments), ())
        return awaiting._replace(first=self._known(awaiting))

    def _known(self, awaiting: AwaitingCodec) -> tuple[Profile, ...]:
        """Return the first calibration of all shapes among the profiles that are known, nothing if there is none."""
        known = [each for each in self._profiles.values() if each.kind == awaiting.profile_kind]
        for calibration in dict.fromkeys(each.calibration for each in known):
            mine = [each for each in known if each.calibration == calibration]
            found = [next(filter(shape.takes, mine), None) for shape in awaiting.shapes]
            chosen = tuple(each for each in found if each is not None)
            if awaiting.takes(chosen):
                return chosen
        return ()


def _parsed(spec: str) -> tuple[_Kind, list[str]]:
    name, *arguments = spec.split(":")
    if name not in _KINDS:
        raise ValueError(f"unknown codec {name!r}, expected one of {', '.join(sorted(_KINDS))}")
    return _KINDS[name], arguments
