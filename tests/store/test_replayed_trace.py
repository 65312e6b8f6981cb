"""A trace through the real cache, memory and disk, beside the simulator: the same blocks, request by request.

Memory holds exactly the simulator's blocks. A disk frees whole segments: it holds these, and others for a while.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.store.test_cache import Collector, fill

from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import ManualClock
from kvtide.codec import CodecRegistry
from kvtide.config import Limits
from kvtide.evict.policies import PolicyOrder
from kvtide.index import LruPolicy, RadixIndex
from kvtide.keys import block_keys
from kvtide.store.cache import Cache
from kvtide.store.load import Whole
from kvtide.testing import namespace
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, ObjectId
from kvtide.wire import object_bytes_max
from kvtide_lab.sim.policies import policy_named

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
    return Cache(
        TierStack([memory, disk]), index, CodecRegistry(()).make("raw"), CodecRegistry(()), clock, Limits()
    ), memory


def made_up_prompts(layout: BlockLayout, count: int) -> list[list[BlockMeta]]:
    """Return prompts that begin alike, in the metadata of their blocks."""
    rng, space, prompts = random.Random(7), namespace(), []
    for _ in range(count):
        words = [min(3, int(rng.expovariate(0.9))) for _ in range(rng.randint(1, 9))]
        keys = block_keys(space, [word for word in words for _ in range(layout.tokens)], layout.tokens)
        parents = [BlockKey(space), *keys]
        prompts.append(
            [
                BlockMeta(ObjectId(space, key), parents[at], at * layout.tokens, layout, "test")
                for at, key in enumerate(keys)
            ]
        )
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
def test_disk_that_evicts_for_real_keeps_what_the_simulator_keeps(
    tmp_path: Path, layout: BlockLayout, policy: str
) -> None:
    clock, bytes_max = ManualClock(1e9), DISK_BLOCKS * (4096 + -(-object_bytes_max(layout) // 4096) * 4096)
    simulated = RadixIndex(clock, policy_named(policy), BLOCKS)
    index = RadixIndex(clock, lambda blocks_max: LruPolicy(), 10_000)
    order = PolicyOrder(policy_named(policy), clock, bytes_max, BLOCKS)
    disk = DiskTier(tmp_path, bytes_max, clock, index.is_pinned, order=order)
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
