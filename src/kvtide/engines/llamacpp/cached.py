"""Prefix caching for llama.cpp through llama-cpp-python: restore, compute the rest, store behind the answer.

Invariant: an answer is that of the model alone; what the cache can't help with runs as if it were not there.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import llama_cpp
import numpy as np

from kvtide.clock import Clock, SystemClock
from kvtide.codec import AwaitingCodec, CodecRegistry, Profile
from kvtide.config import Limits
from kvtide.engines import calibrate_command
from kvtide.engines.llamacpp.identity import ServedLlama, served_llama
from kvtide.engines.llamacpp.prefixes import NOTHING, LlamaPrefixes, Prefix, Tokens
from kvtide.engines.llamacpp.state import LlamaContext
from kvtide.engines.settings import usual_codec
from kvtide.plan import PrefillSpeed
from kvtide.store import Cache, cache_for

_log = logging.getLogger(__name__)

# A load for fewer tokens than this is left to llama.cpp, which has them computed sooner.
_GAIN_TOKENS_MIN = 32
# Computing a prompt's first tokens once more is no more than this part of the work, for a prompt that can be stored.
_SHARE_MIN = 32
_LINE = "%d prompt tokens: %d from the context, %d from the store in %.2f s (%.1f s saved), %d computed in %.2f s"


class LlamaReport(NamedTuple):
    """A prompt's tokens: in the context already, else restored, computed; seconds of these; those saved, estimated."""

    prompt_tokens: int
    context_tokens: int
    hit_tokens: int
    load_s: float
    saved_s: float
    computed_tokens: int
    prefill_s: float = 0.0


class CachedLlama:
    """A `llama_cpp.Llama` with a cache beside it, for the time of a `with`: its own methods are used as ever."""

    def __init__(
        self, llm: Any, cache: Cache, clock: Clock, served: ServedLlama, seek_profile: Callable[[], None] | None
    ) -> None:
        """seek_profile: has the open cache look for the model's profiles, if its codec takes any; None: it has them."""
        self.llm, self.cache, self.served = llm, cache, served
        self.last: LlamaReport | None = None
        self._clock, self._context, self._seek_profile = clock, LlamaContext(llm), seek_profile
        self._prefixes = LlamaPrefixes(self._context, cache, clock, served)
        self._plain_eval, self._plain_load_state = llm.eval, llm.load_state
        self._plain_generate, self._signature = llm.generate, inspect.signature(llm.generate)
        # Of the context's tokens: those that are as a whole prompt's; the first of an answer, and of that now given.
        self._exact, self._spoken, self._answer_from = 0, int(llm.n_ctx()), int(llm.n_ctx())
        # Blocks of them that were stored or loaded; tokens below which a restored context lacks rows of windows.
        self._known_blocks = self._whole_from = 0
        # The answer now given. Those that nobody wants any more end at any time, in any thread: they look at nothing.
        self._lock, self._answer = threading.RLock(), object()

    def __enter__(self) -> Self:
        self.cache.open()
        self.cache.recall()
        if self._seek_profile is not None:
            self._seek_profile()
        # What the model has run by itself since the last time is not known here.
        self._context.clear()
        self._cut(0)
        self.llm.generate, self.llm.eval, self.llm.load_state = self._generate, self._eval, self._load_state
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Store what is queued and leave the model as it was. Idempotent."""
        for name in ("generate", "eval", "load_state"):
            vars(self.llm).pop(name, None)
        with self._lock:
            self._answer = object()
            if self._whole_from and self.llm.ctx:
                # Rows of windows are not there: no prompt begins with this, while a stream under way has its context.
                self.llm.input_ids[0] = -1
                self._cut(0)
        self.cache.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is stored, for other processes to find. False if that took longer."""
        return self.cache.flush(timeout_s)

    def hit_tokens(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt are stored."""
        return self._find(np.asarray(prompt, np.int32)).tokens

    def _find(self, prompt: Tokens) -> Prefix:
        return self.cache.guarded("look up", partial(self._prefixes.find, prompt), NOTHING)

    def _load_state(self, state: Any) -> None:
        self._cut(0)
        # It may be of a context that was restored, without rows that have left the windows.
        self._whole_from = int(state.n_tokens) if self.served.groups[-1].window_cells else 0
        self._plain_load_state(state)

    def _eval(self, tokens: Sequence[int]) -> None:
        start, count = int(self.llm.n_tokens), len(tokens)
        self._cut(start)
        if start >= self._answer_from:
            self._spoken = min(self._spoken, start)
        began_s = self._clock.monotonic_s()
        self._plain_eval(tokens)
        if start == self._exact:
            self._exact = (start + count) // self.served.unit_tokens * self.served.unit_tokens
        self.cache.judge.note_prefill(start, start + count, self._clock.monotonic_s() - began_s)

    def _cut(self, tokens: int) -> None:
        """Take note that the context is left with so many tokens."""
        self._exact = min(self._exact, tokens) // self.served.unit_tokens * self.served.unit_tokens
        self._known_blocks = min(self._known_blocks, tokens // self.served.block_tokens)
        if tokens <= self._spoken:
            self._spoken = int(self.llm.n_ctx())
        if tokens < self._whole_from:
            # Rows of windows are not there, or nothing is.
            self._exact, self._whole_from = 0, self._whole_from if tokens else 0

    def _generate(self, tokens: Sequence[int], *more: Any, **named: Any) -> Generator[int, Sequence[int] | None, None]:
        prompt, report = list(tokens), None
        with self._lock:
            mine = self._answer = object()
        if self._signature.bind(prompt, *more, **named).arguments.get("reset", True):
            report = self._begin(np.asarray(prompt, np.int32))
        began_s, self._answer_from = self._clock.monotonic_s(), len(prompt)
        answer = self._plain_generate(prompt, *more, **named)
        try:
            token = next(answer)
            if report is not None:
                took_s = self._clock.monotonic_s() - began_s
                speed = self.cache.judge.prefill() or PrefillSpeed(report.computed_tokens / max(took_s, 1e-9))
                saved_s = speed.seconds(0, report.hit_tokens) - report.load_s
                self.last = report._replace(prefill_s=took_s, saved_s=max(0.0, saved_s))
                _log.info(_LINE, *self.last)
            sent = yield token
            # The first token is out: now there is time to look at the rows of the prompt, while windows have them.
            self._store()
            while True:
                sent = yield answer.send(sent)
        except StopIteration:
            return
        finally:
            answer.close()
            with self._lock:
                if mine is self._answer and self.llm.ctx:  # which a closed model has no more
                    self._store()
                    self._answer_from = int(self.llm.n_ctx())

    def _begin(self, prompt: Tokens) -> LlamaReport:
        """Restore what is stored of a prompt beyond what the context has of it."""
        began_s = self._clock.monotonic_s()
        reused = self._reused(prompt)
        found, space = self._find(prompt), self.served.groups[0].spaces[0]
        is_worth = found.tokens >= reused + _GAIN_TOKENS_MIN and self.cache.is_worth(found.tokens, found.is_near, space)
        restored = self.cache.guarded("restore", partial(self._restore, prompt, found), 0) if is_worth else 0
        load_s, here = self._clock.monotonic_s() - began_s, 0
        if not restored:
            load_s, here = 0.0, self._begun_between_batches(0 if is_worth else reused, len(prompt))
        return LlamaReport(len(prompt), here, restored, load_s, 0.0, len(prompt) - here - restored)

    def _reused(self, prompt: Tokens) -> int:
        """Return how many tokens of a prompt llama.cpp would take from its context, which it empties if it may not."""
        same = min(self.llm.n_tokens, max(0, len(prompt) - 1))
        reused = int(np.logical_and.accumulate(self.llm.input_ids[:same] == prompt[:same]).sum())
        if not self._has_windows(reused):
            # llama.cpp would go on without them.
            self._context.clear()
            self._cut(0)
            return 0
        return reused

    def _has_windows(self, tokens: int) -> bool:
        """Tell whether the context still has what windows show to the token behind so many."""
        oldest = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(self.llm.ctx), 0)
        return tokens >= self._whole_from and max(0, tokens - self.served.groups[-1].group.reach_tokens) >= oldest

    def _begun_between_batches(self, reused: int, prompt_tokens: int) -> int:
        """Have llama.cpp begin at the end of a batch where that costs next to nothing: such a prompt can be stored."""
        start = min(self._exact, reused) // self.served.unit_tokens * self.served.unit_tokens
        if not (0 < (reused - start) * _SHARE_MIN <= prompt_tokens - start and self._has_windows(start)):
            return reused
        self.llm.n_tokens = start
        return start

    def _restore(self, prompt: Tokens, found: Prefix) -> int:
        llm = self.llm
        llm.reset()
        self._cut(0)
        tokens = self._prefixes.load(found)
        if tokens:
            llm.input_ids[:tokens] = prompt[:tokens]
            llm.n_tokens = tokens
            self._exact, self._known_blocks = found.exact, tokens // self.served.block_tokens
            self._spoken = found.exact if tokens > found.exact else int(llm.n_ctx())
            self._whole_from = tokens if self.served.groups[-1].window_cells else 0
        return tokens

    def _store(self) -> None:
        before, tokens = self._known_blocks, np.asarray(self.llm.input_ids[: self.llm.n_tokens])
        queue = partial(self._prefixes.store, tokens, before, min(self._exact, len(tokens)), self._spoken)
        self._known_blocks = self.cache.guarded("store a prompt", queue, before)


def attach(
    llm: Any,
    store: str | Path,
    *,
    codec: str = "",
    profiles: Sequence[Profile] = (),
    tenant_salt: bytes = b"",
    limits: Limits | None = None,
) -> CachedLlama:
    """Put a cache beside a `llama_cpp.Llama`, whose context is empty afterwards.

    store: `disk:///path`, a folder, `memory://`, `http://…` of `kvtide serve`, … codec: `raw`, which is the default
    for a store on this machine, `lossless`, the default elsewhere, `tide` …; lossy ones take `profiles`, or what
    `kvtide calibrate` left in the store for this model. tenant_salt: keeps tenants apart. UnsupportedModel (a
    ValueError), with the reason, for what can't be served exactly.

        with attach(llm, "disk:///var/cache/kvtide"):
            llm.create_chat_completion(messages)
    """
    clock, registry, codec = SystemClock(), CodecRegistry(profiles), codec or usual_codec(str(store))
    served = served_llama(LlamaContext(llm), registry.make(codec).is_lossless, tenant_salt)
    made = registry.make_by_group(codec, served.profile_shapes)
    if profiles and isinstance(made, AwaitingCodec) and not made.first:
        names = ", ".join(each.group.name for each in served.groups)
        raise ValueError(f"codec {codec!r} needs profiles of one calibration of this model, one each of {names}")
    cache, kind = cache_for(store, made, registry, limits, clock), getattr(made, "profile_kind", "")
    command = calibrate_command(llm.model_path, str(store), kind, b"", bool(tenant_salt))
    seek = None if profiles else partial(cache.profiles.seek, served.weights, tenant_salt, command)
    return CachedLlama(llm, cache, clock, served, seek)
