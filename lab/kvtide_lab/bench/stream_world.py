"""The world of `bench stream`: contexts on a real server, a link of any shape before it, and `attach`.

Invariant: a play is judged by the cache that `generate` worked on, never by what was planned or sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple, Self

import torch
from transformers import DynamicCache

from kvtide.codec import CodecRegistry, Profile
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.law import LossLaw, Purpose
from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.store.load.streamed import StreamedReport
from kvtide_lab.bench.position_cases import passages_of
from kvtide_lab.bench.services import kvtide_words, started
from kvtide_lab.bench.shaped import ShapedProxy
from kvtide_lab.judge.position_judge import PositionJudge
from kvtide_lab.sim.links import Link

# Tokens of the question behind the context; its prefill is part of the time to the first token.
QUESTION_TOKENS = 16
# What is stored in the background must be there before the next play.
_STORE_S_MAX = 120.0


class StreamSize(NamedTuple):
    """The amount that is measured. slo_share: the deadline of the first token, as a share of recomputing all."""

    context_tokens: int
    block_tokens: int
    answer_tokens: int
    texts: int
    slo_share: float = 0.5

    @property
    def tokens(self) -> int:
        """Return the length of a text."""
        return self.context_tokens + self.answer_tokens + 1


class StreamDoor(NamedTuple):
    """A way to load: the codec of what is stored, and what `attach` is told. is_timed: it is told when to start."""

    name: str
    codec: str
    policy: str | None = None
    quality: float | None = None
    is_timed: bool = False


class Played(NamedTuple):
    """One first token: seconds to it, and the cache that it was answered from.

    kl_model, kl_copy: the model's own on that cache, for text that goes on and for answers that copy. kl_law: what the
    loss law says of the former, None for a codec without one. link_bytes: those that passed the link. share_computed:
    of the context's tokens.
    """

    ttft_s: float
    kl_model: float
    kl_copy: float
    kl_law: float | None
    link_bytes: int
    share_computed: float


class _Stopwatch:
    """A stopping criterion that never stops, and says how long the first token took."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.seconds = math.inf

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **more: Any) -> torch.Tensor:
        self.seconds = min(self.seconds, time.monotonic() - self._started_s)
        return torch.zeros(len(ids), dtype=torch.bool)


class StreamWorld:
    """A model, a server with its contexts, and a link between them. Use it with `with`."""

    def __init__(self, model: Any, texts: Sequence[Sequence[int]], size: StreamSize, profiles: Sequence[Profile]):
        """texts: as ids; one more than are played, for `warm`. ValueError for too few that are long enough."""
        found = [list(ids[: size.tokens]) for ids in texts if len(ids) >= size.tokens][: size.texts + 1]
        if len(found) <= size.texts:
            raise ValueError(f"expected {size.texts + 1} texts of {size.tokens} tokens, got {len(found)}")
        self.size = size
        self._model, self._profiles = model, profiles
        self._layout = model_layout(model, size.block_tokens)
        tokens, answer = size.context_tokens, size.answer_tokens
        self._judges = [PositionJudge(model, self._layout, ids, tokens, answer) for ids in found[:-1]]
        self._prompts = [torch.tensor([ids[: tokens + QUESTION_TOKENS]]) for ids in found]

    def __enter__(self) -> Self:
        self._service = started(kvtide_words)
        self._proxy = ShapedProxy(("127.0.0.1", self._service.__enter__().port), lambda seconds: 1e9 * seconds)
        self._proxy.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._proxy.__exit__(*error)
        self._service.__exit__(*error)

    @contextmanager
    def attached(self, door: StreamDoor, start_within_s: float | None = None) -> Iterator[CachedModel]:
        """Attach a cache behind the link, as a user would."""
        size = self.size
        with attach(
            self._model,
            f"http://127.0.0.1:{self._proxy.port}",
            codec=door.codec,
            profiles=self._profiles,
            block_tokens=size.block_tokens,
            # Each codec has a copy of its own.
            tenant_salt=door.codec.encode(),
            start_within_s=start_within_s,
            quality=door.quality,
            policy=door.policy,
            # As many choices in a short context as there are in a long one.
            chunk_tokens=max(size.block_tokens, size.context_tokens // 8),
        ) as cached:
            yield cached

    def store(self, codec: str) -> None:
        """Store all contexts, over a link that is as fast as this machine."""
        self._proxy.restart(lambda seconds: 1e9 * seconds)
        with self.attached(StreamDoor("store", codec)) as cached:
            for prompt in self._prompts:
                cached.generate(prompt, max_new_tokens=1, do_sample=False)
                if not cached.flush(_STORE_S_MAX) or not cached.hit_tokens(prompt):
                    raise ValueError(f"the contexts can't be stored by {codec}")

    def recompute_s(self, text: int) -> float:
        """Return the seconds to the first token without a cache."""
        return self._generated(self._model, text)[0]

    def tail_s(self, codec: str, text: int) -> float:
        """Return what follows the last loaded token: the question's prefill."""
        self._proxy.restart(lambda seconds: 1e9 * seconds)
        with self.attached(StreamDoor("tail", codec, "layered")) as cached:
            ttft_s, _ = self._generated(cached, text)
            assert cached.last is not None and cached.last.streamed is not None
            return ttft_s - cached.last.streamed.ready_s

    def _generated(self, model: Any, text: int) -> tuple[float, DynamicCache]:
        watch = _Stopwatch()
        output = model.generate(
            self._prompts[text],
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            stopping_criteria=[watch],
        )
        return watch.seconds, output.past_key_values

    def warm(self, cached: CachedModel, link: Link, at_s: float, recompute_s: float) -> None:
        """Let a cache learn what link and machine do, as a user's has, on a text that is not played.

        What was loaded before is near: in memory.
        """
        cached.cache.judge.note_prefill(0, self.size.context_tokens + QUESTION_TOKENS, recompute_s)
        self._begin(link, at_s)
        self._generated(cached, -1)
        cached.flush(_STORE_S_MAX)

    def play(self, door: StreamDoor, cached: CachedModel, text: int, link: Link, at_s: float) -> Played:
        """Answer a text's question from the link's moment `at_s` on, and judge the cache that was built."""
        self._begin(link, at_s)
        before_bytes = self._proxy.passed_bytes
        ttft_s, past = self._generated(cached, text)
        link_bytes, report = self._proxy.passed_bytes - before_bytes, cached.last
        assert report is not None and report.bypass is None, report
        tokens, block_tokens = self.size.context_tokens, self.size.block_tokens
        kls = [max(0.0, kl) for kl in self._judges[text].kls_of(past, passages_of(tokens, self.size.answer_tokens))]
        cached.flush(_STORE_S_MAX)
        loaded = report.streamed.loaded if report.streamed is not None else range(report.hit_tokens // block_tokens)
        law = self.law(door.codec)
        kept = None if law is None else kept_blocks(report.streamed, loaded, tokens // block_tokens, law.refinements)
        kl_law = None if law is None or kept is None else law.kl(kept, block_tokens, Purpose.GOES_ON)
        return Played(ttft_s, kls[0], fmean(kls[1:]), kl_law, link_bytes, 1 - len(loaded) * block_tokens / tokens)

    def _begin(self, link: Link, at_s: float) -> None:
        sent = link.carried(at_s)
        self._proxy.restart(lambda seconds: link.carried(at_s + seconds) - sent)

    def law(self, codec: str) -> LossLaw | None:
        """Return the loss law of a codec that has one."""
        made = CodecRegistry(self._profiles).make(codec, self._layout)
        return made.law if isinstance(made, TideCodec) else None


def kept_blocks(
    report: StreamedReport | None, loaded: Sequence[int], blocks: int, refinements: int
) -> list[int] | None:
    """Return the refinements that each block of a context keeps: one more than there are where it was computed.

    None where a load in parts does not say which of its blocks share a chunk.
    """
    found = [refinements + 1] * blocks
    for block in loaded:
        found[block] = refinements
    if report is None or report.fetch is None:
        return found
    here = report.fetch.progress.here
    # Only the first chunk has several blocks: what the engine had computed before anything was known.
    first = blocks - len(here)
    if any(not 0 <= block - first < len(here) for block in loaded) or (first and loaded and min(loaded) <= first):
        return None
    for block in loaded:
        found[block] = here[block - first] - 1
    return found
