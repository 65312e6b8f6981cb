"""Prefixes of a llama.cpp context in a cache: found, loaded into one state, and cut into blocks to be stored.

    [0, exact)        as a whole prompt's batches leave it: of use to every prompt that begins so
    [exact, spoken)   computed from between two batches, as llama.cpp goes on in its own context
    [spoken, tokens)  an answer, token by token, and what came after it

Rows behind `exact` differ from a whole prompt's by rounding. They have names of their own, and only a prompt that goes
on behind an answer takes them: what llama.cpp would have had in its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.engines.gate import WriteGate
from kvtide.engines.llamacpp.identity import ServedGroup, ServedLlama, positions_of
from kvtide.engines.llamacpp.state import LlamaContext, Part, block_rows, build_state, halved, paired
from kvtide.group import Parts, part_keys
from kvtide.keys import block_keys
from kvtide.store import LOOK_UP_S_MAX, BlockSource, Cache, PendingBlock
from kvtide.store.load import MissReason, Whole
from kvtide.types import BlockKey, Namespace, ObjectId

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
        self._context, self._cache, self._clock, self._served = context, cache, clock, served
        size = served.block_tokens
        self._reaches = [each.group.reach_blocks(size) if each.window_cells else 0 for each in served.groups]

    def _named(self, tokens: Tokens) -> list[list[list[BlockMeta]]]:
        """Return the parts of all full blocks of tokens: by group, and by kind of rows as `ServedGroup.spaces` is."""
        served = self._served
        # Any namespace will do: each group's own ones are in the names of its parts.
        keys = block_keys(served.groups[0].spaces[0], tokens, served.block_tokens)
        return [[self._metas(keys, group, space) for space in group.spaces] for group in served.groups]

    def _metas(self, keys: Sequence[BlockKey], group: ServedGroup, space: Namespace) -> list[BlockMeta]:
        named, size, label = self._cache.tiers.named, self._served.block_tokens, self._served.label
        chain = pairwise([BlockKey(space), *part_keys(space, keys)])
        return [
            BlockMeta(named(ObjectId(space, key)), parent, number * size, group.group.layout, label)
            for number, (parent, key) in enumerate(chain)
        ]

    def find(self, prompt: Tokens) -> Prefix:
        """Look up the longest stored prefix of a prompt, whose last token is computed in any case."""
        size, named = self._served.block_tokens, self._named(prompt[:-1])
        exact = self._exact_blocks([kinds[0] for kinds in named])
        kinds, blocks = [0] * exact + self._turns(named, exact), len(named[0][0])
        self._cache.decisions.add_absent((blocks - len(kinds)) * size, self._served.groups[0].spaces[0])
        metas = [
            [own[kind][number] for number, kind in enumerate(kinds)][max(0, len(kinds) - (reach or len(kinds))) :]
            for own, reach in zip(named, self._reaches, strict=True)
        ]
        is_near = bool(kinds) and self._cache.is_near([each[0].id for each in metas])
        return Prefix(len(kinds) * size, exact * size, metas, is_near)

    def _exact_blocks(self, named: Sequence[Sequence[BlockMeta]]) -> int:
        """Return how many leading blocks are stored as a whole prompt leaves them, up to the end of a batch."""
        step = self._served.step // self._served.block_tokens
        stop = len(named[0]) // step * step
        while stop:
            every = zip(named, self._reaches, strict=True)
            parts = [Parts([meta.id for meta in metas[:stop]], reach, bool(reach)) for metas, reach in every]
            blocks = self._cache.match_parts(parts, None, LOOK_UP_S_MAX).blocks
            if blocks == stop:
                break
            stop = blocks // step * step
        return stop

    def _turns(self, named: Sequence[Sequence[Sequence[BlockMeta]]], exact: int) -> list[int]:
        """Return the kinds of blocks that turns left behind exact ones, up to the last answer; none of windows."""
        found, last = list[int](), 0
        while exact + len(found) < len(named[0][0]) and not any(self._reaches):
            at = exact + len(found)
            ids = [[[meta.id for meta in own[n][at:]] for own in named] for n in (1, 2)]
            turns, told = (min(self._cache.match(each, None, LOOK_UP_S_MAX) for each in of_kind) for of_kind in ids)
            kind, run = (2, told) if told else (1, turns)
            if not run or (kind == 1 and last):
                break
            found += [kind] * run
            last = len(found) if kind == 2 else last
        return found[:last]

    def load(self, prefix: Prefix) -> int:
        """Put a stored prefix in the place of all that the context has; return its tokens, 0 if it has none then."""
        groups, tokens = self._served.groups, prefix.tokens
        cells, gaps = [positions_of(tokens, group.window_cells) for group in groups], list[int]()
        for group, each in zip(groups, cells, strict=True):
            # The cell that llama.cpp is to fill next, where it is not the first: a position of its own, to be emptied.
            if 0 < group.window_cells < tokens and tokens % group.window_cells:
                each[tokens % group.window_cells] = tokens + 1
                gaps.append(tokens + 1)
        state, parts = build_state([group.shape for group in groups], cells)
        began_s = self._clock.monotonic_s()
        until_s = began_s + self._cache.judge.deadline_s(tokens)
        reason, wanted, came = None, 0, 0
        for group, part, metas in zip(groups, parts, prefix.metas, strict=True):
            gate = WriteGate()
            write = _writing(part, group, metas, self._served.pairs, gate)
            left_s = max(0.0, until_s - self._clock.monotonic_s())
            report = self._cache.load(metas, Whole(write, layers=write), left_s)
            gate.close()
            wanted, came, reason = wanted + len(metas), came + report.blocks, report.reason
            if report.blocks < len(metas):
                break
            # What has left the windows, which no token looks at.
            before = part.positions < metas[0].start
            for rows in part.rows if group.window_cells else ():
                rows[before] = 0
        if not prefix.is_near and reason in (None, MissReason.DEADLINE):
            now_s = self._clock.monotonic_s()
            self._cache.judge.note_load(tokens, now_s - began_s, now_s, tokens * came // wanted)
        return tokens if reason is None and self._context.write(state, gaps) else 0

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
        queued = stop
        every = zip(self._served.groups, parts, self._named(tokens[: stop * size]), strict=True)
        for number, (group, part, named) in enumerate(every):
            if not np.array_equal(part.positions, positions_of(len(tokens), group.window_cells)):
                # Cells in another order are summed in another order.
                return stop
            blocks, oldest = [], int(part.positions.min())
            for block in range(first, stop):
                start, end = block * size, (block + 1) * size
                kind = 0 if end <= exact else 1 if end <= spoken else 2
                if start >= oldest and not (kind and group.window_cells):
                    capture = partial(_captured, part, start, end, group, self._served.pairs)
                    blocks.append(PendingBlock(named[kind][block], capture, group=number))
            count = self._cache.store(blocks)
            queued = queued if group.window_cells else min(queued, first + count)
        return queued


def _writing(
    part: Part, group: ServedGroup, metas: Sequence[BlockMeta], pairs: int, gate: WriteGate
) -> Callable[..., None]:
    """Return what writes the blocks of one group of a load into a state, from several threads."""
    tokens = group.group.layout.tokens

    def write(position: int, layers: Iterable[BlockBits], first: int = 0) -> None:
        """Write a block, or some layers of it from `first` on."""
        cells = _cells(metas[position].start, metas[position].start + tokens, group.window_cells)
        with gate.enter() as is_in:
            for layer, bits in enumerate(layers if is_in else (), first):
                came = block_rows(group.shape[2 * layer :], tokens, bits.reshape(-1).view(np.uint8))
                for number, rows in enumerate(came, 2 * layer):
                    part.rows[number][cells] = paired(rows, pairs) if pairs and number % 2 == 0 else rows

    return write


def _cells(start: int, stop: int, window_cells: int) -> Any:
    """Return which cells hold these positions, where `positions_of` holds."""
    return np.arange(start, stop) % window_cells if window_cells else slice(start, stop)


def _captured(part: Part, start: int, stop: int, group: ServedGroup, pairs: int) -> BlockSource:
    bits: BlockBits = np.empty(group.group.layout.shape, group.group.layout.bits_dtype)
    places = block_rows(part.shape, stop - start, bits.reshape(-1).view(np.uint8))
    cells = _cells(start, stop, group.window_cells)
    for number, (rows, place) in enumerate(zip(part.rows, places, strict=True)):
        place[:] = halved(rows[cells], pairs) if pairs and number % 2 == 0 else rows[cells]
    return lambda: bits
