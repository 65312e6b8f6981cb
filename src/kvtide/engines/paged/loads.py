"""One load into an engine's pages: where each block goes, which layers are whole, and when nothing may be written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import Codec
from kvtide.config import step_back
from kvtide.engines.gate import WriteGate
from kvtide.engines.paged.pages import Captured, HostPages, PagePool
from kvtide.engines.paged.sequence import BlockRef, LoadOrder
from kvtide.tier.faults import FaultGuard
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId, Section

# Of the memory tier's room so much is taken from the system before it is needed.
TOUCHED_BYTES_MAX = 512 << 20
TOUCH_NICE = 19
# Blocks loaded once are remembered, so that what is loaded a second time is kept.
LOADED_MAX = 1 << 14


class KeptBlocks:
    """Captured blocks of one size, by name. Thread-safe. Those of an id that `is_valid` no more are not here."""

    def __init__(self, bytes_max: int, block_bytes: int, is_valid: Callable[[ObjectId], bool]) -> None:
        self.bytes_max = bytes_max
        self._count_max = bytes_max // block_bytes
        self._is_valid = is_valid
        self._lock = threading.Lock()
        # With the id that was current then: equal ids may be of different generations.
        self._blocks: OrderedDict[ObjectId, tuple[ObjectId, Captured]] = OrderedDict()
        self._loaded: OrderedDict[ObjectId, None] = OrderedDict()

    def leading(self, object_ids: Sequence[ObjectId]) -> list[Captured]:
        """Return the longest leading run of blocks that are here; they stay valid."""
        found = []
        with self._lock:
            for object_id in object_ids:
                named, block = self._blocks.get(object_id, (object_id, None))
                if block is None or not self._is_valid(named):
                    break
                self._blocks.move_to_end(object_id)
                found.append(block)
        return found

    def put(self, object_id: ObjectId, block: Captured) -> None:
        """Keep a block in place of those that were not used for longest."""
        with self._lock:
            self._blocks[object_id] = (object_id, block)
            self._blocks.move_to_end(object_id)
            while len(self._blocks) > self._count_max:
                self._blocks.popitem(last=False)

    def is_loaded_again(self, object_id: ObjectId) -> bool:
        """Note a load from a tier; tell whether the block has earned a place by it. Never where no block has room."""
        if self._count_max == 0:
            return False
        with self._lock:
            if object_id in self._loaded:
                del self._loaded[object_id]
                return True
            self._loaded[object_id] = None
            if len(self._loaded) > LOADED_MAX:
                self._loaded.popitem(last=False)
        return False

    def check(self) -> None:
        """AssertionError if more is kept than may be."""
        with self._lock:
            assert len(self._blocks) <= self._count_max
            assert len(self._loaded) <= LOADED_MAX


class PageLoad:
    """One load, of blocks and the pieces behind them, which have the positions after theirs.

    Its sinks may be called too late: then they write nothing.
    """

    def __init__(
        self, order: LoadOrder, ids: Sequence[ObjectId], pool: PagePool, kept: KeptBlocks, started_s: float
    ) -> None:
        self.order = order
        self.started_s = started_s
        # Where the blocks came, and the states after them did not.
        self.missed_states: ObjectId | None = None
        # Pieces of the tail that came, where all blocks did.
        self.pieces = 0
        self._ids = ids
        self._pool = pool
        self._kept = kept
        self._captured = [] if order.is_latest else kept.leading(ids)
        self._pages_per_block = pool.layout.tokens // pool.page_tokens
        self._gate = WriteGate()
        # The token that the pages begin with.
        self._start = (order.blocks or order.tail)[0].start + order.skip_pages * pool.page_tokens
        # Of each layer, the blocks that are still to come.
        self._missing = [len(order.blocks) + len(order.tail)] * pool.layout.layers

    @property
    def is_kept(self) -> bool:
        """True if nothing has to come from a tier."""
        return len(self._captured) == len(self._ids) and not self.order.tail

    def restore_kept(self, guarded: FaultGuard) -> int:
        """Copy the leading blocks that this process has kept, up to one that can't be; return how many."""
        for position, block in enumerate(self._captured):
            if not guarded("restore", partial(self._restore, position, block), False):
                return position
        return len(self._captured)

    def _restore(self, position: int, block: Captured) -> bool:
        with self._gate.enter() as is_in:
            if is_in:
                block.restore(*self._room(position))
                self._note_layers()
        return True

    def sink(self, position: int, bits: BlockBits, is_kept: bool = True) -> None:
        """Write a block into its pages; a BlockSink. What is not to be kept may be rough."""
        with self._gate.enter() as is_in:
            if is_in and position >= len(self._ids):
                self._write_piece(position, 0, bits)
            elif is_in:
                self._pool.scatter(bits, *self._room(position))
                self._note_layers()
                if is_kept:
                    self._keep(position)

    def _write_piece(self, position: int, first: int, layers: BlockBits | Sequence[BlockBits]) -> None:
        """Write layers of a piece of the tail, from layer `first` on, into its part of a page."""
        assert isinstance(self._pool, HostPages)
        piece = self.order.tail[position - len(self._ids)]
        page, token = divmod(piece.start - self._start, self._pool.page_tokens)
        self._pool.scatter_tokens(layers, self.order.pages[page], token, first)
        self._note_layers(first, first + len(layers))

    def take(self, position: int, meta: BlockMeta, codec: Codec, sections: Sequence[Section]) -> bool:
        """Let the pool decode a block into its pages. False if it does not."""
        if position >= len(self._ids):
            return False
        with self._gate.enter() as is_in:
            if is_in:
                if not self._pool.decode(codec, meta, sections, *self._room(position)):
                    return False
                self._note_layers()
                self._keep(position)
        return True

    def take_layers(self, position: int, first: int, layers: Sequence[BlockBits]) -> None:
        """Write layers of a block, from layer `first` on, into HostPages."""
        assert isinstance(self._pool, HostPages)
        with self._gate.enter() as is_in:
            if is_in and position >= len(self._ids):
                self._write_piece(position, first, layers)
            elif is_in:
                stop = first + len(layers)
                self._pool.scatter_layers(first, layers, *self._room(position))
                self._note_layers(first, stop)
                if stop == self._pool.layout.layers:
                    self._keep(position)

    def take_states(self, pool: PagePool, bits: BlockBits) -> None:
        """Write the states at the end of the last block into the page that they have there."""
        with self._gate.enter() as is_in:
            if is_in:
                pool.scatter(bits, self.order.pages[-1:], 0)

    def _keep(self, position: int) -> None:
        """Keep a block that was loaded before as the pages hold it."""
        pages, skip_pages = self._room(position)
        if not skip_pages and self._kept.is_loaded_again(self._ids[position]):
            captured = self._pool.capture(pages)
            # The engine's thread is another, which may give the pages away once the load has ended.
            captured.wait()
            self._kept.put(self._ids[position], captured)

    def _room(self, position: int) -> tuple[Sequence[int], int]:
        """Return the pages that a block fills, and how many of its pages come before them."""
        start = position * self._pages_per_block - self.order.skip_pages
        return self.order.pages[max(0, start) : start + self._pages_per_block], max(0, -start)

    def _note_layers(self, first: int = 0, stop: int | None = None) -> None:
        with self._gate.changed:
            for layer in range(first, self._pool.layout.layers if stop is None else stop):
                self._missing[layer] -= 1
            if 0 in self._missing[first:stop]:
                self._gate.changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Wait until the layer is whole or the load has ended."""
        with self._gate.changed:
            self._gate.changed.wait_for(lambda: self._gate.is_closed or self._missing[layer] == 0)

    def close(self) -> None:
        """Let nothing more be written; return when nothing is. Idempotent."""
        self._gate.close()

    def is_whole(self, blocks: int) -> bool:
        """True if all came, with so many leading blocks."""
        return blocks == len(self.order.blocks) and self.pieces == len(self.order.tail)

    def first_missing(self, blocks: int) -> BlockRef:
        """Return the block or piece that came no more, after so many blocks."""
        return (*self.order.blocks, *self.order.tail)[blocks + self.pieces]

    def unfilled(self, blocks: int) -> tuple[int, ...]:
        """Return the pages after the first `blocks` blocks, if something is missing."""
        if self.is_whole(blocks):
            return ()
        return self.order.pages[max(0, blocks * self._pages_per_block - self.order.skip_pages) :]


class StreamedPages:
    """The engine's pages after those that are kept, as what a stream is appended to. It computes nothing."""

    def __init__(self, load: PageLoad, kept: int) -> None:
        self._load = load
        self._kept = kept

    def compute(self, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
        """Compute nothing: between steps nobody does."""
        return False

    def append(self, block: int, bits: BlockBits) -> None:
        """Write a block, for this request alone: it may be rough."""
        self._load.sink(self._kept + block, bits, is_kept=False)


def touch_rooms(tiers: TierStack, pool: PagePool, kept_bytes: int, is_wanted: Callable[[], bool]) -> None:
    """Take memory from the system for captured blocks and the memory tier, behind all else that computes."""
    step_back(TOUCH_NICE)
    pool.reserve(kept_bytes // pool.room_bytes, is_wanted)
    memory = tiers.open_tiers.get(MemoryTier.name)
    if isinstance(memory, MemoryTier):
        memory.touch(TOUCHED_BYTES_MAX, is_wanted)
