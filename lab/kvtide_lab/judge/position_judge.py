"""The model's loss on a cache whose tokens keep different refinements of one embedded copy.

One context: it is prefilled once, coded once, decoded at each refinement; then only continuations are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.block import BlockLayout
from kvtide.codec.tide import TideCodec
from kvtide.engines.transformers.groups import block_bits
from kvtide_lab.judge.quality import block_metas

# A prefill by pieces: all 8,192 tokens at once take gigabytes of scores.
PREFILL_TOKENS = 1024


class Patch(NamedTuple):
    """Tokens [start, stop) keep so many refinements."""

    start: int
    stop: int
    kept: int


class Mixture(NamedTuple):
    """A cache: `ground` refinements everywhere but in the patches. One more than the last means exact."""

    name: str
    ground: int
    patches: tuple[Patch, ...] = ()

    def kept(self, tokens: int, piece_tokens: int) -> list[int]:
        """Return what each piece keeps; patches are of whole pieces."""
        found = [self.ground] * (tokens // piece_tokens)
        for start, stop, kept in self.patches:
            assert start % piece_tokens == stop % piece_tokens == 0, self
            found[start // piece_tokens : stop // piece_tokens] = [kept] * ((stop - start) // piece_tokens)
        return found


class PositionJudge:
    """One context of `tokens` ids, and continuations: the ids that follow, and copies of passages in it."""

    def __init__(self, model: Any, layout: BlockLayout, ids: Sequence[int], tokens: int, answer_tokens: int) -> None:
        """ValueError for too few ids, or tokens that are no whole blocks."""
        if tokens % layout.tokens or len(ids) < tokens + answer_tokens + 1:
            raise ValueError(f"{tokens} tokens are no whole blocks, or not {answer_tokens} more among {len(ids)} ids")
        self._model = model
        self._layout = layout
        self._ids = list(ids)
        self._tokens = tokens
        self._answer_tokens = answer_tokens
        self._past = DynamicCache(config=model.config)
        with torch.inference_mode():
            for start in range(0, tokens, PREFILL_TOKENS):
                piece = torch.tensor([self._ids[start : min(tokens, start + PREFILL_TOKENS)]])
                model(piece, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        exact = torch.stack([torch.cat([layer.keys, layer.values]) for layer in self._past.layers])
        # By refinement, exact last: (layers, 2, kv_heads, tokens, head_dim).
        self._levels: list[torch.Tensor] = [exact]
        self._exact: dict[int | None, torch.Tensor] = {}
        # Bytes of each block by refinements kept.
        self.sizes: list[list[int]] = []

    def code(self, codec: TideCodec) -> None:
        """Encode the context's blocks and decode them at each refinement."""
        metas = block_metas(self._ids[: self._tokens], self._layout)
        blocks = [codec.encode(meta, block_bits(self._past, meta)) for meta in metas]
        refinements = range(codec.steps.refinements + 1)
        self._levels = [self._levels[-1].clone() for _ in refinements] + self._levels[-1:]
        out = np.empty(self._layout.shape, dtype=self._layout.bits_dtype)
        self.sizes = []
        for position, (meta, sections) in enumerate(zip(metas, blocks, strict=True)):
            start = position * self._layout.tokens
            self.sizes.append([])
            for refinement in refinements:
                here = [section for section in sections if section.id.refinement <= refinement]
                codec.decode(meta, here, out)
                values = torch.from_numpy(out.view(np.float32)).transpose(2, 3)
                self._levels[refinement][:, :, :, start : start + self._layout.tokens] = values
                self.sizes[-1].append(sum(len(section.data) for section in here))

    def kls(self, mixture: Mixture, passages: Sequence[int]) -> Iterator[float]:
        """Yield the KL of the text that goes on, then of copies of the tokens from each of `passages` on."""
        built = self._levels[mixture.ground]
        if mixture.patches:
            built = built.clone()
        for start, stop, kept in mixture.patches:
            built[:, :, :, start:stop] = self._levels[kept][:, :, :, start:stop]
        yield from self._kls(built, passages)

    def kls_of(self, past: DynamicCache, passages: Sequence[int]) -> Iterator[float]:
        """Yield the same for a cache that an engine built: of the context, and of whatever follows it."""
        layers = [torch.cat([layer.keys, layer.values])[:, :, : self._tokens] for layer in past.layers]
        yield from self._kls(torch.stack(layers), passages)

    def _kls(self, built: torch.Tensor, passages: Sequence[int]) -> Iterator[float]:
        for passage in (None, *passages):
            if passage not in self._exact:
                self._exact[passage] = self._say(self._levels[-1], passage)
            exact = self._exact[passage]
            yield float((exact.exp() * (exact - self._say(built, passage))).sum(-1).mean())

    def _say(self, values: torch.Tensor, passage: int | None) -> torch.Tensor:
        start = self._tokens if passage is None else passage
        ids = self._ids[start : start + self._answer_tokens]
        past = DynamicCache(config=self._model.config)
        for number, (keys, layer_values) in enumerate(values):
            past.update(keys[None], layer_values[None], number)
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids]), past_key_values=past, use_cache=True).logits[0]
        said: torch.Tensor = logits.float().log_softmax(-1)
        return said
