"""Several sequences in one call, padded on the left: each restores its own prefix, as far as all of them can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.clock import Clock
from kvtide.engines.transformers.generation import (
    CallSettings,
    GenerateReport,
    MadeCache,
    made_cache,
    recompute_s,
    watched,
)
from kvtide.engines.transformers.groups import captured, fill_layers
from kvtide.store import Cache, PendingBlock
from kvtide.store.load import Whole
from kvtide.types import BlockKey

_Tokens = np.ndarray[Any, Any]


class BatchRow(NamedTuple):
    """One sequence of a call: columns before its first token, its tokens, its full blocks, and those to restore."""

    pad: int
    tokens: _Tokens
    metas: Sequence[BlockMeta]
    blocks: int


class BatchedModel:
    """A model of one group of layers. `metas` names the full blocks of tokens."""

    def __init__(
        self, model: Any, cache: Cache, clock: Clock, metas: Callable[[_Tokens, bool], list[BlockMeta]]
    ) -> None:
        self._model = model
        self._cache = cache
        self._clock = clock
        self._metas = metas

    def generate(
        self, input_ids: torch.Tensor, call: CallSettings, is_latest: bool, arguments: dict[str, Any]
    ) -> tuple[Any, GenerateReport]:
        """Answer as the model does, from what can be restored on; queue what is new to be stored."""
        started_s, columns = self._clock.monotonic_s(), input_ids.shape[1]
        pads = (columns - call.mask.sum(dim=1)).tolist()
        rows = [self._row(ids, pad, is_latest) for ids, pad in zip(input_ids.cpu().numpy(), pads, strict=True)]
        past, restored, stored_bytes = self._restore(rows, columns)
        load_s = self._clock.monotonic_s() - started_s
        made = made_cache(self._model, past, columns, call)
        _, arguments = watched(self._clock, input_ids, made.past, {**arguments, "attention_mask": call.mask})
        output = self._model.generate(input_ids, **arguments)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        store = partial(self._store, sequences.cpu().numpy(), made, rows, restored, columns, call.ends)
        queued = self._cache.guarded("queue blocks", store, 0)
        tokens = sum(len(row.tokens) for row in rows)
        hit_tokens = sum(max(0, restored - row.pad) for row in rows)
        return output, GenerateReport(tokens, hit_tokens, load_s, stored_bytes, queued, None)

    def _row(self, columns: _Tokens, pad: int, is_latest: bool) -> BatchRow:
        tokens = columns[pad:]
        # The last token always runs: its logits are the answer's first token.
        metas = self._metas(tokens[:-1], is_latest)
        return BatchRow(pad, tokens, metas, self._cache.match([meta.id for meta in metas]))

    def _restore(self, rows: Sequence[BatchRow], columns: int) -> tuple[DynamicCache, int, int]:
        """Return a cache of the leading columns that all rows can have, how many, and the stored bytes read."""
        past, stored_bytes = DynamicCache(config=self._model.config), 0
        layout = next((row.metas[0].layout for row in rows if row.metas), None)
        if layout is None:
            return past, 0, 0
        size = layout.tokens
        stop = min(columns - 1, *(row.pad + row.blocks * size for row in rows))
        loads: dict[BlockKey, list[BatchRow]] = {}
        for row in rows:
            if row.pad < stop:
                loads.setdefault(row.metas[-(-(stop - row.pad) // size) - 1].id.key, []).append(row)
        if not loads:
            return past, 0, 0
        tokens = sum(stop - same[0].pad for same in loads.values())
        ids = [meta.id for same in loads.values() for meta in same[0].metas[:1]]
        if not self._cache.is_worth(tokens, self._cache.is_near(ids), ids[0].namespace):
            return past, 0, 0
        room = np.zeros(_room_shape(layout, len(rows), stop), layout.bits_dtype)
        numbers = {id(row): number for number, row in enumerate(rows)}
        wanted, give_up_s = stop, recompute_s(self._cache.judge, tokens)
        until_s = None if give_up_s is None else self._clock.monotonic_s() + give_up_s
        for same in loads.values():
            metas = same[0].metas[: -(-(wanted - same[0].pad) // size)]
            places = [(numbers[id(row)], row.pad) for row in same]
            left_s = None if until_s is None else max(0.0, until_s - self._clock.monotonic_s())
            report = self._cache.load(metas, Whole(partial(_write, room, places, size)), left_s)
            stored_bytes += report.stored_bytes
            if report.blocks < len(metas):
                stop = min([stop, *(row.pad + report.blocks * size for row in same)])
        fill_layers(past, room[..., :stop, :], layout, self._model.device)
        return past, stop, stored_bytes

    def _store(
        self,
        sequences: _Tokens,
        made: MadeCache,
        rows: Sequence[BatchRow],
        restored: int,
        columns: int,
        ends: Sequence[int | None],
    ) -> int:
        """Queue what is new of each row, up to the end of its own answer; return how many blocks wait now."""
        past = made.settled()
        last, seen, pending = int(past.get_seq_length()), set[BlockKey](), list[PendingBlock]()
        for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            ended = next((at for at in range(columns, last) if int(sequence[at]) in ends), last)
            loaded = max(0, restored - row.pad)
            for meta in self._metas(sequence[row.pad : ended], False):
                if meta.start >= loaded and meta.id.key not in seen:
                    seen.add(meta.id.key)
                    pending.append(PendingBlock(meta, partial(captured, past, meta, number, row.pad)))
        return self._cache.store(pending)


def _room_shape(layout: BlockLayout, rows: int, tokens: int) -> tuple[int, ...]:
    return (layout.layers, 2, rows, layout.kv_heads, tokens, layout.head_dim)


def _write(room: BlockBits, places: Sequence[tuple[int, int]], size: int, position: int, bits: BlockBits) -> None:
    """Copy a block to the rows that begin with it, as far as there is room."""
    for row, pad in places:
        start = pad + position * size
        part = room[:, :, row, :, start : start + size]
        part[:] = bits[:, :, : part.shape[3]].transpose(0, 1, 3, 2, 4)
