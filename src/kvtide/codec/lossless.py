"""Bit-exact codec: exponents coded by rANS, mantissas stored (docs/format.md, `lossless-2`).

Exponents of a KV cache carry about 2.7 of their 8 bits, mantissas are noise; so a plane is coded only if it shrinks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import repeat, starmap

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype, check_bits
from kvtide.codec.base import layer_section_ids, layer_views, sections_by_layer
from kvtide.codec.entropy import ESCAPE, SYMBOLS, Escapes, RansTables, Runs, count_values, rans_paths
from kvtide.errors import CorruptPayload
from kvtide.types import Section

_PLANE = struct.Struct("<BBHI")
_STORED, _CONSTANT, _RANS = 0, 1, 2
# bases of K and V, zero, bytes of the tables, escapes of K and V, bytes of their streams
_CODED = struct.Struct("<BBHI2I2I")
_PLANE_BITS = {KVDtype.BFLOAT16: (8, 8), KVDtype.FLOAT16: (5, 3, 8), KVDtype.FLOAT32: (8, 8, 8, 8)}
# A plane of noise can't shrink; this share of a sample's bits tells without counting the plane.
_SAMPLE_ELEMENTS = 16384
_NOISE_SHARE = 0.99


class LosslessCodec:
    """Splits elements into planes and codes those that shrink. Every bit pattern survives."""

    codec_id = "lossless-2"
    is_lossless = True
    quality = 0.0
    profile = None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound: the planes of one layer, and their coded form."""
        return 3 * layout.layer_bytes

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        """Return one section a layer."""
        check_bits(bits, meta.layout)
        encoded = map(_encode_layer, layer_views(bits), repeat(meta.layout.dtype))
        return [*starmap(Section, zip(layer_section_ids(meta.layout.layers), encoded, strict=True))]

    def decode(self, meta: BlockMeta, sections: Sequence[Section], out: BlockBits) -> None:
        """Write every layer into `out`. CorruptPayload for a plane of wrong method, size or content."""
        check_bits(out, meta.layout)
        for section, layer in zip(sections_by_layer(meta.layout, sections), layer_views(out), strict=True):
            _decode_layer(meta.layout, section, layer)

    def decode_layer(self, layout: BlockLayout, section: Section) -> BlockBits:
        """Return the section's layer."""
        values: BlockBits = np.empty(layout.shape[1:], layout.bits_dtype)
        _decode_layer(layout, section, values.reshape(-1).view(np.uint8))
        return values


def _encode_layer(layer: NDArray[np.uint8], dtype: KVDtype) -> bytes:
    widths = _PLANE_BITS[dtype]
    planes = np.empty((len(widths), 2, layer.size // dtype.item_bytes // 2), dtype=np.uint8)
    _native.split_planes(layer, dtype.value, planes.reshape(-1))
    headers, bodies = list[bytes](), list[bytes | memoryview]()
    for plane, width in zip(planes, widths, strict=True):
        method, body = _encode_plane(plane, width)
        headers.append(_PLANE.pack(method, 0, 0, len(body)))
        bodies.append(body)
    return b"".join((*headers, *bodies))


def _encode_plane(plane: NDArray[np.uint8], width: int) -> tuple[int, bytes | memoryview]:
    if (plane == plane[0, 0]).all():
        return _CONSTANT, plane[0, :1].tobytes()
    stored = plane.reshape(-1).data
    if width == 8 and _sampled_bits(plane) > width * _NOISE_SHARE:
        return _STORED, stored
    coded = _code(plane, width)
    return (_RANS, coded) if len(coded) < plane.size else (_STORED, stored)


def _sampled_bits(plane: NDArray[np.uint8]) -> float:
    sample = plane.reshape(-1)[:: max(1, plane.size // _SAMPLE_ELEMENTS)]
    shares = np.bincount(sample, minlength=256) / sample.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def _code(plane: NDArray[np.uint8], width: int) -> bytes:
    runs = _runs(plane.shape[1])
    counts = count_values(plane, runs, 2)
    if width == 8:
        bases = (_best_base(counts[0]), _best_base(counts[1]))
        symbols, escapes = _symbols(plane, runs, bases)
        by_symbol = np.stack([np.roll(row, -base) for row, base in zip(counts, bases, strict=True)])
        by_symbol[:, ESCAPE] = by_symbol[:, ESCAPE:].sum(axis=1)
        symbol_counts = np.ascontiguousarray(by_symbol[:, :SYMBOLS])
    else:
        bases, symbols = (0, 0), plane
        escapes = Escapes(np.empty(0, np.uint8), np.zeros(2, np.uint64))
        symbol_counts = np.ascontiguousarray(counts[:, :SYMBOLS])
    tables = RansTables.build(symbol_counts)
    written, streams = tables.to_bytes(), tables.encode(symbols, runs)
    header = _CODED.pack(*bases, 0, len(written), *map(int, escapes.counts), *streams.sizes)
    return b"".join((header, written, streams.data, escapes.elements.data))


def _symbols(plane: NDArray[np.uint8], runs: Runs, bases: tuple[int, int]) -> tuple[NDArray[np.uint8], Escapes]:
    """Return symbols, and escapes for values that have none."""
    distances = np.arange(256, dtype=np.uint8) - np.array(bases, dtype=np.uint8)[:, None]
    symbols = np.empty_like(plane)
    _native.map_bytes(plane, runs.symbols, runs.tables, np.minimum(distances, np.uint8(ESCAPE)), symbols)
    is_escape = symbols == ESCAPE
    counts = np.array([np.count_nonzero(row) for row in is_escape], dtype=np.uint64)
    return symbols, Escapes(plane.reshape(-1)[np.flatnonzero(is_escape)], counts)


def _best_base(counts: NDArray[np.uint64]) -> int:
    """Return the first of the 31 neighbouring values, modulo 256, that hold most counts; the lowest of equals."""
    around = np.concatenate([counts, counts[: ESCAPE - 1]])
    sums = np.convolve(around.astype(np.int64), np.ones(ESCAPE, dtype=np.int64), mode="valid")
    return int(sums.argmax())


def _runs(count: int) -> Runs:
    """Return the runs of one stream for K and one for V, each with a table of its own."""
    return Runs(np.array([[0], [1]], dtype=np.uint16), count)


def _decode_layer(layout: BlockLayout, section: Section, out: NDArray[np.uint8]) -> None:
    # In one call, since threads that decode side by side wait for each other between two.
    data = np.frombuffer(section.data, dtype=np.uint8)
    wrong = _native.lossless_decode(rans_paths()[0], data, layout.dtype.value, out)
    if wrong:
        raise CorruptPayload(f"{wrong}, in {len(data)} bytes of a layer of {layout.layer_bytes}")
