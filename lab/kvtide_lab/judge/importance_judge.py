"""Judges selections by what the model then says: whole cache against a part of it, on one question and its answer.

Bytes and times are real: objects lie behind a device of a stated speed, and are read by the code that engines use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.clock import Clock
from kvtide.codec import CodecRegistry
from kvtide.codec.base import RawCodec
from kvtide.codec.packed import PackedCodec
from kvtide.engines.transformers.groups import RestoredRoom, filled_cache, model_layout
from kvtide.engines.transformers.selective import SelectedLayers, SparsePrefix, SparseSettings
from kvtide.importance import AllHeads, Floats
from kvtide.store.load.sparse import SparseLoad
from kvtide.store.repack import Repacker, UseStore
from kvtide.tier import Tier
from kvtide.tier.ram import MemoryTier
from kvtide.wire import object_bytes_max, pack_object, parse_object
from kvtide_lab.judge.quality import block_metas, capture_blocks
from kvtide_lab.wrapped import Paced

# Selectors that ours are measured against: one head a group, the newest tokens, chance, what is known already.

# Better keys than the rough ones, (kv_heads, prefix, head_dim) of a layer: for probes that load keys of their own.
KeySource = Callable[[int], Floats]


class GroupHeads(AllHeads):
    """The first head of each group that shares a KV head: the first heads of a layer may all share one."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return list(range(0, heads, heads // kv_heads))


class Blind(AllHeads):
    """Looks at no key."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return []

    def importance(self, layer: int, tokens: int) -> Floats:
        """Return what matters in a layer of so many tokens: (rows, tokens)."""
        raise NotImplementedError


class Recency(Blind):
    """The last tokens; with the first ones, which are always kept, StreamingLLM."""

    def importance(self, layer: int, tokens: int) -> Floats:
        return np.arange(1, tokens + 1, dtype=np.float32)[None]


class Random(Blind):
    """Tokens by chance."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def importance(self, layer: int, tokens: int) -> Floats:
        drawn: Floats = self._rng.random((1, tokens), dtype=np.float32)
        return drawn


class KnownScores(Blind):
    """Scores from earlier uses, (layers, prefix): no probe at all."""

    def __init__(self, scores: Floats) -> None:
        self._scores = scores

    def importance(self, layer: int, tokens: int) -> Floats:
        scores: Floats = self._scores[layer][None]
        return scores


class ComparedPrefix(SparsePrefix):
    """A selection by any of these, or by better keys than the engine's."""

    def __init__(self, load: SparseLoad, settings: SparseSettings, keys: KeySource | None = None) -> None:
        super().__init__(load, settings)
        self._keys = keys

    def _is_weighed(self, query: torch.Tensor) -> bool:
        return self._keys is None and super()._is_weighed(query)

    def _by_head(self, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> Floats:
        if isinstance(self._settings.selector, Blind):
            return self._settings.selector.importance(layer, self._tokens)
        if self._keys is not None:
            known = key.float()
            key = torch.cat([torch.from_numpy(self._keys(layer)).to(known), known[:, self._tokens :]], dim=1)
        return super()._by_head(layer, query, key, scaling)

    def _selected(self, layer: int, importance: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if isinstance(self._settings.selector, Blind):
            importance = self._settings.selector.importance(layer, self._tokens).mean(axis=0)
        return super()._selected(layer, importance)


ANSWER_TOKENS = 16
# Room for a question and its answer.
SPARE_TOKENS = 256
# Threads that load whole blocks, as many as an engine's cache has for a disk: one copies while another reads.
WHOLE_THREADS = 2
STORE_BYTES = 4 << 30


class Question(NamedTuple):
    """A question after a prefix, as token ids; the beginning of a right answer, if that is known."""

    kind: str
    ids: list[int]
    right: tuple[int, ...] = ()


class ExactAnswer(NamedTuple):
    """The model's answer with the whole cache, and the log-probabilities of each of its tokens."""

    answer: list[int]
    log_probabilities: torch.Tensor


class Judged(NamedTuple):
    """One question under one selection. KL in nats against the whole cache, in the mean over the answer.

    is_right: the answer begins as the text has it, None where that is not known.
    """

    kl: float
    top1: float
    answer_match: bool
    is_right: bool | None
    read_bytes: int
    whole_bytes: int
    ttft_s: float
    selected: SelectedLayers | None


@dataclass(frozen=True)
class JudgedPrefix:
    """A prefix that is stored: whole, packed as it came, packed by uses; its questions and what is said of them."""

    metas: list[BlockMeta]
    blocks: list[BlockBits]
    questions: list[Question]
    said: list[ExactAnswer]
    scores: Floats
    packed: MemoryTier
    original: MemoryTier


class ReadKeys:
    """Exact keys of some KV heads, read from the device layer by layer: what probes without a rough base need.

    The other heads' keys are zeros: a probe that asked them would find nothing.
    """

    def __init__(self, prefix: JudgedPrefix, device: Paced, heads: Sequence[int], dtype: torch.dtype) -> None:
        self._prefix = prefix
        self._device = device
        self._heads = list(heads)
        self._dtype = dtype
        self.read_bytes = 0

    def __call__(self, layer: int) -> Floats:
        """Return (kv_heads, prefix, head_dim)."""
        keys = np.concatenate([bits[layer, 0] for bits in self._prefix.blocks])
        size = keys[:, self._heads].nbytes
        # Read as bytes of the whole objects: what the device takes does not hang on where they lie.
        per_block = size // len(self._prefix.metas)
        buffer = memoryview(bytearray(per_block))
        for meta in self._prefix.metas:
            self.read_bytes += self._device.get_into(meta.id, buffer) or 0
        floats: Floats = torch.from_numpy(keys.view(f"<i{keys.itemsize}")).view(self._dtype).float().numpy()
        found = np.zeros_like(floats)
        found[:, self._heads] = floats[:, self._heads]
        return np.ascontiguousarray(found.transpose(1, 0, 2))


class ImportanceJudge:
    """One model, its KV kept as `dtype`, behind a device of `bytes_s`."""

    def __init__(
        self, model: Any, registry: CodecRegistry, clock: Clock, bytes_s: float, dtype: KVDtype, block_tokens: int = 256
    ) -> None:
        self._model = model
        self._registry = registry
        self._clock = clock
        self.bytes_s = bytes_s
        self.layout: BlockLayout = replace(model_layout(model, block_tokens), dtype=dtype)
        codec = registry.make("packed", self.layout)
        assert isinstance(codec, PackedCodec)
        self.codec = codec

    def add(self, ids: Sequence[int], uses: Sequence[Question], questions: Sequence[Question]) -> JudgedPrefix:
        """Prefill a prefix of whole blocks, store it, learn from `uses`, repack it, and ask with the whole cache."""
        metas = block_metas(ids, self.layout)
        own = model_layout(self._model, self.layout.tokens)
        blocks = [_as(bits, own.dtype, self.layout.dtype) for bits in capture_blocks(self._model, ids, own)]
        packed, original = self._tier(), self._tier()
        for meta, bits in zip(metas, blocks, strict=True):
            sections = self.codec.encode(meta, bits)
            for tier in (packed, original):
                tier.put_from(meta.id, pack_object(meta, self.codec.codec_id, sections, self.codec.profile))
        store = UseStore(packed, b"training", self._clock)
        for use in uses:
            importance = self._importance(metas, packed, use)
            for meta, part in zip(metas, np.split(importance, len(metas), axis=1), strict=True):
                store.note(meta, part)
        opened = SparseLoad(packed)
        assert opened.open(metas, self._registry) == len(metas)
        opened.close()
        report = Repacker(packed, self._registry, store).run(metas, opened.bases)
        assert not report.failed
        scores = np.concatenate([store.scores(meta) for meta in metas], axis=1)
        said = [self._say_whole(blocks, question) for question in questions]
        return JudgedPrefix(metas, blocks, list(questions), said, scores, packed, original)

    def _tier(self) -> MemoryTier:
        tier = MemoryTier(STORE_BYTES, self._clock, lambda key: False, frame_bytes=1 << 20)
        tier.open()
        return tier

    def _importance(self, metas: Sequence[BlockMeta], tier: MemoryTier, use: Question) -> Floats:
        load, pages = SparseLoad(tier), self._pages(len(metas))
        load.open(metas, self._registry, pages.write)
        selection = SparsePrefix(load, SparseSettings(0.25, guard=None))
        self._first(self._filled(pages, load.blocks), use, selection)
        load.close()
        return np.stack([selection.importance[layer] for layer in sorted(selection.importance)])

    def past(self, blocks: Sequence[BlockBits]) -> DynamicCache:
        """Return the engine's cache with these blocks."""
        return filled_cache(self._model, self.layout, blocks)

    def _pages(self, blocks: int) -> RestoredRoom:
        return RestoredRoom(self.layout, blocks * self.layout.tokens, spare_tokens=SPARE_TOKENS)

    def _filled(self, pages: RestoredRoom, blocks: int) -> DynamicCache:
        past = DynamicCache(config=self._model.config)
        pages.fill(past, blocks * self.layout.tokens, self._model.device)
        return past

    def _first(self, past: DynamicCache, question: Question, selection: SparsePrefix | None = None) -> torch.Tensor:
        """Return what the answer's first token is chosen by, as engines do: of the last token's logits alone."""
        return self._pass(past, question.ids, selection, 1)

    def _pass(
        self, past: DynamicCache, ids: Sequence[int], selection: SparsePrefix | None = None, logits: int = 0
    ) -> torch.Tensor:
        """logits: of how many of the last tokens, 0 for all."""
        with torch.inference_mode(), nullcontext() if selection is None else selection.active(self._model):
            tokens = torch.tensor([list(ids)])
            output = self._model(tokens, past_key_values=past, use_cache=True, logits_to_keep=logits)
        found: torch.Tensor = output.logits[0].float().log_softmax(-1)
        return found

    def _say_whole(self, blocks: Sequence[BlockBits], question: Question) -> ExactAnswer:
        past = self.past(blocks)
        rows = [self._first(past, question)]
        for _ in range(ANSWER_TOKENS - 1):
            rows.append(self._pass(past, [int(rows[-1].argmax())]))
        found = torch.cat(rows)
        return ExactAnswer(found.argmax(-1).tolist(), found)

    def whole(self, prefix: JudgedPrefix, number: int) -> Judged:
        """Load everything, as raw objects, and ask."""
        device = self._device(self._tier())
        for meta, bits in zip(prefix.metas, prefix.blocks, strict=True):
            device.put_from(meta.id, pack_object(meta, RawCodec.codec_id, RawCodec().encode(meta, bits)))
        pages = RestoredRoom(self.layout, len(prefix.metas) * self.layout.tokens)
        started_s = self._clock.monotonic_s()
        with ThreadPoolExecutor(WHOLE_THREADS) as pool:
            done = [pool.submit(self._load_raw, device, *each, pages) for each in enumerate(prefix.metas)]
        for each in done:
            each.result()
        past = self._filled(pages, len(prefix.metas))
        first = self._first(past, prefix.questions[number])
        ttft_s = self._clock.monotonic_s() - started_s
        return self._judged(prefix, number, past, first, None, (device.read_bytes, ttft_s), None)

    def _load_raw(self, device: Paced, position: int, meta: BlockMeta, pages: RestoredRoom) -> None:
        buffer = memoryview(bytearray(object_bytes_max(meta.layout)))
        stored = parse_object(buffer[: device.get_into(meta.id, buffer)], meta.id)
        bits: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        RawCodec().decode(meta, stored.sections(), bits)
        pages.write(position, bits)

    def selected(
        self,
        prefix: JudgedPrefix,
        number: int,
        importance: SparseSettings,
        is_packed: bool = True,
        has_base: bool = True,
        probes: bool = False,
    ) -> Judged:
        """Load a part and ask.

        is_packed: of blocks packed by uses, not as they came. has_base: the rough base is read; without it mapping
        lists are known for nothing, as the paper's few bytes. probes: choose by exact keys, which are read too.
        """
        tier = prefix.packed if is_packed else prefix.original
        device = self._device(tier)
        load = SparseLoad(device if has_base else tier)
        keys = self._probe(prefix, device, importance) if probes else None
        pages = self._pages(len(prefix.metas))
        if not has_base:
            load.open(prefix.metas, self._registry, pages.write)
            load.tier, load.read_bytes, load.reads = device, 0, 0
        started_s = self._clock.monotonic_s()
        if has_base:
            ahead = importance.tokens_ahead(self.layout.tokens)
            load.open(prefix.metas, self._registry, pages.write, ahead)
        selection = ComparedPrefix(load, importance, keys)
        past = self._filled(pages, load.blocks)
        ids = prefix.questions[number].ids
        selection.probe(self._model, torch.tensor([ids]), past)
        first = self._pass(past, ids[past.get_seq_length() - load.tokens :], selection, 1)
        ttft_s = self._clock.monotonic_s() - started_s
        read_bytes = load.read_bytes + (keys.read_bytes if keys else 0)
        cost = (read_bytes, ttft_s)
        judged = self._judged(prefix, number, past, first, selection, cost, selection.report())
        load.close()
        return judged

    def rough(self, prefix: JudgedPrefix, number: int) -> Judged:
        """Ask with the base alone."""
        device = self._device(prefix.packed)
        load, pages = SparseLoad(device), self._pages(len(prefix.metas))
        started_s = self._clock.monotonic_s()
        load.open(prefix.metas, self._registry, pages.write)
        past = self._filled(pages, load.blocks)
        first = self._first(past, prefix.questions[number])
        ttft_s = self._clock.monotonic_s() - started_s
        load.close()
        return self._judged(prefix, number, past, first, None, (load.read_bytes, ttft_s), None)

    def _probe(self, prefix: JudgedPrefix, device: Paced, importance: SparseSettings) -> ReadKeys:
        config = self._model.config
        group = config.num_attention_heads // self.layout.kv_heads
        asked = importance.selector.heads(config.num_attention_heads, self.layout.kv_heads)
        dtype = {KVDtype.FLOAT16: torch.float16, KVDtype.BFLOAT16: torch.bfloat16, KVDtype.FLOAT32: torch.float32}
        return ReadKeys(prefix, device, sorted({head // group for head in asked}), dtype[self.layout.dtype])

    def _device(self, tier: Tier) -> Paced:
        return Paced(tier, self._clock, time.sleep, self.bytes_s)

    def _judged(
        self,
        prefix: JudgedPrefix,
        number: int,
        past: DynamicCache,
        first: torch.Tensor,
        selection: SparsePrefix | None,
        cost: tuple[int, float],
        selected: SelectedLayers | None,
    ) -> Judged:
        """cost: bytes read, seconds to the first token."""
        exact, right = prefix.said[number], prefix.questions[number].right
        ours = torch.cat([first, self._pass(past, exact.answer[:-1], selection)])
        whole = exact.log_probabilities
        kl = float((whole.exp() * (whole - ours)).sum(-1).mean())
        same = ours.argmax(-1) == torch.tensor(exact.answer)
        # Greedy words after a wrong one were never said: each is compared after the whole cache's answer.
        said = tuple(ours.argmax(-1).tolist())[: len(right)]
        is_right = said == right if right else None
        read_bytes, ttft_s = cost
        raw_bytes = len(prefix.metas) * self.layout.raw_bytes
        top1, is_same = float(same.float().mean()), bool(same.all())
        return Judged(kl, top1, is_same, is_right, read_bytes, raw_bytes, ttft_s, selected)


def _as(bits: BlockBits, own: KVDtype, wanted: KVDtype) -> BlockBits:
    """Return the bit patterns of the same values in another type."""
    if own is wanted:
        return bits
    assert own is KVDtype.FLOAT32 and wanted is KVDtype.FLOAT16
    with np.errstate(over="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16)
