"""Prefixes of a llama.cpp context in a cache: found, loaded into one state, and cut into blocks to be stored.

    [0, exact)        as a whole prompt's batches leave it: of use to every prompt that begins so
    [exact, spoken)   computed from between two batches, as llama.cpp goes on in its own context
    [spoken, tokens)  an answer, token by token, and what came after it

Rows behind `exact` differ from a whole prompt's by rounding. They have names of their own, and only a prompt that goes
on behind an answer takes them: what llama.cpp would have had in its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec, LayeredCodec, sections_by_layer
from kvtide.engines.gate import WriteGate
from kvtide.engines.llamacpp.context import LlamaContext
from kvtide.engines.llamacpp.identity import ServedGroup, ServedLlama, positions_of
from kvtide.engines.llamacpp.state import Part, StateBuilder, block_rows, paired
from kvtide.group import Parts, part_keys
from kvtide.keys import block_keys
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import MissReason, Whole
from kvtide.types import BlockKey, Namespace, ObjectId, Section

Tokens = NDArray[np.int32]


class Prefix(NamedTuple):
    """A stored prefix: its tokens, those that are as a whole prompt's, and the parts to load, by group."""

    tokens: int
    exact: int
    metas: list[list[BlockMeta]]
    is_near: bool


NOTHING = Prefix(0, 0, [], False)


class LlamaPrefixes:
    """Prefixes of one context, whose rows are `served`, in a cache."""

    def __init__(self, context: LlamaContext, cache: Cache, clock: Clock, served: ServedLlama) -> None:
        self._context = context
        self._cache = cache
        self._clock = clock
        self._served = served

    # Names

    def _keys(self, tokens: Tokens) -> list[BlockKey]:
        # Any namespace will do: each group's own ones are in the names of its parts.
        return block_keys(self._served.groups[0].namespace, tokens, self._served.block_tokens)

    def _metas(self, keys: Sequence[BlockKey], group: ServedGroup, space: Namespace) -> list[BlockMeta]:
        """Return the parts of all blocks in one namespace of a group."""
        parent, found = BlockKey(space), list[BlockMeta]()
        for number, key in enumerate(part_keys(space, keys)):
            object_id = self._cache.tiers.named(ObjectId(space, key))
            start = number * self._served.block_tokens
            found.append(BlockMeta(object_id, parent, start, group.group.layout, self._served.label))
            parent = key
        return found

    def _reach(self, group: ServedGroup) -> int:
        return group.group.reach_blocks(self._served.block_tokens) if group.window_cells else 0

    # Look up and load

    def find(self, prompt: Tokens) -> Prefix:
        """Look up the longest stored prefix of a prompt, whose last token is computed in any case."""
        served, size = self._served, self._served.block_tokens
        keys = self._keys(prompt[:-1])
        exact = self._exact_blocks(keys)
        told, metas = self._turns_blocks(keys, exact), []
        stop = exact + len(told)
        for group in served.groups:
            spaces = [self._metas(keys[:stop], group, each) for each in (group.turns, group.told)] if told else []
            parts = self._metas(keys[:exact], group, group.namespace)
            parts += [spaces[is_told][number] for number, is_told in enumerate(told, exact)]
            metas.append(parts[max(0, stop - (self._reach(group) or stop)) :])
        self._cache.decisions.add_absent((len(keys) - stop) * size, served.groups[0].namespace)
        is_near = stop > 0 and self._cache.is_near([each[0].id for each in metas])
        return Prefix(stop * size, exact * size, metas, is_near)

    def _exact_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks are stored as a whole prompt leaves them, up to the end of a batch."""
        step = self._served.step // self._served.block_tokens
        stop = len(keys) // step * step
        while stop:
            parts = [
                Parts([meta.id for meta in self._metas(keys[:stop], group, group.namespace)], reach, bool(reach))
                for group in self._served.groups
                for reach in [self._reach(group)]
            ]
            blocks = self._cache.match_parts(parts).blocks
            if blocks == stop:
                break
            stop = blocks // step * step
        return stop

    def _turns_blocks(self, keys: Sequence[BlockKey], exact: int) -> list[bool]:
        """Return of each block that a conversation has stored behind exact ones if it has, or follows, an answer.

        Nothing where no answer is in any of them, or where windows have been left.
        """
        groups = self._served.groups
        if any(group.window_cells for group in groups):
            return []
        told, turns = (
            [[meta.id for meta in self._metas(keys, group, space)] for group, space in spaces]
            for spaces in ([(each, each.told) for each in groups], [(each, each.turns) for each in groups])
        )
        found, last = list[bool](), 0
        while exact + len(found) < len(keys):
            at = exact + len(found)
            if run := min(self._cache.match(ids[at:]) for ids in told):
                found += [True] * run
                last = len(found)
            elif not last and (run := min(self._cache.match(ids[at:]) for ids in turns)):
                found += [False] * run
            else:
                break
        return found[:last]

    def load(self, prefix: Prefix) -> int:
        """Put a stored prefix in the place of all that the context has; return its tokens, 0 if it has none then."""
        groups, tokens = self._served.groups, prefix.tokens
        cells = [positions_of(tokens, group.window_cells) for group in groups]
        gaps = [_gap(tokens, group, each) for group, each in zip(groups, cells, strict=True)]
        builder = StateBuilder([group.shape for group in groups], cells)
        began_s = self._clock.monotonic_s()
        until_s = began_s + self._cache.judge.deadline_s(tokens)
        reason, wanted, came = None, 0, 0
        for group, part, metas in zip(groups, builder.parts, prefix.metas, strict=True):
            incoming = _Incoming(group, part, metas, self._served.pairs)
            left_s = max(0.0, until_s - self._clock.monotonic_s())
            report = self._cache.load(metas, Whole(incoming.block, incoming.sections), left_s)
            incoming.gate.close()
            wanted, came, reason = wanted + len(metas), came + report.blocks, report.reason
            if report.blocks < len(metas):
                break
            incoming.fill_before()
        if not prefix.is_near and reason in (None, MissReason.DEADLINE):
            # A load that was given up is extrapolated.
            now_s = self._clock.monotonic_s()
            self._cache.judge.note_load(tokens, (now_s - began_s) * wanted / max(1, came), now_s)
        if reason is not None or not self._context.write(builder.data):
            return 0
        for gap in gaps:
            if gap is not None:
                self._context.drop(gap)
        return tokens

    # Store

    def store(self, tokens: Tokens, first: int, exact: int, spoken: int) -> int:
        """Queue the full blocks from `first` on of what the context has; return before which block all wait or did.

        tokens: of the context. exact: those as a whole prompt's. spoken: the first of an answer; later blocks are
        stored if one of them has such tokens.
        """
        size = self._served.block_tokens
        stop = len(tokens) // size if spoken < len(tokens) // size * size else exact // size
        if first >= stop:
            return first
        _, parts = self._context.read()
        keys, queued = self._keys(tokens[: stop * size]), stop
        for group, part in zip(self._served.groups, parts, strict=True):
            if part is None or (part.positions != positions_of(len(tokens), group.window_cells)).any():
                # Cells in another order are summed in another order.
                return stop
            spaces = [self._metas(keys, group, each) for each in (group.namespace, group.turns, group.told)]
            blocks, oldest = [], int(part.positions.min())
            for block in range(first, stop):
                start, end = block * size, (block + 1) * size
                kind = 0 if end <= exact else 1 if end <= spoken else 2
                if start >= oldest and not (kind and group.window_cells):
                    blocks.append(
                        PendingBlock(
                            spaces[kind][block], partial(_captured, part, start, end, group, self._served.pairs)
                        )
                    )
            count = self._cache.store(blocks)
            queued = queued if group.window_cells else min(queued, first + count)
        return queued


class _Incoming:
    """Takes the parts of one group of a load, from several threads, and writes their rows into a state."""

    def __init__(self, group: ServedGroup, part: Part, metas: Sequence[BlockMeta], pairs: int) -> None:
        self._pairs = pairs
        self.gate = WriteGate()
        self._group = group
        self._part = part
        self._metas = metas

    def _cells(self, start: int, stop: int) -> Any:
        """Return which cells hold these positions."""
        window = self._group.window_cells
        if not window or start // window == (stop - 1) // window:
            start, stop = (start % window, (stop - 1) % window + 1) if window else (start, stop)
            return slice(start, stop)
        return np.arange(start, stop) % window

    def _write(self, position: int, first: int, layers: NDArray[Any]) -> None:
        """Write some layers of a block, from `first` on: their bytes as a block has them."""
        tokens, start = self._group.group.layout.tokens, self._metas[position].start
        cells, tensors = self._cells(start, start + tokens), self._group.shape.tensors
        with self.gate.enter() as is_in:
            if is_in:
                data = layers.reshape(-1).view(np.uint8)
                for number, rows in enumerate(block_rows(tensors[2 * first :], tokens, data), 2 * first):
                    is_paired = self._pairs and number % 2 == 0
                    self._part.rows[number][cells] = paired(rows, self._pairs) if is_paired else rows

    def block(self, position: int, bits: BlockBits) -> None:
        """Write a block."""
        self._write(position, 0, bits)

    def sections(self, position: int, codec: Codec, sections: Sequence[Section]) -> bool:
        """Write a block's layers out of its sections, without a copy between; False if they are none."""
        layout = self._group.group.layout
        if not isinstance(codec, LayeredCodec) or len(sections) != layout.layers:
            return False
        for layer, section in enumerate(sections_by_layer(layout, sections)):
            self._write(position, layer, codec.decode_layer(layout, section))
        return True

    def fill_before(self) -> None:
        """Clear the rows before the first part: of what has left the windows, which no token looks at."""
        before = np.flatnonzero(self._part.positions < self._metas[0].start)
        if self._group.window_cells and len(before):
            for rows in self._part.rows:
                rows[before] = 0


def _gap(tokens: int, group: ServedGroup, cells: Tokens) -> int | None:
    """Give the cell that llama.cpp is to fill next a position of its own, to be emptied; None if it finds it anyway."""
    window = group.window_cells
    if not window or tokens <= window or tokens % window == 0:
        return None
    cells[tokens % window] = tokens + 1
    return tokens + 1


def _captured(part: Part, start: int, stop: int, group: ServedGroup, pairs: int) -> BlockSource:
    """Copy a block out of a state."""
    bits: BlockBits = np.empty(group.group.layout.shape, group.group.layout.bits_dtype)
    is_whole = part.cut(start, stop, bits.reshape(-1).view(np.uint8), pairs)
    assert is_whole, f"tokens {start} to {stop} are not all in the state"
    return lambda: bits
