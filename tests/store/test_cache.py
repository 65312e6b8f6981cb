"""The cache over one store and over several tiers; a trace through it beside the simulator."""

import math
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.stores import stored_records
from tests.suites import namespace, smooth_bits

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import ManualClock
from kvtide.codec import CodecRegistry, LosslessCodec
from kvtide.codec.tide import TideCodec
from kvtide.config import Limits
from kvtide.evict.policies import PolicyOrder
from kvtide.index import LruPolicy, RadixIndex
from kvtide.keys import block_keys
from kvtide.outcomes import Decided, decisions_text
from kvtide.store import PendingBlock
from kvtide.store.cache import Cache, cache_for
from kvtide.store.load import MissReason, Whole
from kvtide.store.storing import STORE_NICE
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import object_bytes_max
from kvtide_lab.sim.policies import policy_named

OpenCache = Callable[..., Cache]


def metas_of(layout: BlockLayout, blocks: int, space: Namespace | None = None) -> list[BlockMeta]:
    return metas_of_tokens(layout, range(blocks * layout.tokens), space or namespace())


def metas_of_tokens(layout: BlockLayout, tokens: Sequence[int], space: Namespace) -> list[BlockMeta]:
    keys = block_keys(space, tokens, layout.tokens)
    chained = enumerate(zip([BlockKey(space), *keys], keys, strict=False))
    return [BlockMeta(ObjectId(space, key), parent, i * layout.tokens, layout, "test") for i, (parent, key) in chained]


def pending(meta: BlockMeta, bits: BlockBits) -> PendingBlock:
    return PendingBlock(meta, lambda: lambda: bits)


def fill(cache: Cache, metas: list[BlockMeta]) -> list[BlockBits]:
    contents = [smooth_bits(meta.layout, seed) for seed, meta in enumerate(metas)]
    assert cache.store(list(map(pending, metas, contents))) == len(metas)
    assert cache.flush(60)
    return contents


class Collector:
    def __init__(self) -> None:
        self.blocks: dict[int, BlockBits] = {}

    def __call__(self, position: int, bits: BlockBits) -> None:
        self.blocks[position] = bits.copy()


def damage_one(store: Path, metas: Sequence[BlockMeta], damage: str, flips: dict[str, int]) -> None:
    """Damage the first of two stored blocks; flips: where a bit does it, by the damage's name."""
    record, other = (next(each for each in stored_records(store) if each.header.id == meta.id) for meta in metas)
    data = bytearray(record.body())
    if damage in flips:
        data[flips[damage]] ^= 4
    changed = {"cut": data[:-10], "empty": b"", "foreign": b"not ours" * 100, "other block": other.body()}
    record.write_body(bytes(changed.get(damage, data)))


def ids(metas: list[BlockMeta]) -> list[ObjectId]:
    return [meta.id for meta in metas]


def tiers_of(cache: Cache, metas: list[BlockMeta]) -> list[int]:
    """The masks of the known blocks: 1 memory, 2 disk, 3 both."""
    keys = [meta.id.key for meta in metas]
    runs = [(cache.index._tree.run_of(key), key) for key in keys[: cache.index.match(keys)]]
    return [run.tiers[run.keys.index(key)] for run, key in runs if run is not None]


def test_index_knows_what_tier_each_block_is_in(layout: BlockLayout, open_cache: OpenCache) -> None:
    cache, metas = open_cache(), metas_of(layout, 4)
    fill(cache, metas)
    assert tiers_of(cache, metas) == [3, 3, 3, 3]
    memory, disk = (place.tier for place in cache.tiers._places)
    memory.delete(metas[1].id, "evicted")
    assert tiers_of(cache, metas) == [3, 2, 3, 3]
    assert cache.tiers.prefetch([metas[1].id], object_bytes_max(layout)) == 1 and cache.tiers._prefetcher.wait(10)
    assert tiers_of(cache, metas) == [3, 3, 3, 3]
    memory.delete(metas[2].id, "evicted")
    disk.delete(metas[2].id, "evicted")
    assert tiers_of(cache, metas) == [3, 3]
    cache.index.check()


def test_blocks_evicted_from_memory_are_known_to_be_on_disk(layout: BlockLayout, open_cache: OpenCache) -> None:
    room = 3 * object_bytes_max(layout)
    cache, metas = open_cache(codec="raw", memory_bytes_max=room), metas_of(layout, 12)
    fill(cache, metas)
    for _ in range(3):
        cache.load(metas, Whole(Collector()))
    memory = cache.tiers._places[0].tier
    masks = tiers_of(cache, metas)
    assert [bool(mask & 1) for mask in masks] == [memory.contains(meta.id) for meta in metas]
    assert 0 < sum(mask & 1 for mask in masks) < 12
    assert all(mask & 2 for mask in masks)


def test_blocks_stored_by_another_process_later_are_found_and_known_to_be_on_disk(
    layout: BlockLayout, open_cache: OpenCache
) -> None:
    early, metas = open_cache(), metas_of(layout, 3)
    fill(open_cache(), metas)
    assert early.match(ids(metas)) == 3
    assert tiers_of(early, metas) == tiers_of(open_cache(), metas) == [2, 2, 2]
    assert early.load(metas, Whole(Collector())).blocks == 3


def test_run_without_its_beginning_is_found_from_any_block_on(layout: BlockLayout, open_cache: OpenCache) -> None:
    # As llama.cpp's conversations are, behind however many blocks are stored as a whole prompt left them.
    metas = metas_of(layout, 6)
    fill(open_cache(), metas[2:])
    reader, ids = open_cache(), [meta.id for meta in metas]
    assert [reader.match(ids[start:]) for start in (3, 2, 4, 3, 2)] == [3, 4, 2, 3, 4]
    assert not reader.guarded.counts.all()


def test_loads_are_counted_as_decisions_and_told_to_the_store(
    layout: BlockLayout, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Counter[Decided]()
    monkeypatch.setattr(DiskTier, "note_decisions", lambda self, namespace, counts: told.update(counts))
    cache, metas = open_cache(), metas_of(layout, 4)
    fill(cache, metas[:3])
    cache.load(metas, Whole(Collector()))
    assert cache.stats().decisions == "abandoned:not_there=16,load:in_time=48"
    cache.close()
    assert decisions_text(told) == "abandoned:not_there=16,load:in_time=48"


def test_slow_tier_does_not_hold_up_what_memory_has(
    layout: BlockLayout, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, metas = open_cache(), metas_of(layout, 6)
    fill(cache, metas)
    memory, disk = (place.tier for place in cache.tiers._places)
    for meta in metas[2:]:
        memory.delete(meta.id, "evicted")
    go_on = threading.Event()
    monkeypatch.setattr(disk, "get_into", lambda *arguments: go_on.wait(20) and None)
    slow = threading.Thread(target=cache.load, args=(metas[2:], Whole(Collector())))
    slow.start()
    assert cache.load(metas[:2], Whole(Collector()), deadline_s=10.0).blocks == 2
    assert slow.is_alive()
    go_on.set()
    slow.join()


def test_no_blocks_is_no_work(open_cache: OpenCache) -> None:
    cache = open_cache()
    assert cache.match([]) == 0
    assert cache.load([], Whole(Collector())).blocks == 0
    assert cache.store([]) == 0


@pytest.mark.parametrize("damage", ["flip header", "flip body", "cut", "empty", "foreign", "other block"])
def test_damaged_object_is_a_counted_miss_and_removed(
    damage: str, tmp_path: Path, layout: BlockLayout, open_cache: OpenCache
) -> None:
    metas = metas_of(layout, 2)
    fill(open_cache(tmp_path), metas)
    damage_one(tmp_path, metas, damage, {"flip header": 100, "flip body": -100})
    reader, sink = open_cache(tmp_path), Collector()
    report = reader.load(metas, Whole(sink))
    assert (report.blocks, report.reason) == (0, MissReason.CORRUPT)
    assert 0 not in sink.blocks
    assert reader.stats().misses == {"corrupt": 1}
    assert [record.header.id for record in stored_records(tmp_path)] == [metas[1].id]
    assert reader.match(ids(metas)) == 0


@pytest.mark.parametrize(("quality", "flipped", "blocks"), [(2e-2, -9, 1), (1e-4, -9, 0), (2e-2, 700, 0)])
def test_flipped_bit_loses_a_refinement_where_the_quality_allows_it(
    quality: float, flipped: int, blocks: int, tmp_path: Path
) -> None:
    profile, layout = fitted(LAYOUT), LAYOUT
    metas, sink = metas_of(layout, 1), Collector()
    with cache_for(str(tmp_path), TideCodec(profile, 1e-4, 3), CodecRegistry([profile])) as writer:
        fill(writer, metas)
    (record,) = stored_records(tmp_path)
    data = bytearray(record.body())
    data[flipped] ^= 4  # in the last range's last refinement, or in a base
    record.write_body(bytes(data))
    with cache_for(str(tmp_path), TideCodec(profile, quality, 3), CodecRegistry([profile])) as reader:
        assert reader.load(metas, Whole(sink)).blocks == blocks
        assert (reader.stats().blocks_damaged, reader.stats().misses.get("corrupt", 0)) == (blocks, 1 - blocks)
    if blocks:
        exact, found = smooth_bits(layout, 0).view(np.float32), sink.blocks[0].view(np.float32)
        errors = np.sqrt(np.mean((found - exact)[:, :, 4:] ** 2, axis=(1, 2, 3, 4)))
        assert errors[-1] > 2 * errors[0]


def test_object_of_a_codec_that_is_not_here_is_a_miss(
    tmp_path: Path, layout: BlockLayout, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    metas = metas_of(layout, 1)
    fill(open_cache(tmp_path), metas)
    reader = open_cache(tmp_path)
    monkeypatch.setattr(CodecRegistry, "get", lambda *arguments: None)
    report = reader.load(metas, Whole(Collector()))
    assert (report.blocks, report.reason) == (0, MissReason.UNKNOWN_CODEC)
    assert len(stored_records(tmp_path)) == 1


def test_queue_bound_drops_the_tail_and_flush_says_when_it_was_too_early(
    layout: BlockLayout, open_cache: OpenCache
) -> None:
    cache, metas = open_cache(store_queue_bytes_max=2 * layout.raw_bytes), metas_of(layout, 4)
    release = threading.Event()

    def slow_bits() -> BlockBits:
        release.wait(10)
        return smooth_bits(layout, 1)

    assert cache.store([PendingBlock(meta, lambda: slow_bits) for meta in metas]) == 2
    assert not cache.flush(0.05)
    release.set()
    assert cache.flush(60)
    assert (cache.stats().blocks_stored, cache.stats().blocks_dropped) == (2, 2)


def test_failing_source_is_counted_and_the_next_block_stored(
    layout: BlockLayout, open_cache: OpenCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache, metas = open_cache(), metas_of(layout, 2)
    broken = Mock(side_effect=RuntimeError("device lost"))
    cache.store([PendingBlock(metas[0], lambda: broken), pending(metas[1], smooth_bits(layout, 1))])
    assert cache.flush(60)
    assert cache.stats().blocks_stored == 1
    assert [record.message for record in caplog.records] == ["can't store, served as a miss: device lost"]


def test_same_block_is_stored_once(layout: BlockLayout, open_cache: OpenCache) -> None:
    cache, metas = open_cache(), metas_of(layout, 1)
    fill(cache, metas)
    fill(cache, metas)
    assert cache.stats().blocks_stored == 1


def test_leak_fails_the_check(open_cache: OpenCache) -> None:
    cache = open_cache()
    cache._storer._queued_bytes += 1
    with pytest.raises(AssertionError, match="1 bytes"):
        cache.check()
    # What waits holds up closing.
    cache._storer._queued_bytes -= 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own here")
def test_storing_thread_stores_where_it_may_not_give_way(
    layout: BlockLayout, open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "setpriority", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    fill(open_cache(), metas_of(layout, 1))


def test_more_tiers_than_the_index_tells_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 tiers at most, got memory, disk-1"):
        cache_for(" ".join(f"disk://{tmp_path}/{number}" for number in range(7)), LosslessCodec())


def test_storing_thread_gives_way_to_the_engine(layout: BlockLayout, open_cache: OpenCache) -> None:
    cache = open_cache()
    fill(cache, metas_of(layout, 1))
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert cache._storer is not None and cache._storer.thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, cache._storer.thread.native_id) == min(19, own + STORE_NICE)


def test_block_that_the_codec_cannot_keep_is_stored_losslessly(layout: BlockLayout, open_cache: OpenCache) -> None:
    cache, (meta,), sink = open_cache(codec="cachegen"), metas_of(layout, 1), Collector()
    bits = smooth_bits(layout, 1)
    bits[1, 0, 3, 1, 2] = 0x7F800000  # infinity
    cache.store([pending(meta, bits)])
    assert cache.flush(60)
    assert cache.load([meta], Whole(sink)).blocks == 1
    assert np.array_equal(sink.blocks[0], bits)
    assert cache.stats().blocks_unencodable == 1


# More sections than an object may have, not quite so many, and tables that are larger than what they code.
@pytest.mark.parametrize(
    ("spec", "extent", "unfit"),
    [("impress:1:1", (9, 1024, 2), 1), ("impress:1:2", (9, 1024, 2), 0), ("cachegen:3-4", (2, 4, 8), 2)],
)
def test_block_whose_object_would_be_too_large_is_stored_losslessly(
    spec: str, extent: tuple[int, int, int], unfit: int, open_cache: OpenCache
) -> None:
    layout = BlockLayout(*extent, 128, KVDtype.BFLOAT16)
    cache, metas = open_cache(codec=spec), metas_of(layout, 1)
    fill(cache, metas)
    assert cache.load(metas, Whole(Collector())).blocks == 1
    assert (cache.stats().blocks_unencodable, len(list(cache.tiers.objects()))) == (unfit, 1)


def test_scratch_bound_gives_way_to_lossless_and_then_to_nothing(
    tmp_path: Path, layout: BlockLayout, open_cache: OpenCache
) -> None:
    for name, bound, stored in (("lossy", 1 << 20, "cachegen-2"), ("less", 13 * layout.layer_bytes // 4, "lossless-2")):
        cache = open_cache(tmp_path / name, "cachegen:3-4", encode_scratch_bytes_max=bound)
        fill(cache, metas_of(layout, 1))
        assert len(stored_records(tmp_path / name)) == (2 if name == "lossy" else 1)
        assert stored.encode() in stored_records(tmp_path / name)[0].body()[:256]
    cache = open_cache(tmp_path / "none", "cachegen", encode_scratch_bytes_max=1)
    cache.store([pending(metas_of(layout, 1)[0], smooth_bits(layout, 1))])
    assert cache.flush(60)
    assert stored_records(tmp_path / "none") == []
    assert cache.stats().blocks_dropped == 1


def test_restart_rebuilds_the_tree_and_says_how_long_it_took(
    layout: BlockLayout, open_cache: OpenCache, caplog: pytest.LogCaptureFixture
) -> None:
    metas = metas_of(layout, 5)
    fill(open_cache(), metas)
    with caplog.at_level("INFO", logger="kvtide.store.cache"):
        cache = open_cache()
    assert cache.index.match([meta.id.key for meta in metas]) == 5
    assert any("index rebuilt from 5 stored blocks in" in message for message in caplog.messages)
    cache.index.check()


def test_judge_s_record_waits_for_no_silent_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with cache_for(str(tmp_path), LosslessCodec()) as cache:
        for verb in ("get_into", "put_from", "delete"):
            monkeypatch.setattr(cache.tiers, verb, lambda *arguments: waits.append(caller_deadline_s()))
        cache.recall()
        cache.judge.link.estimator.add(1000, 0.0, 1.0)
    assert len(waits) == 3
    assert max(waits) < math.inf


# A trace through the real cache, memory and disk, beside the simulator: the same blocks, request by request.

BLOCKS = 24
# Beside what the order keeps, a disk holds given-up objects of its segments, and room for the next segment.
DISK_BLOCKS = 60


def traced_cache(folder: Path, policy: str, layout: BlockLayout, clock: ManualClock) -> tuple[Cache, MemoryTier]:
    """Return a cache, not yet opened, with room for BLOCKS objects in memory and for all on disk; and its memory."""
    frame_bytes = -(-object_bytes_max(layout) // 4096) * 4096
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), 10_000)
    order = PolicyOrder(policy_named(policy), clock, BLOCKS * frame_bytes, BLOCKS)
    memory = MemoryTier(BLOCKS * frame_bytes, clock, index.is_pinned, order, frame_bytes)
    disk = DiskTier(folder, 1 << 30, clock, index.is_pinned)
    codecs = CodecRegistry(())
    return Cache(TierStack([memory, disk]), index, codecs.make("raw"), codecs, clock, Limits()), memory


def made_up_prompts(layout: BlockLayout, count: int) -> list[list[BlockMeta]]:
    """Return prompts that begin alike, in the metadata of their blocks."""
    rng, prompts = random.Random(7), []
    for _ in range(count):
        words = [min(3, int(rng.expovariate(0.9))) for _ in range(rng.randint(1, 9))]
        prompts.append(metas_of_tokens(layout, [word for word in words for _ in range(layout.tokens)], namespace()))
    return prompts


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "mix"])
def test_cache_holds_in_memory_what_the_simulator_says_and_finds_the_rest_on_disk(
    tmp_path: Path, layout: BlockLayout, policy: str
) -> None:
    clock = ManualClock(1e9)
    simulated, known = RadixIndex(clock, policy_named(policy), BLOCKS), set[BlockKey]()
    cache, memory = traced_cache(tmp_path, policy, layout, clock)
    with cache:
        for metas in made_up_prompts(layout, 150):
            clock.advance(1.0)
            keys = [meta.id.key for meta in metas]
            in_memory = [memory.contains(meta.id) for meta in metas]
            expected = simulated.match(keys)
            assert [*in_memory, False].index(False) == expected
            hits = cache.match([meta.id for meta in metas])
            assert hits == next((at for at, key in enumerate(keys) if key not in known), len(keys))
            assert cache.load(metas[:hits], Whole(Collector())).blocks == hits
            fill(cache, metas[hits:])
            simulated.insert(metas[0].id.namespace, keys)
            known.update(keys)
            assert {each for each in known if simulated.is_held(each)} == {info.id.key for info in memory.objects()}
        cache.check()


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "mix"])
def test_disk_that_evicts_keeps_what_the_simulator_keeps(tmp_path: Path, layout: BlockLayout, policy: str) -> None:
    clock, bytes_max = ManualClock(1e9), DISK_BLOCKS * (4096 + -(-object_bytes_max(layout) // 4096) * 4096)
    simulated = RadixIndex(clock, policy_named(policy), BLOCKS)
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), 10_000)
    order_of = partial(PolicyOrder, policy_named(policy), bytes_max=bytes_max, blocks_max=BLOCKS)
    disk = DiskTier(tmp_path, bytes_max, clock, index.is_pinned, order_of=order_of)
    codecs, limits = CodecRegistry(()), Limits()
    with Cache(TierStack([disk]), index, codecs.make("raw"), codecs, clock, limits) as cache:
        for metas in made_up_prompts(layout, 150):
            clock.advance(1.0)
            hits = cache.match([meta.id for meta in metas])
            assert hits >= simulated.match([meta.id.key for meta in metas])
            assert cache.load(metas[:hits], Whole(Collector())).blocks == hits
            fill(cache, metas[hits:])
            simulated.insert(metas[0].id.namespace, [meta.id.key for meta in metas])
            here = {info.id.key for info in disk.objects()}
            assert simulated.stats().held_blocks == sum(map(simulated.is_held, here))
        assert disk.stats().evictions > BLOCKS
        assert disk.stats().used_bytes <= bytes_max
        cache.check()
