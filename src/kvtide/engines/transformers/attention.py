"""Attention functions in place of a model's usual one: they tell what a suffix attends to in a prefix."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtide.block import BlockMeta
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.codec.packed import PackedBase
from kvtide.importance import WRITER_BYTES, Floats, Guard, Orders, ProbeFinding, Selector, packing_orders
from kvtide.store import Cache
from kvtide.store.repack import Repacker, UseStore
from kvtide.tier.breaker import caller_deadline_s, until
from kvtide.types import ObjectId

# Of a long suffix the last tokens are asked: the answer goes on from them, and all would cost as much as attending.
PROBE_TOKENS = 32


@contextmanager
def attending(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Have the model attend through a function with the arguments and masks of the usual one (sdpa)."""
    usual = model.config._attn_implementation
    # Functions are looked up by name in the whole process: each has a name of its own.
    name = f"kvtide-{id(attend):x}"
    AttentionMaskInterface.register(name, sdpa_mask)
    ALL_ATTENTION_FUNCTIONS[name] = attend
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = usual
        del ALL_ATTENTION_FUNCTIONS[name]
        # There is no public way back, and names must not add up.
        AttentionMaskInterface._global_mapping.pop(name)


class ObservedPrefix:
    """Attention of the last tokens of a prompt's first pass to its first ones, for learning. Answers are as without."""

    def __init__(
        self, tokens: int, guard: Guard | None = None, selector: Selector | None = None, ratio: float = 1.0
    ) -> None:
        """tokens: the first ones, all of the prompt maybe. guard: asked of a share that a selector's heads choose."""
        self.tokens = tokens
        # Importance of each token by layer.
        self.importance: dict[int, Floats] = {}
        self._guard = guard
        self._selector = selector
        self._ratio = ratio
        self._scores: list[float] = []

    @property
    def is_refused(self) -> bool:
        """Tell whether the guard trusts no selection of what was attended to."""
        return self._guard is not None and bool(self._scores) and not self._guard.trusts(self._scores, self._ratio)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> Any:
        """Attend as usual; the first time of each layer note what the last tokens attend to."""
        layer = int(module.layer_idx)
        if layer not in self.importance:
            asked, heads = query[0, :, -PROBE_TOKENS:].float(), list(range(query.shape[1]))
            mass = attention_mass(asked, key[0].float(), heads, self.tokens, float(arguments["scaling"]))
            self.importance[layer] = mass.mean(axis=0)
            if self._guard is not None:
                chosen = heads if self._selector is None else self._selector.heads(len(heads), key.shape[1])
                finding = ProbeFinding(mass[chosen], max(1, round(self._ratio * self.tokens)), kept_tokens(self.tokens))
                self._scores.append(self._guard.score(finding))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> Any:
    """Do what the usual function does without a copy of keys and values for each head of a group.

    The heads of a group become more queries of one head: copies of 4,096 tokens take longer than a short suffix's sums.
    """
    _, heads, suffix, head_dim = query.shape
    group = heads // key.shape[1]
    is_plain = attention_mask is not None and attention_mask.shape[1] == 1 and query.shape[0] == 1
    if group == 1 or not is_plain or any(arguments.get(name) is not None for name in ("softcap", "position_bias")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    assert attention_mask is not None
    packed = query.reshape(1, heads // group, group * suffix, head_dim)
    mask = attention_mask.repeat(1, 1, group, 1)
    scaling = arguments["scaling"]
    found = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(1, heads, suffix, -1).transpose(1, 2).contiguous(), None


class WeightRoom:
    """Memory for the weights of one layer after the other: 3 MiB of fresh memory take as long as filling them."""

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None

    def of(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return room for a tensor, with anything in it; what was returned before is no longer valid."""
        size = math.prod(shape)
        if self._room is None or self._room.numel() < size:
            self._room = like.new_empty(size)
        return self._room[:size].view(shape)


def weighed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int, scaling: float, room: WeightRoom
) -> tuple[torch.Tensor, Floats]:
    """Do what `grouped_attention` does, and find what `attention_mass` does of the same weights.

    query: (1, heads, suffix, head_dim), a short suffix, of which each token sees the prefix and those before it.
    """
    _, heads, suffix, head_dim = query.shape
    kv_heads, rows = key.shape[1], heads // key.shape[1] * suffix
    packed = query.reshape(kv_heads, rows, head_dim) * scaling
    weights = room.of(query, (kv_heads, rows, key.shape[2]))
    torch.bmm(packed, key[0].transpose(1, 2), out=weights)
    by_head = weights.view(heads, suffix, -1)
    hidden = torch.ones(suffix, suffix, dtype=torch.bool, device=key.device).triu(1)
    by_head[:, :, tokens:].masked_fill_(hidden, -torch.inf)
    torch.softmax(weights, -1, out=weights)
    output = torch.bmm(weights, value[0]).view(1, heads, suffix, -1).transpose(1, 2).contiguous()
    mass: Floats = (by_head[:, -PROBE_TOKENS:, :tokens].mean(dim=1) * tokens).cpu().numpy()
    return output, mass


def attention_mass(query: torch.Tensor, key: torch.Tensor, heads: list[int], tokens: int, scaling: float) -> Floats:
    """Return what `importance.attention_mass` does, by the engine's own threads.

    numpy's would be a second team, whose waiting costs seconds beside busy neighbours (2 s a prompt at load 11).
    query: (heads, asked, head_dim), the last ones, of the suffix or of the tokens themselves; key: (kv_heads, tokens
    and suffix, head_dim).
    """
    asked, group = query.shape[1], len(query) // len(key)
    own = max(asked, key.shape[1] - tokens)
    if heads == list(range(len(query))):
        # The heads of a group are more queries of one: keys are not copied for each.
        chosen = query.reshape(len(key), group * asked, -1) * scaling
        logits = torch.bmm(chosen, key.transpose(1, 2)).view(len(query), asked, -1)
    else:
        logits = torch.bmm(query[heads] * scaling, key[[head // group for head in heads]].transpose(1, 2))
    hidden = torch.ones(asked, own, dtype=torch.bool, device=key.device).triu(1 + own - asked)
    logits[:, :, -own:].masked_fill_(hidden, -torch.inf)
    mass: Floats = (logits.softmax(-1)[:, :, :tokens].mean(dim=1) * tokens).cpu().numpy()
    return mass


# Always attended to: the first tokens draw attention from all others, the last ones are what the suffix goes on from.
FIRST_TOKENS = 4
LAST_TOKENS = 32


def kept_tokens(prefix: int) -> NDArray[np.int64]:
    """Return the tokens that are always attended to."""
    first = np.arange(min(FIRST_TOKENS, prefix))
    return np.unique(np.concatenate([first, np.arange(max(0, prefix - LAST_TOKENS), prefix)]))


# Records of uses are small and read side by side.
WEIGHT_THREADS = 4
# What packing blocks again may read and write, of what was used; it adds up over so many uses at most.
REPACK_SHARE = 0.05
REPACK_USES = 10


class Learner:
    """Notes uses and acts on them. Owns a thread between the first use and `close`."""

    def __init__(self, registry: CodecRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._uses: UseStore | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._task: Future[None] | None = None
        self._repack_bytes = 0.0
        self.replaced = 0

    def important_tokens(self, object_id: ObjectId) -> float:
        """Return what `ScoreRanking` wants to know of a block."""
        return self._uses.important_tokens(object_id) if self._uses else 1.0

    def weights(self, cache: Cache, metas: Sequence[BlockMeta]) -> NDArray[np.float64]:
        """Return how much each block mattered to past prompts of all engines, 1 for an even share or no use.

        Waits no longer than the caller (`tier.breaker.until`).
        """
        deadline_s = caller_deadline_s()

        def weight(meta: BlockMeta) -> float:
            with until(deadline_s):
                scores = UseStore(cache.tiers, bytes(WRITER_BYTES), self._clock).scores(meta)
            return 1.0 if scores is None else float(scores.mean())

        with ThreadPoolExecutor(WEIGHT_THREADS, thread_name_prefix="kvtide-weigh") as pool:
            return np.array(list(pool.map(weight, metas)))

    def orders(self, metas: Sequence[BlockMeta], importance: Mapping[int, Floats]) -> list[Orders]:
        """Return in which orders to store blocks: by a prompt over them, and by past uses that this process knows."""
        by_block = np.split(_by_layer(importance), len(metas), axis=1)
        uses = self._uses
        return [
            packing_orders(part if uses is None else uses.blended(meta, part))
            for meta, part in zip(metas, by_block, strict=True)
        ]

    def note(
        self, cache: Cache, metas: Sequence[BlockMeta], importance: Mapping[int, Floats], bases: Sequence[PackedBase]
    ) -> bool:
        """Learn from one prompt over some blocks. False if left out: the last one is being worked on.

        importance: (tokens of all blocks) of each layer. bases: how they are packed, none for those of other codecs.
        """
        if self._task is not None and not self._task.done():
            return False
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="kvtide-learn")
        learn = partial(self._learn, cache, metas, bases, _by_layer(importance))
        self._task = self._pool.submit(cache.guarded, "learn", learn, None)
        return True

    def _learn(self, cache: Cache, metas: Sequence[BlockMeta], bases: Sequence[PackedBase], importance: Floats) -> None:
        uses = self._uses = self._uses or UseStore(cache.tiers, secrets.token_bytes(WRITER_BYTES), self._clock)
        for meta, part in zip(metas, np.split(importance, len(metas), axis=1), strict=True):
            uses.note(meta, part)
            uses.save(meta)
        gained = REPACK_SHARE * sum(meta.layout.raw_bytes for meta in metas)
        self._repack_bytes = min(self._repack_bytes + gained, REPACK_USES * gained)
        if bases:
            done = Repacker(cache.tiers, self._registry, uses).run(metas, bases, self._repack_bytes)
            self._repack_bytes -= done.moved_bytes
            self.replaced += done.replaced

    def flush(self, timeout_s: float) -> None:
        """Wait until what was noted is done, at most so long. TimeoutError."""
        if self._task is not None:
            self._task.result(timeout_s)

    def close(self) -> None:
        """End after what is under way. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _by_layer(importance: Mapping[int, Floats]) -> Floats:
    return np.stack([importance[layer] for layer in sorted(importance)])
