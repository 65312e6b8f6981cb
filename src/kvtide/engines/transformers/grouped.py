"""Models of several groups: all of a prefix is restored or nothing, and states are kept where passes are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtide.block import BlockBits, BlockMeta
from kvtide.clock import Clock
from kvtide.engines.transformers.fingerprint import ModelIdentity
from kvtide.engines.transformers.generation import GenerateReport, leaving_out, note_prefill, recompute_s, watched
from kvtide.engines.transformers.groups import ModelGroup, RowsRoom, cache_argument, fill_states, read_rows, read_states
from kvtide.evict import Advice
from kvtide.group import GroupKind, Hit, Parts, part_keys, state_cuts, state_every
from kvtide.keys import LatestKeys, TokenIds
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import Whole
from kvtide.types import BlockKey, ObjectId

_Tokens = np.ndarray[Any, Any]


class GroupedPrefix(NamedTuple):
    """A prompt's parts, by group, and what can be restored of them."""

    metas: list[list[BlockMeta]]
    hit: Hit


class GroupedModel:
    """A model whose cache has several groups. `identity` names them."""

    def __init__(self, model: Any, cache: Cache, clock: Clock, identity: ModelIdentity, block_tokens: int) -> None:
        self._model = model
        self._cache = cache
        self._clock = clock
        self._identity = identity
        self._block_tokens = block_tokens
        self._keys = LatestKeys(block_tokens)
        self._argument = cache_argument(model)
        rows, states = (
            [each.group.layout for each in identity.groups if bool(each.states) is want] for want in (False, True)
        )
        # A state is kept so often, so that a prompt that branches has one near.
        self._state_every_tokens = state_every(
            sum(layout.raw_bytes for layout in states), sum(layout.raw_bytes for layout in rows) / block_tokens
        )

    def keep_states(self, every_tokens: int) -> None:
        """From now on keep a state after so many tokens too. ValueError if there are none, or for a bad number."""
        if every_tokens < 1 or not any(each.states for each in self._identity.groups):
            raise ValueError(f"state_every_tokens must be positive, and the model keep states, got {every_tokens}")
        self._state_every_tokens = every_tokens

    def generate(
        self, input_ids: torch.Tensor, prompt: _Tokens, is_latest: bool, hint: Advice | None, arguments: dict[str, Any]
    ) -> tuple[Any, GenerateReport]:
        """Answer as the model does, from what can be restored on; queue what is new to be stored."""
        prefix = self.find(prompt, is_latest, hint)
        past, report = self.restore(prompt, prefix)
        for layer in past.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                # What leaves the window is kept until the end of the call, to be stored then.
                layer.activate_past_recording()
        started_s = self._clock.monotonic_s()
        ran, states = self._run_to_cuts(input_ids, past, report.hit_tokens, prefix)
        first_token, arguments = watched(self._clock, input_ids, past, arguments, self._argument)
        has_length = any(not each.states for each in self._identity.groups)
        with nullcontext() if has_length else leaving_out(self._model, ran):
            output = self._model.generate(input_ids, **arguments)
        note_prefill(self._cache.judge, report.hit_tokens, len(prompt), first_token.seen_s - started_s)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        store = partial(self._store, sequences[0], past, report.hit_tokens // self._block_tokens, states)
        return output, report._replace(blocks_queued=self._cache.guarded("queue blocks", store, 0))

    def find(self, prompt: _Tokens, is_latest: bool = False, hint: Advice | None = None) -> GroupedPrefix:
        """Return what can be restored of a prompt; its last token always runs."""
        metas, groups = self._metas(prompt[:-1], is_latest), [each.group for each in self._identity.groups]
        parts = [
            Parts([meta.id for meta in mine], group.reach_blocks(self._block_tokens), group.kind is GroupKind.STATE)
            for group, mine in zip(groups, metas, strict=True)
        ]
        return GroupedPrefix(metas, self._cache.match_parts(parts, hint))

    def _metas(self, tokens: TokenIds, is_latest: bool = False) -> list[list[BlockMeta]]:
        """Return the parts of all full blocks of tokens, by group."""
        keys, size, found = self._keys.of(self._identity.namespace, tokens), self._block_tokens, []
        label = str(self._model.config._name_or_path).rstrip("/").rpartition("/")[2]
        for each, namespace in zip(self._identity.groups, self._identity.namespaces, strict=True):
            group, root = each.group, BlockKey(namespace)
            ids = [ObjectId(namespace, key) for key in part_keys(namespace, keys)]
            named, text = [self._cache.tiers.named(one, is_latest) for one in ids], f"{label} {group.name}"
            if group.kind is GroupKind.STATE:
                # Each stands alone, at its block's last token.
                mine = [BlockMeta(one, root, (i + 1) * size - 1, group.layout, text) for i, one in enumerate(named)]
            else:
                parents = [root, *(one.key for one in ids)]
                mine = [BlockMeta(one, parents[i], i * size, group.layout, text) for i, one in enumerate(named)]
            found.append(mine)
        return found

    def restore(self, prompt: _Tokens, prefix: GroupedPrefix) -> tuple[DynamicCache, GenerateReport]:
        """Return a cache with what is worth loading and came."""
        started_s, past, cache = self._clock.monotonic_s(), DynamicCache(config=self._model.config), self._cache
        tokens, stored_bytes, namespace = prefix.hit.blocks * self._block_tokens, 0, self._identity.namespace
        absent = (len(prompt) - 1) // self._block_tokens * self._block_tokens - tokens
        cache.decisions.add_absent(absent, namespace)
        last = [mine[prefix.hit.blocks - 1].id for mine in prefix.metas] if tokens else []
        is_near = cache.is_near(last)
        if not cache.is_worth(tokens, is_near, namespace):
            tokens = 0
        if tokens:
            fill = partial(self._filled, past, prefix, recompute_s(cache.judge, tokens))
            found = cache.guarded("restore", fill, None)
            now_s = self._clock.monotonic_s()
            if found is None:
                # What was begun to be filled is not what it seems.
                tokens, past = 0, DynamicCache(config=self._model.config)
            elif not is_near:
                cache.judge.note_load(tokens, now_s - started_s, now_s)
            stored_bytes = found or 0
        ended_by = prefix.hit.ended_by
        name = None if ended_by is None else self._identity.groups[ended_by].group.name
        load_s = self._clock.monotonic_s() - started_s
        return past, GenerateReport(len(prompt), tokens, load_s, stored_bytes, 0, None, ended_by=name)

    def _filled(self, past: DynamicCache, prefix: GroupedPrefix, deadline_s: float | None) -> int | None:
        """Load what the hit needs of every group, fill an empty cache and return the stored bytes read.

        None if something did not come.
        """
        blocks, size, device, stored_bytes = prefix.hit.blocks, self._block_tokens, self._model.device, 0
        fills: list[Callable[[], None]] = []
        give_up_s = None if deadline_s is None else self._clock.monotonic_s() + deadline_s
        for each, metas in zip(self._identity.groups, prefix.metas, strict=True):
            wanted = metas[max(0, blocks - (each.group.reach_blocks(size) or blocks)) : blocks]
            left_s = None if give_up_s is None else give_up_s - self._clock.monotonic_s()
            if each.states:
                room = np.empty(each.group.layout.shape, each.group.layout.bits_dtype)
                report = self._cache.load(wanted, Whole(partial(_copy, room)), left_s)
                fills.append(partial(fill_states, past, each, room, device))
            else:
                rows = RowsRoom(each, len(wanted))
                report = self._cache.load(wanted, Whole(rows.write), left_s)
                fills.append(partial(rows.fill, past, blocks * size, device))
            stored_bytes += report.stored_bytes
            if report.blocks < len(wanted):
                return None
        for fill in fills:
            fill()
        return stored_bytes

    def _run_to_cuts(
        self, input_ids: torch.Tensor, past: DynamicCache, start: int, prefix: GroupedPrefix
    ) -> tuple[int, list[PendingBlock]]:
        """Run the prompt as far as states are to be kept; return the tokens that the cache has then, and the states."""
        states: list[PendingBlock] = []
        nothing: list[PendingBlock] = []
        for cut in self.cuts(input_ids.shape[1], start, prefix.hit.known):
            # Not in inference mode: what `generate` goes on with is changed in place.
            with torch.no_grad():
                self._model(input_ids[:, start:cut], use_cache=True, logits_to_keep=1, **{self._argument: past})
            start = cut
            states += self._cache.guarded("keep states", partial(self._states, past, prefix, cut), nothing)
        return start, states

    def cuts(self, tokens: int, restored: int, known: int) -> list[int]:
        """Return the tokens, after those restored, at which states are to be kept.

        Often, at the prompt's last block, and after the `known` leading blocks, with which another prompt began.
        """
        if not any(each.states for each in self._identity.groups):
            return []
        size = self._block_tokens
        cuts = state_cuts(restored // size, (tokens - 1) // size, known, max(1, self._state_every_tokens // size))
        return [size * block for block in cuts]

    def _states(self, past: DynamicCache, prefix: GroupedPrefix, tokens: int) -> list[PendingBlock]:
        """Return the states of a cache that has just taken so many tokens, a whole number of blocks."""
        block = tokens // self._block_tokens
        return [
            # It saves the whole prefix.
            PendingBlock(metas[block - 1], partial(_held, read_states(past, each)), float(block), is_exact=True)
            for each, metas in zip(self._identity.groups, prefix.metas, strict=True)
            if each.states
        ]

    def _store(self, sequence: torch.Tensor, past: DynamicCache, restored: int, states: Sequence[PendingBlock]) -> int:
        """Queue what is new of a call's cache; return how many blocks wait now."""
        if all(each.states for each in self._identity.groups):
            return self._cache.store(states)
        metas = self._metas(sequence[: past.get_seq_length()].cpu().numpy())
        queued = [
            self._cache.store(
                [PendingBlock(meta, partial(_captured, past, each, meta), group=number) for meta in mine[restored:]]
            )
            for number, (each, mine) in enumerate(zip(self._identity.groups, metas, strict=True))
            if not each.states
        ]
        self._cache.store(states)
        return min(queued)


def _copy(room: BlockBits, position: int, bits: BlockBits) -> None:
    room[:] = bits


def _captured(past: DynamicCache, group: ModelGroup, meta: BlockMeta) -> BlockSource:
    return _held(read_rows(past, group, meta))


def _held(bits: BlockBits) -> BlockSource:
    return lambda: bits
