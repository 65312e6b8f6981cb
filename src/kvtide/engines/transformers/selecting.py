"""Loads of one model by importance: when a prefix is loaded in part, the answer on it, and what is learnt from both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.engines.transformers.attention import Learner, ObservedPrefix, attending
from kvtide.engines.transformers.pages import RestoredRoom
from kvtide.engines.transformers.selective import SelectedLayers, SparsePrefix, SparseSettings
from kvtide.engines.ways import Refusals, RestoreWay, Ways
from kvtide.importance import Orders
from kvtide.store import Cache
from kvtide.store.load.sparse import Sparse, SparseLoad
from kvtide.types import ObjectId

# Tokens of an answer after a selected prefix before it is copied for each.
ANSWER_ROOM = 256


class OpenedPrefix(NamedTuple):
    """Rough blocks in an engine's cache, of which exact chunks can still be had until `sparse` is closed."""

    sparse: Sparse
    load: SparseLoad
    past: DynamicCache


class ImportanceLoads:
    """Loads exactly only what matters of blocks that are stored as `packed`, and learns what that is."""

    def __init__(
        self, cache: Cache, clock: Clock, settings: SparseSettings, learner: Learner, is_reordered: bool
    ) -> None:
        """is_reordered: as in `CachedModel.select`."""
        self._cache = cache
        self._clock = clock
        self._settings = settings
        self._learner = learner
        self._is_reordered = is_reordered
        self.ways = Ways()
        self.refusals = Refusals()

    def open(self, model: Any, metas: Sequence[BlockMeta], is_near: bool, spare_tokens: int) -> OpenedPrefix | None:
        """Load the rough blocks of a hit; None if they are not packed, or are to be loaded whole."""
        now_s = self._clock.monotonic_s()
        if not metas or self._settings.ratio == 1.0 or self.refusals.is_refused(metas[-1].id, now_s):
            return None
        if self.ways.choose(is_near, now_s) is RestoreWay.WHOLE:
            return None
        layout = metas[0].layout
        pages = RestoredRoom(layout, len(metas), spare_tokens + ANSWER_ROOM)
        sparse = Sparse(pages.write, self._settings.tokens_ahead(layout.tokens))
        self._cache.load(metas, sparse)
        if sparse.opened is None:
            return None
        past = DynamicCache(config=model.config)
        pages.fill(past, sparse.opened.blocks, model.device)
        return OpenedPrefix(sparse, sparse.opened, past)

    def answer(
        self, model: Any, input_ids: torch.Tensor, opened: OpenedPrefix, arguments: dict[str, Any]
    ) -> tuple[Any, SelectedLayers]:
        """Answer on rough blocks of which each layer loads what matters."""
        load, metas = opened.load, opened.load.metas
        selection = SparsePrefix(load, self._settings)
        with closing(opened.sparse):
            selection.probe(model, input_ids[:, load.tokens :], opened.past)
            if selection.report().is_fallback:
                self._refuse(metas)
            with selection.active(model):
                output = model.generate(input_ids, **arguments)
        # A pass that ended early tells nothing of the layers behind.
        if len(selection.importance) == load.layout.layers:
            bases = load.bases if self._is_reordered else ()
            learn = partial(self._learner.note, self._cache, metas, selection.importance, bases)
            self._cache.guarded("learn", learn, False)
        return output, selection.report()

    @contextmanager
    def observed(self, model: Any, metas: Sequence[BlockMeta]) -> Iterator[ObservedPrefix | None]:
        """Learn what a prompt attends to in its blocks, those that it is about to store among them."""
        with observing(model, self._cache, self._learner, metas, self._settings) as observed:
            yield observed
        if observed is not None and observed.is_refused:
            self._refuse(metas)

    def _refuse(self, metas: Sequence[BlockMeta]) -> None:
        self.refusals.note([meta.id for meta in metas], self._clock.monotonic_s())

    def orders(self, metas: Sequence[BlockMeta], observed: ObservedPrefix | None) -> dict[ObjectId, Orders]:
        """Return in which orders to store the observed blocks' tokens."""
        if not self._is_reordered or observed is None or not observed.importance:
            return {}
        seen = metas[: observed.tokens // metas[0].layout.tokens]
        orders = self._learner.orders(seen, observed.importance)
        return {meta.id: order for meta, order in zip(seen, orders, strict=True)}


@contextmanager
def observing(
    model: Any, cache: Cache, learner: Learner, metas: Sequence[BlockMeta], settings: SparseSettings | None = None
) -> Iterator[ObservedPrefix | None]:
    """Have a learner note what the first pass attends to in some blocks; None where the model can't tell."""
    if not metas or model.config._attn_implementation != "sdpa":
        yield None
        return
    tokens = len(metas) * metas[0].layout.tokens
    observed = ObservedPrefix(tokens)
    if settings is not None:
        observed = ObservedPrefix(tokens, settings.guard, settings.selector, settings.ratio)
    with attending(model, observed.attend):
        yield observed
    cache.guarded("learn", partial(learner.note, cache, metas, observed.importance, ()), False)
