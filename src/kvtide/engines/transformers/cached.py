"""Prefix caching for Hugging Face causal language models: restore, run the suffix, store in the background.

Invariant: the answer is that of `model.generate`; whatever the cache can't help with runs as if it were not there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import DynamicCache, StoppingCriteriaList

from kvtide.clock import Clock, SystemClock
from kvtide.codec import AwaitingCodec, Codec, CodecRegistry, Profile
from kvtide.config import Limits
from kvtide.engines import calibrate_command
from kvtide.engines.transformers.fingerprint import ModelIdentity
from kvtide.engines.transformers.generation import (
    CallSettings,
    FirstToken,
    GenerateReport,
    bypass_reason,
    leaving_out,
    made_cache,
    misfit_reason,
)
from kvtide.engines.transformers.groups import ModelGroup, groups_of, is_plain, plain_layout, profile_shapes
from kvtide.engines.transformers.importance import ImportanceLoads, Learner
from kvtide.engines.transformers.prefixes import Prefixes, SequenceRow
from kvtide.engines.transformers.selective import Impress, ObservedPrefix, SparseSettings
from kvtide.engines.transformers.streaming import StreamedPrefill, StreamSettings
from kvtide.errors import UnsupportedModel
from kvtide.evict import Advice, ScoreRanking
from kvtide.plan import PrefillSpeed
from kvtide.plan.base import CHUNK_TOKENS
from kvtide.plan.policies import policy_named
from kvtide.store import Cache, PendingBlock, cache_for
from kvtide.store.load.sparse import Sparse
from kvtide.store.load.streamed import Streamed

_log = logging.getLogger(__name__)

BLOCK_TOKENS = 256
# Tokens a second, before any were measured: what a plan then gets wrong it puts right at the next chunk.
PREFILL_GUESS = 1000.0
# Shorter runs say more about the machine's mood than about its prefill speed.
PREFILL_SAMPLE_TOKENS_MIN = 128


class _Begun(NamedTuple):
    """A call before the model runs: its rows, a cache with their first columns, a report, the load of rough blocks."""

    rows: list[SequenceRow]
    past: Any
    columns: int
    report: GenerateReport
    sparse: Sparse | None = None


@dataclass(eq=False, repr=False)
class CachedModel:
    """A model with a cache beside it. Use it with `with`; one call of `generate` at a time."""

    model: Any
    cache: Cache
    _clock: Clock
    # The model's groups of layers, and where the parts of each belong.
    identity: ModelIdentity
    prefixes: Prefixes
    # Where a profile is looked for, at the start and when the model changed, and of which kind; "" for none.
    _store_url: str
    _profile_kind: str
    # How what is not in the fastest tier is streamed, and how only what matters is loaded exactly; None: not so.
    _streaming: StreamSettings | None
    _importance: ImportanceLoads | None

    def __post_init__(self) -> None:
        self.last: GenerateReport | None = None
        self._block_tokens = self.identity.block_tokens
        self._bypass_logged: set[str] = set()
        # The fingerprint of the model whose profile was looked for.
        self._sought = b""

    def __enter__(self) -> Self:
        self.cache.open()
        if self._streaming is not None:
            self.cache.recall()
        self._look_for_profile()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._importance is not None:
            self._importance.learner.close()
        self._sought = b""
        self.cache.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored, for other processes to find. False if that took longer."""
        return self.cache.flush(timeout_s)

    def learned(self, timeout_s: float) -> None:
        """Wait until what prompts taught is noted beside the blocks. TimeoutError if that takes longer."""
        if self._importance is not None:
            self._importance.learner.flush(timeout_s)

    def weights_changed(self, fingerprint: bytes | None = None) -> None:
        """Tell that the model was changed where kvtide can't see it: what was stored before is not used any more.

        fingerprint: the new one, for who gave one at the beginning; by default all weights are read.
        """
        self.identity.renew(fingerprint)

    def hit_tokens(self, input_ids: torch.Tensor) -> int:
        """Return how many tokens of the prompt a call of `generate` would try to restore."""
        if self._follow() is not None:
            return 0
        return self._block_tokens * self.prefixes.find(self.prefixes.row(input_ids[0].cpu().numpy())).hit.blocks

    def restored(self, input_ids: torch.Tensor) -> DynamicCache:
        """Return a cache with the longest stored prefix of a prompt, as `generate` would begin with."""
        if self._follow() is not None:
            return DynamicCache(config=self.model.config)
        row = self.prefixes.row(input_ids[0].cpu().numpy())
        return self._begin([row], self._streaming).past

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
        bypass = bypass_reason(self.model, call) or self._follow()
        bypass = bypass or misfit_reason(call, self.identity.is_plain, self._importance is not None)
        if bypass is not None:
            self._note_bypass(bypass, input_ids.shape[1])
            return self.model.generate(input_ids, **arguments)
        streaming = self._streaming
        if (kvtide_start_within_s, kvtide_quality) != (None, None):
            streaming = (streaming or StreamSettings()).asked(kvtide_start_within_s, kvtide_quality)
        began_s, pads = self._clock.monotonic_s(), (input_ids.shape[1] - call.mask.sum(dim=1)).tolist()
        columns = zip(input_ids.cpu().numpy(), pads, strict=True)
        rows = [self.prefixes.row(ids, pad, kvtide_force_latest) for ids, pad in columns]
        ways = (streaming if self.identity.is_plain else None, kvtide_hint, self._importance) if call.is_single else ()
        return self._run(call, self._begin(rows, *ways), began_s, arguments)

    def _follow(self) -> str | None:
        """Follow changes of the model, and look for the profile of what it is now. Return why it can't be served."""
        refusal = self.identity.follow()
        if self._sought != self.identity.fingerprint:
            self._look_for_profile()
        return refusal

    def _look_for_profile(self) -> None:
        """Look in the store for the profile of the model as it is now; say which command makes it if there is none."""
        identity = self.identity
        if self._profile_kind and identity.refusal is None:
            folder, salt = str(self.model.config._name_or_path), identity.tenant_salt
            # Without a folder nobody else can know whose profile it is.
            has_folder = bool(folder) and Path(folder).is_dir()
            own = identity.given_fingerprint or (b"" if has_folder else identity.fingerprint)
            command = calibrate_command(folder, self._store_url, self._profile_kind, own, bool(salt))
            self.cache.profiles.seek(identity.fingerprint, salt, command)
        self._sought = identity.fingerprint

    def _note_bypass(self, reason: str, prompt_tokens: int) -> None:
        self._note(GenerateReport(prompt_tokens, bypass=reason))
        if reason not in self._bypass_logged:
            self._bypass_logged.add(reason)
            _log.warning("running without the cache: %s", reason)

    def _begin(
        self,
        rows: list[SequenceRow],
        streaming: StreamSettings | None = None,
        hint: Advice | None = None,
        importance: ImportanceLoads | None = None,
    ) -> _Begun:
        """Restore what the rows of a call begin with, by the first of the ways that is given and has it; else whole."""
        began_s, row = self._clock.monotonic_s(), rows[0]
        if importance is not None:
            rows, hint = [row := self.prefixes.find(row, hint)], None
            tokens = self._block_tokens * row.hit.blocks
            metas, is_near = row.metas[0][: row.hit.blocks], self.prefixes.is_near(row, tokens)
            opened = importance.open(self.model, metas, is_near, len(row.tokens) - tokens)
            if opened is not None:
                (sparse, past), load_s = opened, self._clock.monotonic_s() - began_s
                tokens = past.get_seq_length()
                report = GenerateReport(len(row.tokens), tokens, load_s, found_in=self._found_in(is_near))
                return _Begun(rows, past, tokens, report, sparse)
        if streaming is not None:
            if hint is not None:
                self.cache.advise([meta.id for meta in row.metas[0]], hint)
            if (streamed := self._stream(row, streaming)) is not None:
                return streamed
            hint = None
        if importance is None:
            rows = [self.prefixes.find(each, hint) for each in rows]
        restored = self.prefixes.restore(rows, began_s)
        ended_by = rows[0].hit.ended_by
        report = GenerateReport(
            sum([len(each.tokens) for each in rows]),
            hit_tokens=sum([max(0, restored.columns - each.pad) for each in rows]),
            load_s=self._clock.monotonic_s() - began_s,
            stored_bytes_read=restored.stored_bytes,
            ended_by=None if ended_by is None else self.identity.groups[ended_by].group.name,
            found_in=self._found_in(restored.is_near),
        )
        return _Begun(rows, restored.past, restored.columns, report)

    def _stream(self, row: SequenceRow, streaming: StreamSettings) -> _Begun | None:
        """Stream a prompt's blocks; None for none, for what is in the fastest tier, and for a load that failed."""
        metas = row.metas[0]
        if not metas or self.cache.is_near([meta.id for meta in metas]):
            return None
        engine = StreamedPrefill(self.model, row.tokens.tolist(), self.identity.layout)
        speed = self.cache.judge.prefill() or PrefillSpeed(PREFILL_GUESS)
        request, policy = streaming.request(speed, self.cache.quality), policy_named(streaming.policy)
        streamed = Streamed(engine, request, policy, chunk_tokens=streaming.chunk_tokens)
        self.cache.load(metas, streamed, self.cache.judge.deadline_s(len(metas) * self._block_tokens))
        if (found := streamed.report) is None:
            return None
        report = GenerateReport(len(row.tokens), found.tokens, found.ready_s, found.received_bytes, streamed=found)
        return _Begun([row], engine.past, found.tokens, report._replace(found_in=self._found_in(is_near=False)))

    def _run(self, call: CallSettings, begun: _Begun, began_s: float, arguments: dict[str, Any]) -> Any:
        """Answer from what was restored on, learn from it, queue what is new."""
        row, report, importance = begun.rows[0], begun.report, self._importance if call.is_single else None
        if call.special_cache is not None:
            begun = begun._replace(past=made_cache(self.model, begun.past, call))
        started_s, observed = self._clock.monotonic_s(), None
        ran, states = 0, list[PendingBlock]()
        if not self.identity.is_plain:
            ran, states = self.prefixes.run_to_cuts(call.input_ids, begun.past, begun.columns, row)
        first_token = FirstToken(self._clock)
        criteria = StoppingCriteriaList([first_token, *(arguments.get("stopping_criteria") or [])])
        own = {self.prefixes.argument: begun.past, "attention_mask": call.mask}
        arguments = {**arguments, **own, "stopping_criteria": criteria, "cache_implementation": None}
        if begun.sparse is None or importance is None:
            # Models of states alone don't tell `generate` how many tokens their cache has.
            cut = leaving_out(self.model, ran) if self.identity.is_of_states else nullcontext()
            learning = nullcontext() if importance is None else importance.observed(self.model, row.metas[0])
            with learning as observed, cut:
                output = self.model.generate(call.input_ids, **arguments)
            if call.is_single and len(row.tokens) - begun.columns >= PREFILL_SAMPLE_TOKENS_MIN:
                self.cache.judge.note_prefill(begun.columns, len(row.tokens), first_token.seen_s - started_s)
        else:
            output, layers = importance.answer(self.model, call.input_ids, begun.sparse, begun.past, arguments)
            absent = len(row.metas[0]) * self._block_tokens - report.hit_tokens
            self.cache.decisions.add_absent(absent, self.identity.namespace)
            report = report._replace(stored_bytes_read=layers.read_bytes, selected=layers)
        if importance is not None:
            is_part, is_near = begun.sparse is not None, self.prefixes.is_near(row, min(1, len(row.metas[0])))
            seconds, now_s = first_token.seen_s - began_s, self._clock.monotonic_s()
            importance.ways.note(is_part, is_near, report.hit_tokens, seconds, now_s)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        store = partial(self._store, sequences, call, begun, states, observed)
        self._note(report._replace(blocks_queued=self.cache.guarded("queue blocks", store, 0)))
        for layer in begun.past.layers:
            if getattr(layer, "record_past", False):
                # What left the window was kept to be stored; the caller may go on with this cache.
                layer.crop(0)
                layer.record_past = False
        return output

    def _note(self, report: GenerateReport) -> None:
        self.last = report
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", report.told(self.cache.judge.prefill()))

    def _found_in(self, is_near: bool) -> str:
        fastest, *others = self.cache.tiers.tier_names
        return fastest if is_near or not others else " or ".join(others)

    def _store(
        self,
        sequences: torch.Tensor,
        call: CallSettings,
        begun: _Begun,
        states: Sequence[PendingBlock],
        observed: ObservedPrefix | None,
    ) -> int:
        """Queue what is new of each row, up to the end of its own answer; return how many blocks wait now."""
        size = self._block_tokens
        # The last token of an answer was never run, so the cache ends before it.
        last = 0 if self.identity.is_of_states else int(begun.past.get_seq_length())
        tokens, loaded = [], list[Collection[int]]()
        for row, sequence in zip(begun.rows, sequences.cpu().numpy(), strict=True):
            ended = next((at for at in range(call.mask.shape[1], last) if int(sequence[at]) in call.ends), last)
            tokens.append(sequence[row.pad : ended])
            loaded.append(range(-(-max(0, begun.columns - row.pad) // size)))
        streamed = begun.report.streamed
        if streamed is not None:
            loaded = [frozenset(streamed.loaded)]
            if streamed.loaded and streamed.is_rougher_than(self.cache.quality):
                # What is computed on top of rougher blocks than are stored is no better than they are.
                tokens = [tokens[0][: size * min(streamed.loaded)]]
        orders = {}
        if self._importance is not None and observed is not None:
            orders = self._importance.orders(self.prefixes.metas(tokens[0])[0], observed)
        return self.prefixes.store(begun.past, tokens, begun.rows, loaded, states, orders)


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
) -> CachedModel:
    """Put a cache beside a Hugging Face causal language model.

    store: `disk:///path`, a folder (a Path, or text such as `./folder`), `memory://`, … codec: `lossless` (the
    default), `tide[:quality[:refinements]]`, `tide-light`, `tide-deep`, `cachegen[:level[:coder]]`, …; lossy ones take
    the first of the `profiles` that fits, or one a group of layers. Without `profiles` tide takes what `kvtide
    calibrate` left in the store for this model, and stores losslessly until then; others keep tables in payloads.
    importance: the share of a restored prefix's tokens, from 0 to 1, to load exactly, those that the rest of the prompt
    attends to; the others stay rough (decision 0013). The codec is then `packed`, which needs a profile as tide does.
    `Impress(ratio)`: the paper's way, without a profile, leaves the others out.
    start_within_s, quality, policy: any of them streams a stored prefix, as in `StreamSettings` (docs/streaming.md).
    state_every_tokens: of models with states, how often one is kept (docs/transformers.md).
    tenant_salt: keeps tenants apart. fingerprint: by default of the weights; one that is given changes when they do.
    UnsupportedModel (a ValueError) for a model that can't be served exactly; ValueError for a bad store or codec.

        with attach(model, "disk:///var/cache/kvtide") as cached:
            output = cached.generate(input_ids, max_new_tokens=64)
    """
    clock, registry, groups = SystemClock(), CodecRegistry(profiles), groups_of(model, block_tokens)
    steps = importance if isinstance(importance, Impress) else Impress(1.0)
    asked = importance.settings() if isinstance(importance, Impress) else importance
    settings = SparseSettings(asked) if isinstance(asked, float | int) else asked
    streaming = None
    if (start_within_s, quality, policy) != (None, None, None):
        wanted = None if quality is None else float(quality)
        streaming = StreamSettings(start_within_s, wanted, policy, chunk_tokens).checked()
    _check_loads(model, groups, settings, streaming)
    learner = Learner(registry, clock)
    made = _made(registry, codec or _usual_codec(model, groups, importance), groups, bool(profiles))
    part_quality = max(made.quality, settings.quality) if settings and settings.ratio < 1 else None
    ranking = ScoreRanking(learner.important_tokens) if settings and steps.is_scored else None
    cache = cache_for(store, made, registry, limits, clock, ranking, quality=part_quality)
    is_exact = made.is_lossless and part_quality is None
    identity = ModelIdentity(model, block_tokens, tenant_salt, fingerprint, is_exact)
    kind = made.profile_kind if isinstance(made, AwaitingCodec) and not profiles else ""
    loads = ImportanceLoads(cache, clock, settings, learner, steps.is_reordered) if settings else None
    prefixes = Prefixes(model, cache, clock, identity, state_every_tokens)
    return CachedModel(model, cache, clock, identity, prefixes, str(store), kind, streaming, loads)


def _usual_codec(model: Any, groups: Sequence[ModelGroup], importance: object) -> str:
    if isinstance(importance, Impress):
        return importance.codec(model.config.num_attention_heads, groups[0].group.layout.kv_heads)
    return "lossless" if importance is None else "packed"


def _made(
    registry: CodecRegistry, spec: str, groups: Sequence[ModelGroup], has_profiles: bool
) -> Codec | AwaitingCodec:
    """Return the codec of a model; of profiles that are given each group must have its own. ValueError otherwise."""
    if has_profiles and is_plain(groups):
        return registry.make(spec, groups[0].group.layout)
    if not (shapes := profile_shapes(groups)):
        # States are kept losslessly by any codec.
        return registry.make(spec)
    made = registry.make_by_group(spec, shapes)
    if has_profiles and isinstance(made, AwaitingCodec) and not made.first:
        names = ", ".join(each.group.name for each in groups if each.rows)
        raise ValueError(f"codec {spec!r} needs profiles of one calibration of this model, one each of {names}")
    return made


def _check_loads(
    model: Any, groups: Sequence[ModelGroup], settings: SparseSettings | None, streaming: StreamSettings | None
) -> None:
    """Refuse ways to load that the model does not take, or that do not go together."""
    if settings is not None:
        if not 0 < settings.ratio <= 1:
            raise ValueError(f"importance is the share of the tokens to load, in (0, 1], got {settings.ratio!r}")
        if streaming is not None:
            raise ValueError("importance loads a prefix in its own way: it takes no start_within_s, quality or policy")
    if settings is not None or streaming is not None:
        plain_layout(groups)
    if settings is not None and not model.is_backend_compatible():
        # It would get another's masks, and choose nothing.
        raise UnsupportedModel(f"{type(model).__name__} can't attend through a function of importance's")
