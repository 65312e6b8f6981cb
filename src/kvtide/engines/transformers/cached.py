"""Prefix caching for Hugging Face causal language models: restore, run the suffix, store in the background.

Invariant: the answer is that of `model.generate`; whatever the cache can't help with runs as if it were not there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.block import BlockLayout, BlockMeta
from kvtide.clock import Clock, SystemClock
from kvtide.codec import AwaitingCodec, Codec, CodecRegistry, Profile
from kvtide.config import Limits
from kvtide.engines.transformers.batches import BatchedModel
from kvtide.engines.transformers.fingerprint import ModelIdentity, NamespaceSettings
from kvtide.engines.transformers.generation import (
    CallSettings,
    GenerateReport,
    MadeCache,
    bypass_reason,
    made_cache,
    note_prefill,
    recompute_s,
    watched,
)
from kvtide.engines.transformers.grouped import GroupedModel
from kvtide.engines.transformers.groups import (
    ModelGroup,
    RestoredRoom,
    captured,
    groups_of,
    is_plain,
    plain_layout,
    profile_shapes,
)
from kvtide.engines.transformers.importance import ImportanceLoads, Learner, OpenedPrefix, observing
from kvtide.engines.transformers.profiles import CalibrationStatus, ProfileSeeker
from kvtide.engines.transformers.selective import Impress, ObservedPrefix, SparseSettings, check_ratio
from kvtide.engines.transformers.streaming import StreamedPrefill, StreamSettings, asked
from kvtide.engines.ways import RestoreWay
from kvtide.evict import Advice, ScoreRanking
from kvtide.group import LayerGroup
from kvtide.keys import LatestKeys
from kvtide.plan import PrefillSpeed
from kvtide.plan.base import CHUNK_TOKENS
from kvtide.plan.policies import policy_named
from kvtide.store import Cache, PendingBlock, cache_for
from kvtide.store.load import MissReason, Whole
from kvtide.store.load.streamed import Streamed
from kvtide.types import BlockKey, Namespace, ObjectId

_log = logging.getLogger(__name__)
_Tokens = np.ndarray[Any, Any]

BLOCK_TOKENS = 256
# Tokens a second, before any were measured: what a plan then gets wrong it puts right at the next chunk.
PREFILL_GUESS = 1000.0


class CachedModel:
    """A model with a cache beside it. Use it with `with`; one call of `generate` at a time."""

    def __init__(
        self, model: Any, cache: Cache, clock: Clock, settings: NamespaceSettings, seeker: ProfileSeeker
    ) -> None:
        self.model = model
        self.cache = cache
        self.last: GenerateReport | None = None
        self._clock = clock
        self._identity = ModelIdentity(model, settings)
        self._block_tokens = settings.block_tokens
        self._keys = LatestKeys(settings.block_tokens)
        self._grouped = GroupedModel(model, cache, clock, self._identity, settings.block_tokens)
        self._batched = BatchedModel(model, cache, clock, self._metas)
        self._streaming: StreamSettings | None = None
        # Learns from prompts what `importance` and `importance-first` go by.
        self._learner: Learner | None = None
        self._importance: ImportanceLoads | None = None
        self._bypass_logged: set[str] = set()
        self._seeker = seeker

    @property
    def calibration(self) -> CalibrationStatus | None:
        """Return how far a calibration in the background is, None without one."""
        return self._seeker.calibration

    def stream(self, streaming: StreamSettings, learner: Learner) -> None:
        """From now on stream what is not in the fastest tier, computing meanwhile. ValueError for a bad setting."""
        self._streaming = streaming.checked()
        self._learner = learner if streaming.is_by_importance else None

    def select(self, importance: SparseSettings, learner: Learner, is_reordered: bool = True) -> None:
        """From now on load exactly only what matters of blocks that are stored as `packed`, and learn from it.

        is_reordered: tokens are stored in the order in which they matter, else as they come, for good.
        """
        self._importance = ImportanceLoads(self.cache, self._clock, importance, learner, is_reordered)
        self._learner = learner

    def keep_states(self, every_tokens: int) -> None:
        """From now on keep the states of a prompt after so many tokens too. ValueError if the model has none."""
        self._grouped.keep_states(every_tokens)

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of the model's blocks."""
        return self._identity.layout

    @property
    def namespace(self) -> Namespace:
        """Return where the model's blocks belong."""
        return self._identity.namespace

    @property
    def groups(self) -> list[tuple[LayerGroup, Namespace]]:
        """Return the model's groups of layers, one for a plain model, and where the parts of each belong."""
        identity = self._identity
        return [(each.group, space) for each, space in zip(identity.groups, identity.namespaces, strict=True)]

    def __enter__(self) -> Self:
        self.cache.open()
        if self._streaming is not None:
            self.cache.recall()
        self._seeker.seek(self._identity)
        return self

    def __exit__(self, *raised: object) -> None:
        for helper in (self._learner, self._seeker):
            if helper is not None:
                helper.close()
        self.cache.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored, for other processes to find. False if that took longer."""
        return self.cache.flush(timeout_s)

    def learned(self, timeout_s: float) -> None:
        """Wait until what prompts taught is noted beside the blocks. TimeoutError if that takes longer."""
        if self._learner is not None:
            self._learner.flush(timeout_s)

    def weights_changed(self, fingerprint: bytes | None = None) -> None:
        """Tell that the model was changed where kvtide can't see it: what was stored before is not used any more.

        fingerprint: the new one, for who gave one at the beginning; by default all weights are read.
        """
        self._identity.renew(fingerprint)

    def hit_tokens(self, input_ids: torch.Tensor) -> int:
        """Return how many tokens of the prompt a call of `generate` would try to restore."""
        if self._identity.follow():
            return 0
        prompt = self._prompt(input_ids)
        blocks = self._match(prompt) if self._identity.is_plain else self._grouped.find(prompt).hit.blocks
        return blocks * self._block_tokens

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        kvtide_force_latest: bool = False,
        kvtide_start_within_s: float | None = None,
        kvtide_quality: float | None = None,
        kvtide_hint: Advice | None = None,
        **arguments: Any,
    ) -> Any:
        """Generate as `model.generate(inputs, generation_config, **arguments)` does, restoring a stored prefix first.

        inputs, or the keyword input_ids: (sequences, tokens). New full blocks of prompt and answer are stored
        afterwards, in the background. kvtide_force_latest: restore only what the store's servers say is the latest of
        all regions, no copy of this machine. kvtide_start_within_s, kvtide_quality: as in `attach`, for this call.
        kvtide_hint: advice about a single prompt's session. Several sequences, padded on the left, restore what all of
        them can, by whole loads. What the cache can't help with runs without it; `last.bypass` says why. ValueError
        for no token.
        """
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        input_ids = arguments.pop("input_ids", None) if inputs is None else inputs
        if input_ids is None:
            self._note_bypass("a call without token ids", 0)
            return self.model.generate(**arguments)
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(f"input_ids must be (sequences, tokens), at least one token, got {tuple(input_ids.shape)}")
        call = CallSettings.of(self.model, input_ids, arguments)
        is_batch = len(input_ids) > 1 or not call.mask.all()
        bypass = self._bypass(input_ids, is_batch, call)
        if bypass is not None:
            self._note_bypass(bypass, input_ids.shape[1])
            return self.model.generate(input_ids, **arguments)
        if is_batch:
            output, self.last = self._batched.generate(input_ids, call, kvtide_force_latest, arguments)
            return output
        prompt, streaming = self._prompt(input_ids), asked(self._streaming, kvtide_start_within_s, kvtide_quality)
        if not self._identity.is_plain:
            output, self.last = self._grouped.generate(input_ids, prompt, kvtide_force_latest, kvtide_hint, arguments)
            return output
        if kvtide_hint is not None:
            self.cache.advise([meta.id for meta in self._metas(prompt[:-1], kvtide_force_latest)], kvtide_hint)
        return self._generate(input_ids, call, kvtide_force_latest, streaming, arguments)

    def _generate(
        self,
        input_ids: torch.Tensor,
        call: CallSettings,
        is_latest: bool,
        streaming: StreamSettings | None,
        arguments: dict[str, Any],
    ) -> Any:
        began_s, prompt = self._clock.monotonic_s(), self._prompt(input_ids)
        selected = self._select(prompt, is_latest)
        if selected is None:
            past, report = self._restore(prompt, is_latest, streaming)
            made = made_cache(self.model, past, len(prompt), call)
        else:
            made, load_s = MadeCache(selected.past, selected.past), self._clock.monotonic_s() - began_s
            report = GenerateReport(len(prompt), selected.load.tokens, load_s, 0, 0, None)
        first_token, arguments = watched(self._clock, input_ids, made.past, arguments)
        started_s, observed = self._clock.monotonic_s(), None
        if selected is None or self._importance is None:
            with self._observed(prompt, report) as observed:
                output = self.model.generate(input_ids, **arguments)
            note_prefill(self.cache.judge, report.hit_tokens, len(prompt), first_token.seen_s - started_s)
        else:
            output, layers = self._importance.answer(self.model, input_ids, selected, arguments)
            self.cache.decisions.add_absent(self._full_tokens(len(prompt)) - report.hit_tokens, self.namespace)
            report = report._replace(stored_bytes_read=layers.read_bytes, selected=layers)
        if self._importance is not None:
            way, now_s = RestoreWay.WHOLE if selected is None else RestoreWay.PART, self._clock.monotonic_s()
            took_s = first_token.seen_s - began_s
            self._importance.ways.note(way, self._is_near(prompt), report.hit_tokens, took_s, now_s)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        store = partial(self._store, sequences, made, report, observed)
        self.last = report._replace(blocks_queued=self.cache.guarded("queue blocks", store, 0))
        return output

    def _bypass(self, input_ids: torch.Tensor, is_batch: bool, call: CallSettings) -> str | None:
        """Return why the cache can't help with a call, by itself or on this model with these settings."""
        reason = bypass_reason(self.model, input_ids, call) or self._follow()
        if reason is not None:
            return reason
        is_plain = self._identity.is_plain
        if call.special_cache and (not is_plain or (self._importance is not None and not is_batch)):
            return f"cache_implementation={call.special_cache}, of a model with several groups or with importance"
        if is_batch and not is_plain:
            return "several or padded sequences, of a model with several groups of layers"
        return None

    def _follow(self) -> str | None:
        """Follow changes of the model, and look for the profile of what it is now."""
        refusal = self._identity.follow()
        self._seeker.seek(self._identity)
        return refusal

    def _observed(self, prompt: _Tokens, report: GenerateReport) -> AbstractContextManager[ObservedPrefix | None]:
        """Learn what a prompt attends to where loads go by that: in its restored prefix, or in all that it stores."""
        if self._importance is not None:
            return self._importance.observed(self.model, self._metas(prompt[:-1]))
        if self._learner is not None:
            return observing(self.model, self.cache, self._learner, self._metas(prompt[: report.hit_tokens]))
        return nullcontext()

    def _is_near(self, prompt: _Tokens) -> bool:
        """Tell whether the prompt begins in the fastest tier."""
        return self.cache.is_near([meta.id for meta in self._metas(prompt[: self.layout.tokens])])

    def _select(self, prompt: _Tokens, is_latest: bool) -> OpenedPrefix | None:
        """Open what is stored packed of the prompt's prefix; None if nothing is, or all is to be exact and so whole."""
        if self._importance is None:
            return None
        metas = self._metas(prompt[:-1], is_latest)[: self._match(prompt, is_latest)]
        spare_tokens = len(prompt) - len(metas) * self.layout.tokens
        return self._importance.open(self.model, metas, self._is_near(prompt), spare_tokens)

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
        if not self._identity.is_plain:
            prompt = self._prompt(input_ids)
            return self._grouped.restore(prompt, self._grouped.find(prompt))[0]
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
        self.cache.decisions.add_absent(self._full_tokens(len(prompt)) - hits * block_tokens, self.namespace)
        past = DynamicCache(config=self.model.config)
        stored_bytes, judge, is_near = 0, self.cache.judge, bool(hits) and self._is_near(prompt)
        if hits and not self.cache.is_worth(hits * block_tokens, is_near, self.namespace):
            hits = 0
        if hits:
            pages = RestoredRoom(self.layout, hits)
            metas = self._metas(prompt[:-1], is_latest)[:hits]
            report = self.cache.load(metas, Whole(pages.write), recompute_s(judge, hits * block_tokens))
            now_s = self._clock.monotonic_s()
            if not is_near and report.reason in (None, MissReason.DEADLINE):
                # A load that was given up is extrapolated.
                judge.note_load(hits * block_tokens, (now_s - started_s) * hits / max(1, report.blocks), now_s)
            hits, stored_bytes = report.blocks, report.stored_bytes
            pages.fill(past, hits, self.model.device)
        tokens = hits * self.layout.tokens
        return past, GenerateReport(len(prompt), tokens, self._clock.monotonic_s() - started_s, stored_bytes, 0, None)

    def _stream(
        self, prompt: _Tokens, metas: list[BlockMeta], streaming: StreamSettings
    ) -> tuple[DynamicCache, GenerateReport] | None:
        """Stream a prompt's blocks; None for what is in the fastest tier, and for a load that failed."""
        if self.cache.is_near([meta.id for meta in metas]):
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

    def _full_tokens(self, prompt_tokens: int) -> int:
        return (prompt_tokens - 1) // self.layout.tokens * self.layout.tokens

    def _cost(self, meta: BlockMeta) -> float | None:
        """Return what recomputing a block takes beside a prompt's first one, None while that was not measured."""
        speed = self.cache.judge.prefill()
        if speed is None or math.isinf(speed.double_at):
            return None
        tokens = meta.layout.tokens
        return speed.seconds(meta.start, meta.start + tokens) / speed.seconds(0, tokens)

    def _store(
        self, sequences: torch.Tensor, made: MadeCache, report: GenerateReport, observed: ObservedPrefix | None
    ) -> int:
        past = made.settled()
        # The last token of the answer was never run, so the cache ends before it.
        tokens = sequences[0, : int(past.get_seq_length())].cpu().numpy()
        loaded: Collection[int] = range(report.hit_tokens // self.layout.tokens)
        streamed, stop = report.streamed, len(tokens)
        if streamed is not None:
            loaded = frozenset(streamed.loaded)
            if loaded and streamed.is_rougher_than(self.cache.quality):
                # What is computed on top of rougher blocks than are stored is no better than they are.
                stop = min(loaded) * self.layout.tokens
        metas = self._metas(tokens[:stop])
        orders = self._importance.orders(metas, observed) if self._importance else {}
        fresh = [
            PendingBlock(meta, partial(captured, past, meta), self._cost(meta), orders=orders.get(meta.id))
            for block, meta in enumerate(metas)
            if block not in loaded
        ]
        return self.cache.store(fresh)


def attach(
    model: Any,
    store: str | Path,
    *,
    codec: str | None = None,
    profiles: Sequence[Profile] = (),
    block_tokens: int = BLOCK_TOKENS,
    tenant_salt: bytes = b"",
    limits: Limits | None = None,
    fingerprint: bytes | None = None,
    importance: float | Impress | SparseSettings | None = None,
    start_within_s: float | None = None,
    quality: float | str | None = None,
    policy: str | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    state_every_tokens: int | None = None,
    calibrate: Literal["background"] | None = None,
) -> CachedModel:
    """Put a cache beside a Hugging Face causal language model.

    store: `disk:///path`, a folder (a Path, or text such as `./folder`), `memory://`, … codec: `lossless` (the
    default), `tide[:quality[:refinements]]`, `tide-light`, `tide-deep`, `cachegen[:level[:coder]]`, …; lossy ones take
    the first of the `profiles` that fits, or one a group of layers. Without `profiles` tide takes what `kvtide
    calibrate` left in the store for this model, and stores losslessly until then; others keep tables in payloads.
    importance: the share of a restored prefix's tokens, from 0 to 1, to load exactly, those that the rest of the prompt
    attends to; the others stay rough (decision 0013). The codec is then `packed`, which needs a profile as tide does.
    `Impress(ratio)`: the paper's way, without a profile, leaves the others out.
    start_within_s: stream a stored prefix, its roughest form first, computing meanwhile, and start the model after so
    many seconds with what has come. quality: the KL divergence, in nats, at which it starts earlier; the codec's unless
    given. policy: what to ask for first, one of `kvtide.plan.policies.POLICIES`; `cachegen` picks one of the levels
    that `codec="cachegen:1-4"` stores for each `chunk_tokens`. Any of the three streams (docs/streaming.md).
    state_every_tokens: of models with states, how often one is kept (docs/transformers.md).
    calibrate: `background` has a child process make the profile that the store lacks; see `cached.calibration`.
    The salt keeps tenants apart. A fingerprint is taken from the weights; one that is given must change when they do.
    UnsupportedModel (a ValueError) for a model that can't be served exactly; ValueError for a bad store or codec.

        with attach(model, "disk:///var/cache/kvtide") as cached:
            output = cached.generate(input_ids, max_new_tokens=64)
    """
    clock = SystemClock()
    registry, groups = CodecRegistry(profiles), groups_of(model, block_tokens)
    settings, steps = _settings(importance), importance if isinstance(importance, Impress) else Impress(1.0)
    is_streamed = (start_within_s, quality, policy) != (None, None, None)
    _check_loads(groups, settings, is_streamed)
    layout, learner = groups[0].group.layout, Learner(registry, clock)
    made = _made(registry, codec or _usual_codec(model, layout.kv_heads, importance), groups, bool(profiles))
    part_quality = max(made.quality, settings.quality) if settings and settings.ratio < 1 else None
    ranking = ScoreRanking(learner.important_tokens) if settings and steps.is_scored else None
    cache = cache_for(store, made, registry, limits, clock, ranking, quality=part_quality)
    named = NamespaceSettings(block_tokens, tenant_salt, fingerprint, made.is_lossless and part_quality is None)
    seeker = ProfileSeeker(cache, model, str(store), None if profiles else made, calibrate)
    cached = CachedModel(model, cache, clock, named, seeker)
    if state_every_tokens is not None:
        cached.keep_states(state_every_tokens)
    if is_streamed:
        wanted = None if quality is None else float(quality)
        cached.stream(StreamSettings(start_within_s, wanted, policy, chunk_tokens), learner)
    if settings is not None:
        cached.select(settings, learner, steps.is_reordered)
    return cached


def _settings(importance: float | Impress | SparseSettings | None) -> SparseSettings | None:
    asked = importance.settings() if isinstance(importance, Impress) else importance
    return SparseSettings(asked) if isinstance(asked, float | int) else asked


def _usual_codec(model: Any, kv_heads: int, importance: object) -> str:
    if isinstance(importance, Impress):
        return importance.codec(model.config.num_attention_heads, kv_heads)
    return "lossless" if importance is None else "packed"


def _made(
    registry: CodecRegistry, spec: str, groups: Sequence[ModelGroup], has_profiles: bool
) -> Codec | AwaitingCodec:
    """Return the codec of a model; of profiles that are given each group must have its own. ValueError otherwise."""
    if has_profiles and is_plain(groups):
        return registry.make(spec, groups[0].group.layout)
    shapes = profile_shapes(groups)
    if not shapes:
        # States are kept losslessly by any codec.
        return registry.make(spec)
    made = registry.make_by_group(spec, shapes)
    if has_profiles and isinstance(made, AwaitingCodec) and not made.first:
        names = ", ".join(each.group.name for each in groups if each.rows)
        raise ValueError(f"codec {spec!r} needs profiles of one calibration of this model, one each of {names}")
    return made


def _check_loads(groups: Sequence[ModelGroup], settings: SparseSettings | None, is_streamed: bool) -> None:
    """Refuse ways to load that the model does not take, or that do not go together."""
    if settings is not None:
        check_ratio(settings.ratio)
        if is_streamed:
            raise ValueError("importance loads a prefix in its own way: it takes no start_within_s, quality or policy")
    if settings is not None or is_streamed:
        plain_layout(groups)
