"""Whole blocks, or the first layers of all blocks before the next layers of any, in a few threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from mmap import PAGESIZE
from typing import NamedTuple

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import Codec, LayeredCodec, layer_section_ids, sections_by_layer
from kvtide.errors import CorruptPayload
from kvtide.store.load.access import BlockSink, LoadAccess, LoadBuffers, LoadReport, MissReason
from kvtide.types import ObjectId, Section
from kvtide.wire import SectionEntry, head_bytes, parse_header, parse_object

# As much of a block is read at a time where layers come one after the other: a disk is as fast with this as with more.
PIECE_BYTES = 1 << 20

# A load whose pace says that it will take so many times its deadline ends early, once this share of it is over.
_LATE_FACTOR, _TRIED_SHARE = 1.5, 0.2

# Offered a block's checked sections first; if it takes them, the block is not decoded for the sink.
SectionSink = Callable[[int, Codec, Sequence[Section]], bool]
# Called with the block's position, the values of one layer after the other, each (2, tokens, kv_heads, head_dim), and
# the number of the first; otherwise as a BlockSink. Layers of a block come in order.
LayerSink = Callable[[int, Sequence[BlockBits], int], None]
# Stored bytes that were read for a block so far.
_Outcome = int | MissReason


@dataclass(slots=True)
class _LayeredBlock:
    """A block of which the first `layers` layers have been delivered. Its pieces are loaded one after the other."""

    position: int
    meta: BlockMeta
    codec: LayeredCodec | None = None
    entries: Sequence[SectionEntry] = ()
    layers: int = 0
    read_bytes: int = 0


class Whole(NamedTuple):
    """The strategy that brings whole blocks. `layers` takes those of a codec that keeps layers apart, layer by layer.

    is_in_turn: the first layers of all blocks are read before the next ones of any. `sections` is offered a block
    before it is decoded for `sink`. Blocks after the first missing one may reach the sinks too, even after the load has
    returned: they don't count.
    """

    sink: BlockSink
    sections: SectionSink | None = None
    layers: LayerSink | None = None
    is_in_turn: bool = False

    def load(self, access: LoadAccess, metas: Sequence[BlockMeta], deadline_s: float) -> LoadReport:
        """Bring blocks; see `Strategy`."""
        report = _WholeLoad(access, self, deadline_s).run(metas)
        access.decide(metas, report.blocks, report.reason)
        return report


class _WholeLoad:
    """One load, from the moment at which its blocks are queued for the threads."""

    def __init__(self, access: LoadAccess, into: Whole, deadline_s: float) -> None:
        self._access = access
        self._into = into
        self._deadline_s = deadline_s
        self._started_s = access.clock.monotonic_s()

    def run(self, metas: Sequence[BlockMeta]) -> LoadReport:
        if self._into.is_in_turn:
            return self._leading(self._begin_layers(metas))
        loads = [(meta, partial(self._load_whole, position, meta)) for position, meta in enumerate(metas)]
        return self._leading([[self._pool(meta.id).submit(self._checked, meta, load)] for meta, load in loads])

    def _pool(self, object_id: ObjectId) -> ThreadPoolExecutor:
        access, near, far = self._access, self._access.workers.near, self._access.workers.far
        assert near is not None and far is not None, "load before open"
        if access.queued(object_id) is not None:
            return near
        is_near = access.guarded("look up", partial(access.tiers.is_near, object_id), False)
        return near if is_near else far

    def _leading(self, pending: Sequence[Sequence[Future[_Outcome]]]) -> LoadReport:
        """Wait for one block after the other; each is done with the last of its pieces, or with one that fails."""
        stored_bytes = 0
        for count, pieces in enumerate(pending):
            block_bytes = 0
            for piece in pieces:
                try:
                    since_s = self._access.clock.monotonic_s() - self._started_s
                    outcome = piece.result(max(0.0, self._deadline_s - since_s))
                except TimeoutError:
                    outcome = MissReason.DEADLINE
                except CancelledError:
                    outcome = MissReason.CLOSED
                if isinstance(outcome, MissReason):
                    _cancel(pending)
                    return LoadReport(count, stored_bytes, outcome)
                block_bytes = outcome
            stored_bytes += block_bytes
            if self._is_hopeless(count + 1, len(pending)):
                _cancel(pending)
                return LoadReport(count + 1, stored_bytes, MissReason.DEADLINE)
        return LoadReport(len(pending), stored_bytes, None)

    def _is_hopeless(self, done: int, blocks: int) -> bool:
        """Tell whether, at the pace so far, the load would end long after its deadline: its caller can begin now."""
        since_s = self._access.clock.monotonic_s() - self._started_s
        is_tried = since_s >= _TRIED_SHARE * self._deadline_s
        return done < blocks and is_tried and since_s * blocks > _LATE_FACTOR * self._deadline_s * done

    # Whole blocks

    def _checked(self, meta: BlockMeta, action: Callable[[LoadBuffers], _Outcome]) -> _Outcome:
        """Run an action on a scratch; what it finds corrupt is removed, other faults are misses."""
        workers = self._access.workers

        def run() -> _Outcome:
            scratch = workers.take(meta.layout)
            try:
                return action(scratch)
            except CorruptPayload as error:
                return self._access.corrupt(meta.id, error)
            finally:
                workers.give_back(scratch)

        fault: _Outcome = MissReason.FAULT
        return self._access.guarded("load", run, fault)

    def _load_whole(self, position: int, meta: BlockMeta, scratch: LoadBuffers) -> _Outcome:
        access, into = self._access, self._into
        source = access.queued(meta.id)
        if source is not None:
            into.sink(position, source())
            return 0
        size = access.tiers.get_into(meta.id, scratch.stored)
        if size is None:
            return access.absent(meta.id)
        stored = parse_object(scratch.stored[:size], meta.id)
        codec = access.codec_of(stored, meta)
        if isinstance(codec, MissReason):
            return codec
        sections = access.good_sections(stored, codec)
        if into.layers is not None and isinstance(codec, LayeredCodec):
            # A block of its own would be one more copy.
            for layer, section in enumerate(sections_by_layer(meta.layout, sections)):
                into.layers(position, [codec.decode_layer(meta.layout, section)], layer)
        elif into.sections is None or not into.sections(position, codec, sections):
            codec.decode(meta, sections, scratch.bits)
            into.sink(position, scratch.bits)
        return size

    # Layers

    def _begin_layers(self, metas: Sequence[BlockMeta]) -> list[list[Future[_Outcome]]]:
        """Queue the first layers of all blocks, then the next ones: as few as fill a piece."""
        pending: list[list[Future[_Outcome]]] = [[] for _ in metas]
        blocks = [(_LayeredBlock(position, meta), self._pool(meta.id)) for position, meta in enumerate(metas)]
        sizes = [(max(1, PIECE_BYTES // meta.layout.layer_bytes), meta.layout.layers) for meta in metas]
        for stops in zip_longest(*[[*range(step, layers, step), layers] for step, layers in sizes]):
            for (block, pool), stop, before in zip(blocks, stops, pending, strict=True):
                if stop is not None:
                    before.append(pool.submit(self._load_piece, block, stop, before[-1] if before else None))
        return pending

    def _load_piece(self, block: _LayeredBlock, stop: int, before: Future[_Outcome] | None) -> _Outcome:
        """Deliver a block's layers up to `stop`, after those of the piece before, which was queued before."""
        outcome: _Outcome = 0
        if before is not None:
            outcome = MissReason.DEADLINE if before.cancelled() else before.result()
        if isinstance(outcome, MissReason) or block.layers >= stop:
            return outcome
        return self._checked(block.meta, partial(self._load_layers, block, stop))

    def _load_layers(self, block: _LayeredBlock, stop: int, scratch: LoadBuffers) -> _Outcome:
        access, meta, start = self._access, block.meta, 0
        if not block.layers and access.queued(meta.id) is not None:
            block.layers = meta.layout.layers
            return self._load_whole(block.position, meta, scratch)
        if block.layers:
            # Direct reads begin at a page.
            start = block.entries[block.layers].offset // PAGESIZE * PAGESIZE
            end = block.entries[stop - 1].offset + block.entries[stop - 1].size
        else:
            end = min(len(scratch.stored), head_bytes(meta.layout.layers) + stop * meta.layout.layer_bytes)
        size = access.tiers.get_into(meta.id, scratch.stored[: end - start], start)
        if size is None:
            return access.absent(meta.id)
        block.read_bytes += size
        data = scratch.stored[:size]
        if not block.layers and not self._begin_block(block, data, stop):
            # The bytes so far are read again.
            block.layers = meta.layout.layers
            return self._load_whole(block.position, meta, scratch)
        assert block.codec is not None and self._into.layers is not None
        values = [
            block.codec.decode_layer(meta.layout, entry.cut(data, start, meta.id))
            for entry in block.entries[block.layers : stop]
        ]
        self._into.layers(block.position, values, block.layers)
        block.layers = stop
        return block.read_bytes

    def _begin_block(self, block: _LayeredBlock, data: memoryview, stop: int) -> bool:
        """Take the head of a block's object; False if layers up to `stop` are no sections of their own in `data`."""
        stored = parse_header(data, block.meta.id)
        codec = self._access.codec_of(stored, block.meta)
        last = stored.entries[min(stop, len(stored.entries)) - 1]
        is_layered = stored.section_ids == layer_section_ids(block.meta.layout.layers)
        if not isinstance(codec, LayeredCodec) or not is_layered:
            return False
        block.codec, block.entries = codec, stored.entries
        return last.offset + last.size <= len(data)


def _cancel(pending: Sequence[Sequence[Future[_Outcome]]]) -> None:
    # Backwards: a piece that runs must not find the one before it cancelled under its feet.
    for piece in reversed([each for block in pending for each in block]):
        piece.cancel()
