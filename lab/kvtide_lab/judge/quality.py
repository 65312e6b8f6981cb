"""Judges a codec by what the model then says: exact cache against decoded cache, on the same continuation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import Codec
from kvtide.engines.transformers.groups import block_bits, filled_cache
from kvtide.keys import block_keys
from kvtide.types import BlockKey, Namespace, ObjectId, Section
from kvtide.wire import pack_object, parse_object


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use the calling thread alone, in threads that are started meanwhile too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def capture_blocks(model: Any, ids: Sequence[int], layout: BlockLayout) -> list[BlockBits]:
    """Prefill token ids and return the full blocks of the cache."""
    past = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
    return [block_bits(past, meta) for meta in block_metas(ids, layout)]


def block_metas(ids: Sequence[int], layout: BlockLayout) -> list[BlockMeta]:
    """Return identities for the full blocks of a text that is only measured."""
    # Objects are made only to be measured: any namespace will do.
    namespace = Namespace(bytes(32))
    keys = [BlockKey(namespace), *block_keys(namespace, np.array(ids, dtype=np.uint32), layout.tokens)]
    return [
        BlockMeta(ObjectId(namespace, keys[i + 1]), keys[i], i * layout.tokens, layout) for i in range(len(keys) - 1)
    ]


class CodedContext(NamedTuple):
    """A context's blocks through a codec: whole objects counted, headers and all; they end at a refinement.

    Times are of the calling thread's CPU.
    """

    decoded: list[BlockBits]
    stored_bytes: int
    refinements: int
    raw_bytes: int
    encode_s: float
    decode_s: float


class CacheVerdict(NamedTuple):
    """The loss of one decoded cache on one context. KL in nats, of the exact next-token distribution against ours."""

    kl: float
    nll_change: float
    top1: float
    greedy_match: int


class _Context(NamedTuple):
    ids: list[int]
    metas: list[BlockMeta]
    blocks: list[BlockBits]
    exact: torch.Tensor
    greedy: list[int]


class _Encoded(NamedTuple):
    metas: list[BlockMeta]
    blocks: list[list[Section]]
    refinements: int
    encode_s: float


class QualityJudge:
    """Contexts with their exact caches and what the model says on them; every codec is held against these."""

    def __init__(self, model: Any, layout: BlockLayout, context_tokens: int, continuation: int, greedy: int) -> None:
        if context_tokens % layout.tokens:
            raise ValueError(f"a context must be whole blocks of {layout.tokens} tokens, got {context_tokens}")
        self._model = model
        self.layout = layout
        self._context_tokens = context_tokens
        self._continuation = continuation
        self._greedy = greedy
        self.contexts: list[_Context] = []

    @property
    def tokens_needed(self) -> int:
        """Return the tokens that a text must have."""
        return self._context_tokens + self._continuation + 1

    def add(self, ids: Sequence[int]) -> None:
        """Take a context: prefill it, continue and answer with the exact cache. ValueError if it is too short."""
        if len(ids) < self.tokens_needed:
            raise ValueError(f"a context needs {self.tokens_needed} tokens, got {len(ids)}")
        ids = list(ids[: self.tokens_needed])
        context_ids = ids[: self._context_tokens]
        blocks = capture_blocks(self._model, context_ids, self.layout)
        exact = self._say(blocks, ids[self._context_tokens :]).log_softmax(-1)
        greedy = self._greedy_ids(blocks, ids[: self._context_tokens + 1])
        self.contexts.append(_Context(ids, block_metas(context_ids, self.layout), blocks, exact, greedy))

    def code(self, context: int, codec: Codec, refinement: int | None = None) -> CodedContext:
        """Encode a context's blocks, and decode them from objects that end at a refinement, None for the last.

        CorruptPayload if the codec can't read what it wrote.
        """
        encoded = self._encoded(context, codec)
        return self._decoded(encoded, codec, encoded.refinements if refinement is None else refinement)

    def code_prefixes(self, context: int, codec: Codec) -> list[CodedContext]:
        """Encode a context's blocks once, and decode them from objects that end at each refinement, the base's first.

        `encode_s` of all is the time of the whole encoding.
        """
        encoded = self._encoded(context, codec)
        return [self._decoded(encoded, codec, refinement) for refinement in range(encoded.refinements + 1)]

    def stored_bytes(self, context: int, codec: Codec) -> int:
        """Return the bytes of a context's whole objects."""
        encoded = self._encoded(context, codec)
        pairs = zip(encoded.metas, encoded.blocks, strict=True)
        return sum(len(pack_object(meta, codec.codec_id, sections, codec.profile)) for meta, sections in pairs)

    def _encoded(self, context: int, codec: Codec) -> _Encoded:
        found = self.contexts[context]
        start = time.thread_time()
        blocks = [codec.encode(meta, bits) for meta, bits in zip(found.metas, found.blocks, strict=True)]
        encode_s = time.thread_time() - start
        return _Encoded(found.metas, blocks, max(section.id.refinement for section in blocks[0]), encode_s)

    def _decoded(self, encoded: _Encoded, codec: Codec, refinement: int) -> CodedContext:
        decoded, stored_bytes, decode_s = [], 0, 0.0
        for meta, sections in zip(encoded.metas, encoded.blocks, strict=True):
            here = [section for section in sections if section.id.refinement <= refinement]
            packed = pack_object(meta, codec.codec_id, here, codec.profile)
            out = np.empty(self.layout.shape, dtype=self.layout.bits_dtype)
            start = time.thread_time()
            codec.decode(meta, parse_object(packed, meta.id).sections(), out)
            decode_s += time.thread_time() - start
            decoded.append(out)
            stored_bytes += len(packed)
        raw_bytes = len(decoded) * self.layout.raw_bytes
        return CodedContext(decoded, stored_bytes, refinement, raw_bytes, encoded.encode_s, decode_s)

    def judge(self, context: int, decoded: list[BlockBits]) -> CacheVerdict:
        """Say the continuation and the greedy answer with a decoded cache and compare."""
        found = self.contexts[context]
        said = self._say(decoded, found.ids[self._context_tokens :]).log_softmax(-1)
        exact = found.exact
        kl = (exact.exp() * (exact - said)).sum(-1).mean()
        targets = torch.tensor(found.ids[self._context_tokens + 1 :])[:, None]
        nll_change = (exact.gather(-1, targets) - said.gather(-1, targets)).mean()
        top1 = (exact.argmax(-1) == said.argmax(-1)).float().mean()
        return CacheVerdict(float(kl), float(nll_change), float(top1), self._greedy_match(decoded, found))

    def _greedy_match(self, decoded: list[BlockBits], found: _Context) -> int:
        # Until the first difference both answers are one text, so that one pass over the exact one finds it.
        last = found.ids[self._context_tokens]
        said = self._say(decoded, [last, *found.greedy]).argmax(-1).tolist()
        return next((i for i, (a, b) in enumerate(zip(said, found.greedy, strict=False)) if a != b), len(found.greedy))

    def _past(self, blocks: list[BlockBits]) -> DynamicCache:
        return filled_cache(self._model, self.layout, blocks)

    def _say(self, blocks: list[BlockBits], ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of each of `ids` but the last, following these blocks: (tokens - 1, vocabulary)."""
        with torch.inference_mode():
            output = self._model(torch.tensor([ids[:-1]]), past_key_values=self._past(blocks), use_cache=True)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _greedy_ids(self, blocks: list[BlockBits], ids: list[int]) -> list[int]:
        output = self._model.generate(
            torch.tensor([ids]),
            past_key_values=self._past(blocks),
            max_new_tokens=self._greedy,
            min_new_tokens=self._greedy,
            do_sample=False,
        )
        found: list[int] = output[0][len(ids) :].tolist()
        return found
