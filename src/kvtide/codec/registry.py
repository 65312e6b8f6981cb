"""Finds the codec that an object names. A registry is an object that one passes on, never a global."""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.codec.base import Codec
from kvtide.codec.lossless import LosslessCodec
from kvtide.codec.raw import RawCodec

__all__ = ["CodecRegistry", "default_registry"]


class CodecRegistry:
    """Maps codec ids to codecs. A user's name (`lossless`) stands for its newest version (`lossless-2`)."""

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._by_id: dict[str, Codec] = {}
        for codec in codecs:
            if codec.codec_id in self._by_id:
                raise ValueError(f"two codecs have the id {codec.codec_id!r}")
            self._by_id[codec.codec_id] = codec

    def get(self, codec_id: str) -> Codec | None:
        """Return the codec with this id, or None: the object is then a miss."""
        return self._by_id.get(codec_id)

    def by_name(self, name: str) -> Codec:
        """Return the newest codec of this name, with or without its version. ValueError if there is none."""
        versions = [codec_id for codec_id in self._by_id if name in (codec_id, codec_id.rpartition("-")[0])]
        if not versions:
            raise ValueError(f"unknown codec {name!r}, expected one of {', '.join(self.names())}")
        return self._by_id[max(versions, key=lambda codec_id: int(codec_id.rpartition("-")[2]))]

    def names(self) -> list[str]:
        """Return all names without versions, sorted."""
        return sorted({codec_id.rpartition("-")[0] for codec_id in self._by_id})


def default_registry() -> CodecRegistry:
    """Return a registry of every codec that ships."""
    return CodecRegistry([RawCodec(), LosslessCodec()])
