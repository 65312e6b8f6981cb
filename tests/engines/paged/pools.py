"""A small engine for tests, without an engine: its pages, what it wrote and where, and both halves on a stored line."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import SystemClock
from kvtide.engines.paged import OpaquePages, ScheduledRequest, SchedulerHalf, WorkerHalf
from kvtide.engines.paged.pages import CellOrder, HostPages, keys_values
from kvtide.engines.paged.sequence import StepCommands
from kvtide.engines.settings import NO_OPTIONS, RequestOptions
from kvtide.keys import block_keys, namespace_digest
from kvtide.store import Cache, PendingBlock
from kvtide.types import BlockKey, Namespace, ObjectId

PAGE_TOKENS = 4
# Of a toy engine.
ORDER, PAGES = CellOrder.TRANSPOSED_KEYS, 64
LAYOUT = BlockLayout(layers=3, tokens=8, kv_heads=2, head_dim=6, dtype=KVDtype.BFLOAT16)
BLOCK = LAYOUT.tokens
PROMPT = list(range(3 * BLOCK + 3))


def empty_layers(pages: int = 12, layout: BlockLayout = LAYOUT) -> list[Any]:
    """Return zeroed pages of all layers in one storage, as engines allocate them."""
    shape = (layout.layers, pages, layout.kv_heads, PAGE_TOKENS, 2 * layout.head_dim)
    return list(np.zeros(shape, layout.bits_dtype))


def random_block(seed: int, layout: BlockLayout = LAYOUT) -> Any:
    return np.random.default_rng(seed).integers(1, 1 << 15, layout.shape).astype(layout.bits_dtype)


def engine_writes(layers: Sequence[Any], order: CellOrder, bits: BlockBits, pages: Sequence[int]) -> None:
    """Write a block token by token, as an engine that knows nothing of blocks would."""
    for layer, cells in enumerate(layers):
        keys, values = keys_values(cells, order)
        for token in range(bits.shape[2]):
            page, slot = pages[token // PAGE_TOKENS], token % PAGE_TOKENS
            keys[page, :, slot], values[page, :, slot] = bits[layer, 0, token], bits[layer, 1, token]


def host_pages(
    order: CellOrder = CellOrder.TRANSPOSED_KEYS, pages: int = 12, layout: BlockLayout = LAYOUT
) -> tuple[HostPages, list[Any]]:
    layers = empty_layers(pages, layout)
    return HostPages(layers, layout, order), layers


def namespaces(layout: BlockLayout = LAYOUT, shards: int = 1) -> Callable[[bytes], tuple[Namespace, ...]]:
    def of(salt: bytes) -> tuple[Namespace, ...]:
        texts = [f"toy {shard}/{shards}" for shard in range(shards)]
        return tuple(namespace_digest(b"model", layout.dtype, text, layout.tokens, salt) for text in texts)

    return of


def pending(layout: BlockLayout, tokens: list[int], blocks: Sequence[BlockBits], start: int = 0) -> list[PendingBlock]:
    """Return a prompt's blocks, from block `start` on, as an engine of the toy model would store them."""
    (space,) = namespaces(layout)(b"")
    keys = [BlockKey(space), *block_keys(space, np.array(tokens, dtype=np.uint32), layout.tokens)]

    def one(position: int, bits: BlockBits) -> PendingBlock:
        name, start = ObjectId(space, keys[position + 1]), position * layout.tokens
        return PendingBlock(BlockMeta(name, keys[position], start, layout, "toy"), lambda: lambda: bits)

    return [one(position, bits) for position, bits in enumerate(blocks, start)]


class ToyEngine:
    """An engine that computes by writing blocks given beforehand; the pages of a request are the next free ones."""

    def __init__(
        self,
        open_cache: Callable[..., Cache],
        store: str,
        shards: int = 1,
        kept_bytes_max: int = 0,
        tail_tokens: int = 0,
        states: OpaquePages | None = None,
        every: int = 0,
        layout: BlockLayout = LAYOUT,
        page_count: int = PAGES,
    ) -> None:
        names, clock = namespaces(layout, shards), SystemClock()
        cache = open_cache(store, load_s_max=5.0)
        # A busy machine is no slow store.
        self.scheduler = SchedulerHalf(cache, names, layout.tokens, PAGE_TOKENS, clock, 20.0, every, False, tail_tokens)
        self.pool, self.layers = host_pages(ORDER, page_count, layout)
        self.has_room, kept = True, (kept_bytes_max, states, tail_tokens, False, lambda: self.has_room)
        self.worker = WorkerHalf(open_cache(store), self.pool, 0, "toy", clock, *kept)
        self._free = iter(range(1, page_count))
        # Whether the last load failed its request.
        self.has_failed = False

    def close(self) -> None:
        """End its requests and itself; AssertionError if anything of one is left."""
        for request in list(self.scheduler._sequences):
            self.finish(request)
        self.scheduler.check()
        self.worker.check()
        self.scheduler.close()
        self.worker.close()

    def pages(self, tokens: int) -> list[int]:
        return [next(self._free) for _ in range(-(-tokens // PAGE_TOKENS))]

    def step(self, *scheduled: ScheduledRequest, tokens: int = 100) -> StepCommands:
        orders = self.scheduler.plan(scheduled, tokens)
        self.worker.start(orders)
        self.worker.store(orders)
        return orders

    def carry_out(self, orders: StepCommands) -> int:
        """Do what was planned, what it waits for first; return how many blocks are stored by then."""
        self.worker.start(orders)
        self.worker.wait_loads()
        self.worker.store(orders)
        assert self.worker.cache.flush(60)
        return self.worker.cache.stats().blocks_stored

    def ask(
        self,
        request: str,
        tokens: list[int],
        computed: int = 0,
        salt: bytes = b"",
        options: RequestOptions = NO_OPTIONS,
    ) -> int:
        """Match as an engine does: again and again until there is an answer."""
        hit = None
        while hit is None:
            hit = self.scheduler.match(request, salt, tokens, computed, options)
        return hit

    def compute(self, request: str, tokens: list[int], salt: bytes = b"") -> list[int]:
        """Run a whole prompt without loading anything; return its pages."""
        self.ask(request, tokens, salt=salt)
        pages = self.pages(len(tokens))
        self.fill(tokens, pages)
        self.step(ScheduledRequest(request, tokens, len(tokens), lambda: pages))
        assert self.worker.cache.flush(60)
        self.finish(request)
        return pages

    def fill(self, tokens: list[int], pages: list[int]) -> None:
        for position in range(len(tokens) // BLOCK):
            start = position * BLOCK // PAGE_TOKENS
            engine_writes(self.layers, ORDER, block_of(tokens, position), pages[start : start + BLOCK // PAGE_TOKENS])

    def finish(self, request: str) -> None:
        self.scheduler.finished(request)
        self.worker.ended([request], is_idle=False)

    def wait(self, request: str) -> set[int]:
        """Step until the request's load has ended; return the pages that were not filled."""
        for _ in range(12_000):
            outcome = self.worker.ended([], is_idle=True)
            if request in outcome.requests:
                self.has_failed = bool(outcome.failed)
                return outcome.failed_pages
        raise AssertionError("the load never ended")

    def begin(self, request: str, tokens: list[int], is_in_step: bool = True) -> tuple[int, list[int]]:
        """Have the load of what there is begin; return its tokens and the request's pages."""
        hit, pages = self.ask(request, tokens), self.pages(len(tokens))
        assert hit
        self.scheduler.allocated(request, pages, hit, is_in_step)
        self.step(tokens=0)
        return hit, pages

    def load(
        self, request: str, tokens: list[int], computed: int = 0, options: RequestOptions = NO_OPTIONS
    ) -> tuple[int, list[int], set[int]]:
        """Load what there is; return its tokens, the request's pages, and those that were not filled."""
        hit = self.ask(request, tokens, computed, options=options)
        pages = self.pages(len(tokens))
        if not hit:
            return 0, pages, set()
        self.scheduler.allocated(request, pages, hit)
        orders = self.step(tokens=0)
        failed = self.wait(request)
        self.scheduler.heard(self.worker.report(orders.step))
        return hit, pages, failed


def block_of(tokens: list[int], position: int) -> Any:
    return random_block(hash(tuple(tokens[: (position + 1) * BLOCK])) & 0xFFFF)


def held(engine: ToyEngine, pages: list[int]) -> Any:
    """Return keys and values of pages as (layers, 2, tokens, heads, dim)."""
    layers = []
    for cells in engine.layers:
        both = [part[pages].transpose(0, 2, 1, 3).reshape(-1, 2, LAYOUT.head_dim) for part in keys_values(cells, ORDER)]
        layers.append(np.stack(both))
    return np.stack(layers)
