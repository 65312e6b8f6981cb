"""Finds the codec that an object names, and makes the one that a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.block import BlockLayout
from kvtide.codec.base import Codec
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.packed import BASE_QUALITY, PackedCodec
from kvtide.codec.profile import Profile
from kvtide.codec.published import CODERS, CachegenCodec, ChunkwiseCodec
from kvtide.codec.raw import RawCodec
from kvtide.codec.tide import DEFAULT_QUALITY, DEFAULT_REFINEMENTS, TideCodec
from kvtide.importance import CHUNK_TOKENS

__all__ = ["CodecRegistry", "CodecSpec"]


class CodecSpec(NamedTuple):
    """A codec as a user names it: `cachegen[:level[:coder]]`, `tide[:quality[:refinements]]`, or a name alone."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Return the spec in a text. ValueError if it is not of the form."""
        name, *arguments = text.split(":")
        if not name or len(arguments) > 2:
            raise ValueError(f"a codec is name[:argument[:argument]], got {text!r}")
        return cls(name, tuple(arguments))


# Makes a codec from the spec's arguments and a profile. ValueError for arguments that it does not take.
_Maker = Callable[[tuple[str, ...], Profile | None], Codec]


class _Kind(NamedTuple):
    codec_id: str
    profile_kind: str | None
    make: _Maker


def _plain(codec: type[RawCodec] | type[LosslessCodec]) -> _Maker:
    def make(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
        if arguments:
            raise ValueError(f"codec {codec.codec_id!r} has no levels and no choice of coder, got {arguments}")
        return codec()

    return make


def _by_level(codec: type[CachegenCodec] | type[ChunkwiseCodec]) -> _Maker:
    def make(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
        level, coder = (*arguments, *("3", CODERS[0].name)[len(arguments) :])
        coders = [found.name for found in CODERS]
        if not level.isdecimal() or int(level) == 0 or coder not in coders:
            raise ValueError(f"expected a level from 1 on and a coder of {', '.join(coders)}, got {arguments}")
        return codec(int(level), coders.index(coder), profile)

    return make


def _tide(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
    quality, refinements = (*arguments, *(str(DEFAULT_QUALITY), str(DEFAULT_REFINEMENTS))[len(arguments) :])
    try:
        return TideCodec(profile, float(quality), int(refinements))
    except ValueError as error:
        raise ValueError(f"codec tide[:quality[:refinements]], got {arguments}: {error}") from error


def _packed(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
    quality, chunk_tokens = (*arguments, *(str(BASE_QUALITY), str(CHUNK_TOKENS))[len(arguments) :])
    try:
        return PackedCodec(profile, float(quality), int(chunk_tokens))
    except ValueError as error:
        raise ValueError(f"codec packed[:quality[:chunk tokens]], got {arguments}: {error}") from error


def _kinds() -> dict[str, _Kind]:
    return {
        "raw": _Kind(RawCodec.codec_id, None, _plain(RawCodec)),
        "lossless": _Kind(LosslessCodec.codec_id, None, _plain(LosslessCodec)),
        "cachegen": _Kind(CachegenCodec.codec_id, "cachegen", _by_level(CachegenCodec)),
        "chunkwise": _Kind(ChunkwiseCodec.codec_id, "chunkwise", _by_level(ChunkwiseCodec)),
        "packed": _Kind(PackedCodec.codec_id, "tide-layer", _packed),
        "tide": _Kind(TideCodec.codec_id, "tide-layer", _tide),
        "tide-light": _Kind(TideCodec.codec_id, "tide-light", _tide),
        "tide-deep": _Kind(TideCodec.codec_id, "tide-deep", _tide),
    }


class CodecRegistry:
    """Knows every codec that ships, and the profiles that it was given."""

    def __init__(self, profiles: Sequence[Profile] = ()) -> None:
        self._kinds = _kinds()
        self._profiles = {profile.digest: profile for profile in profiles}
        # What decodes: one for each id and profile, made when first asked for. A race makes one twice, harmlessly.
        self._decoders: dict[tuple[str, bytes | None], Codec] = {}

    def names(self) -> list[str]:
        """Return the names of all codecs, sorted."""
        return sorted(self._kinds)

    def get(self, codec_id: str, profile: bytes | None) -> Codec | None:
        """Return what decodes objects of this codec id and profile digest, or None: the object is then a miss."""
        found = self._decoders.get((codec_id, profile))
        if found is None:
            kind = next((kind for kind in self._kinds.values() if kind.codec_id == codec_id), None)
            if kind is None or (profile is not None and (kind.profile_kind is None or profile not in self._profiles)):
                return None
            found = kind.make((), self._profiles[profile] if profile else None)
            self._decoders[codec_id, profile] = found
        return found

    def make(self, spec: str, layout: BlockLayout | None = None) -> Codec:
        """Return the codec that a user asks for: with the first profile of its kind that fits the layout.

        Without a fitting profile the published codecs keep their tables in each payload. ValueError for an unknown
        name, for arguments that the codec does not take, and for tide and packed where the layout is given and no
        profile fits.
        """
        name, arguments = CodecSpec.parse(spec)
        kind = self._kinds.get(name)
        if kind is None:
            raise ValueError(f"unknown codec {name!r}, expected one of {', '.join(self.names())}")
        fitting = [
            found
            for found in self._profiles.values()
            if layout is not None and found.kind == kind.profile_kind and found.fits(layout)
        ]
        needs_profile = kind.codec_id in {TideCodec.codec_id, PackedCodec.codec_id}
        if needs_profile and layout is not None and not fitting:
            raise ValueError(f"codec {name!r} needs a profile of this model: make one with `kvtide calibrate`")
        return kind.make(arguments, fitting[0] if fitting else None)
