"""The codec that changes nothing: the block's bytes, a section for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import layer_section_ids, layer_views, sections_by_layer
from kvtide.errors import CorruptPayload
from kvtide.types import Section


class RawCodec:
    """Stores every byte as it is."""

    codec_id = "raw-1"
    is_lossless = True
    quality = 0.0
    profile = None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return 0: the sections are views."""
        return 0

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return one section a layer; they are views of `bits`, valid until it changes."""
        check_bits(bits, meta.layout)
        layers = zip(layer_section_ids(meta.layout), layer_views(bits), strict=True)
        return [Section(section_id, layer.data) for section_id, layer in layers]

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Copy each section into its layer of `out`."""
        check_bits(out, meta.layout)
        for section, layer in zip(sections_by_layer(meta.layout, sections), out, strict=True):
            layer[:] = self.decode_layer(meta.layout, section)

    def decode_layer(self, layout: BlockLayout, section: Section) -> BlockBits:
        """Return a view of the section."""
        if len(section.data) != layout.layer_bytes:
            found = f"section {section.id} has {len(section.data)} bytes"
            raise CorruptPayload(f"{found}, a layer has {layout.layer_bytes}")
        return np.frombuffer(section.data, layout.bits_dtype).reshape(layout.shape[1:])
