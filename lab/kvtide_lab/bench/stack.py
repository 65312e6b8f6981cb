"""The fast tiers under each promotion policy, on a replayed trace: hit ratio by tier and bytes moved.

Every policy replays the same requests on the real stack: a device and a memory position, and a store with a full copy.
Objects are small, so that the sizes of the tiers in blocks are what they would be and bytes are scaled afterwards.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from kvtide.clock import Clock, SystemClock
from kvtide.evict import RankedOrder, Ranking, RecencyRanking, ScoreRanking
from kvtide.tier.base import WrappedTier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.workload import Trace
from kvtide_lab.wrapped import Counting

# One request: the ids of its blocks, from the first token on.
Request = Sequence[int]

_SEED = 11
_TOKENS = 256
_OBJECT_BYTES = 4096
# A block of a model of 7 to 8 billion parameters with grouped heads, fp16: what one object stands for.
_BLOCK_BYTES = 32 << 20
_NAMESPACE = Namespace(hashlib.sha256(b"bench stack").digest())
_QUICK_REQUESTS = 1000


class StackBenchRow(msgspec.Struct, frozen=True):
    """One policy. Ratios are of block look-ups that some tier could serve; `important` counts important tokens."""

    policy: str
    device_hit_ratio: float
    memory_hit_ratio: float
    disk_hit_ratio: float
    fast_hit_ratio: float
    fast_important_ratio: float
    moved_up_gb: float
    evicted_write_gb: float


class StackBenchResult(msgspec.Struct, frozen=True):
    """All policies. `score_vs_lru` and `score_vs_lfu` compare the shares of important tokens from the fast tiers."""

    score_vs_lru: float
    score_vs_lfu: float
    trace: str
    importance: str
    requests: int
    lookups: int
    distinct_blocks: int
    device_blocks: int
    memory_blocks: int
    replay_s: float
    rows: list[StackBenchRow]


def run(
    quick: bool,
    requests: Iterable[Request] | None = None,
    importance: Mapping[int, float] | None = None,
    trace_name: str = "given",
    clock: Clock | None = None,
) -> StackBenchResult:
    """Replay requests under every policy; without requests the built-in synthetic trace.

    `importance` gives the important tokens of a block; without it they are drawn, seeded, alike for all policies:
    few blocks are rich. Quick means the first 1,000 requests. ValueError if there are none.
    """
    clock = clock or SystemClock()
    if requests is None:
        requests, trace_name = synthetic_trace(4 * _QUICK_REQUESTS), "synthetic"
    trace = list(islice(requests, _QUICK_REQUESTS) if quick else requests)
    blocks = {block for request in trace for block in request}
    if not blocks:
        raise ValueError("expected requests with block ids, got none")
    source = "drawn" if importance is None else "side file"
    tokens = _drawn_importance(blocks) if importance is None else importance
    # A tenth of all blocks fits into the fast tiers, a fifth of that on the device.
    device, memory = max(1, len(blocks) // 50), max(2, len(blocks) * 8 // 100)
    started_s = clock.monotonic_s()
    policies: dict[str, Callable[[], Ranking]] = {
        "lru": RecencyRanking,
        "lfu": Ranking,
        "score": lambda: ScoreRanking(lambda each: tokens.get(int.from_bytes(each.key, "big"), float(_TOKENS))),
    }
    rows = [_replay(name, make(), trace, tokens, device, memory, clock) for name, make in policies.items()]
    shares = {row.policy: row.fast_important_ratio for row in rows}
    return StackBenchResult(
        score_vs_lru=_ratio(shares["score"], shares["lru"]),
        score_vs_lfu=_ratio(shares["score"], shares["lfu"]),
        trace=trace_name,
        importance=source,
        requests=len(trace),
        lookups=sum(map(len, trace)),
        distinct_blocks=len(blocks),
        device_blocks=device,
        memory_blocks=memory,
        replay_s=clock.monotonic_s() - started_s,
        rows=rows,
    )


def _ratio(share: float, other: float) -> float:
    return share / other if other else 1.0


class _Place(MemoryTier):
    """A tier of so many blocks in some place of the stack."""

    def __init__(self, name: str, blocks: int, clock: Clock, ranking: Ranking | None) -> None:
        order = RankedOrder(ranking)
        super().__init__(blocks * _OBJECT_BYTES, clock, lambda key: False, order, frame_bytes=_OBJECT_BYTES)
        self.name = name


def _replay(
    policy: str,
    ranking: Ranking,
    trace: Sequence[Request],
    importance: Mapping[int, float],
    device_blocks: int,
    memory_blocks: int,
    clock: Clock,
) -> StackBenchRow:
    blocks = len({block for request in trace for block in request})
    places = [("device", device_blocks, ranking), ("memory", memory_blocks, ranking), ("disk", blocks, None)]
    tiers = [Counting(_Place(name, size, clock, rank)) for name, size, rank in places]
    # The stack asks the tiers themselves whether they admit; counting is around them.
    stack = TierStack([_Admitting(tier) for tier in tiers], ranking)
    served = {tier.name: 0 for tier in tiers}
    important = dict.fromkeys(served, 0.0)
    content, buffer = bytes(_OBJECT_BYTES), memoryview(bytearray(_OBJECT_BYTES + 1))
    stack.open()
    for request in trace:
        for block in request:
            object_id = ObjectId(_NAMESPACE, BlockKey(block.to_bytes(32, "big")))
            before = [tier.bytes["get"] for tier in tiers]
            if stack.get_into(object_id, buffer) is None:
                stack.put_from(object_id, content)
                continue
            name = next(tier.name for tier, old in zip(tiers, before, strict=True) if tier.bytes["get"] > old)
            served[name] += 1
            important[name] += importance.get(block, float(_TOKENS))
    stack.close()
    hits, weight = sum(served.values()) or 1, sum(important.values()) or 1.0
    scale = _BLOCK_BYTES / _OBJECT_BYTES / 1e9
    return StackBenchRow(
        policy=policy,
        device_hit_ratio=served["device"] / hits,
        memory_hit_ratio=served["memory"] / hits,
        disk_hit_ratio=served["disk"] / hits,
        fast_hit_ratio=(served["device"] + served["memory"]) / hits,
        fast_important_ratio=(important["device"] + important["memory"]) / weight,
        moved_up_gb=(tiers[0].bytes["put"] + tiers[1].bytes["put"]) * scale,
        evicted_write_gb=(tiers[2].bytes["put"] - blocks * _OBJECT_BYTES) * scale,
    )


class _Admitting(WrappedTier):
    """A counted tier whose admission the stack can ask for."""

    def __init__(self, counting: Counting) -> None:
        super().__init__(counting)
        assert isinstance(counting.tier, MemoryTier)
        self._place = counting.tier

    def would_admit(self, object_id: ObjectId, size: int) -> bool:
        return self._place.would_admit(object_id, size)


def _drawn_importance(blocks: Iterable[int]) -> dict[int, float]:
    rng = random.Random(_SEED)
    return {block: _TOKENS * rng.betavariate(0.6, 3.0) for block in sorted(blocks)}


def synthetic_trace(requests: int, seed: int = _SEED) -> Iterator[Request]:
    """Yield requests of many sessions: a few shared system prompts, documents asked about again, growing chats."""
    rng, next_block = random.Random(seed), 1_000_000
    prompts = [list(range(1000 * number, 1000 * number + rng.randrange(2, 12))) for number in range(20)]
    sessions: list[list[int]] = []
    for _ in range(requests):
        if sessions and rng.random() < 0.6:
            # Recent sessions come back most.
            session = sessions[-min(len(sessions), int(rng.expovariate(1 / 40)) + 1)]
        else:
            session = list(prompts[min(int(rng.paretovariate(1.0)) - 1, len(prompts) - 1)])
            sessions.append(session)
        grown = rng.randrange(1, 8)
        session.extend(range(next_block, next_block + grown))
        next_block += grown
        yield tuple(session)


def trace_requests(trace: Trace) -> Iterator[Request]:
    """Yield a trace's requests; blocks are numbered from 0 in the order in which the trace first names them."""
    for request in trace.requests:
        yield [int.from_bytes(key, "little") for key in request.keys]
