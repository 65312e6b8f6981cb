"""The paper's ablation: which blocks a bounded memory keeps in front of the disk, for a sequence of questions.

What each question reads of each block was counted while it was answered; here the real stack and its rankings decide
whether that comes from memory. Every byte that is copied up is counted beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from kvtide.clock import Clock
from kvtide.evict import RankedOrder, Ranking, RecencyRanking, ScoreRanking
from kvtide.evict.ranking import FrequencyRanking
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId

# Bytes that a question reads of each block.
Reads = Mapping[ObjectId, int]

QUESTIONS = 60
# Of all blocks.
MEMORY_SHARE = 0.3
# Blocks stand for themselves by a page each: only their number counts.
OBJECT_BYTES = 4096
CACHES = ("none", "lru", "lfu", "score")


class AblationRow(msgspec.Struct, frozen=True):
    """A way to choose and store, with a memory that keeps blocks by `cache`; means over the sequence of questions.

    disk_read_share: bytes that a question waits for, of the raw bytes of its prefix; memory_share: of what it reads.
    copied_up_share: bytes copied to memory in the background, of the raw bytes. disk_s: what the disk takes a question.
    """

    step: str
    cache: str
    kl: float
    disk_read_share: float
    memory_share: float
    copied_up_share: float
    disk_s: float


class _Place(MemoryTier):
    def __init__(self, name: str, blocks: int, clock: Clock, ranking: Ranking | None) -> None:
        order = RankedOrder(ranking)
        super().__init__(blocks * OBJECT_BYTES, clock, lambda key: False, order, frame_bytes=OBJECT_BYTES)
        self.name = name


def sequence(prefixes: int, questions: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return (prefix, question) of each turn: one prefix is asked about most, the next half as often."""
    weights = [2.0**-number for number in range(prefixes)]
    chosen = rng.choices(range(prefixes), weights, k=QUESTIONS)
    return [(prefix, rng.randrange(questions)) for prefix in chosen]


def replayed(
    step: str,
    kl: float,
    asked: Sequence[Reads],
    block_bytes: int,
    important: Mapping[ObjectId, float],
    bytes_s: float,
    clock: Clock,
) -> list[AblationRow]:
    """Return a row for each cache. asked: the sequence of questions, each with all blocks of its prefix."""
    rankings: dict[str, Callable[[], Ranking]] = {
        "none": RecencyRanking,
        "lru": RecencyRanking,
        "lfu": FrequencyRanking,
        "score": lambda: ScoreRanking(lambda block: important.get(block, 1.0), half_life=None),
    }
    return [_row(step, cache, kl, asked, block_bytes, rankings[cache](), bytes_s, clock) for cache in CACHES]


def _row(
    step: str,
    cache: str,
    kl: float,
    asked: Sequence[Reads],
    block_bytes: int,
    ranking: Ranking,
    bytes_s: float,
    clock: Clock,
) -> AblationRow:
    blocks = list(dict.fromkeys(block for reads in asked for block in reads))
    memory = _Place("memory", max(1, round(MEMORY_SHARE * len(blocks))), clock, ranking)
    disk = _Place("disk", len(blocks), clock, None)
    tiers = [disk] if cache == "none" else [memory, disk]
    stack = TierStack(tiers, ranking)
    stack.open()
    for block in blocks:
        disk.put_from(block, bytes(OBJECT_BYTES))
    buffer = memoryview(bytearray(OBJECT_BYTES + 1))
    disk_shares, memory_shares, copied = [], [], 0
    for reads in asked:
        near = {block for block in reads if stack.is_near(block)}
        for block in reads:
            stack.get_into(block, buffer)
            copied += block not in near and stack.is_near(block)
        from_memory = sum(size for block, size in reads.items() if block in near)
        all_bytes = sum(reads.values())
        disk_shares.append((all_bytes - from_memory) / (len(reads) * block_bytes))
        memory_shares.append(from_memory / max(1, all_bytes))
    stack.close()
    raw_bytes = block_bytes * fmean(len(reads) for reads in asked)
    share = fmean(disk_shares)
    copied_share = copied * block_bytes / (raw_bytes * len(asked))
    return AblationRow(step, cache, kl, share, fmean(memory_shares), copied_share, share * raw_bytes / bytes_s)
