"""Messages between the scheduler half and the worker half. Values only; they cross processes."""

from __future__ import annotations

from typing import NamedTuple

from kvtide.engines.settings import StreamOrder
from kvtide.types import BlockKey, ObjectId


class BlockRef(NamedTuple):
    """One block of a sequence: for each shard of the model, its object and that of the block before."""

    ids: tuple[ObjectId, ...]
    parents: tuple[BlockKey, ...]
    start: int


class LoadOrder(NamedTuple):
    """Fill `pages`, in order, with the blocks' tokens from `skip_pages` pages into the first block on.

    is_in_step: this step computes with them, each layer as soon as it is there; else nobody waits. is_latest: copies of
    this machine won't do. stream: how much time there is for refinements of streamed blocks; None for whole ones.
    """

    request: str
    blocks: tuple[BlockRef, ...]
    pages: tuple[int, ...]
    skip_pages: int
    deadline_s: float
    is_in_step: bool = False
    is_latest: bool = False
    stream: StreamOrder | None = None


class StoreOrder(NamedTuple):
    """Store one block of a request, whose tokens the step completes, from these pages."""

    request: str
    block: BlockRef
    pages: tuple[int, ...]


class StepCommands(NamedTuple):
    """All orders of one engine step.

    is_idle: the step computes nothing, so that waiting costs nobody. heard: the newest step whose reports were known
    when these orders were given; engines may plan a step before they hear of the one before.
    """

    step: int
    loads: tuple[LoadOrder, ...]
    stores: tuple[StoreOrder, ...]
    is_idle: bool
    heard: int = 0


class LoadTiming(NamedTuple):
    """Seconds that a load took for so many tokens; one that was given up is extrapolated."""

    tokens: int
    seconds: float


class WorkerReport(NamedTuple):
    """A worker's findings of a step.

    `lost`: blocks that were promised and are not there. `failed`: requests whose loads did not bring everything.
    `rough`: requests whose blocks came rougher than the store has them.
    """

    step: int
    loads: tuple[LoadTiming, ...]
    lost: tuple[BlockKey, ...]
    failed: tuple[str, ...]
    rough: tuple[str, ...] = ()
