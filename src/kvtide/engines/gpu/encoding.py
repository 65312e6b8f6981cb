"""Blocks encoded on the device beside the engine, as they wait to be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec, LevelledCodec
from kvtide.codec.published.shared import ProfiledCodec
from kvtide.codec.tide import TideCodec
from kvtide.engines.gpu.groups import DeviceGroups
from kvtide.engines.gpu.kernels import Kernels
from kvtide.engines.gpu.targets import block_target
from kvtide.engines.gpu.tide_encode import TOKENS_MAX, DeviceTideEncoder, PagedBlock
from kvtide.engines.gpu.tide_model import DeviceModel
from kvtide.errors import UnencodableBlock
from kvtide.types import Section

# Returns a block's sections, None if the device did not encode it.
DeviceEncode = Callable[[Codec, BlockMeta, BlockBits], list[Section] | None]


class BlockEncoder:
    """Encodes blocks of this machine's memory by lossy codecs. One thread at a time."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._groups: DeviceGroups | None = None
        self._models: dict[bytes, DeviceModel] = {}

    def encode(self, codec: Codec, meta: BlockMeta, bits: BlockBits) -> list[Section] | None:
        """Return a block's sections, None if that is left to the processor. UnencodableBlock as the codec's own."""
        if isinstance(codec, ProfiledCodec):
            self._groups = self._groups or DeviceGroups(self._kernels)
            return self._groups.encode(codec, meta, bits)
        model = codec.model if isinstance(codec, TideCodec) else None
        if model is None or not model.profile.fits(meta.layout) or meta.layout.tokens > TOKENS_MAX:
            return None
        assert isinstance(codec, TideCodec)
        digest = model.profile.digest
        if digest not in self._models:
            self._models[digest] = DeviceModel(self._kernels, model)
        signed: Any = bits.view(f"<i{bits.itemsize}")
        with self._kernels.queue():
            block = torch.from_numpy(signed).to(self._kernels.device)
            target = block_target(block, meta.layout)
            encoder = DeviceTideEncoder(self._models[digest], target, codec.steps)
            (found,) = encoder.encode([PagedBlock(meta, target.token_starts([0]))])
        if isinstance(found, UnencodableBlock):
            raise found
        return found


class DeviceCodec:
    """A codec whose blocks a device encodes; what the device leaves, it encodes itself."""

    def __init__(self, codec: Codec, encode: DeviceEncode) -> None:
        self._codec = codec
        self._encode = encode
        self.codec_id = codec.codec_id
        self.is_lossless = codec.is_lossless
        self.quality = codec.quality
        self.profile = codec.profile
        levels = codec.coarser if isinstance(codec, LevelledCodec) else ()
        self.coarser = tuple(DeviceCodec(level, encode) for level in levels)

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return the codec's own bound: it may have to do the work."""
        return self._codec.scratch_bytes(layout)

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return the block's sections; see Codec."""
        found = self._encode(self._codec, meta, bits)
        return self._codec.encode(meta, bits) if found is None else found

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Decode as the codec does: on the processor."""
        self._codec.decode(meta, sections, out)
