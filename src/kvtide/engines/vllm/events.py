"""KV events: what routers are told of kvtide's blocks, in vLLM's own words, so that vLLM owns the wire format.

Invariant: a block is announced in a medium once it lies there, and withdrawn by the same hashes that announced it.

vLLM's page hashes name a block to routers: a block of 128 tokens on pages of 16 is an event of eight hashes, told for
each of vLLM's groups of layers that attend.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import MambaSpec, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtide.engines.paged import BlockRef, StepCommands, WorkerReport
from kvtide.engines.vllm.stats import LOCAL_TIERS, counted
from kvtide.types import BlockKey

# Blocks whose tokens are remembered until tiers have them: 2 M tokens of 128 a block.
KNOWN_MAX = 1 << 14
# Announcements that can be withdrawn; of older ones routers are not told that they are gone.
ANNOUNCED_MAX = 1 << 18


class _Told(NamedTuple):
    """The words of an event about a block."""

    hashes: list[Any]
    parent: Any
    tokens: list[int]
    extra_keys: Any
    adapter: Any
    session: str | None


class _Place(NamedTuple):
    """A tier in the words of routers."""

    medium: str
    locality: str
    owner: str


def _place_of(tier: str) -> _Place | None:
    """Return how routers call a tier; None for one beside the engine's own pages, which nobody else reads."""
    name = tier.partition("-")[0]
    if name == "device":
        return None
    medium = MEDIUM_CPU if name == "memory" else MEDIUM_STORAGE
    return _Place(medium, "LOCAL" if name in LOCAL_TIERS else "REMOTE", f"kvtide:{tier}")


class BlockEvents:
    """Turns moves of objects into events. Not thread-safe: the engine's scheduler calls it.

    store_tier: the name of the tier that blocks were found in which this process did not store.
    """

    def __init__(self, kv_cache_config: Any, block_tokens: int, store_tier: str) -> None:
        # A state stands for a whole prefix, and is kept where a step happens to end: not what a router counts on.
        self._groups = [
            (number, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for number, spec in enumerate(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
            if not isinstance(spec, MambaSpec)
        ]
        self._page_tokens: int = kv_cache_config.hash_block_size
        self._block_tokens = block_tokens
        self._store_tier = store_tier
        self._known: OrderedDict[BlockKey, _Told] = OrderedDict()
        self._announced: OrderedDict[tuple[BlockKey, _Place], list[Any]] = OrderedDict()
        self._events: list[KVCacheEvent] = []
        self._counts: Counter[str] = Counter()

    def _note(self, request: Any, blocks: Iterable[BlockRef]) -> None:
        pages = self._block_tokens // self._page_tokens
        for block in blocks:
            key, first = block.ids[0].key, block.start // self._page_tokens
            if key in self._known or first + pages > len(request.block_hashes):
                continue
            hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[first : first + pages]]
            before = maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None
            tokens = list(request.all_token_ids[block.start : block.start + self._block_tokens])
            extra = [
                generate_block_hash_extra_keys(request, start, start + self._page_tokens, 0)[0]
                for start in range(block.start, block.start + self._block_tokens, self._page_tokens)
            ]
            told = _Told(hashes, before, tokens, to_event_extra_keys(extra), request.lora_request, request.session_id)
            self._known[key] = told
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def ordered(self, orders: StepCommands, requests: Mapping[str, Any]) -> None:
        """Remember blocks that are to be stored; announce those that are loaded from the store, whoever stored them."""
        for order in orders.stores:
            # A piece is less than a page, and routers know pages.
            if not order.is_tail:
                self._note(requests[order.request], [order.block])
        for load in orders.loads:
            if load.request in requests:
                self._note(requests[load.request], load.blocks)
                for block in load.blocks:
                    self._placed(block.ids[0].key, self._store_tier)

    def heard(self, report: WorkerReport) -> None:
        """Announce what was placed, and withdraw what has left a tier, or all."""
        for move in report.moves:
            if move.is_placed:
                self._placed(move.key, move.tier)
            else:
                self._removed(move.key, _place_of(move.tier))
        places = {place for _, place in self._announced}
        for key in report.lost:
            for place in places:
                self._removed(key, place)

    def _placed(self, key: BlockKey, tier: str) -> None:
        told, place = self._known.get(key), _place_of(tier)
        if told is None or place is None or (key, place) in self._announced:
            return
        self._announced[key, place] = told.hashes
        if len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)
        for number, kind, window in self._groups:
            self._events.append(
                BlockStored(
                    block_hashes=told.hashes,
                    parent_block_hash=told.parent,
                    token_ids=told.tokens,
                    block_size=self._page_tokens,
                    lora_id=told.adapter.adapter_id if told.adapter else None,
                    medium=place.medium,
                    lora_name=told.adapter.name if told.adapter else None,
                    extra_keys=told.extra_keys,
                    group_idx=number,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                    locality=place.locality,
                    ownership=place.owner,
                    session_id=told.session,
                )
            )
        self._counts[counted("block_events", "stored", place.medium)] += 1

    def _removed(self, key: BlockKey, place: _Place | None) -> None:
        hashes = None if place is None else self._announced.pop((key, place), None)
        if hashes is None or place is None:
            return
        where = {"medium": place.medium, "locality": place.locality, "ownership": place.owner}
        self._events += [BlockRemoved(block_hashes=hashes, group_idx=number, **where) for number, _, _ in self._groups]
        self._counts[counted("block_events", "removed", place.medium)] += 1

    def reset(self) -> None:
        """Withdraw everything: no request finds it any more."""
        for key, place in list(self._announced):
            self._removed(key, place)
        self._known.clear()

    def take(self) -> Sequence[KVCacheEvent]:
        """Return the events since the last call."""
        found, self._events = self._events, []
        return found

    def take_counts(self) -> dict[str, float]:
        """Return how many blocks were announced and withdrawn since the last call."""
        found: dict[str, float] = dict(self._counts)
        self._counts.clear()
        return found
