"""A section as bytes: prefix, loudness and tokens that stand apart (in base sections), streams, escapes.

And the layers of a block as they are stored, which sections are made of. Format: docs/codec.md, "Codec tide-1".
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide import _native
from kvtide.block import BlockBits, BlockMeta, KVDtype
from kvtide.codec.base import ByteReader
from kvtide.codec.entropy import Streams
from kvtide.codec.rotary import Rotary, RotaryTables
from kvtide.codec.tide.grid import PARTS, STATE_PAIRS, STREAMS, THIRD, CodedLists, part_bounds
from kvtide.errors import CorruptPayload, UnencodableBlock

REFINEMENTS_MAX = 7
STEP_UNITS_MAX = 480
GAIN_UNITS_MAX = 60

_PREFIX = struct.Struct("<hBB4I")
# Of each pair of lists, in as many bytes as a section's values could need.
_STATE_COUNTS_BYTES_MAX = 8 * len(STATE_PAIRS)
_PART_BITS = np.arange(0, 2 * PARTS, 2, dtype=np.uint8)
# The parts of the four tokens that a byte stands for.
_UNPACKED = (np.arange(256)[:, None] >> _PART_BITS & 3).astype(np.uint8)
# 2^120: 127 of it, turned by RoPE, are a finite float32.
_SCALE_BITS_MAX = 0x7B80

# (layers, 2, tokens, kv_heads, head_dim), or fewer dimensions.
Floats = NDArray[np.float32]
# How many powers of two each channel is multiplied by to be in line with others: (layers, 2, channels).
Octaves = NDArray[np.int16]
# As native kernels take them: cosines and sines of (kinds, tokens, pairs), the kind of each layer, first dim, pairing.
NativeTurns = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8], int, bool]


class Steps(NamedTuple):
    """The step of the last refinement, in units, and how many refinements there are after the base.

    is_trellis: levels of the last refinement lie on a trellis, and are thirds of one another all the same.
    """

    final_units: int
    refinements: int
    is_trellis: bool = False

    @property
    def base_units(self) -> int:
        """Return the base's step."""
        return self.final_units + THIRD * self.refinements

    def has_states(self, refinement: int) -> bool:
        """Tell whether a section's levels lie on a trellis, and are not those of a coarser step."""
        return self.is_trellis and refinement == self.refinements


class SectionBytes(NamedTuple):
    """The fields of every section. state_counts: of the last one where levels lie on a trellis."""

    steps: Steps
    lists: CodedLists
    state_counts: bytes = b""


class Loudness(NamedTuple):
    """The part that each token belongs to, and how many units louder than usual each part is."""

    parts: NDArray[np.uint8]
    gains: NDArray[np.int64]

    @property
    def places(self) -> NDArray[np.uint16]:
        """Return the tokens in coded order: by part, then by position."""
        return np.argsort(self.parts, kind="stable").astype(np.uint16)


class Apart(NamedTuple):
    """Tokens that are kept whole, not transformed: positions, a scale for each head and byte for each value.

    scales: (layers, 2, tokens, kv_heads), bfloat16 patterns; values: (layers, 2, tokens, kv_heads, head_dim). They are
    those of values in line: times two to the power of the profile's octaves.
    """

    positions: NDArray[np.uint16]
    scales: NDArray[np.uint16]
    values: NDArray[np.int8]

    def with_octaves(self, octaves: Octaves) -> Apart:
        """Return it with a scale for each value, (layers, 2, tokens, channels), as values are stored."""
        scales = (self.scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
        layers, two, tokens, heads = scales.shape
        by_head = np.exp2(-octaves).astype(np.float32).reshape(layers, two, 1, heads, -1)
        each = (scales[..., None] * by_head).reshape(layers, two, tokens, octaves.shape[-1])
        return self._replace(scales=(each.view(np.uint32) >> np.uint32(16)).astype(np.uint16))


class Base(NamedTuple):
    """The further fields of a base section."""

    loudness: Loudness
    apart: Apart


def join_refinement(section: SectionBytes, *base: bytes) -> bytes:
    """Return the bytes of a section. base: what a base has besides, in pieces."""
    lists = section.lists
    head = _PREFIX.pack(*section.steps, *lists.streams.sizes, *lists.escape_counts)
    return b"".join([head, *base, section.state_counts, lists.streams.data, lists.escapes.astype("<i2").tobytes()])


def join_base(section: SectionBytes, base: Base) -> bytes:
    """Return the bytes of a base section."""
    tokens = len(base.loudness.parts)
    padded = np.zeros(-(-tokens // PARTS) * PARTS, dtype=np.uint8)
    padded[:tokens] = base.loudness.parts
    packed = (padded.reshape(-1, PARTS) << _PART_BITS).sum(axis=1)
    positions, scales, values = base.apart
    parts = [base.loudness.gains.astype(np.int8), packed.astype(np.uint8), np.array([len(positions)], dtype="<u2")]
    parts += [positions.astype("<u2"), scales.astype("<u2"), values]
    return join_refinement(section, *(each.tobytes() for each in parts))


def join_state_counts(counts: NDArray[np.int64]) -> bytes:
    """Return how many items of each pair of lists quantiser 1 has. counts: of quantiser 0 and 1, (pairs, 2)."""
    pairs = zip(counts[:, 1].tolist(), counts.sum(axis=1).tolist(), strict=True)
    return b"".join(count.to_bytes(_bytes_of(most), "little") for count, most in pairs)


def split_state_counts(data: bytes, sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts that `join_state_counts` joined. sums: of both quantisers. CorruptPayload if it is not that."""
    found, start = np.empty((len(sums), 2), dtype=np.int64), 0
    for pair, most in enumerate(sums.tolist()):
        stop = start + _bytes_of(most)
        found[pair, 1] = int.from_bytes(data[start:stop], "little")
        start = stop
    found[:, 0] = sums - found[:, 1]
    if start != len(data) or (found < 0).any():
        raise CorruptPayload(f"tide: {len(data)} bytes say how a trellis shares {int(sums.sum())} items out")
    return found


def _bytes_of(most: int) -> int:
    return (most.bit_length() + 7) // 8


class _Reader(ByteReader):
    """Reads a section, from the prefix on. CorruptPayload if it is none."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        final_units, refinements, trellis, *counts = _PREFIX.unpack(self.take(_PREFIX.size))
        if trellis > 1 or abs(final_units) > STEP_UNITS_MAX or refinements > REFINEMENTS_MAX:
            raise CorruptPayload(f"tide: step {final_units} with {refinements} refinements, levels of kind {trellis}")
        self.steps = Steps(final_units, refinements, bool(trellis))
        self._sizes, self._escape_counts = tuple(counts[:STREAMS]), tuple(counts[STREAMS:])

    def body(self) -> SectionBytes:
        """Return streams and escapes, which fill the rest, but for a trellis' counts."""
        streams_bytes, escapes_bytes = sum(self._sizes), 2 * sum(self._escape_counts)
        left = len(self.left) - streams_bytes - escapes_bytes
        if left and not (self.steps.is_trellis and 0 < left <= _STATE_COUNTS_BYTES_MAX):
            raise CorruptPayload(f"tide: {left} bytes too many")
        state_counts = bytes(self.take(left))
        streams = Streams(self.take(streams_bytes), self._sizes)
        escapes = np.frombuffer(self.take(escapes_bytes), dtype="<i2").astype(np.int16)
        return SectionBytes(self.steps, CodedLists(streams, escapes, self._escape_counts), state_counts)


def steps_of(data: memoryview) -> Steps:
    """Return what a section's prefix says of steps. CorruptPayload if it is none."""
    return _Reader(data).steps


def split_refinement(data: memoryview) -> SectionBytes:
    """Return what `join_refinement` joined. CorruptPayload if it is not that."""
    return _Reader(data).body()


def split_base(data: memoryview, shape: tuple[int, ...]) -> tuple[SectionBytes, Base]:
    """Return what `join_base` joined of layers of this shape. CorruptPayload if it is not that."""
    layers, _, tokens, kv_heads, head_dim = shape
    reader = _Reader(data)
    loudness = _read_loudness(reader, tokens)
    (count,) = struct.unpack("<H", reader.take(2))
    if count > tokens:
        raise CorruptPayload(f"tide: {count} of {tokens} tokens stand apart")
    positions = np.frombuffer(reader.take(2 * count), dtype="<u2").astype(np.uint16)
    if count and (int(positions[-1]) >= tokens or (np.diff(positions.astype(np.int64)) <= 0).any()):
        raise CorruptPayload("tide: positions of tokens that stand apart must grow")
    scales = reader.take_scales(layers, 2, count, kv_heads)
    values = np.frombuffer(reader.take(scales.size * head_dim), dtype=np.int8).reshape(*scales.shape, head_dim)
    return reader.body(), Base(loudness, Apart(positions, scales, values))


def gains_of(data: memoryview) -> NDArray[np.int64]:
    """Return how much louder than usual the tokens of a base section are, part by part. CorruptPayload if it is cut."""
    return np.frombuffer(_Reader(data).take(PARTS), dtype=np.int8).astype(np.int64)


def _read_loudness(reader: _Reader, tokens: int) -> Loudness:
    gains = np.frombuffer(reader.take(PARTS), dtype=np.int8).astype(np.int64)
    packed = np.frombuffer(reader.take(-(-tokens // PARTS)), dtype=np.uint8)
    parts = _UNPACKED[packed].reshape(-1)
    sizes = np.bincount(parts[:tokens], minlength=PARTS)
    is_loud = max(map(abs, gains.tolist())) > GAIN_UNITS_MAX
    if is_loud or parts[tokens:].any() or (sizes != np.diff(part_bounds(tokens))).any():
        raise CorruptPayload("tide: parts of tokens are not of the sizes that they must have")
    return Loudness(parts[:tokens], gains)


class KeyRotation:
    """The rotation of a block's keys, forth or back: tables are made once for all layers that turn alike."""

    def __init__(self, meta: BlockMeta, rotary: Rotary | None, is_back: bool) -> None:
        """is_back: to before RoPE."""
        layers, tokens = meta.layout.layers, meta.layout.tokens
        self._kinds = np.zeros(layers, dtype=np.uint8)
        if rotary is None:
            nothing = np.empty((1, tokens, 0), dtype=np.float32)
            self._tables, self._dims = RotaryTables(nothing, nothing), (0, False)
            return
        make = rotary.inverse_tables if is_back else rotary.tables
        frequencies = [rotary.frequencies(layer) for layer in range(layers)]
        kinds = list(dict.fromkeys(frequencies))
        self._kinds[:] = [kinds.index(each) for each in frequencies]
        tables = [make(meta.start, tokens, frequencies.index(kind)) for kind in kinds]
        self._tables = RotaryTables(*(np.stack(part) for part in zip(*tables, strict=True)))
        self._dims = (rotary.dim_start, rotary.neighbours)

    def of(self, layers: slice) -> NativeTurns:
        """Return what the native kernels take for some layers."""
        return (*self._tables, self._kinds[layers], *self._dims)


class StoredLayers(NamedTuple):
    """Some layers of a block as they are stored, from `layer_start` on, contiguous, and how their keys turn."""

    bits: BlockBits
    dtype: KVDtype
    layer_start: int
    turns: KeyRotation

    @property
    def layers(self) -> slice:
        """Return these layers' numbers in the model."""
        return slice(self.layer_start, self.layer_start + len(self.bits))


def load_values(stored: StoredLayers) -> Floats:
    """Return layers as float32, keys turned. UnencodableBlock if a value is not finite."""
    out = np.empty(stored.bits.shape, dtype=np.float32)
    cos, sin, kinds, dim_start, neighbours = stored.turns.of(stored.layers)
    for layer, kind in enumerate(kinds):
        for which, (cosines, sines) in enumerate(((cos[kind], sin[kind]), (cos[kind, :, :0], sin[kind, :, :0]))):
            half = stored.bits[layer, which].reshape(-1).view(np.uint8)
            turn = (dim_start, neighbours, np.ascontiguousarray(cosines), np.ascontiguousarray(sines))
            _native.rope_load(half, stored.dtype.code, *turn, out[layer, which])
    if not np.isfinite(out).all():
        raise UnencodableBlock("a value is not finite")
    return out


def keep_apart(stored: StoredLayers, positions: NDArray[np.uint16], octaves: Octaves | None) -> Apart:
    """Return these tokens as they are kept, by the layers' octaves. UnencodableBlock for values too large."""
    layers, _, _, *heads = stored.bits.shape
    # As most blocks do.
    if not len(positions):
        nothing = np.empty((layers, 2, 0, *heads), dtype=np.int8)
        return Apart(positions, np.empty(nothing.shape[:-1], dtype=np.uint16), nothing)
    tokens = load_values(stored)[:, :, positions]
    if octaves is not None:
        tokens *= np.exp2(octaves).astype(np.float32).reshape(layers, 2, 1, *heads)
    return kept_tokens(tokens, positions)


def kept_tokens(tokens: Floats, positions: NDArray[np.uint16]) -> Apart:
    """Return tokens, keys before RoPE, as they are kept. UnencodableBlock if a value is too large for bfloat16."""
    peaks = np.abs(tokens).max(axis=-1, initial=0.0) / np.float32(127)
    scales = (peaks.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    if scales.size and int(scales.max()) >= _SCALE_BITS_MAX:
        raise UnencodableBlock("a value is too large")
    steps = np.maximum((scales << np.uint32(16)).view(np.float32), np.float32(1e-38))[..., None]
    return Apart(positions, scales.astype(np.uint16), np.rint(tokens / steps).astype(np.int8))
