"""Bit-exact codec: exponents entropy-coded, mantissas stored (docs/format.md, `lossless-1`).

Exponents of a KV cache carry about 2.7 of their 8 bits, mantissas are noise; so a plane is coded only if it shrinks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.base import layer_section_ids, layer_views, sections_by_layer
from kvtide.errors import CorruptPayload
from kvtide.types import Section

__all__ = ["LosslessCodec"]

_PLANE = struct.Struct("<BBHI")
_STORED, _ZSTD = 0, 1
_ZSTD_LEVEL = 1
# A plane of noise can't shrink; below this share of distinct neighbours coding is worth a try. Measured on a sample.
_SAMPLE_BYTES = 16384
_NOISE_BITS = 7.9


class LosslessCodec:
    """Splits elements into byte planes and codes those that shrink. Every bit pattern survives."""

    codec_id = "lossless-1"
    profile = None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: the planes of one layer, and their coded form."""
        return 3 * layout.layer_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return one section a layer."""
        check_bits(bits, meta.layout)
        item_bytes = meta.layout.dtype.item_bytes
        layers = zip(layer_section_ids(meta.layout), layer_views(bits), strict=True)
        return [Section(section_id, _encode_layer(layer, item_bytes)) for section_id, layer in layers]

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write every layer into `out`. CorruptPayload for a plane of wrong method, size or content."""
        check_bits(out, meta.layout)
        item_bytes = meta.layout.dtype.item_bytes
        planes = np.empty(meta.layout.layer_bytes, dtype=np.uint8)
        for section, layer in zip(sections_by_layer(meta.layout, sections), layer_views(out), strict=True):
            _decode_planes(memoryview(section.data).cast("B"), item_bytes, planes)
            _native.join_planes(planes, item_bytes, layer)


def _encode_layer(layer: NDArray[np.uint8], item_bytes: int) -> bytes:
    planes = np.empty_like(layer)
    _native.split_planes(layer, item_bytes, planes)
    coder = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False)
    headers, bodies = [], []
    for plane in planes.reshape(item_bytes, -1):
        method, body = _STORED, plane.data
        if _entropy_bits(plane) < _NOISE_BITS:
            coded = coder.compress(body)
            if len(coded) < len(body):
                method, body = _ZSTD, memoryview(coded)
        headers.append(_PLANE.pack(method, 0, 0, len(body)))
        bodies.append(body)
    return b"".join((*headers, *bodies))


def _entropy_bits(plane: NDArray[np.uint8]) -> float:
    sample = plane[:: max(1, plane.size // _SAMPLE_BYTES)]
    shares = np.bincount(sample, minlength=256) / sample.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def _decode_planes(data: memoryview, item_bytes: int, planes: NDArray[np.uint8]) -> None:
    headers_bytes = item_bytes * _PLANE.size
    if len(data) < headers_bytes:
        raise CorruptPayload(f"a lossless section has at least {headers_bytes} bytes, got {len(data)}")
    offset = headers_bytes
    for index, plane in enumerate(planes.reshape(item_bytes, -1)):
        method, zero, zeros, size = _PLANE.unpack_from(data, index * _PLANE.size)
        body = data[offset : offset + size]
        offset += size
        if zero or zeros or len(body) != size:
            raise CorruptPayload(f"plane {index} says {size} bytes, {len(body)} are here")
        if method == _STORED and size == plane.size:
            plane[:] = np.frombuffer(body, dtype=np.uint8)
        elif method == _ZSTD:
            plane[:] = _decompress(body, plane.size)
        else:
            raise CorruptPayload(f"plane {index}: method {method} with {size} bytes for {plane.size} elements")
    if offset != len(data):
        raise CorruptPayload(f"a lossless section ends at {offset}, got {len(data)} bytes")


def _decompress(body: memoryview, size: int) -> NDArray[np.uint8]:
    try:
        # The frame must state its size: the decoder then never allocates more than we allow.
        if zstandard.frame_content_size(body) != size:
            raise CorruptPayload(f"zstd frame does not say that it holds {size} bytes")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(body), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise CorruptPayload(f"zstd frame does not decode: {error}") from error
