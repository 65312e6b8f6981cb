"""The cost of a block in the index: match, insert and evict in steady state, one core, by policy and size.

Requests of 64 blocks: half of them the next turn of a session (3 of 4 blocks known if still held), half new ones. The
index is full before the clock starts, so that each new block evicts another one. Keys are made outside the clock:
hashing is measured apart, as `key_ns_per_block` for 16-token blocks in bulk.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator

import msgspec

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex
from kvtide.keys import block_keys
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace
from kvtide_lab.sim.policies import policy_named

REQUEST_BLOCKS = 64
TURN_BLOCKS = 16
BLOCKS_SMALL, BLOCKS_LARGE = 10_000, 1_000_000
POLICIES_FULL, POLICIES_QUICK = ("lru", "arc", "s3fifo", "reuse", "mix"), ("lru", "mix")
# The one that the cache's own index uses.
DEFAULT_POLICY = "lru"
MEASURED_BLOCKS_FULL, MEASURED_BLOCKS_QUICK = 400_000, 200_000
REPEATS = 5
REQUEST_GAP_S = 0.2
KEY_TOKENS, KEY_BLOCK_TOKENS = 200_000, 16
# Multiples of an odd number modulo a power of two are all different.
_SPREAD, _KEYS = (1 << 255) // 3 | 1, 1 << 256
_NAMESPACE = Namespace(bytes(DIGEST_BYTES))


class PolicyCost(msgspec.Struct, frozen=True):
    """One policy with so many blocks resident: median over repeats, lowest and highest."""

    policy: str
    resident_blocks: int
    known_blocks: int
    ns_per_block: float
    ns_per_block_spread: tuple[float, float]
    bytes_per_block: float


class IndexBench(msgspec.Struct, frozen=True):
    """The default policy on top; `growth` is its time with 1 M blocks over that with 10 k."""

    ns_per_block: float
    growth: float
    bytes_per_block: float
    key_ns_per_block: float
    policy: str
    rows: list[PolicyCost]


def run(quick: bool) -> IndexBench:
    """Measure every policy at both sizes."""
    policies = POLICIES_QUICK if quick else POLICIES_FULL
    measured = MEASURED_BLOCKS_QUICK if quick else MEASURED_BLOCKS_FULL
    rows = [_cost(policy, blocks, measured) for policy in policies for blocks in (BLOCKS_SMALL, BLOCKS_LARGE)]
    small, large = (row for row in rows if row.policy == DEFAULT_POLICY)
    growth = large.ns_per_block / small.ns_per_block
    return IndexBench(large.ns_per_block, growth, large.bytes_per_block, _key_ns(), DEFAULT_POLICY, rows)


def _cost(policy: str, resident: int, measured: int) -> PolicyCost:
    clock = ManualClock()
    # Traced allocation is slow: the memory is that of a run of its own, which is also what fills the index.
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = RadixIndex(clock, policy_named(policy), resident)
    chains = _requests(resident)
    while index.stats().held_blocks < resident:
        _serve(index, clock, next(chains))
    bytes_held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    full = index.stats()
    for _ in range(resident // 8 // REQUEST_BLOCKS):
        _serve(index, clock, next(chains))
    times = []
    for _ in range(REPEATS):
        batch = [next(chains) for _ in range(measured // REPEATS // REQUEST_BLOCKS)]
        gc.collect()
        start_ns = time.process_time_ns()
        for keys in batch:
            _serve(index, clock, keys)
        times.append((time.process_time_ns() - start_ns) / (len(batch) * REQUEST_BLOCKS))
    # Measured when full and before anything but residents was known, so that it is the price of one known block.
    bytes_per_block = bytes_held / full.known_blocks
    known = index.stats().known_blocks
    return PolicyCost(policy, resident, known, statistics.median(times), (min(times), max(times)), bytes_per_block)


def _serve(index: RadixIndex, clock: ManualClock, keys: list[BlockKey]) -> None:
    clock.advance(REQUEST_GAP_S)
    index.match(keys)
    index.insert(_NAMESPACE, keys)


def _requests(resident: int) -> Iterator[list[BlockKey]]:
    """Yield requests without end. A session goes on while an LRU of this size would still hold it."""
    rng = random.Random(0)
    sessions: list[list[BlockKey]] = []
    sessions_max = max(2, resident // REQUEST_BLOCKS // 4)
    made = 0
    while True:
        if sessions and rng.random() < 0.5:
            slot = rng.randrange(len(sessions))
            # The window slides at whole turns only at the start of a session: what is known stays a prefix.
            keys = [*sessions[slot][: REQUEST_BLOCKS - TURN_BLOCKS], *_keys(made, TURN_BLOCKS)]
            made += TURN_BLOCKS
        else:
            slot = len(sessions) if len(sessions) < sessions_max else rng.randrange(sessions_max)
            keys = _keys(made, REQUEST_BLOCKS)
            made += REQUEST_BLOCKS
        if slot == len(sessions):
            sessions.append(keys)
        sessions[slot] = keys
        yield keys


def _keys(start: int, count: int) -> list[BlockKey]:
    # Spread like digests, so that the table sees what it will see.
    return [
        BlockKey((number * _SPREAD % _KEYS).to_bytes(DIGEST_BYTES, "big")) for number in range(start, start + count)
    ]


def _key_ns() -> float:
    tokens = list(range(KEY_TOKENS))
    times = []
    for _ in range(REPEATS):
        start_ns = time.process_time_ns()
        keys = block_keys(_NAMESPACE, tokens, KEY_BLOCK_TOKENS)
        times.append((time.process_time_ns() - start_ns) / len(keys))
    return statistics.median(times)
