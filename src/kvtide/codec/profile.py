"""Profiles: static statistics of one model, or one group of its layers, named by payloads through their digest.

`kvtide calibrate` fits them, once (docs/format.md, "Profile"). A payload whose profile is not here is a miss; one
of another model can't be chosen by mistake, since the shape is part of the profile and the digest part of the object.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockLayout
from kvtide.codec.base import ByteReader
from kvtide.errors import CorruptPayload

PROFILE_BYTES_MAX = 4 << 30
_MAGIC = b"\x89KVTPROF"
_VERSION = 1
_PREFIX = struct.Struct("<8sHHI")
_DIGEST_BYTES = 32
_DTYPES = {"u1", "u2", "u4", "u8", "i2", "i4", "f4", "f8"}


class _ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Origin(msgspec.Struct, frozen=True):
    kind: str
    model: str
    layers: int
    kv_heads: int
    head_dim: int
    texts: int
    tokens: int


class _Description(_Origin, frozen=True, forbid_unknown_fields=True):
    arrays: tuple[_ArrayEntry, ...]


class Profile(_Origin, frozen=True):
    """Arrays by name, for one model shape. Made of whole bytes: equal contents give equal digests."""

    arrays: Mapping[str, NDArray[Any]]
    digest: bytes

    @classmethod
    def make(
        cls,
        kind: str,
        model: str,
        layout: BlockLayout,
        calibrated_on: tuple[int, int],
        arrays: Mapping[str, NDArray[Any]],
    ) -> Profile:
        """Return the profile of these arrays; `calibrated_on` are the texts and tokens that it was fitted on."""
        shape = (layout.layers, layout.kv_heads, layout.head_dim)
        return cls.parse(cls(kind, model, *shape, *calibrated_on, arrays, b"").to_bytes())

    def with_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> Profile:
        """Return a profile with these arrays added or replaced; its digest is another."""
        return self.parse(msgspec.structs.replace(self, arrays={**self.arrays, **arrays}).to_bytes())

    @property
    def group(self) -> str:
        """The group of layers that it is of, as `LayerGroup.text` has it; empty for a model's only one."""
        found = self.arrays.get("group")
        return "" if found is None else found.tobytes().decode(errors="replace")

    @property
    def calibration(self) -> bytes:
        """The name that profiles of all groups of one calibration share; empty for that of a model's only group."""
        found = self.arrays.get("calibration")
        return b"" if found is None else found.tobytes()

    def fits(self, layout: BlockLayout) -> bool:
        """Tell whether blocks of this layout are of the profile's model shape."""
        return (self.layers, self.kv_heads, self.head_dim) == (layout.layers, layout.kv_heads, layout.head_dim)

    def to_bytes(self) -> bytes:
        """Return the file."""
        arrays = sorted(self.arrays.items())
        entries = tuple(_ArrayEntry(name, each.dtype.str[1:], each.shape) for name, each in arrays)
        text = msgspec.json.encode(_Description(*(*msgspec.structs.astuple(self)[:-2], entries)))
        parts = [_PREFIX.pack(_MAGIC, _VERSION, 0, len(text)), text, *(each.tobytes() for _, each in arrays)]
        body = b"".join(parts)
        return body + hashlib.sha256(body).digest()

    @classmethod
    def parse(cls, data: bytes) -> Profile:
        """Return the profile in a file's bytes. CorruptPayload if they are not exactly one."""
        if len(data) < _PREFIX.size + _DIGEST_BYTES:
            raise CorruptPayload(f"a profile has at least {_PREFIX.size + _DIGEST_BYTES} bytes, got {len(data)}")
        magic, version, zero, description_bytes = _PREFIX.unpack_from(data)
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if magic != _MAGIC or version != _VERSION or zero:
            raise CorruptPayload(f"not a profile of version {_VERSION}: it begins with {magic!r}, version {version}")
        if hashlib.sha256(body).digest() != digest:
            raise CorruptPayload("the profile's digest does not match its content")
        try:
            found = msgspec.json.decode(body[_PREFIX.size : _PREFIX.size + description_bytes], type=_Description)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptPayload(f"the profile's description does not parse: {error}") from error
        arrays = _read_arrays(memoryview(body)[_PREFIX.size + description_bytes :], found.arrays)
        return cls(*(*msgspec.structs.astuple(found)[:-1], arrays, digest))


def _read_arrays(data: memoryview, entries: tuple[_ArrayEntry, ...]) -> dict[str, NDArray[Any]]:
    arrays, reader = dict[str, NDArray[Any]](), ByteReader(data)
    for entry in entries:
        if entry.dtype not in _DTYPES or min(entry.shape, default=1) < 0 or entry.name in arrays:
            raise CorruptPayload(f"array {entry.name!r} of the profile has type {entry.dtype!r}, shape {entry.shape}")
        dtype = np.dtype(f"<{entry.dtype}")
        piece = reader.take(dtype.itemsize * math.prod(entry.shape))
        try:
            arrays[entry.name] = np.frombuffer(piece, dtype=dtype).reshape(entry.shape)
        except (ValueError, OverflowError) as error:
            raise CorruptPayload(f"array {entry.name!r} of the profile has a shape of none: {error}") from error
    if reader.left:
        raise CorruptPayload(f"the profile has {len(reader.left)} bytes behind its last array")
    return arrays
