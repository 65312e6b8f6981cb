"""`attach(importance=…)`: a prefix loaded in part, and attention that selects: exact with all, else like a mask."""

import math
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.codec.tide_profiles import fitted_on
from tests.doors.user import PROMPT
from tests.joints.conftest import in_part
from tests.stores import open_memory, read_object
from transformers import DynamicCache, FalconConfig, FalconForCausalLM

from kvtide.codec import CodecRegistry
from kvtide.codec.packed import ImpressCodec, PackedCodec
from kvtide.config import Limits
from kvtide.engines.transformers import Impress, attach, selective
from kvtide.engines.transformers.groups import RestoredRoom, filled_cache, model_layout
from kvtide.engines.transformers.importance import REPACK_USES, Learner, Ways
from kvtide.engines.transformers.selective import (
    PROBE_TOKENS,
    WEIGHED_TOKENS,
    Rest,
    SparsePrefix,
    SparseSettings,
    attention_mass,
    grouped_attention,
    kept_tokens,
    weighed_attention,
)
from kvtide.errors import UnsupportedModel
from kvtide.importance import AllHeads, FirstHeads, HeadsAgree, packing_orders
from kvtide.store.load.sparse import SparseLoad
from kvtide.tier.base import WrappedTier
from kvtide.types import ObjectId
from kvtide.wire import pack_object, parse_object
from kvtide_lab.judge.importance_judge import ComparedPrefix, GroupHeads, KnownScores, Recency
from kvtide_lab.judge.quality import block_metas, capture_blocks

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def fill(model: Any, store: Path, importance: float | None = 0.25) -> Path:
    with in_part(model, store, importance) as cached:
        cached.generate(PROMPT, **GREEDY)
        assert cached.last.selected is None and cached.flush(60)
    return store


@pytest.fixture
def store(tiny_model: Any, tmp_path: Path) -> Path:
    return fill(tiny_model, tmp_path)


def test_a_model_that_attends_by_itself_is_refused(tmp_path: Path) -> None:
    # Falcon took the masks of another attention for its own: tokens saw those behind them.
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = FalconForCausalLM(FalconConfig(**sizes)).eval()
    for importance in (0.25, Impress(0.25)):
        with pytest.raises(UnsupportedModel, match="FalconForCausalLM can't attend"):
            attach(model, tmp_path, importance=importance)


def test_a_first_prompt_says_in_which_order_its_blocks_are_stored(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = list[tuple[Any, ...]]()
    monkeypatch.setattr(Learner, "note", lambda *arguments: noted.append(arguments[3:]))
    fill(tiny_model, tmp_path)
    with in_part(tiny_model, tmp_path) as cached:
        cached.generate(PROMPT, **GREEDY)
    (importance, _), (_, bases) = noted
    for block, base in enumerate(bases):
        scores = np.stack([importance[layer][16 * block :][:16] for layer in range(3)])
        assert np.array_equal(base.orders, packing_orders(scores)) and not base.repacks


@pytest.mark.parametrize(
    ("stored", "loaded", "hit_tokens"),
    # With all tokens, off on blocks that are exact, and off on blocks that are taken for parts.
    [(None, 1.0, 96), (1.0, None, 96), (0.25, None, 0)],
)
def test_whole_loads_are_exact_and_parts_are_never_served_as_such(
    stored: float | None, loaded: float | None, hit_tokens: int, tiny_model: Any, tmp_path: Path
) -> None:
    fill(tiny_model, tmp_path, stored)
    with in_part(tiny_model, tmp_path, loaded) as cached:
        for hits in (hit_tokens, 96):
            assert torch.equal(cached.generate(PROMPT, **GREEDY), tiny_model.generate(PROMPT, **GREEDY))
            assert (cached.last.hit_tokens, cached.last.selected) == (hits, None)
            assert cached.flush(60)


def test_uses_are_learnt_and_blocks_packed_anew_stay_exact(tiny_model: Any, tmp_path: Path) -> None:
    with in_part(tiny_model, tmp_path) as cached:
        cached._importance._is_reordered = False  # Tokens are stored as they come.
        cached.generate(PROMPT, **GREEDY)
        assert cached.flush(60)
    with in_part(tiny_model, tmp_path) as cached:
        for _ in range(REPACK_USES):
            cached._importance.ways = Ways()  # It knows no faster way yet.
            cached._importance.refused_s.clear()
            cached.generate(PROMPT, **GREEDY)
            cached.learned(20)
        assert cached._importance.learner.replaced
    with in_part(tiny_model, tmp_path) as cached:
        for is_near in (False, True):
            cached._importance.ways.note(True, is_near, 1000, 2.0, cached._clock.monotonic_s())
        assert torch.equal(cached.generate(PROMPT, **GREEDY), tiny_model.generate(PROMPT, **GREEDY))
        assert (cached.last.hit_tokens, cached.last.selected) == (96, None)


def test_part_is_awaited_no_longer_than_computing_takes(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(tiny_model, tmp_path, importance=Impress(0.25, is_guarded=False), block_tokens=16) as cached:
        cached.generate(PROMPT, **GREEDY)
        assert cached.flush(60)
        cached.cache.judge.note_prefill(0, 1000, 1.0)
        opened, started_s = Mock(return_value=0), time.monotonic()
        monkeypatch.setattr(SparseLoad, "open", opened)
        cached.generate(PROMPT, **GREEDY)
    until_s = opened.call_args.args[4]
    assert until_s < started_s + Limits().load_s_max / 2


@pytest.mark.parametrize("importance", [0, 1.5, -1])
def test_importance_out_of_range_is_refused(tiny_model: Any, tmp_path: Path, importance: float) -> None:
    with pytest.raises(ValueError, match="importance"):
        in_part(tiny_model, tmp_path, importance)


@pytest.mark.parametrize("chunk", [None, 40])
def test_importance_waits_for_a_profile(chunk: int | None, tiny_model: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {**GREEDY, "prefill_chunk_size": chunk}
    for hit_tokens in (0, 96):
        with attach(tiny_model, str(tmp_path), importance=0.25, block_tokens=16) as cached:
            output = cached.generate(PROMPT, **options)
            assert torch.equal(output, tiny_model.generate(PROMPT, **options))
            assert cached.last.hit_tokens == hit_tokens and cached.flush(60)
            assert cached.cache.stats().blocks_without_profile == (0 if hit_tokens else 6)


@pytest.mark.parametrize("tokens", [100, 97])
def test_a_refused_selection_gives_the_exact_answer(tokens: int, tiny_model: Any, store: Path) -> None:
    """The guard refuses a prefix of 96 tokens, which is too short to tell; a last token alone is guarded too."""
    with in_part(tiny_model, store) as cached:
        for is_selected in (True, False):
            output = cached.generate(PROMPT[:, :tokens], **GREEDY)
            # 105 tokens are 6 blocks.
            assert (cached.last.hit_tokens, cached.last.blocks_queued) == (96, 0)
            assert torch.equal(output, tiny_model.generate(PROMPT[:, :tokens], **GREEDY))
            # What was refused is loaded whole the next time.
            selected = cached.last.selected
            assert (selected.is_fallback and 0 < selected.tokens_share <= 1) if is_selected else selected is None


def test_nothing_is_learnt_from_a_pass_cut_short(tiny_model: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layers behind would have attended to is not known."""
    monkeypatch.setattr(HeadsAgree, "trusts", lambda *_: False)
    noted = list[Any]()
    monkeypatch.setattr(Learner, "note", lambda *arguments: noted.append(len(arguments[3])))
    with in_part(tiny_model, store, SparseSettings(0.25, guard=HeadsAgree())) as cached:
        cached.generate(PROMPT, **GREEDY)
    assert cached.last.selected.is_fallback and not noted


@pytest.mark.parametrize(
    "steps", [{}, {"heads": None}, {"is_guarded": False}, {"is_reordered": False, "is_scored": False}]
)
def test_the_papers_way_by_steps(tiny_model: Any, tmp_path: Path, steps: dict[str, Any]) -> None:
    importance = Impress(0.25, **steps)
    for hit_tokens in (0, 96):
        with attach(tiny_model, str(tmp_path), block_tokens=16, importance=importance) as cached:
            cached.generate(PROMPT, **GREEDY)
            assert cached.flush(60) and cached.last.hit_tokens == hit_tokens
    assert cached.last.selected.is_fallback or 0.25 <= cached.last.selected.tokens_share <= 1


def test_guided_answer_is_that_of_the_plain_model(tiny_model: Any, tmp_path: Path) -> None:
    # Guidance runs a second prompt, of one token at first, within each step.
    guided = {**GREEDY, "guidance_scale": 1.5}
    with attach(tiny_model, tmp_path, importance=Impress(0.25, is_guarded=False), block_tokens=16) as cached:
        cached.generate(PROMPT, **GREEDY)
        assert cached.flush(60)
        assert torch.equal(cached.generate(PROMPT, **guided), tiny_model.generate(PROMPT, **guided))


@pytest.mark.parametrize("is_guarded", [True, False])
def test_heads_that_disagree_load_the_whole(
    tiny_model: Any, tmp_path: Path, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadsAgree, "trusts", lambda *_: False)
    for _ in range(2):
        importance = Impress(0.25, is_guarded=is_guarded)
        with attach(tiny_model, str(tmp_path), block_tokens=16, importance=importance) as cached:
            output = cached.generate(PROMPT, **GREEDY)
            assert cached.flush(60)
    assert cached.last.selected.is_fallback is is_guarded
    assert torch.equal(output, tiny_model.generate(PROMPT, **GREEDY)) or not is_guarded


PREFIX = 96


class Prefix:
    """The prompt's blocks, stored packed."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        self.model, self.ids = model, prompt[0].tolist()
        layout = model_layout(model, 16)
        profile = fitted_on(model, layout, prompt)
        self.registry, codec = CodecRegistry([profile]), PackedCodec(profile, 1e-2, 4)
        self.metas = block_metas(self.ids[:PREFIX], layout)
        self.blocks = capture_blocks(model, self.ids[:PREFIX], layout)
        self.tier = open_memory()
        for meta, bits in zip(self.metas, self.blocks, strict=True):
            self.tier.put_from(meta.id, pack_object(meta, codec.codec_id, codec.encode(meta, bits), codec.profile))

    def past(self, blocks: list[Any]) -> DynamicCache:
        return filled_cache(self.model, model_layout(self.model, 16), blocks)

    def said(self, blocks: list[Any], selection: SparsePrefix | None = None) -> torch.Tensor:
        past, suffix = self.past(blocks), torch.tensor([self.ids[PREFIX:]])
        usual = self.model.config._attn_implementation
        with torch.inference_mode(), nullcontext() if selection is None else selection.active(self.model):
            logits = self.model(suffix, past_key_values=past).logits
        assert self.model.config._attn_implementation == usual, "the model is as before afterwards"
        return logits

    def probed(self, selection: SparsePrefix) -> torch.Tensor:
        """Ask what matters first; return what the model then says of the tokens that are left."""
        past, ids = self.past(self.rough), torch.tensor([self.ids[PREFIX:]])
        selection.probe(self.model, ids, past)
        with torch.inference_mode(), selection.active(self.model):
            return self.model(ids[:, past.get_seq_length() - PREFIX :], past_key_values=past).logits

    def load(self) -> SparseLoad:
        load, rough = SparseLoad(self.tier), dict[int, Any]()
        assert load.open(self.metas, self.registry, rough.__setitem__) == PREFIX // 16
        self.rough = [rough[position] for position in range(load.blocks)]
        return load


@pytest.fixture
def prefix(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    monkeypatch.setattr("kvtide.store.load.sparse.GAP_BYTES", 0)
    return Prefix(tiny_model, PROMPT)


def test_selected_tokens_are_exact_and_the_rest_is_rough(prefix: Prefix) -> None:
    selection = SparsePrefix(prefix.load(), SparseSettings(0.25, guard=None))
    got = prefix.said(prefix.rough, selection)
    exact, rough = prefix.said(prefix.blocks), prefix.said(prefix.rough)
    assert (got - exact).abs().mean() < (rough - exact).abs().mean()
    report = selection.report()
    assert 0.25 <= report.tokens_share < 0.35 and not report.is_fallback


def test_dropped_tokens_are_as_if_masked(prefix: Prefix) -> None:
    """Recency and single tokens: what is attended to is known without asking the selection."""
    selection = ComparedPrefix(prefix.load(), SparseSettings(0.5, Recency(), None, Rest.DROP, by_chunks=False))
    got = prefix.said(prefix.rough, selection)
    past, seen = DynamicCache(config=prefix.model.config), torch.ones(1, len(prefix.ids), dtype=torch.long)
    seen[:, 4 : PREFIX // 2] = 0
    with torch.inference_mode():
        prefix.model(torch.tensor([prefix.ids[:PREFIX]]), past_key_values=past)
        places = torch.arange(PREFIX, len(prefix.ids))[None]
        rest = torch.tensor([prefix.ids[PREFIX:]])
        masked = prefix.model(rest, past_key_values=past, attention_mask=seen, position_ids=places).logits
    assert torch.allclose(got, masked, atol=1e-4)


class Trusting:
    """A guard that trusts the first so many layers, less one."""

    def __init__(self, layers: float) -> None:
        self._layers = layers

    def score(self, *finding: Any) -> float:
        return 0.0

    def trusts(self, scores: Any, ratio: float) -> bool:
        return scores.count(0.0) < self._layers


NEVER, ALWAYS = Trusting(0), Trusting(math.inf)


@pytest.mark.parametrize("suffix", [1, 4])
@pytest.mark.parametrize("by_chunks", [True, False])
def test_what_the_guard_refuses_is_loaded_whole(prefix: Prefix, by_chunks: bool, suffix: int) -> None:
    prefix.ids = prefix.ids[: PREFIX + suffix]
    selection = SparsePrefix(prefix.load(), SparseSettings(0.1, guard=NEVER, rest=Rest.DROP, by_chunks=by_chunks))
    assert torch.equal(prefix.probed(selection), prefix.said(prefix.blocks))
    assert selection.report().is_fallback and selection.report().tokens_share == 1.0
    assert len(selection.importance) == 1  # Nothing could have changed the verdict after the first layer.


@pytest.mark.parametrize("rest", list(Rest))
def test_a_fallback_reads_nothing_twice(prefix: Prefix, rest: Rest) -> None:
    """Nor what the probe asked for of layers that it did not get to."""
    load = prefix.load()
    before = load.read_bytes
    selection = SparsePrefix(load, SparseSettings(0.25, guard=Trusting(3), rest=rest))
    assert torch.equal(prefix.probed(selection), prefix.said(prefix.blocks))
    assert len(selection.importance) == 3 and selection.report().is_fallback
    assert load.read_bytes - before == load.blocks * load.layout.raw_bytes


def test_layers_of_a_fallback_attend_while_the_next_are_read(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "FALLBACK_LAYERS", 1)
    attended, last_layer = threading.Event(), set[tuple[ObjectId, int]]()
    for meta in prefix.metas:
        entries = parse_object(read_object(prefix.tier, meta.id)).entries
        last_layer |= {(meta.id, entry.offset) for entry in entries if entry.id.layer_start == 2}

    class Held(WrappedTier):
        def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
            """Wait with the last layer's chunks until the first layer has attended."""
            is_last = any((object_id, at) in last_layer for at in range(offset, offset + len(buffer)))
            assert not is_last or attended.wait(10)
            return super().get_into(object_id, buffer, offset)

    load = prefix.load()
    load.tier = Held(prefix.tier)
    selection, past = SparsePrefix(load, SparseSettings(0.25, guard=NEVER)), prefix.past(prefix.rough)
    ids = torch.tensor([prefix.ids[PREFIX:]])
    selection.probe(prefix.model, ids, past)
    hook = prefix.model.model.layers[0].register_forward_hook(lambda *passed: attended.set())
    with torch.inference_mode(), selection.active(prefix.model):
        assert torch.equal(prefix.model(ids, past_key_values=past).logits, prefix.said(prefix.blocks))
    hook.remove()


@pytest.mark.parametrize("guard", [None, NEVER])
def test_tokens_that_could_not_be_had_are_not_attended_to(prefix: Prefix, guard: Any) -> None:
    """Where the rest is left out nothing stands in for them: their values would be zeros."""
    codec, meta = ImpressCodec(1, 4), prefix.metas[2]
    for each, bits in zip(prefix.metas, prefix.blocks, strict=True):
        packed = pack_object(each, codec.codec_id, codec.encode(each, bits))
        if each is meta:
            entry = next(entry for entry in parse_object(packed).entries if entry.id.refinement == 2)
            packed[entry.offset] ^= 1
        prefix.tier.replace(each.id, packed)
    settings = SparseSettings(0.9, FirstHeads(3), guard, Rest.DROP, by_chunks=False)
    selection = SparsePrefix(prefix.load(), settings)
    prefix.probed(selection)
    attended = selection._attended[0]
    assert attended is not None and not set(range(meta.start + 4, meta.start + 8)) & set(attended.tolist())
    assert len(attended) >= 80


def test_what_the_guard_trusts_goes_on_with_what_was_asked(prefix: Prefix) -> None:
    for suffix in (1, 4):
        ids = torch.tensor([prefix.ids[PREFIX : PREFIX + suffix]])
        selection, past = SparsePrefix(prefix.load(), SparseSettings(0.25, guard=ALWAYS)), prefix.past(prefix.rough)
        selection.probe(prefix.model, ids, past)
        assert past.get_seq_length() == PREFIX + suffix - 1
        assert not selection.report().is_fallback and selection.report().tokens_share >= 0.25


def test_better_keys_and_known_scores_can_choose(prefix: Prefix) -> None:
    keys = np.concatenate([bits[:, 0] for bits in prefix.blocks], axis=1)
    floats = keys.view(np.float32).transpose(0, 2, 1, 3)
    probed = ComparedPrefix(prefix.load(), SparseSettings(0.25, AllHeads(), None), lambda layer: floats[layer])
    prefix.said(prefix.rough, probed)
    scores = np.stack([probed.importance[layer] for layer in sorted(probed.importance)])
    known = ComparedPrefix(prefix.load(), SparseSettings(0.25, KnownScores(scores), None))
    prefix.said(prefix.rough, known)
    assert known.report().tokens_share == probed.report().tokens_share


def test_kept_tokens_are_first_and_last_ones() -> None:
    assert kept_tokens(3).tolist() == [0, 1, 2]
    assert kept_tokens(100).tolist() == [0, 1, 2, 3, *range(68, 100)]


@pytest.mark.parametrize("selector", [AllHeads(), FirstHeads(3), GroupHeads()])
def test_attention_mass_is_that_of_the_plain_twin(selector: AllHeads) -> None:
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=size).astype(np.float32) for size in ((6, 5, 8), (2, 45, 8)))
    heads = selector.heads(6, 2)
    found = attention_mass(torch.from_numpy(query), torch.from_numpy(key), heads, 40, 0.3)
    for row, head in zip(found, heads, strict=True):
        logits = query[head] @ key[head // 3].T * 0.3
        logits[:, 40:][np.triu_indices(5, 1)] = -np.inf
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        assert np.allclose(row, 40 * weights[:, :40].mean(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suffix", [1, 5, 40])
def test_weighed_attention_is_the_usual_one_and_its_mass(suffix: int) -> None:
    rng = np.random.default_rng(suffix)
    shapes = ((1, 6, suffix, 8), (1, 2, 40 + suffix, 8), (1, 2, 40 + suffix, 8))
    query, key, value = (torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    mask = torch.ones(1, 1, suffix, 40 + suffix, dtype=torch.bool).tril(40)
    usual, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    output, mass = weighed_attention(query, key, value, 40, 0.3)
    assert torch.allclose(output, usual, atol=1e-5)
    assert np.allclose(mass, attention_mass(query[0][:, -PROBE_TOKENS:], key[0], list(range(6)), 40, 0.3), rtol=1e-4)


@pytest.mark.parametrize("suffix", [WEIGHED_TOKENS, WEIGHED_TOKENS + 1])
def test_importance_is_noted_of_all_layers_whatever_the_length_of_a_suffix(prefix: Prefix, suffix: int) -> None:
    prefix.ids = [*prefix.ids[:PREFIX], *(number % 50 for number in range(suffix))]
    selection = SparsePrefix(prefix.load(), SparseSettings(0.5, guard=None))
    prefix.said(prefix.blocks, selection)
    assert sorted(selection.importance) == list(range(prefix.model.config.num_hidden_layers))
    assert all(0 < found.sum() / PREFIX <= 1 for found in selection.importance.values())


@pytest.mark.parametrize(
    ("lag", "together", "choosers"),
    [(0, 1, [0, 1, 2, 3, 4, 5]), (1, 1, [0, 0, 1, 2, 3, 4]), (3, 1, [0, 0, 1, 1, 2, 2]), (1, 2, [0, 0, 1, 1, 3, 3])],
)
def test_a_layer_chooses_for_those_behind_it_the_first_ones_for_fewer(
    prefix: Prefix, lag: int, together: int, choosers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = prefix.load()
    selection = SparsePrefix(load, SparseSettings(0.25, guard=None, lag=lag, together=together))
    start, chosen_by = load.start, dict[int, int]()

    def noted(wanted: Any) -> Any:
        chosen_by.update(dict.fromkeys(wanted, len(selection.importance) - 1))
        return start(wanted)

    monkeypatch.setattr(load, "start", noted)
    prefix.said(prefix.rough, selection)
    layers = prefix.model.config.num_hidden_layers
    assert [chosen_by[layer] for layer in range(layers)] == choosers[:layers]


def test_a_cache_with_room_grows_as_the_usual_one(prefix: Prefix) -> None:
    layout = model_layout(prefix.model, 16)
    pages = RestoredRoom(layout, PREFIX, spare_tokens=3)
    for position, bits in enumerate(prefix.blocks):
        pages.write(position, bits)
    roomy = DynamicCache(config=prefix.model.config)
    pages.fill(roomy, PREFIX, prefix.model.device)
    usual = prefix.past(prefix.blocks)
    with torch.inference_mode():
        for token in prefix.ids[PREFIX:]:
            said = [prefix.model(torch.tensor([[token]]), past_key_values=past).logits for past in (roomy, usual)]
            assert torch.allclose(*said, atol=1e-5)
    assert roomy.get_seq_length() == usual.get_seq_length() == len(prefix.ids)
