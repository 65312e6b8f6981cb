"""Regions and a centre on made-up requests: what is found where, and what crosses between regions.

The stack, the manifest and the synchroniser are the server's; clock, places of tiers and requests are made up.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvtide.clock import ManualClock
from kvtide.server.names import Names
from kvtide.server.regions import CentralTier, Manifest, Synchroniser
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Name, NamedId, Namespace, ObjectId
from kvtide_lab.bench.store_clients import bench_object
from kvtide_lab.wrapped import Counting

# A block of a model of 7 to 8 billion parameters with grouped heads, fp16: what one object stands for.
BLOCK_BYTES = 32 << 20
SHARED_SHARES = (0.2, 0.5, 0.8)
SYNC_BYTES_S = (10e6, 50e6, 500e6)
REQUESTS = 6000
REQUESTS_QUICK = 1500
# A dump of the whole store at this interval is what synchronising saves.
DUMP_S = 600.0
_REGIONS = 3
_BLOCKS = 3000
_REQUEST_S = 0.5
_OBJECT_BYTES = 4096
_NAMESPACE = Namespace(hashlib.sha256(b"sim regions").digest())


class RegionsRow(msgspec.Struct, frozen=True):
    """One share of requests for what all regions want, and one rate of synchronising. Rates are of all requests."""

    shared_share: float
    sync_mb_s: float
    own_hit_rate: float
    hit_rate: float
    without_centre_hit_rate: float
    read_through_gb: float
    synchronised_gb: float
    synchronised_per_new_byte: float
    dumped_gb: float
    waiting_blocks: int


class RegionsReport(msgspec.Struct, frozen=True):
    """All rows; bytes as if a block had 32 MiB."""

    regions: int
    requests: int
    seed: int
    rows: list[RegionsRow]


class _Region(NamedTuple):
    local: MemoryTier
    store: TierStack
    central: CentralTier
    manifest: Manifest
    sync: Synchroniser


def run_regions(seed: int, requests: int = REQUESTS) -> RegionsReport:
    """Simulate so many requests for each row. ValueError if there are none."""
    if requests <= 0:
        raise ValueError(f"expected requests, got {requests}")
    rows = [_run(seed, requests, shared, rate) for shared in SHARED_SHARES for rate in SYNC_BYTES_S]
    return RegionsReport(_REGIONS, requests, seed, rows)


def _run(seed: int, requests: int, shared: float, sync_bytes_s: float) -> RegionsRow:
    clock, rng = ManualClock(), np.random.default_rng(seed)
    centre = Counting(_memory(_BLOCKS * (_REGIONS + 1), clock))
    popularity = 1.0 / np.arange(1, _BLOCKS + 1)
    wanted = rng.choice(_BLOCKS, requests, p=popularity / popularity.sum())
    is_shared, places = rng.random(requests) < shared, rng.integers(0, _REGIONS, requests)
    own = found = alone = dumped = 0
    seen: list[set[ObjectId]] = [set() for _ in range(_REGIONS)]
    with tempfile.TemporaryDirectory(prefix="kvtide-sim-") as folder:
        regions = [_region(centre, Path(folder) / str(n), sync_bytes_s, clock) for n in range(_REGIONS)]
        budgets, since_dump_s = [0.0] * _REGIONS, 0.0
        buffer = memoryview(bytearray(_OBJECT_BYTES + 1))
        for number, block, place in zip(range(requests), wanted.tolist(), places.tolist(), strict=True):
            object_id = _object_id(block if is_shared[number] else block + _BLOCKS * (1 + place))
            region = regions[place]
            region.manifest.note_use(object_id)
            own += region.local.contains(object_id)
            alone += object_id in seen[place]
            seen[place].add(object_id)
            if region.store.get_into(object_id, buffer) is not None:
                found += 1
            else:
                region.store.put_from(object_id, bench_object(object_id, bytes(64)))
            clock.advance(_REQUEST_S)
            since_dump_s += _REQUEST_S
            if since_dump_s >= DUMP_S:
                since_dump_s, dumped = 0.0, dumped + sum(each.local.stats().objects for each in regions)
            _synchronise(regions, budgets, sync_bytes_s * _REQUEST_S / BLOCK_BYTES)
        waiting = sum(len(region.manifest) for region in regions)
        sent = sum(region.sync.sent_objects for region in regions)
        for region in regions:
            region.manifest.close()
            region.store.close()
    gb, new = BLOCK_BYTES / 1e9, requests - found
    return RegionsRow(
        shared_share=shared,
        sync_mb_s=sync_bytes_s / 1e6,
        own_hit_rate=own / requests,
        hit_rate=found / requests,
        without_centre_hit_rate=alone / requests,
        read_through_gb=(found - own) * gb,
        synchronised_gb=sent * gb,
        synchronised_per_new_byte=sent / new if new else 0.0,
        dumped_gb=dumped * gb,
        waiting_blocks=waiting,
    )


def _synchronise(regions: list[_Region], budgets: list[float], blocks: float) -> None:
    """Let each region send what its rate allows since the last request."""
    for position, region in enumerate(regions):
        budgets[position] = min(budgets[position] + blocks, max(1.0, blocks))
        while budgets[position] >= 1.0:
            size = region.sync.step()
            if size is None:
                break
            budgets[position] -= 1.0 if size else 0.0


def _region(centre: Counting, path: Path, sync_bytes_s: float, clock: ManualClock) -> _Region:
    local, manifest = _memory(_BLOCKS * 2, clock), Manifest(path)
    central = CentralTier(centre, manifest)
    inner = TierStack([local])
    store = TierStack([inner, central], written_last=[central])
    store.open()
    manifest.open()
    names = Names(lambda tenant, namespace: 0)
    return _Region(
        local, store, central, manifest, Synchroniser(inner, centre, manifest, names, sync_bytes_s, 256 << 20, clock)
    )


def _memory(blocks: int, clock: ManualClock) -> MemoryTier:
    return MemoryTier(blocks * _OBJECT_BYTES, clock, lambda key: False, frame_bytes=_OBJECT_BYTES)


def _object_id(block: int) -> NamedId:
    key = BlockKey(hashlib.sha256(block.to_bytes(8, "little")).digest())
    return NamedId.of(ObjectId(_NAMESPACE, key), Name("", _NAMESPACE, 0))
