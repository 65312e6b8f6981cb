"""Blocks encoded on the device beside the engine, as they wait to be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec
from kvtide.types import Section

# Returns a block's sections, None if the device did not encode it.
DeviceEncode = Callable[[BlockMeta, BlockBits], list[Section] | None]


class DeviceCodec:
    """A codec whose blocks a device encodes, byte for byte as it would; what the device leaves, it encodes itself."""

    def __init__(self, codec: Codec, encode: DeviceEncode) -> None:
        self._codec = codec
        self._encode = encode
        self.codec_id = codec.codec_id
        self.is_lossless = codec.is_lossless
        self.quality = codec.quality
        self.profile = codec.profile

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return the codec's own bound: it may have to do the work."""
        return self._codec.scratch_bytes(layout)

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return the block's sections; see Codec."""
        found = self._encode(meta, bits)
        return self._codec.encode(meta, bits) if found is None else found

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Decode as the codec does: on the processor."""
        self._codec.decode(meta, sections, out)
