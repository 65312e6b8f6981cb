"""Finds the codec that an object names, and makes the one that a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.block import BlockLayout
from kvtide.codec.base import Codec, RawCodec
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.profile import Profile

# Makes a codec from the spec's arguments and a profile. ValueError for arguments that it does not take.
_Maker = Callable[[tuple[str, ...], Profile | None], Codec]


class _Kind(NamedTuple):
    codec_id: str
    profile_kind: str | None
    make: _Maker


def _plain(codec: Codec, arguments: tuple[str, ...]) -> Codec:
    if arguments:
        raise ValueError(f"codec {codec.codec_id!r} has no levels and no choice of coder, got {arguments}")
    return codec


def _level_and_coder(arguments: tuple[str, ...]) -> tuple[int, int]:
    from kvtide.codec.published import CODERS

    level, coder = (*arguments, *("3", CODERS[0].name)[len(arguments) :])
    coders = [found.name for found in CODERS]
    if not level.isdecimal() or int(level) == 0 or coder not in coders:
        raise ValueError(f"expected a level from 1 on and a coder of {', '.join(coders)}, got {arguments}")
    return int(level), coders.index(coder)


def _cachegen(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
    from kvtide.codec.published import CachegenCodec

    finest, dash, coarsest = arguments[0].partition("-") if arguments else ("", "", "")
    if not dash:
        return CachegenCodec(*_level_and_coder(arguments), profile)
    first, coder = _level_and_coder((finest, *arguments[1:]))
    last, _ = _level_and_coder((coarsest,))
    coarser = [CachegenCodec(level, coder, profile) for level in range(first + 1, last + 1)]
    if not coarser:
        raise ValueError(f"levels are from the finest to the coarsest, as 1-4, got {arguments[0]}")
    return CachegenCodec(first, coder, profile, coarser)


def _snippet(arguments: tuple[str, ...], _profile: Profile | None) -> Codec:
    from kvtide.codec.published import SnippetCodec

    return _plain(SnippetCodec(), arguments)


def _chunkwise(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
    from kvtide.codec.published import ChunkwiseCodec

    return ChunkwiseCodec(*_level_and_coder(arguments), profile)


def _tide(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
    from kvtide.codec.tide import DEFAULT_QUALITY, DEFAULT_REFINEMENTS, TideCodec

    quality, refinements = (*arguments, *(str(DEFAULT_QUALITY), str(DEFAULT_REFINEMENTS))[len(arguments) :])
    try:
        return TideCodec(profile, float(quality), int(refinements))
    except ValueError as error:
        raise ValueError(f"codec tide[:quality[:refinements]], got {arguments}: {error}") from error


def _packed(arguments: tuple[str, ...], profile: Profile | None) -> Codec:
    from kvtide.codec.packed import BASE_QUALITY, PackedCodec
    from kvtide.importance import CHUNK_TOKENS

    quality, chunk_tokens = (*arguments, *(str(BASE_QUALITY), str(CHUNK_TOKENS))[len(arguments) :])
    try:
        return PackedCodec(profile, float(quality), int(chunk_tokens))
    except ValueError as error:
        raise ValueError(f"codec packed[:quality[:chunk tokens]], got {arguments}: {error}") from error


# Codecs by the name that a user gives: the id that objects carry, the kind of profile, what makes one. Each is
# imported when it is first made.
_KINDS = {
    "raw": _Kind(RawCodec.codec_id, None, lambda arguments, profile: _plain(RawCodec(), arguments)),
    "lossless": _Kind(LosslessCodec.codec_id, None, lambda arguments, profile: _plain(LosslessCodec(), arguments)),
    "cachegen": _Kind("cachegen-2", "cachegen", _cachegen),
    "cachegen-snippet": _Kind("snippet-1", None, _snippet),
    "chunkwise": _Kind("chunkwise-1", "chunkwise", _chunkwise),
    "packed": _Kind("packed-1", "tide-layer", _packed),
    "tide": _Kind("tide-1", "tide-layer", _tide),
    "tide-light": _Kind("tide-1", "tide-light", _tide),
    "tide-deep": _Kind("tide-1", "tide-deep", _tide),
}
# These can't do without a profile.
_PROFILED = {"tide-1", "packed-1"}


class CodecRegistry:
    """Knows every codec that ships, and the profiles that it was given."""

    def __init__(self, profiles: Sequence[Profile] = ()) -> None:
        self._profiles = {profile.digest: profile for profile in profiles}
        # What decodes: one for each id and profile, made when first asked for. A race makes one twice, harmlessly.
        self._decoders: dict[tuple[str, bytes | None], Codec] = {}

    def names(self) -> list[str]:
        """Return the names of all codecs, sorted."""
        return sorted(_KINDS)

    def get(self, codec_id: str, profile: bytes | None) -> Codec | None:
        """Return what decodes objects of this codec id and profile digest, or None: the object is then a miss."""
        found = self._decoders.get((codec_id, profile))
        if found is None:
            kind = next((kind for kind in _KINDS.values() if kind.codec_id == codec_id), None)
            if kind is None or (profile is not None and (kind.profile_kind is None or profile not in self._profiles)):
                return None
            found = kind.make((), self._profiles[profile] if profile else None)
            assert found.codec_id == codec_id
            self._decoders[codec_id, profile] = found
        return found

    def make(self, spec: str, layout: BlockLayout | None = None) -> Codec:
        """Return the codec that a user asks for: with the first profile of its kind that fits the layout.

        spec: `cachegen[:level[-level][:coder]]`, `tide[:quality[:refinements]]`, a name alone. Without a profile that
        fits the published codecs keep their tables in each payload. ValueError for an unknown name, for arguments that
        the codec does not take, and for tide and packed where the layout is given and no profile fits.
        """
        name, *arguments = spec.split(":")
        if not name or len(arguments) > 2:
            raise ValueError(f"a codec is name[:argument[:argument]], got {spec!r}")
        kind = _KINDS.get(name)
        if kind is None:
            raise ValueError(f"unknown codec {name!r}, expected one of {', '.join(self.names())}")
        fitting = [
            found
            for found in self._profiles.values()
            if layout is not None and found.kind == kind.profile_kind and found.fits(layout)
        ]
        needs_profile = kind.codec_id in _PROFILED
        if needs_profile and layout is not None and not fitting:
            raise ValueError(f"codec {name!r} needs a profile of this model: make one with `kvtide calibrate`")
        return kind.make(tuple(arguments), fitting[0] if fitting else None)
