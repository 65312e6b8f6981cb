"""Prefixes of a call's sequences: their parts found in a cache, loaded from it, and queued to be stored.

Several sequences, padded on the left, restore the columns that all of them can have. Of a model whose layers keep
windows or states all that a hit needs comes, or nothing is restored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.engines.transformers.fingerprint import ModelIdentity
from kvtide.engines.transformers.groups import RestoredRoom, StateRoom, block_bits, cache_argument, read_states
from kvtide.evict import Advice
from kvtide.group import GroupKind, Hit, Parts, part_keys, state_every
from kvtide.importance import Orders
from kvtide.keys import TokenIds, block_keys
from kvtide.store import LOOK_UP_S_MAX, BlockSource, Cache, PendingBlock
from kvtide.store.load import MissReason, Whole
from kvtide.types import BlockKey, ObjectId


class SequenceRow(NamedTuple):
    """One sequence of a call: columns of padding before it, its tokens, and the parts of full blocks, by group.

    The last token has no part: it always runs, as its logits are the answer's first token. hit: as it was looked up.
    """

    pad: int
    tokens: np.ndarray[Any, Any]
    metas: list[list[BlockMeta]]
    hit: Hit = Hit(0)


class RestoredColumns(NamedTuple):
    """An engine's cache with the leading columns of a call's rows, and the stored bytes that were read for it.

    is_near: they were in the fastest tier.
    """

    past: DynamicCache
    columns: int = 0
    stored_bytes: int = 0
    is_near: bool = False


@dataclass(eq=False, repr=False)
class Prefixes:
    """Prefixes of one live model in a cache. `identity` names its groups of layers; a plain model has one."""

    _model: Any
    _cache: Cache
    _clock: Clock
    _identity: ModelIdentity
    state_every_tokens: InitVar[int | None]

    def __post_init__(self, state_every_tokens: int | None) -> None:
        """state_every_tokens: a state is kept so often. ValueError if there are none, or for a bad number."""
        identity = self._identity
        self._block_tokens = identity.block_tokens
        # The name by which the model takes its cache.
        self.argument = cache_argument(self._model)
        # Of a state, and of a block's rows.
        state_bytes, row_bytes = (
            sum(each.group.layout.raw_bytes for each in identity.groups if bool(each.states) is want)
            for want in (True, False)
        )
        if state_every_tokens is not None and (state_every_tokens < 1 or not state_bytes):
            raise ValueError(f"state_every_tokens must be positive, of a model with states, got {state_every_tokens}")
        # Often enough that a prompt that branches has one near.
        self._state_every_tokens = state_every_tokens or state_every(state_bytes, row_bytes / identity.block_tokens)

    def metas(self, tokens: TokenIds, is_latest: bool = False) -> list[list[BlockMeta]]:
        """Return the parts of all full blocks of tokens, by group; a plain model's are its blocks."""
        identity, size, found = self._identity, self._block_tokens, []
        keys = block_keys(identity.namespace, tokens, size)
        model = str(self._model.config._name_or_path).rstrip("/").rpartition("/")[2]
        for (group, *_), namespace in zip(identity.groups, identity.namespaces, strict=True):
            own = keys if identity.is_plain else part_keys(namespace, keys)
            label = f"{model} {group.layout.dtype.value if identity.is_plain else group.name}"
            # A state stands alone, at its block's last token.
            is_state, parent, mine = group.kind is GroupKind.STATE, BlockKey(namespace), list[BlockMeta]()
            for start, key in zip(range(size - 1 if is_state else 0, len(keys) * size, size), own, strict=True):
                object_id = self._cache.tiers.named(ObjectId(namespace, key), is_latest)
                mine.append(BlockMeta(object_id, parent, start, group.layout, label))
                parent = parent if is_state else key
            found.append(mine)
        return found

    def row(self, columns: np.ndarray[Any, Any], pad: int = 0, is_latest: bool = False) -> SequenceRow:
        """Return the sequence that is behind `pad` columns."""
        tokens = columns[pad:]
        return SequenceRow(pad, tokens, self.metas(tokens[:-1], is_latest))

    def find(self, row: SequenceRow, hint: Advice | None = None) -> SequenceRow:
        """Look up how much of a sequence can be restored."""
        if self._identity.is_plain:
            return row._replace(hit=Hit(self._cache.match([meta.id for meta in row.metas[0]], hint, LOOK_UP_S_MAX)))
        parts = [
            Parts([meta.id for meta in metas], each.group.reach_blocks(self._block_tokens), bool(each.states))
            for each, metas in zip(self._identity.groups, row.metas, strict=True)
        ]
        return row._replace(hit=self._cache.match_parts(parts, hint, LOOK_UP_S_MAX))

    def needed(self, row: SequenceRow, tokens: int) -> list[list[BlockMeta]]:
        """Return the parts, by group, that restoring so many tokens takes."""
        blocks = max(0, -(-tokens // self._block_tokens))
        return [
            metas[max(0, blocks - (reach or blocks)) : blocks]
            for metas, reach in zip(row.metas, self._identity.reaches, strict=True)
        ]

    def is_near(self, row: SequenceRow, tokens: int) -> bool:
        """Tell whether what restoring so many tokens takes begins in the fastest tier."""
        return tokens > 0 and self._cache.is_near([metas[0].id for metas in self.needed(row, tokens)])

    def restore(self, rows: Sequence[SequenceRow], began_s: float) -> RestoredColumns:
        """Return a cache with the columns that all rows can have, if loading is worth it, as far as they came."""
        cache, size, namespace = self._cache, self._block_tokens, self._identity.namespace
        for row in rows:
            cache.decisions.add_absent(size * (len(row.metas[0]) - row.hit.blocks), namespace)
        stop = min([row.pad + size * row.hit.blocks for row in rows])
        # Rows that begin alike are loaded once, as many blocks as the one with the least padding needs of any columns.
        alike = defaultdict[BlockKey, list[int]](list)
        for number, row in sorted(enumerate(rows), key=lambda each: each[1].pad):
            if row.pad < stop:
                alike[row.metas[0][(stop - row.pad - 1) // size].id.key].append(number)
        loaded = [rows[number] for number, *_ in alike.values()]
        tokens = stop * len(loaded) - sum(map(attrgetter("pad"), loaded))
        is_near = cache.is_near([metas[0].id for row in loaded for metas in self.needed(row, stop - row.pad)])
        if alike and cache.is_worth(tokens, is_near, namespace):
            load = partial(self._load, rows, [*alike.values()], stop, tokens, None if is_near else began_s)
            if (found := cache.guarded("restore", load, None)) is not None:
                return found._replace(is_near=is_near)
        return RestoredColumns(DynamicCache(config=self._model.config))

    def _load(
        self, rows: Sequence[SequenceRow], alike: Sequence[Sequence[int]], stop: int, tokens: int, since_s: float | None
    ) -> RestoredColumns | None:
        """Load the columns before `stop`. None if a part did not come without which the others are of no use.

        alike: numbers of the rows that begin alike, the least padded first. since_s: when it began; None where that
        tells nothing of the link.
        """
        identity, size, clock = self._identity, self._block_tokens, self._clock
        until_s = clock.monotonic_s() + self._cache.judge.deadline_s(tokens)
        pads, rooms = [row.pad for row in rows], list[RestoredRoom | StateRoom]()
        for each, reach in zip(identity.groups, identity.reaches, strict=True):
            before, layout = max(0, stop - reach * size) if reach else 0, each.group.layout
            rooms.append(RestoredRoom(layout, stop - before, pads, each, before) if each.rows else StateRoom(each))
        columns, stored_bytes, wanted, came, reason = stop, 0, 0, 0, None
        for group, same in product(range(len(rooms)), alike):
            metas = self.needed(rows[same[0]], columns - pads[same[0]])[group]
            left_s = max(0.0, until_s - clock.monotonic_s())
            report = self._cache.load(metas, Whole(partial(rooms[group].write, sequences=same)), left_s)
            stored_bytes, wanted, came = stored_bytes + report.stored_bytes, wanted + len(metas), came + report.blocks
            if report.blocks < len(metas):
                reason = report.reason
                columns = min([columns, *(pads[number] + report.blocks * size for number in same)])
                if any(identity.reaches):
                    break
        if since_s is not None and reason in (None, MissReason.DEADLINE):
            now_s = clock.monotonic_s()
            self._cache.judge.note_load(tokens, now_s - since_s, now_s, tokens * came // max(1, wanted))
        if columns < stop and any(identity.reaches):
            return None
        past = DynamicCache(config=self._model.config)
        for room in rooms:
            room.fill(past, columns, self._model.device)
        return RestoredColumns(past, columns, stored_bytes)

    def cuts(self, tokens: int, restored: int, known: int) -> list[int]:
        """Return after which tokens fresh states are kept: every so often, after `known` blocks, and the last."""
        if not any(each.states for each in self._identity.groups):
            return []
        size, first, last = self._block_tokens, restored // self._block_tokens, (tokens - 1) // self._block_tokens
        often = range(first, last, max(1, self._state_every_tokens // size))
        return [size * block for block in sorted({*often, known, last}) if first < block <= last]

    def run_to_cuts(
        self, input_ids: torch.Tensor, past: DynamicCache, restored: int, row: SequenceRow
    ) -> tuple[int, list[PendingBlock]]:
        """Run the prompt as far as states are to be kept; return the tokens that the cache has then, and the states."""
        for layer in past.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        states, nothing = list[PendingBlock](), list[PendingBlock]()
        for cut in self.cuts(len(row.tokens), restored, row.hit.known):
            # Not in inference mode: what `generate` goes on with is changed in place.
            given = {self.argument: past, "use_cache": True, "logits_to_keep": 1}
            with torch.no_grad():
                self._model(input_ids[:, restored:cut], **given)
            restored = cut
            states += self._cache.guarded("keep states", partial(self._states, past, row, cut), nothing)
        return restored, states

    def _states(self, past: DynamicCache, row: SequenceRow, tokens: int) -> list[PendingBlock]:
        """Return the states of a cache that has just taken so many tokens, a whole number of blocks."""
        block = tokens // self._block_tokens
        return [
            PendingBlock(metas[block - 1], partial(_held, read_states(past, each)), is_exact=True)
            for each, metas in zip(self._identity.groups, row.metas, strict=True)
            if each.states
        ]

    def store(
        self,
        past: Any,
        tokens: Sequence[np.ndarray[Any, Any]],
        rows: Sequence[SequenceRow],
        loaded: Sequence[Collection[int]],
        states: Sequence[PendingBlock],
        orders: Mapping[ObjectId, Orders],
    ) -> int:
        """Queue the full blocks of rows that were not loaded, and states; return how many wait, of the least group."""
        named, queued = [self.metas(own) for own in tokens], list[int]()
        for group, each in enumerate(self._identity.groups):
            fresh: dict[BlockKey, PendingBlock] = {}
            for number, (row, parts, known) in enumerate(zip(rows, named, loaded, strict=True)):
                for block, meta in enumerate(() if each.states else parts[group]):
                    if block not in known and meta.id.key not in fresh:
                        capture, order = partial(_captured, past, meta, each, number, row.pad), orders.get(meta.id)
                        fresh[meta.id.key] = PendingBlock(meta, capture, orders=order, group=group)
            if not each.states:
                queued.append(self._cache.store([*fresh.values()]))
        kept = self._cache.store(states) if states else 0
        return min(queued, default=kept)


def _captured(past: DynamicCache, *which: Any) -> BlockSource:
    """Copy a block out of a cache, which is the caller's to change once `generate` has returned."""
    return _held(block_bits(past, *which))


def _held(bits: BlockBits) -> BlockSource:
    return lambda: bits
