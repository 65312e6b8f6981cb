"""The steps of storing a block: encoded, put into the tiers, made known.

Invariant: whatever goes wrong is counted, logged once for each verb, and costs that block alone.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import Codec, LevelledCodec, LosslessCodec, OrderingCodec
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.index import TIERS_MAX, RadixIndex
from kvtide.outcomes import DecisionCounter
from kvtide.store.following import ProfileFollower
from kvtide.store.load import QUALITY_SLACK, level_meta
from kvtide.store.storing import QueuedBlock
from kvtide.tier.stack import TierStack
from kvtide.types import ObjectId
from kvtide.wire import HEADER_BYTES, object_quality, pack_object

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# The queue counts as a tier in the index, after all real ones.
QUEUE_TIER = TIERS_MAX - 1
# A block that was found too coarse is not looked up again for so long, unless this process stores it.
COARSE_S = 60.0
COARSE_MAX = 1 << 14


class Counts:
    """Sums by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> int:
        """Add to a sum and return it."""
        with self._lock:
            self._counts[name] += count
            return self._counts[name]

    def all(self) -> Counter[str]:
        """Return all sums."""
        with self._lock:
            return self._counts.copy()


class FaultGuard:
    """The one boundary where a fault of the cache becomes a miss: counted, and logged once for each verb."""

    def __init__(self) -> None:
        self._faults = Counts()

    def __call__(self, verb: str, action: Callable[[], _Result], fallback: _Result) -> _Result:
        """Run an action; whatever goes wrong in it becomes `fallback`."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - the one boundary: a cache fault never fails the engine
            if self._faults.add(verb) == 1:
                is_expected = isinstance(error, TierUnavailable)
                _log.warning("can't %s, served as a miss: %s", verb, error, exc_info=None if is_expected else error)
            return fallback


class CoarseBlocks:
    """Blocks that were found too coarse lately; at most COARSE_MAX. Safe to use from several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._found_s: OrderedDict[ObjectId, float] = OrderedDict()

    def note(self, object_id: ObjectId) -> None:
        """Note that a block was found too coarse now."""
        with self._lock:
            self._found_s[object_id] = self._clock.monotonic_s()
            self._found_s.move_to_end(object_id)
            if len(self._found_s) > COARSE_MAX:
                self._found_s.popitem(last=False)

    def forget(self, object_id: ObjectId) -> None:
        """Note that a block was stored again."""
        with self._lock:
            self._found_s.pop(object_id, None)

    def first_of(self, ids: Sequence[ObjectId]) -> int:
        """Return how many leading blocks come before the first that was found too coarse lately."""
        if not self._found_s:
            return len(ids)
        oldest_s = self._clock.monotonic_s() - COARSE_S
        coarse = (i for i, each in enumerate(ids) if self._found_s.get(each, -math.inf) > oldest_s)
        return next(coarse, len(ids))


class Placer:
    """Encodes blocks and places them in tiers and index; counts the outcomes."""

    def __init__(
        self,
        tiers: TierStack,
        index: RadixIndex,
        profiles: ProfileFollower,
        quality: float,
        limits: Limits,
        guard: FaultGuard,
        coarse: CoarseBlocks,
        decisions: DecisionCounter,
    ) -> None:
        self.counts = Counts()
        self._tiers = tiers
        self._index = index
        self._profiles = profiles
        self._quality = quality
        self._limits = limits
        self._guard = guard
        self._coarse = coarse
        self._decisions = decisions

    def store(self, block: QueuedBlock) -> None:
        """Place a block that was queued; it waits no more. Raises nothing."""
        self._profiles.look()
        codec = self._profiles.codec_of(block.group)  # once: a profile that comes meanwhile is not that of the bytes
        if block.orders is not None and isinstance(codec, OrderingCodec):
            codec = codec.ordered(block.orders)
        self._guard("store", partial(self.place, block.meta, partial(self._packed, block, codec), block.cost), False)
        if isinstance(codec, LevelledCodec) and codec.coarser and not block.is_exact:
            self._guard("store levels", partial(self._place_levels, block, codec), None)
        self._index.remove(block.meta.id.key, QUEUE_TIER)

    def tell_decisions(self) -> None:
        """Tell the tiers what engines decided since it was told last. Raises nothing."""
        self._guard("tell decisions", partial(self._decisions.tell, self._tiers.note_decisions), None)

    def _packed(self, block: QueuedBlock, chosen: Codec) -> bytearray | None:
        """Return the object; by the lossless codec where ours can't, or may not take the memory; else None."""
        meta, bits = block.meta, block.source()
        for codec in (chosen, LosslessCodec()):
            is_large = codec.scratch_bytes(meta.layout) > self._limits.encode_scratch_bytes_max
            if is_large or (block.is_exact and not codec.is_lossless):
                continue
            sections = self._profiles.encode(codec, block, bits)
            if sections is not None:
                # A block computed on top of blocks of this quality is no better, however it is encoded.
                return pack_object(meta, codec.codec_id, sections, codec.profile, self._quality)
        return None

    def _place_levels(self, block: QueuedBlock, codec: LevelledCodec) -> None:
        """Store a block in the coarser levels too, each an object of its own."""
        for number, level in enumerate(codec.coarser, 1):
            meta = level_meta(block.meta, number)
            if not self._tiers.contains(meta.id):
                sections = level.encode(meta, block.source())
                self._tiers.put_from(meta.id, pack_object(meta, level.codec_id, sections, level.profile, level.quality))

    def place(self, meta: BlockMeta, pack: Callable[[], bytes | bytearray | None], cost: float | None = None) -> bool:
        """Store an object unless one as good is here; put it in the place of a coarser one."""
        here = self._stored_quality(meta.id)
        if here is None or here > self._quality * (1 + QUALITY_SLACK):
            packed, put = pack(), self._tiers.put_from if here is None else self._tiers.replace
            is_stored = packed is not None and put(meta.id, packed)
            self._coarse.forget(meta.id)
            if packed is None or not is_stored:
                self.counts.add("dropped")
                return False
            self.counts.add("stored")
            self.counts.add("raw_bytes", meta.layout.raw_bytes)
            self.counts.add("bytes", len(packed))
            # The tiers have told where it is now.
            return True
        for number, tier in enumerate(self._tiers.places(meta.id)):
            if number:
                self._index.place(meta.id.key, tier)
            else:
                self._index.insert(meta.id.namespace, [meta.id.key], meta.parent, tier, cost=cost)
        return True

    def _stored_quality(self, object_id: ObjectId) -> float | None:
        """Return the quality of the object that is here, inf for one that can't be read, None if none is."""
        if not self._tiers.contains(object_id):
            return None
        if self._quality == 0:
            # Namespaces of exact blocks have no others.
            return 0.0
        head = bytearray(HEADER_BYTES)
        size = self._tiers.get_into(object_id, memoryview(head))
        return object_quality(head[: size or 0])
