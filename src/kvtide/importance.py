"""Importance of tokens (IMPRESS, FAST '25): probes, guards, scores over uses, packing. Pure: arrays in, arrays out.

Importance is attention mass, 1 for a token that gets its even share. Guards look at a layer at a time, and then at
what all layers gave. A block's average importance over past uses is a record beside it (docs/format.md). Invariant:
merging records is commutative, associative and idempotent: a record has an entry for each writer, writers change none
but their own, and the later version of an entry wins. An order lists logical tokens as they are stored,
`order[place] = token`, and never leaves its block.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtide.errors import CorruptPayload
from kvtide.types import BlockKey, ObjectId

Floats = NDArray[np.float32]
ALPHA = 0.6
# Between ordinary prompts and adversarial ones (decision 0013 has the measurements).
ALIKE = 0.1
# Tokens so far apart are compared with neighbours; further ones differ by place, too.
APART = (2, 3)
# Below this a token's mass, in even shares, is rounding.
MASS_MIN = 1e-5
# Logarithms of importance that differ by less are attention to everything alike.
SPREAD_MIN = 0.1
# Of fewer tokens a mean is chance; loading them whole costs little.
TOKENS_MIN = 128


class AllHeads:
    """A probe of every query head (H2O); with low-bit keys, ours."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        """Return the query heads that are asked, whose keys must be there."""
        return list(range(heads))


class FirstHeads(AllHeads):
    """A probe of the first heads of a layer (IMPRESS takes three)."""

    def __init__(self, count: int = 3) -> None:
        if count < 1:
            raise ValueError(f"a probe asks at least one head, got {count}")
        self._count = count

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return list(range(min(self._count, heads)))


def top_tokens(importance: Floats, count: int) -> NDArray[np.int64]:
    """Return the `count` most important tokens, ascending; among equals the earliest."""
    return np.sort(np.argsort(-importance, kind="stable")[:count])


class Guard(Protocol):
    """Judges a selection layer by layer, and then by what it found in all of them."""

    def score(self, importance: Floats, count: int, kept: NDArray[np.int64]) -> float:
        """Return how far a layer's selection of `count` tokens may stand for the whole, from 0 to 1.

        importance: by head, (rows, prefix). kept: tokens that come in any case.
        """

    def trusts(self, scores: Sequence[float], ratio: float) -> bool:
        """Tell from the scores of all layers, one or more, whether a selection of a share of the tokens will do."""


class HeadsAgree(Guard):
    """IMPRESS: the top tokens of the probed heads are more alike than t = j^ALPHA, j being the level of chance."""

    def score(self, importance: Floats, count: int, kept: NDArray[np.int64]) -> float:
        # One head agrees with itself.
        tops = [set(top_tokens(row, count).tolist()) for row in importance]
        pairs = [len(one & other) / len(one | other) for one, other in combinations(tops, 2)]
        return float(np.mean(pairs)) if pairs else 1.0

    def trusts(self, scores: Sequence[float], ratio: float) -> bool:
        # j: of two random selections of a share of the tokens.
        return bool(median(scores) >= (ratio / (2 - ratio)) ** ALPHA)


class NeighboursAgree(Guard):
    """Ours: neighbouring tokens matter alike, since what a text says takes several of them.

    In shuffled text and in noise single tokens stand out, whatever is asked. Length and ratio hardly move the score, as
    nothing is counted against the whole. Only the deeper half of the layers is asked: the first go by token and place.
    """

    def score(self, importance: Floats, count: int, kept: NDArray[np.int64]) -> float:
        """Return how much less logarithms of neighbours differ than those two and three apart, the median over heads.

        0 where neighbours differ more, for attention to everything alike, and for a prefix that is too short to tell.
        """
        mass = np.delete(importance, kept, axis=1)
        if mass.shape[1] < TOKENS_MIN:
            return 0.0
        mass += np.float32(MASS_MIN)
        known = np.log(mass, out=mass)
        near, *others = (np.abs(known[:, apart:] - known[:, :-apart]).mean(axis=1) for apart in (1, *APART))
        far = np.mean(others, axis=0)
        alike = np.where(far > SPREAD_MIN, 1 - near / np.maximum(far, SPREAD_MIN), 0.0)
        return max(0.0, float(np.median(alike)))

    def trusts(self, scores: Sequence[float], ratio: float) -> bool:
        return median(scores[len(scores) // 2 :]) >= ALIKE


WRITER_BYTES = 8
# Writers that a record remembers: those that wrote last.
WRITERS_MAX = 8
# A use counts half after this long.
HALF_LIFE_S = 7 * 86_400.0
RECORD_BYTES_MAX = 16 << 20
# Means are kept as float16.
_MEAN_MAX = 60_000.0

_MAGIC = b"\x89KVUSE\r\n"
_VERSION = 1
_HEAD = struct.Struct("<8sHH32sIII")
_ENTRY = struct.Struct("<8sQdd")
_DIGEST_BYTES = 16
CHUNK_TOKENS = 32
# (layers, tokens): for each layer the logical tokens as they are stored.
Orders = NDArray[np.uint16]


class UseEntry(NamedTuple):
    """One writer's scores: the mean importance over its uses, each weighed by its age.

    version: uses noted; weight: sum of the uses' weights at time_s (wall time of the last). mean: (layers, tokens).
    """

    version: int
    time_s: float
    weight: float
    mean: NDArray[np.float16]

    def weight_at(self, time_s: float) -> float:
        """Return the weight at a time; clocks that go back don't make uses younger."""
        return float(self.weight * 0.5 ** (max(0.0, time_s - self.time_s) / HALF_LIFE_S))


def record_id(block: ObjectId) -> ObjectId:
    """Return the id under which a block's record is stored."""
    return ObjectId(block.namespace, BlockKey(hashlib.sha256(b"kvtide-uses-1" + block.key).digest()))


@dataclass(frozen=True)
class UseRecord:
    """The uses of one block, by writer. Immutable: `noted` and `merged` return another."""

    block: BlockKey
    layers: int
    tokens: int
    entries: Mapping[bytes, UseEntry] = field(default_factory=dict)

    def noted(self, writer: bytes, importance: Floats, time_s: float) -> UseRecord:
        """Return the record with one more use. importance: (layers, tokens), finite, not negative."""
        if importance.shape != (self.layers, self.tokens) or len(writer) != WRITER_BYTES:
            raise ValueError(f"importance {importance.shape} of {self.layers} layers, {self.tokens} tokens; {writer!r}")
        if not np.isfinite(importance).all() or (importance < 0).any():
            raise ValueError("importance must be finite and not negative")
        old = self.entries.get(writer) or UseEntry(0, time_s, 0.0, np.zeros(importance.shape, np.float16))
        before = old.weight_at(time_s)
        total = before + 1.0
        mean = importance.astype(np.float64) / total + old.mean.astype(np.float64) * (before / total)
        kept = np.minimum(mean, _MEAN_MAX).astype(np.float16)
        entry = UseEntry(old.version + 1, max(time_s, old.time_s), total, kept)
        return self._with({**self.entries, writer: entry})

    def merged(self, other: UseRecord) -> UseRecord:
        """Return what both know. ValueError for another block's record."""
        if (self.block, self.layers, self.tokens) != (other.block, other.layers, other.tokens):
            raise ValueError("records of two blocks can't be merged")
        # Of a writer's two entries the later one comes last, and stays.
        both = sorted([*self.entries.items(), *other.entries.items()], key=lambda item: _order(*item))
        return self._with(dict(both))

    def _with(self, entries: Mapping[bytes, UseEntry]) -> UseRecord:
        last = sorted(entries.items(), key=lambda item: _order(*item), reverse=True)[:WRITERS_MAX]
        return UseRecord(self.block, self.layers, self.tokens, dict(sorted(last)))

    def scores(self, time_s: float) -> Floats | None:
        """Return the average importance of each token, (layers, tokens); None if there were no uses."""
        entries = self.entries.values()
        total = sum(entry.weight_at(time_s) for entry in entries)
        if not total > 0:
            return None
        parts = [entry.mean.astype(np.float64) * (entry.weight_at(time_s) / total) for entry in entries]
        scores: Floats = np.sum(parts, axis=0).astype(np.float32)
        return scores

    def uses(self) -> int:
        """Return the uses that all writers noted."""
        return sum(entry.version for entry in self.entries.values())

    @property
    def bytes_max(self) -> int:
        """Return how large a record of such a block can be."""
        return _HEAD.size + WRITERS_MAX * (_ENTRY.size + 2 * self.layers * self.tokens) + _DIGEST_BYTES

    def to_bytes(self) -> bytes:
        """Return the record as it is stored."""
        body = _HEAD.pack(_MAGIC, _VERSION, 0, self.block, self.layers, self.tokens, len(self.entries))
        for writer, (version, time_s, weight, mean) in self.entries.items():
            body += _ENTRY.pack(writer, version, time_s, weight) + mean.astype("<f2").tobytes()
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, block: BlockKey, layers: int, tokens: int) -> UseRecord:
        """Return a stored record of this block. CorruptPayload if it is none."""
        view = memoryview(data)
        entry_bytes = _ENTRY.size + 2 * layers * tokens
        if not _HEAD.size + _DIGEST_BYTES <= len(view) <= RECORD_BYTES_MAX:
            raise CorruptPayload(f"a use record can't have {len(view)} bytes")
        magic, version, zero, *named, count = _HEAD.unpack_from(view)
        if (magic, version, zero) != (_MAGIC, _VERSION, 0) or tuple(named) != (block, layers, tokens):
            raise CorruptPayload(f"not a use record of version {_VERSION}, or not this block's")
        if count > WRITERS_MAX or len(view) != _HEAD.size + count * entry_bytes + _DIGEST_BYTES:
            raise CorruptPayload(f"{count} writers in a use record of {len(view)} bytes")
        if xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES]) != view[-_DIGEST_BYTES:]:
            raise CorruptPayload("checksum of the use record does not match")
        entries: dict[bytes, UseEntry] = {}
        for offset in range(_HEAD.size, len(view) - _DIGEST_BYTES, entry_bytes):
            writer, uses, time_s, weight = _ENTRY.unpack_from(view, offset)
            mean = np.frombuffer(view[offset + _ENTRY.size : offset + entry_bytes], dtype="<f2")
            is_sound = np.isfinite(mean).all() and (mean >= 0).all() and np.isfinite([time_s, weight]).all()
            if not is_sound or weight < 0 or (entries and writer <= max(entries)):
                raise CorruptPayload("a use record's writers must be sorted, its numbers finite and not negative")
            entries[writer] = UseEntry(uses, time_s, weight, mean.astype(np.float16).reshape(layers, tokens))
        return cls(block, layers, tokens, entries)


def _order(writer: bytes, entry: UseEntry) -> tuple[float, int, bytes, float, bytes]:
    # Total, so that whoever merges in whatever order keeps the same entries. A writer's own time never falls.
    return (entry.time_s, entry.version, writer, entry.weight, entry.mean.tobytes())


def packing_orders(scores: Floats) -> Orders:
    """Return orders, most important first, by scores (layers, tokens). ValueError for scores that are not finite."""
    if scores.ndim != 2 or not np.isfinite(scores).all():
        raise ValueError(f"expected finite scores (layers, tokens), got {scores.shape}")
    return np.argsort(-scores, axis=1, kind="stable").astype(np.uint16)


def is_order(orders: NDArray[np.uint16]) -> bool:
    """Tell whether each row has every token once."""
    return bool((np.sort(orders, axis=1) == np.arange(orders.shape[1], dtype=np.uint16)).all())


def select_chunks(importance: Floats, orders: NDArray[np.uint16], count: int, chunk_tokens: int) -> NDArray[np.int64]:
    """Return the most important chunks of a layer that together have `count` tokens or just more, numbered through.

    importance: (blocks, tokens), infinite for what must come; orders: (blocks, tokens).
    """
    blocks, tokens = orders.shape
    stored = np.take_along_axis(importance.astype(np.float64), orders.astype(np.int64), axis=1)
    starts = np.arange(0, tokens, chunk_tokens)
    totals = np.add.reduceat(stored, starts, axis=1)
    sizes = np.broadcast_to(np.diff(starts, append=tokens), totals.shape)
    ranked = np.argsort(-(totals / sizes).reshape(-1), kind="stable")
    filled = np.cumsum(sizes.reshape(-1)[ranked])
    needed = int(np.searchsorted(filled, min(count, blocks * tokens))) + 1 if count else 0
    must = int(np.isinf(totals).sum())
    return np.sort(ranked[: max(needed, must)])


def shares_touched(scores: Floats, orders: Orders, ratio: float, chunk_tokens: int) -> tuple[float, float]:
    """Return the share of chunks that a block's most important tokens touch: as it is stored, and packed by scores."""
    layers, tokens = orders.shape
    count, chunks, touched = max(1, round(ratio * tokens)), -(-tokens // chunk_tokens), 0
    for order, each in zip(orders, scores, strict=True):
        places = np.argsort(order, kind="stable")
        touched += len(np.unique(places[top_tokens(each, count)] // chunk_tokens))
    return touched / (layers * chunks), -(-count // chunk_tokens) / chunks
