"""Blocks packed anew while others read them, by processes that are killed: never a wrong byte, never a lost block."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
from tests.faults.writers import pack_blocks, writing
from tests.store.load.test_sparse import BITS, METAS, REGISTRY, a_tier
from tests.store.test_repack import read

from kvtide.clock import SystemClock
from kvtide.store.load.sparse import SparseLoad
from kvtide.tier.disk import DiskTier

SEED = 20251121
KILLS = 4
STORE_BYTES = 1 << 24


def opened(store: Path) -> DiskTier:
    tier = DiskTier(store, STORE_BYTES, SystemClock(), lambda key: False)
    tier.open()
    return tier


def read_in_part(tier: DiskTier) -> int:
    """Load some chunks of all blocks; return how many tokens came, all of them right."""
    load = SparseLoad(tier)
    blocks = load.open(METAS, REGISTRY)
    if not blocks:
        return 0
    loaded = load.fetch(1, np.arange(0, blocks * load.chunks_per_block, 2))
    whole = np.concatenate([bits[1] for bits in BITS], axis=1)
    assert np.array_equal(loaded.bits, whole[:, loaded.tokens])
    return len(loaded.tokens)


def test_no_wrong_byte_and_no_lost_block_while_packers_are_killed(tmp_path: Path, fault_factor: int) -> None:
    rng, source, store = random.Random(SEED), a_tier(), tmp_path / "store"
    tier = opened(store)
    for meta in METAS:
        buffer = bytearray(1 << 20)
        tier.put_from(meta.id, buffer[: source.get_into(meta.id, memoryview(buffer))])
    tokens = 0
    for kill in range(KILLS * fault_factor):
        with writing(pack_blocks, store, STORE_BYTES, kill) as (packer, _):
            stop_s = time.monotonic() + rng.uniform(0, 0.3)
            # Beside busy neighbours the packer may take its time over the first block.
            while time.monotonic() < stop_s + (0 if tokens else 10):
                tokens += read_in_part(tier)
            assert packer.is_alive(), f"the packer failed, seed {SEED}"
        fresh = opened(store)
        for meta, bits in zip(METAS, BITS, strict=True):
            assert np.array_equal(read(fresh, meta), bits), f"kill {kill}, seed {SEED}"
        fresh.check()
        fresh.close()
    assert tokens
    tier.close()
