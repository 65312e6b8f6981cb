"""Finds the codec that an object names, and makes the one that a user asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.block import BlockLayout
from kvtide.codec.base import Codec
from kvtide.codec.cachegen import CachegenCodec
from kvtide.codec.chunkwise import ChunkwiseCodec
from kvtide.codec.integers import CODERS
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.profile import Profile
from kvtide.codec.raw import RawCodec

__all__ = ["CodecRegistry", "CodecSpec"]


class CodecSpec(NamedTuple):
    """A codec as a user names it: `name[:level[:coder]]`, for example `cachegen:2:prefix`."""

    name: str
    level: int | None
    coder: int

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Return the spec in a text. ValueError if it is not of the form, or names no coder."""
        name, *rest = text.split(":")
        coders = [coder.name for coder in CODERS]
        if (
            not name
            or len(rest) > 2
            or (rest and not rest[0].isdecimal())
            or (len(rest) == 2 and rest[1] not in coders)
        ):
            raise ValueError(f"a codec is name[:level[:coder]] with a coder of {', '.join(coders)}, got {text!r}")
        return cls(name, int(rest[0]) if rest else None, coders.index(rest[1]) if len(rest) == 2 else 0)


# Makes a codec from level, coder and profile; a codec without levels takes none of them.
_Maker = Callable[[int | None, int, Profile | None], Codec]


class _Kind(NamedTuple):
    codec_id: str
    has_levels: bool
    make: _Maker


def _kinds() -> dict[str, _Kind]:
    return {
        "raw": _Kind(RawCodec.codec_id, False, lambda level, coder, profile: RawCodec()),
        "lossless": _Kind(LosslessCodec.codec_id, False, lambda level, coder, profile: LosslessCodec()),
        "cachegen": _Kind(
            CachegenCodec.codec_id, True, lambda level, coder, profile: CachegenCodec(level or 3, coder, profile)
        ),
        "chunkwise": _Kind(
            ChunkwiseCodec.codec_id, True, lambda level, coder, profile: ChunkwiseCodec(level or 3, coder, profile)
        ),
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
            if kind is None or (profile is not None and (not kind.has_levels or profile not in self._profiles)):
                return None
            found = kind.make(None, 0, self._profiles[profile] if profile else None)
            self._decoders[codec_id, profile] = found
        return found

    def make(self, spec: str, layout: BlockLayout | None = None) -> Codec:
        """Return the codec that a user asks for: with the first profile of its name that fits the layout, or none.

        ValueError for an unknown name, level or coder, and for a level where there are none.
        """
        name, level, coder = CodecSpec.parse(spec)
        kind = self._kinds.get(name)
        if kind is None:
            raise ValueError(f"unknown codec {name!r}, expected one of {', '.join(self.names())}")
        if not kind.has_levels and (level is not None or coder):
            raise ValueError(f"codec {name!r} has no levels and no choice of coder, got {spec!r}")
        if level == 0:
            raise ValueError(f"levels count from 1, got {spec!r}; level 0 is the codec 'lossless'")
        fitting = [p for p in self._profiles.values() if layout is not None and p.kind == name and p.fits(layout)]
        return kind.make(level, coder, fitting[0] if fitting else None)
