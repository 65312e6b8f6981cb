"""Prefix caching for Hugging Face causal language models: restore, run the suffix, store in the background.

Invariant: the answer is that of `model.generate`; whatever the cache can't help with runs as if it were not there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import DynamicCache, StoppingCriteriaList

from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import Clock
from kvtide.engines.transformers.attention import ObservedPrefix, attending
from kvtide.engines.transformers.fingerprint import ModelIdentity, NamespaceSettings
from kvtide.engines.transformers.generation import FirstToken, RestoreWay, Ways, bypass_reason
from kvtide.engines.transformers.learning import Learner
from kvtide.engines.transformers.pages import RestoredRoom, block_bits
from kvtide.engines.transformers.selective import SelectedLayers, SparsePrefix, SparseSettings
from kvtide.engines.transformers.streaming import StreamedPrefill, StreamSettings
from kvtide.keys import LatestKeys
from kvtide.outcomes import Choice, Why
from kvtide.plan import PrefillSpeed, policy_named
from kvtide.store import BlockSource, Cache, PendingBlock
from kvtide.store.load import MissReason, Whole
from kvtide.store.load.sparse import Sparse
from kvtide.store.load.streamed import Streamed, StreamedReport
from kvtide.types import BlockKey, Namespace, ObjectId

_log = logging.getLogger(__name__)
_Tokens = np.ndarray[Any, Any]

BLOCK_TOKENS = 256
# Tokens of an answer after a selected prefix before it is copied for each.
ANSWER_ROOM = 256
# Shorter runs say more about the machine's mood than about its prefill speed.
PREFILL_SAMPLE_TOKENS_MIN = 128
# Tokens a second, before any were measured: what a plan then gets wrong it puts right at the next chunk.
PREFILL_GUESS = 1000.0


class GenerateReport(NamedTuple):
    """The cache's part in the last call. `bypass` names the reason if it was left out.

    streamed: the decision and its outcome, where blocks are streamed. selected: what was loaded of the restored
    tokens, where only a part was.
    """

    prompt_tokens: int
    hit_tokens: int
    load_s: float
    stored_bytes_read: int
    blocks_queued: int
    bypass: str | None
    streamed: StreamedReport | None = None
    selected: SelectedLayers | None = None


class CachedModel:
    """A model with a cache beside it. Use it with `with`; one call of `generate` at a time."""

    def __init__(self, model: Any, cache: Cache, clock: Clock, settings: NamespaceSettings) -> None:
        self.model = model
        self.cache = cache
        self.last: GenerateReport | None = None
        self._clock = clock
        self._identity = ModelIdentity(model, settings)
        self._keys = LatestKeys(settings.block_tokens)
        self._streaming: StreamSettings | None = None
        # Learns from streamed prefixes what `importance-first` goes by.
        self._learner: Learner | None = None
        self._importance: tuple[SparseSettings, Learner] | None = None
        self._ways = Ways()
        self._bypass_logged: set[str] = set()

    def stream(self, streaming: StreamSettings, learner: Learner) -> None:
        """From now on stream what is not in the fastest tier, computing meanwhile. ValueError for a bad setting."""
        self._streaming = streaming.checked()
        self._learner = learner if streaming.is_by_importance else None

    def select(self, importance: SparseSettings, learner: Learner) -> None:
        """From now on load exactly only what matters of blocks that are stored as `packed`, and learn from it."""
        self._importance = (importance, learner)

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of the model's blocks."""
        return self._identity.layout

    @property
    def namespace(self) -> Namespace:
        """Return where the model's blocks belong."""
        return self._identity.namespace

    def __enter__(self) -> Self:
        self.cache.open()
        if self._streaming is not None:
            self.cache.recall()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for learner in (self._learner, self._importance and self._importance[1]):
            if learner is not None:
                learner.close()
        self.cache.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored, for other processes to find. False if that took longer."""
        return self.cache.flush(timeout_s)

    def weights_changed(self, fingerprint: bytes | None = None) -> None:
        """Tell that the model was changed where kvtide can't see it: what was stored before is not used any more.

        fingerprint: the new one, for who gave one at the beginning; by default all weights are read.
        """
        self._identity.renew(fingerprint)

    def hit_tokens(self, input_ids: torch.Tensor) -> int:
        """Return how many tokens of the prompt a call of `generate` would try to restore."""
        return 0 if self._identity.follow() else self._match(self._prompt(input_ids)) * self.layout.tokens

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        kvtide_force_latest: bool = False,
        kvtide_start_within_s: float | None = None,
        kvtide_quality: float | None = None,
        **arguments: Any,
    ) -> Any:
        """Generate as `model.generate(inputs, generation_config, **arguments)` does, restoring a stored prefix first.

        inputs, or the keyword input_ids: (1, tokens). New full blocks of prompt and answer are stored afterwards, in
        the background. kvtide_force_latest: restore only what the store's servers say is the latest of all regions, no
        copy of this machine. kvtide_start_within_s, kvtide_quality: as in `attach`, for this call. ValueError for an
        empty prompt. What the cache can't help with (several sequences, other
        model inputs, beams, a cache of the caller's own) runs without it, and `last.bypass` names the reason.
        """
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        input_ids = arguments.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None:
            self._note_bypass("a call without token ids", 0)
            return self.model.generate(**arguments)
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be (1, tokens) with at least one token, got {tuple(input_ids.shape)}")
        bypass = bypass_reason(self.model, input_ids, arguments) or self._identity.follow()
        if bypass is not None:
            self._note_bypass(bypass, input_ids.shape[1])
            return self.model.generate(input_ids, **arguments)
        prompt = self._prompt(input_ids)
        began_s = self._clock.monotonic_s()
        selected = self._select(prompt, kvtide_force_latest)
        streaming = _asked(self._streaming, kvtide_start_within_s, kvtide_quality)
        past, report = (
            self._restore(prompt, kvtide_force_latest, streaming)
            if selected is None
            else self._opened(prompt, *selected)
        )
        first_token = FirstToken(self._clock)
        criteria = StoppingCriteriaList([first_token, *(arguments.get("stopping_criteria") or [])])
        arguments = {**arguments, "past_key_values": past, "stopping_criteria": criteria}
        if arguments.get("attention_mask") is None:
            arguments["attention_mask"] = torch.ones_like(input_ids)
        started_s = self._clock.monotonic_s()
        if selected is None:
            with self._observed(prompt, report):
                output = self.model.generate(input_ids, **arguments)
            self._note_prefill(report.hit_tokens, len(prompt), first_token.seen_s - started_s)
        else:
            output, report = self._generate_selected(input_ids, prompt, selected[0], report, arguments)
        if self._importance is not None:
            way, seconds = RestoreWay.WHOLE if selected is None else RestoreWay.PART, first_token.seen_s - began_s
            self._ways.note(way, self._is_near(prompt), report.hit_tokens, seconds, self._clock.monotonic_s())
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        queued = self.cache.guarded("queue blocks", partial(self._store, sequences[0], past, report), 0)
        self.last = report._replace(blocks_queued=queued)
        return output

    @contextmanager
    def _observed(self, prompt: _Tokens, report: GenerateReport) -> Iterator[None]:
        """Learn what a prompt attends to in its restored prefix, where loads go by that."""
        if self._learner is None or not report.hit_tokens or self.model.config._attn_implementation != "sdpa":
            yield
            return
        observed = ObservedPrefix(report.hit_tokens)
        with attending(self.model, observed.attend):
            yield
        metas = self._metas(prompt[: report.hit_tokens])
        self.cache.guarded("learn", partial(self._learner.note, self.cache, metas, observed.importance, ()), False)

    def _is_near(self, prompt: _Tokens) -> bool:
        """Tell whether the prompt begins in the fastest tier."""
        first = self._metas(prompt[: self.layout.tokens])
        return any(self.cache.guarded("look up", partial(self.cache.tiers.is_near, meta.id), False) for meta in first)

    def _select(self, prompt: _Tokens, is_latest: bool) -> tuple[Sparse, RestoredRoom, float] | None:
        """Open what is stored packed of the prompt's prefix; None if nothing is, or all is to be exact and so whole."""
        if self._importance is None or self._importance[0].ratio == 1.0:
            return None
        started_s, importance = self._clock.monotonic_s(), self._importance[0]
        hits = self._match(prompt, is_latest)
        if not hits or self._ways.choose(self._is_near(prompt), started_s) is RestoreWay.WHOLE:
            return None
        pages = RestoredRoom(self.layout, hits, len(prompt) - hits * self.layout.tokens + ANSWER_ROOM)
        sparse = Sparse(pages.write, importance.tokens_ahead(self.layout.tokens))
        self.cache.load(self._metas(prompt[:-1], is_latest)[:hits], sparse)
        return (sparse, pages, started_s) if sparse.opened is not None else None

    def _opened(
        self, prompt: _Tokens, sparse: Sparse, pages: RestoredRoom, started_s: float
    ) -> tuple[DynamicCache, GenerateReport]:
        """Return a cache with the rough blocks of an open load."""
        assert sparse.opened is not None
        past = DynamicCache(config=self.model.config)
        pages.fill(past, sparse.opened.blocks, self.model.device)
        load_s = self._clock.monotonic_s() - started_s
        return past, GenerateReport(len(prompt), sparse.opened.tokens, load_s, 0, 0, None)

    def _generate_selected(
        self,
        input_ids: torch.Tensor,
        prompt: _Tokens,
        sparse: Sparse,
        report: GenerateReport,
        arguments: dict[str, Any],
    ) -> tuple[Any, GenerateReport]:
        """Answer on rough blocks of which each layer loads what matters."""
        assert self._importance is not None
        assert sparse.opened is not None
        (importance, learner), load = self._importance, sparse.opened
        selection = SparsePrefix(load, importance)
        with closing(sparse):
            self._probe(input_ids[:, report.hit_tokens : -1], arguments["past_key_values"], selection)
            with selection.active(self.model):
                output = self.model.generate(input_ids, **arguments)
        self.cache.guarded(
            "learn", partial(learner.note, self.cache, load.metas, selection.importance, load.bases), False
        )
        self.cache.decisions.add_absent(self._full_tokens(prompt) - report.hit_tokens, self.namespace)
        return output, report._replace(stored_bytes_read=load.read_bytes, selected=selection.report())

    def _probe(self, suffix: torch.Tensor, past: DynamicCache, selection: SparsePrefix) -> None:
        """Run the suffix but for its last token; where the guard then refuses, load all and forget that it ran."""
        if suffix.shape[1] == 0:
            return
        with torch.inference_mode(), selection.active(self.model):
            self.model(suffix, past_key_values=past, use_cache=True, logits_to_keep=1)
        if selection.is_refused:
            selection.fall_back(past)

    def _prompt(self, input_ids: torch.Tensor) -> _Tokens:
        prompt: _Tokens = input_ids[0].cpu().numpy()
        return prompt

    def _note_bypass(self, reason: str, prompt_tokens: int) -> None:
        self.last = GenerateReport(prompt_tokens, 0, 0.0, 0, 0, reason)
        if reason not in self._bypass_logged:
            self._bypass_logged.add(reason)
            _log.warning("running without the cache: %s", reason)

    def _metas(self, tokens: _Tokens, is_latest: bool = False) -> list[BlockMeta]:
        keys = self._keys.of(self.namespace, tokens)
        parents = [BlockKey(self.namespace), *keys]
        ids = [self.cache.tiers.named(ObjectId(self.namespace, key), is_latest) for key in keys]
        return [
            BlockMeta(each, parents[i], i * self.layout.tokens, self.layout, self._label) for i, each in enumerate(ids)
        ]

    @property
    def _label(self) -> str:
        return f"{str(self.model.config._name_or_path).rstrip('/').rpartition('/')[2]} {self.layout.dtype.value}"

    def _match(self, prompt: _Tokens, is_latest: bool = False) -> int:
        # The last token always runs: its logits are the answer's first token.
        return self.cache.match([meta.id for meta in self._metas(prompt[:-1], is_latest)])

    def restored(self, input_ids: torch.Tensor) -> DynamicCache:
        """Return a cache with the longest stored prefix of a prompt, as `generate` would begin with."""
        if self._identity.follow() is not None:
            return DynamicCache(config=self.model.config)
        return self._restore(self._prompt(input_ids), False, self._streaming)[0]

    def _restore(
        self, prompt: _Tokens, is_latest: bool, streaming: StreamSettings | None
    ) -> tuple[DynamicCache, GenerateReport]:
        started_s = self._clock.monotonic_s()
        if streaming is not None:
            found = self._stream(prompt, self._metas(prompt[:-1], is_latest), streaming)
            if found is not None:
                return found
        hits, block_tokens = self._match(prompt, is_latest), self.layout.tokens
        self.cache.decisions.add_absent(self._full_tokens(prompt) - hits * block_tokens, self.namespace)
        past = DynamicCache(config=self.model.config)
        stored_bytes, judge, is_near = 0, self.cache.judge, bool(hits) and self._is_near(prompt)
        if hits and not is_near and not judge.is_load_faster(hits * block_tokens, started_s):
            self.cache.decisions.add(Choice.RECOMPUTE, Why.LINK_SLOWER, hits * block_tokens, self.namespace)
            hits = 0
        if hits:
            pages = RestoredRoom(self.layout, hits)
            speed = judge.prefill()
            # Longer than recompute is of no use to anybody; unknown speed leaves the cache's own bound.
            recompute_s = speed.seconds(0, hits * block_tokens) if speed is not None else None
            metas = self._metas(prompt[:-1], is_latest)[:hits]
            report = self.cache.load(metas, Whole(pages.write), recompute_s)
            now_s = self._clock.monotonic_s()
            if not is_near and report.reason in (None, MissReason.DEADLINE):
                # A load that was given up is extrapolated.
                judge.note_load(hits * block_tokens, (now_s - started_s) * hits / max(1, report.blocks), now_s)
            hits, stored_bytes = report.blocks, report.stored_bytes
            pages.fill(past, hits, self.model.device)
        load_s = self._clock.monotonic_s() - started_s
        return past, GenerateReport(len(prompt), hits * self.layout.tokens, load_s, stored_bytes, 0, None)

    def _stream(
        self, prompt: _Tokens, metas: list[BlockMeta], streaming: StreamSettings
    ) -> tuple[DynamicCache, GenerateReport] | None:
        """Stream a prompt's blocks; None for what is in the fastest tier, and for a load that failed."""
        is_near = partial(all, (self.cache.tiers.is_near(meta.id) for meta in metas))
        if self.cache.guarded("look up", is_near, False):
            return None
        engine = StreamedPrefill(self.model, prompt.tolist(), self.layout)
        speed = self.cache.judge.prefill() or PrefillSpeed(PREFILL_GUESS)
        request, policy = streaming.request(speed, self.cache.quality), policy_named(streaming.policy)
        weights = None if self._learner is None else partial(self._learner.weights, self.cache)
        streamed = Streamed(engine, request, policy, chunk_tokens=streaming.chunk_tokens, weights=weights)
        self.cache.load(metas, streamed, self.cache.judge.deadline_s(len(metas) * self.layout.tokens))
        if (found := streamed.report) is None:
            return None
        report = GenerateReport(len(prompt), found.tokens, found.ready_s, found.received_bytes, 0, None, found)
        return engine.past, report

    def _full_tokens(self, prompt: _Tokens) -> int:
        return (len(prompt) - 1) // self.layout.tokens * self.layout.tokens

    def _note_prefill(self, start: int, stop: int, seconds: float) -> None:
        if stop - start >= PREFILL_SAMPLE_TOKENS_MIN:
            self.cache.judge.note_prefill(start, stop, seconds)

    def _cost(self, meta: BlockMeta) -> float | None:
        """Return what recomputing a block takes beside a prompt's first one, None while that was not measured."""
        speed = self.cache.judge.prefill()
        if speed is None or math.isinf(speed.double_at):
            return None
        tokens = meta.layout.tokens
        return speed.seconds(meta.start, meta.start + tokens) / speed.seconds(0, tokens)

    def _store(self, sequence: torch.Tensor, past: DynamicCache, report: GenerateReport) -> int:
        # The last token of the answer was never run, so the cache ends before it.
        tokens = sequence[: past.get_seq_length()].cpu().numpy()
        loaded: Collection[int] = range(report.hit_tokens // self.layout.tokens)
        streamed, stop = report.streamed, len(tokens)
        if streamed is not None:
            loaded = frozenset(streamed.loaded)
            if loaded and streamed.is_rougher_than(self.cache.quality):
                # What is computed on top of rougher blocks than are stored is no better than they are.
                stop = min(loaded) * self.layout.tokens
        fresh = [meta for block, meta in enumerate(self._metas(tokens[:stop])) if block not in loaded]
        return self.cache.store([PendingBlock(meta, partial(_capture, past, meta), self._cost(meta)) for meta in fresh])


def _asked(usual: StreamSettings | None, start_within_s: float | None, quality: float | None) -> StreamSettings | None:
    """Return how a call's prefix is streamed. ValueError for a bad setting."""
    asked = {"start_within_s": start_within_s, "quality": quality}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    return (usual or StreamSettings())._replace(**given).checked() if given else usual


def _capture(past: DynamicCache, meta: BlockMeta) -> BlockSource:
    """Copy a block out of a cache, which is the caller's to change once `generate` has returned."""
    bits = block_bits(past, meta)
    return lambda: bits
