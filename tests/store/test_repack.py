"""Learning from uses and packing anew: the same blocks, bounded writing, whatever happens meanwhile."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.writers import pack_blocks, writing
from tests.servers import running_server
from tests.store.load.test_sparse import BITS, METAS, REGISTRY, WHOLE, a_tier, fetched, fill_tier
from tests.stores import open_disk, opened, read_object
from tests.suites.codec_suite import decoded_by

from kvtide.block import BlockMeta
from kvtide.clock import ManualClock, SystemClock
from kvtide.importance import Floats, record_id
from kvtide.index import RadixIndex
from kvtide.store.load.sparse import SparseLoad
from kvtide.store.notes import USES_CODEC, write_note
from kvtide.store.repack import REPACKS_MAX, Repacked, Repacker, UseStore
from kvtide.tier import Tier
from kvtide.tier.disk import DiskTier
from kvtide.tier.http.tier import http_tier
from kvtide.types import ObjectId
from kvtide.wire import parse_object
from kvtide_lab.sim.policies import policy_named

META = METAS[0]
SHAPE = (META.layout.layers, META.layout.tokens)


def every_eighth(offset: int) -> Floats:
    importance = np.zeros(SHAPE, dtype=np.float32)
    importance[:, offset::8] = 2
    return importance


def uses_of(tier: Tier, writer: bytes = b"writer-1", times: int = 8) -> UseStore:
    uses = UseStore(tier, writer, ManualClock())
    for _ in range(times):
        uses.note(META, every_eighth(3))
    return uses


def bases_of(tier: Tier) -> Any:
    load = SparseLoad(tier)
    load.open(METAS, REGISTRY)
    load.close()
    return load.bases


def repacked(tier: Tier, uses: UseStore) -> Repacked:
    return Repacker(tier, REGISTRY, uses).run(METAS, bases_of(tier))


def decoded(tier: Tier, meta: BlockMeta) -> np.ndarray:
    stored = parse_object(read_object(tier, meta.id), meta.id)
    codec: Any = REGISTRY.get(stored.codec_id, stored.profile)
    return decoded_by(codec, meta, stored.sections())


def test_packed_anew_a_block_is_the_same_and_its_important_tokens_lie_together() -> None:
    tier = a_tier()
    report = repacked(tier, uses_of(tier))
    assert (report.replaced, report.failed) == (1, 0) and report.moved_bytes
    assert np.array_equal(decoded(tier, META), BITS[0])
    assert not repacked(tier, uses_of(tier)).replaced  # It would gain nothing more.


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12))
@settings(max_examples=5, deadline=None)
def test_a_block_is_written_anew_only_so_often_however_uses_change(offsets: list[int]) -> None:
    tier = a_tier()
    uses = UseStore(tier, b"writer-1", ManualClock())
    replaced = 0
    for offset in offsets:
        for _ in range(16):
            uses.note(META, every_eighth(offset))
        replaced += repacked(tier, uses).replaced
    assert replaced <= REPACKS_MAX
    assert np.array_equal(decoded(tier, META), BITS[0])


def test_restart_finds_what_was_repacked(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    fill_tier(disk)
    uses = uses_of(disk)
    assert uses.save(META) and repacked(disk, uses).replaced == 1
    disk.close()
    again = open_disk(tmp_path)
    index = RadixIndex(ManualClock(), policy_named("lru"), 100)
    assert index.restore(again.parents(), 0) == 3
    assert index.match([meta.id.key for meta in METAS]) == 3
    assert np.array_equal(decoded(again, META), BITS[0])
    again.check()
    again.close()


def test_uses_of_several_processes_are_joined() -> None:
    tier = a_tier()
    first, second = uses_of(tier, b"writer-1", 2), uses_of(tier, b"writer-2", 3)
    assert first.save(META) and second.save(META) and first.save(META)
    assert UseStore(tier, b"writer-3", ManualClock()).known(META).uses() == 5


@pytest.mark.parametrize("damaged", ["object", "record"])
def test_a_damaged_record_is_forgotten(damaged: str) -> None:
    tier, name = a_tier(), record_id(META.id)
    if damaged == "object":
        tier.put_from(name, b"no object")
    else:
        write_note(tier, name, USES_CODEC, b"no record")
    assert UseStore(tier, b"writer-1", ManualClock()).scores(META) is None
    assert not tier.contains(record_id(META.id))


def test_a_server_keeps_what_engines_learn() -> None:
    with running_server(tiers=("memory://",)) as server, opened(http_tier(server.url, SystemClock())) as tier:
        for count in (1, 2):
            assert uses_of(tier, b"writer-1", 1).save(META)
            assert UseStore(tier, b"writer-2", ManualClock()).known(META).uses() == count


def test_a_block_with_more_important_tokens_ranks_higher() -> None:
    uses = uses_of(a_tier())
    assert uses.important_tokens(META.id) > uses.important_tokens(METAS[1].id) == 1.0


def test_a_damaged_object_is_left_alone() -> None:
    tier, bases = a_tier(), bases_of(a_tier())
    tier.replace(META.id, b"damaged")
    assert Repacker(tier, REGISTRY, uses_of(tier)).run([META], bases[:1]).failed == 1


def test_nothing_is_read_of_blocks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, bases = a_tier(), bases_of(a_tier())
    uses, read_ids = uses_of(tier, times=1), list[ObjectId]()
    monkeypatch.setattr(tier, "get_into", lambda object_id, *rest: read_ids.append(object_id))
    assert Repacker(tier, REGISTRY, uses).run(METAS, bases) == (3, 0, 0, 0)
    assert not {meta.id for meta in METAS} & set(read_ids)


def test_packing_reads_and_writes_no_more_than_it_may() -> None:
    tier, bases = a_tier(), bases_of(a_tier())
    uses = uses_of(tier)
    block = 2 * META.layout.raw_bytes
    assert Repacker(tier, REGISTRY, uses).run(METAS, bases, block - 1) == (3, 0, 0, 0)
    done = Repacker(tier, REGISTRY, uses).run(METAS, bases, block)
    assert done.replaced == 1 and done.moved_bytes


def test_importance_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="importance"):
        UseStore(a_tier(), b"writer-1", ManualClock()).note(META, np.zeros((1, 1), dtype=np.float32))


# Blocks packed anew while others read them, by processes that are killed: never a wrong byte, never a lost block.

SEED = 20251121
KILLS = 4
STORE_BYTES = 1 << 24


def read_in_part(tier: DiskTier) -> int:
    """Load some chunks of all blocks; return how many tokens came, all of them right."""
    load = SparseLoad(tier)
    blocks = load.open(METAS, REGISTRY)
    if not blocks:
        return 0
    loaded = fetched(load, 1, np.arange(0, blocks * load.chunks_per_block, 2))
    assert np.array_equal(loaded.bits, WHOLE[1][:, loaded.tokens])
    return len(loaded.tokens)


def test_no_wrong_byte_and_no_lost_block_while_packers_are_killed(tmp_path: Path, fault_factor: int) -> None:
    rng, store, tokens = random.Random(SEED), tmp_path / "store", 0
    tier = open_disk(store, STORE_BYTES)
    fill_tier(tier)
    for kill in range(KILLS * fault_factor):
        with writing(pack_blocks, store, STORE_BYTES, kill) as (packer, _):
            stop_s = time.monotonic() + rng.uniform(0, 0.3)
            # Beside busy neighbours the packer may take its time over the first block.
            while time.monotonic() < stop_s + (0 if tokens else 10):
                tokens += read_in_part(tier)
            assert packer.is_alive(), f"the packer failed, seed {SEED}"
        fresh = open_disk(store, STORE_BYTES)
        for meta, bits in zip(METAS, BITS, strict=True):
            assert np.array_equal(decoded(fresh, meta), bits), f"kill {kill}, seed {SEED}"
        fresh.check()
        fresh.close()
    assert tokens
    tier.close()
