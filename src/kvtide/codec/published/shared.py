"""What codecs share that take distributions from a profile, or else carry them in the payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockLayout, BlockMeta, check_bits
from kvtide.codec.profile import Profile
from kvtide.codec.published.integers import (
    CODERS,
    Distribution,
    IntegerRuns,
    Integers,
    coder_of,
    decode_integers,
    encode_integers,
    fit_distribution,
    value_counts,
)
from kvtide.errors import CorruptPayload, UnencodableBlock


def distribution_arrays(name: str, by_layer: Sequence[Distribution]) -> dict[str, NDArray[Any]]:
    """Return the arrays under which a profile keeps one distribution set a layer. They must be of the rANS coder."""
    tables = [distribution.tables.to_bytes() for distribution in by_layer]
    return {
        f"{name}.shift": np.stack([distribution.shifts for distribution in by_layer]),
        f"{name}.tables": np.frombuffer(b"".join(tables), dtype=np.uint8),
        f"{name}.tables_bytes": np.array([len(table) for table in tables], dtype=np.uint32),
    }


class SharedDistributions:
    """Builds a profile's tables when they are first asked for, and keeps them. Threads may share it.

    A profile holds rANS frequencies; the prefix coder's code lengths follow from them.
    """

    def __init__(self, profile: Profile) -> None:
        self._arrays: Mapping[str, NDArray[Any]] = profile.arrays
        self._layers = profile.layers
        # A race makes the same table twice, which does no harm.
        self._built: dict[tuple[str, range, int], Distribution] = {}

    def get(self, name: str, layers: range, coder: int) -> Distribution:
        """Return the distributions of these layers. CorruptPayload if the profile has none of this name."""
        key = (name, layers, coder)
        if key not in self._built:
            self._built[key] = Distribution.join([self._stored(name, layer) for layer in layers], coder)
        return self._built[key]

    def _stored(self, name: str, layer: int) -> Distribution:
        try:
            shifts = self._arrays[f"{name}.shift"]
            tables, sizes = self._arrays[f"{name}.tables"], self._arrays[f"{name}.tables_bytes"]
        except KeyError as error:
            raise CorruptPayload(f"the profile has no distributions {name!r}") from error
        if shifts.ndim != 2 or len(shifts) != self._layers or sizes.shape != (self._layers,):
            raise CorruptPayload(f"the profile's distributions {name!r} are not of {self._layers} layers")
        stops = np.cumsum(sizes, dtype=np.uint64)
        if int(stops[-1]) != tables.size:
            raise CorruptPayload(f"the profile's tables {name!r} have {tables.size} bytes, {int(stops[-1])} expected")
        stop = int(stops[layer])
        data = shifts[layer].tobytes() + tables[stop - int(sizes[layer]) : stop].tobytes()
        return Distribution.parse(0, memoryview(data), shifts.shape[1])


class ProfiledCodec:
    """Base of codecs that encode at one level with one coder, and decode every level and coder of their profile.

    Without a profile each section carries its distributions. A profile's tables take about 1.5 KB of memory for each
    (layer, channel) once they are used.
    """

    is_lossless = False

    def __init__(self, level: int, levels: Mapping[int, float], coder: int, profile: Profile | None) -> None:
        """levels: the quality of each level, as measured on a model (docs/benchmarks.md), to rank them by."""
        if level not in levels:
            raise ValueError(f"this codec has the levels {sorted(levels)}, got {level!r}")
        if coder not in range(len(CODERS)):
            raise ValueError(f"coders are numbered 0 to {len(CODERS) - 1}, got {coder!r}")
        self.quality = levels[level]
        self._level = level
        self._coder = coder
        self._profile = profile
        self._shared = SharedDistributions(profile) if profile else None

    @property
    def profile(self) -> bytes | None:
        """Return the digest of the profile that payloads need, or None."""
        return self._profile.digest if self._profile else None

    def scratch_bytes(self, layout: BlockLayout) -> int:
        """Return a bound on the memory that encoding takes: two int16 a value of one layer, and copies while coding."""
        return 16 * layout.layer_bytes // layout.dtype.item_bytes

    def check(self, meta: BlockMeta, bits: BlockBits) -> None:
        """ValueError if `bits` is not of the layout; UnencodableBlock if the profile is of another model shape."""
        check_bits(bits, meta.layout)
        if self._profile and not self._profile.fits(meta.layout):
            raise UnencodableBlock(f"the profile is of {self._profile.model}, whose shape is another")

    def check_out(self, meta: BlockMeta, out: BlockBits) -> None:
        """ValueError if `out` is not of the layout; CorruptPayload if the profile is of another model shape."""
        check_bits(out, meta.layout)
        if self._profile and not self._profile.fits(meta.layout):
            raise CorruptPayload(f"the payload names a profile of {self._profile.model}, whose shape is another")

    def code(self, name: str, layer: int, values: Integers) -> bytes:
        """Return the coded form of `values`: (streams, runs, symbols), under the distributions of this name."""
        runs = IntegerRuns(*values.shape)
        shared = self.shared(name, range(layer, layer + 1), self._coder)
        if shared:
            return encode_integers(values, runs, shared, is_shared=True)
        return encode_integers(values, runs, self.fit(values.reshape(runs.distributions, -1)), is_shared=False)

    def uncode(self, name: str, layer: int, data: memoryview, runs: IntegerRuns) -> Integers:
        """Return what `code` was given. CorruptPayload if `data` is not its result."""
        return decode_integers(data, runs, self.shared(name, range(layer, layer + 1), coder_of(data)))

    def shared(self, name: str, layers: range, coder: int) -> Distribution | None:
        """Return the profile's distributions of these layers, None without a profile."""
        return self._shared.get(name, layers, coder) if self._shared else None

    def fit(self, values: Integers) -> Distribution:
        """Return the distributions that code the rows of `values` best, and nothing else."""
        return fit_distribution(value_counts(values), self._coder, is_open=False)


def read_scales(data: memoryview, streams: int) -> NDArray[np.uint16]:
    """Return scales, bfloat16 patterns, as (streams, tokens). CorruptPayload unless all are finite and not negative."""
    scales = np.frombuffer(data, dtype="<u2").astype(np.uint16).reshape(streams, -1)
    if scales.size and int(scales.max()) >= 0x7F80:
        raise CorruptPayload(f"a scale is not a finite positive bfloat16: {int(scales.max()):#06x}")
    return scales
