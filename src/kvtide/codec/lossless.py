"""Bit-exact codec: exponents coded by rANS, mantissas stored (docs/format.md, `lossless-2`).

Exponents of a KV cache carry about 2.7 of their 8 bits, mantissas are noise; so a plane is coded only if it shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import LayeredCodec, layer_section_ids, layer_views, sections_by_layer
from kvtide.codec.entropy import rans_paths
from kvtide.errors import CorruptPayload
from kvtide.types import Section


class LosslessCodec(LayeredCodec):
    """Splits elements into planes and codes those that shrink. Every bit pattern survives."""

    codec_id = "lossless-2"
    is_lossless = True
    quality = 0.0
    profile = None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: the planes of one layer, and their coded form."""
        return 3 * layout.layer_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        check_bits(bits, meta.layout)
        path, dtype = rans_paths()[0], meta.layout.dtype.value
        layers = zip(layer_section_ids(meta.layout.layers), layer_views(bits), strict=True)
        # In one call a layer, since threads that work side by side wait for each other between two.
        return [Section(section_id, _native.lossless_encode(path, layer, dtype).data) for section_id, layer in layers]

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write every layer into `out`. CorruptPayload for a plane of wrong method, size or content."""
        check_bits(out, meta.layout)
        for section, layer in zip(sections_by_layer(meta.layout, sections), layer_views(out), strict=True):
            _decode_layer(meta.layout, section, layer)

    def decode_layer(self, layout: BlockLayout, section: Section) -> BlockBits:
        values: BlockBits = np.empty(layout.shape[1:], layout.bits_dtype)
        _decode_layer(layout, section, values.reshape(-1).view(np.uint8))
        return values


def _decode_layer(layout: BlockLayout, section: Section, out: NDArray[np.uint8]) -> None:
    data = np.frombuffer(section.data, dtype=np.uint8)
    wrong = _native.lossless_decode(rans_paths()[0], data, layout.dtype.value, out)
    if wrong:
        raise CorruptPayload(f"{wrong}, in {len(data)} bytes of a layer of {layout.layer_bytes}")
