"""Talks a text as a chat whose every turn begins with what a real cache kept of the turns before it.

Invariant: beside it runs a chat that keeps its cache in memory and cuts it where the other restored, so that both run
the same tokens in the same passes. What an exact codec brings back gives the same bits; nothing else differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.codec import CodecRegistry, Profile
from kvtide.engines.calibrate.judge import block_metas
from kvtide.engines.transformers import CachedModel, attach
from kvtide.engines.transformers.fingerprint import model_layout
from kvtide.engines.transformers.pages import RestoredRoom, block_bits
from kvtide.engines.transformers.watch import model_fingerprint

# What a turn stores must be there in the next one; on a busy machine that takes a while.
FLUSH_S_MAX = 120.0


class ChatSize(NamedTuple):
    """The length of a chat. Of each turn the user says the first tokens, the model the others."""

    turns: int
    user_tokens: int
    answer_tokens: int
    block_tokens: int

    @property
    def turn_tokens(self) -> int:
        """Return the tokens that a turn adds."""
        return self.user_tokens + self.answer_tokens

    @property
    def tokens_needed(self) -> int:
        """Return the tokens that a text must have."""
        return self.turns * self.turn_tokens


class TurnVerdict(NamedTuple):
    """The model's loss on a turn's tokens: KL of each, in nats, from the exact chat, and where the top token is its.

    kl_once: the same after the exact chat's own cache, coded once. hit_tokens: how many the turn restored.
    """

    kl: list[float]
    kl_once: list[float]
    is_top1: list[bool]
    hit_tokens: int


class ChatJudge:
    """A model, and chats of one size with it."""

    def __init__(self, model: Any, profiles: Sequence[Profile], size: ChatSize) -> None:
        self._model = model
        self._profiles = profiles
        self._size = size
        # Every turn attaches again, as a new process would; the weights are read once for all of them.
        self._fingerprint = model_fingerprint(model)
        self._layout = model_layout(model, size.block_tokens)

    def turns(self, ids: Sequence[int], folders: Mapping[str, Path]) -> Iterator[dict[str, TurnVerdict]]:
        """Talk a text with every codec at once, each on a store in a folder of its own; yield each turn's verdicts.

        Answers are the text's own, said token by token. RuntimeError if a turn's blocks are not stored, or not loaded
        in the next one.
        """
        size = self._size
        past, hits = DynamicCache(config=self._model.config), 0
        for turn in range(size.turns):
            whole = torch.tensor([ids[: (turn + 1) * size.turn_tokens]])
            past = self._cut(past, hits)
            exact = self._say(self._cut(past, hits), whole)
            yield {codec: self._take(codec, folder, whole, exact, past) for codec, folder in folders.items()}
            self._answer(self._model, whole, past_key_values=past)
            # The answer's last token is not run, the prompt's last one not restored.
            hits = (past.get_seq_length() // size.block_tokens) * size.block_tokens

    def identity_share(self, ids: Sequence[int], folder: Path, calls: int) -> float:
        """Return the share of a warm request that goes into the check that the model is still the one stored for.

        The request restores a prefix and answers one token.
        """
        prompt = torch.tensor([ids])
        with self._attached("lossless", folder) as cached:
            self._generate_one(cached, prompt)
            warm_s = median(self._generate_one(cached, prompt) for _ in range(calls))
            started_s = time.perf_counter()
            for _ in range(calls):
                cached._identity.follow()
            return (time.perf_counter() - started_s) / calls / warm_s

    def _generate_one(self, cached: CachedModel, prompt: torch.Tensor) -> float:
        started_s = time.perf_counter()
        cached.generate(prompt, max_new_tokens=1, do_sample=False)
        took_s = time.perf_counter() - started_s
        cached.cache.flush(FLUSH_S_MAX)
        return took_s

    def _attached(self, codec: str, folder: Path) -> CachedModel:
        tokens, profiles = self._size.block_tokens, self._profiles
        return attach(
            self._model,
            str(folder),
            codec=codec,
            profiles=profiles,
            block_tokens=tokens,
            fingerprint=self._fingerprint,
        )

    def _take(
        self, codec: str, folder: Path, whole: torch.Tensor, exact: torch.Tensor, past: DynamicCache
    ) -> TurnVerdict:
        """Take a turn: restore, judge what is said after that, answer, store. past: what an exact codec restores."""
        prompt, hits = whole[:, : -self._size.answer_tokens], past.get_seq_length()
        with self._attached(codec, folder) as cached:
            said = self._say(cached.restored(prompt), whole)
            self._answer(cached, whole)
            report = cached.last
            assert report is not None
            if report.hit_tokens != hits or report.bypass is not None:
                raise RuntimeError(f"{codec} restored {report.hit_tokens} of {hits} tokens, bypass: {report.bypass}")
            if not cached.cache.flush(FLUSH_S_MAX):
                raise RuntimeError(f"{codec} did not store a turn within {FLUSH_S_MAX:g} s")
        once = self._say(self._coded(codec, past, whole[0, :hits].tolist()), whole)
        is_top1 = (exact.argmax(-1) == said.argmax(-1)).tolist()
        return TurnVerdict(_kl(exact, said).tolist(), _kl(exact, once).tolist(), is_top1, hits)

    def _coded(self, codec: str, past: DynamicCache, ids: Sequence[int]) -> DynamicCache:
        """Return what a codec makes of whole blocks."""
        made = CodecRegistry(self._profiles).make(codec, self._layout)
        metas = block_metas(ids, self._layout)
        pages = RestoredRoom(self._layout, len(metas))
        bits = np.empty(self._layout.shape, dtype=self._layout.bits_dtype)
        for position, meta in enumerate(metas):
            made.decode(meta, made.encode(meta, block_bits(past, meta)), bits)
            pages.write(position, bits)
        coded = DynamicCache(config=self._model.config)
        pages.fill(coded, len(metas), self._model.device)
        return coded

    def _say(self, past: DynamicCache, whole: torch.Tensor) -> torch.Tensor:
        """Run what is after a cache; return what the model says of the turn's tokens: (tokens, vocabulary), log."""
        count = self._size.turn_tokens
        with torch.inference_mode():
            rest = whole[:, past.get_seq_length() :]
            output = self._model(rest, past_key_values=past, use_cache=True, logits_to_keep=count)
        logits: torch.Tensor = output.logits[0].float()
        return logits.log_softmax(-1)

    def _answer(self, model: Any, whole: torch.Tensor, **arguments: Any) -> None:
        """Have the user's tokens read and the answer's ones said, whatever the model would rather say."""
        prompt = whole[:, : -self._size.answer_tokens]
        arguments.setdefault("attention_mask", torch.ones_like(prompt))
        model.generate(
            prompt,
            max_new_tokens=self._size.answer_tokens,
            do_sample=False,
            prefix_allowed_tokens_fn=lambda _, said: [int(whole[0, said.shape[0]])],
            **arguments,
        )

    def _cut(self, past: DynamicCache, tokens: int) -> DynamicCache:
        """Return another cache with the first tokens of one; torch appends to neither in place."""
        cut = DynamicCache(config=self._model.config)
        if tokens:
            for layer, whole in zip(cut.layers, past.layers, strict=True):
                layer.lazy_initialization(whole.keys, whole.values)
                layer.keys, layer.values = whole.keys[..., :tokens, :], whole.values[..., :tokens, :]
        return cut


def _kl(exact: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    return (exact.exp() * (exact - said)).sum(-1)
