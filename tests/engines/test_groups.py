"""Models whose cache is more than keys and values of one shape: windows, latents, states; Gemma 3 as a real one."""

import functools
import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import gguf
import pytest
import torch
from tests.families import EXACT, LOSSY, REFUSED, SUPPORT, TIDE, families, model_of_family
from tests.store.test_profiles import codec_ids_of
from tokenizers.processors import TemplateProcessing

from kvtide.cli.explain import Explanation, MatchVerdict, explain_prompt
from kvtide.config import Limits
from kvtide.engines.calibrate.texts import evaluation_texts
from kvtide.engines.transformers import CachedModel, Impress, attach, load_tokenizer
from kvtide.engines.transformers.fingerprint import ModelIdentity
from kvtide.engines.transformers.groups import StateRoom, groups_of, model_groups, read_states
from kvtide.engines.transformers.smollm2 import _begin_texts
from kvtide.errors import UnsupportedModel
from kvtide.group import GroupKind
from kvtide.types import Namespace
from kvtide_lab.subjects import LoadedModel, gemma_file

BLOCK = 64
WANTED: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FLUSH_S_MAX = 120.0
# Of each kind of group; with --nightly thirty times as many.
FAULTS = 35
FAMILIES = families("transformers", EXACT, TIDE, LOSSY)
WITH_STATES = [family for family in FAMILIES if "states" in SUPPORT[family].keeps]
KINDS = {"windows": "kv", "rows": "kv", "chunks": "kv", "latents": "latent", "states": "state"}
model_of = functools.cache(model_of_family)
pytestmark = pytest.mark.usefixtures("unhurried", "one_thread")


class Said(NamedTuple):
    ids: list[int]
    logits: torch.Tensor


def prompt_of(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(seed))


def branched(prompt: torch.Tensor, at: int, tokens: int) -> torch.Tensor:
    return torch.cat([prompt[:, :at], prompt_of(tokens, 1)], dim=1)


def said(model: Any, prompt: torch.Tensor) -> Said:
    output = model.generate(prompt, **WANTED, return_dict_in_generate=True, output_logits=True)
    return Said(output.sequences[0].tolist(), torch.stack(output.logits))


def assert_as_plain(cached: CachedModel, prompt: torch.Tensor) -> int:
    """Check an answer against the model's own; return the tokens that were restored."""
    found, plain = said(cached, prompt), said(cached.model, prompt)
    assert found.ids == plain.ids
    torch.testing.assert_close(found.logits, plain.logits, rtol=0, atol=1e-3)
    assert cached.last is not None and cached.last.bypass is None
    return cached.last.hit_tokens


def filled(family: str, store: Path, *prompts: torch.Tensor, **options: Any) -> None:
    with attach(model_of(family), store, block_tokens=BLOCK, **options) as cached:
        for prompt in prompts:
            said(cached, prompt)
            assert cached.flush(FLUSH_S_MAX)
        cached.cache.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restart_restores_every_group_and_the_answer_is_the_model_s_own(family: str, tmp_path: Path) -> None:
    # Longer than the window, so that blocks leave it.
    prompt = prompt_of(420)
    filled(family, tmp_path, prompt)
    with attach(model_of(family), tmp_path, block_tokens=BLOCK) as cached:
        assert assert_as_plain(cached, prompt) == 384
        # Another prompt with the same beginning; a state is there only where one was kept.
        branch = branched(prompt, 300, 60)
        hit = assert_as_plain(cached, branch)
        assert hit == (0 if family in WITH_STATES else 256)
        assert cached.flush(FLUSH_S_MAX)
        assert assert_as_plain(cached, branch) == 320
        cached.cache.check()
        assert cached.cache.stats().misses == {}
    kept = {kind for word, kind in KINDS.items() if word in SUPPORT[family].keeps}
    assert {each.group.kind.value for each in groups_of(model_of(family), BLOCK)} == kept


@pytest.mark.parametrize("tokens", [256, 257])
def test_a_prompt_that_ends_where_the_window_does_comes_back(tokens: int, tmp_path: Path) -> None:
    filled("gemma3", tmp_path, prompt_of(tokens))
    with attach(model_of("gemma3"), tmp_path, block_tokens=BLOCK) as cached:
        assert assert_as_plain(cached, prompt_of(tokens)) == (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("family", [family for family in WITH_STATES if SUPPORT[family].keeps != "states"])
def test_where_prompts_branch_a_state_is_kept_for_the_third(family: str, tmp_path: Path) -> None:
    prompt = prompt_of(300)
    filled(family, tmp_path, prompt, branched(prompt, 200, 80))
    with attach(model_of(family), tmp_path, block_tokens=BLOCK) as cached:
        assert assert_as_plain(cached, branched(prompt, 200, 40)) == 192


def test_states_are_kept_often_at_the_end_and_where_another_prompt_left(tmp_path: Path) -> None:
    with attach(model_of("lfm2"), tmp_path, block_tokens=BLOCK) as cached:
        cuts = cached.prefixes.cuts
        assert cuts(BLOCK, 0, 0) == []
        assert cuts(2 * BLOCK + 1, 0, 0) == [2 * BLOCK]
        assert cuts(9 * BLOCK + 1, BLOCK, 5) == [5 * BLOCK, 9 * BLOCK]
        assert cuts(9 * BLOCK, 8 * BLOCK, 8) == []
        assert cuts(2 * 4096 + 1, 0, 0) == [4096, 2 * 4096]
    with attach(model_of("gemma3"), tmp_path, block_tokens=BLOCK) as cached:
        assert cached.prefixes.cuts(9 * BLOCK, 0, 5) == []


def test_states_are_kept_as_often_as_one_says(tmp_path: Path) -> None:
    prompt, branch = prompt_of(420), branched(prompt_of(420), 300, 60)
    for folder, every, hit in (("rare", None, 0), ("often", 2 * BLOCK, 256)):
        with attach(model_of("lfm2"), tmp_path / folder, block_tokens=BLOCK, state_every_tokens=every) as cached:
            said(cached, prompt)
            assert cached.flush(FLUSH_S_MAX)
            assert assert_as_plain(cached, branch) == hit
    for family, number in (("lfm2", 0), ("gemma3", 64)):
        with pytest.raises(ValueError, match="state_every_tokens"):
            attach(model_of(family), tmp_path / "refused", state_every_tokens=number)


def test_a_prompt_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(200)
    filled("qwen3_next", tmp_path, prompt)
    with attach(model_of("qwen3_next"), tmp_path, block_tokens=BLOCK) as cached:
        asked: list[tuple[int, list[int]]] = []
        monkeypatch.setattr(
            cached.cache.tiers, "note_request", lambda ids, hint, states: asked.append((len(ids), [*map(len, states)]))
        )
        assert cached.hit_tokens(prompt) == 192
        # Rows, and the states that they may need.
        assert asked == [(3, [3])]


def test_a_talk_goes_on_from_where_it_was(tmp_path: Path) -> None:
    prompt, hits = prompt_of(200), []
    for turn in range(3):
        with attach(model_of("qwen3_next"), tmp_path, block_tokens=BLOCK) as cached:
            hits.append(assert_as_plain(cached, prompt))
            answered = said(cached.model, prompt).ids
            assert cached.flush(FLUSH_S_MAX)
        prompt = torch.cat([torch.tensor([answered]), prompt_of(100, turn)], dim=1)
    assert hits == [0, 192, 256]


def explained_groups(cached: CachedModel, prompt: torch.Tensor, quality: float | None = None) -> Explanation:
    identity = cached.identity
    groups = [(each.group, space) for each, space in zip(identity.groups, identity.namespaces, strict=True)]
    first = identity.namespace
    return explain_prompt(cached.cache.tiers, first, prompt[0, :-1].tolist(), BLOCK, None, quality, groups)


@pytest.mark.parametrize("kind", list(GroupKind)[:3])
def test_a_part_that_is_gone_or_damaged_costs_the_hit_and_no_answer(kind: GroupKind, tmp_path: Path) -> None:
    prompt = prompt_of(300)
    filled("kimi_linear" if kind is not GroupKind.KV else "gemma3", tmp_path, prompt)
    family = model_of("kimi_linear" if kind is not GroupKind.KV else "gemma3")
    group = next(i for i, each in enumerate(groups_of(family, BLOCK)) if each.group.kind is kind)
    with attach(family, tmp_path, block_tokens=BLOCK) as cached:
        name = cached.identity.groups[group].group.name
        meta = cached.prefixes.metas(prompt[0, :-1].numpy())[group][3]
        assert cached.cache.tiers.delete(meta.id, "removed")
        cached.cache.index.remove(meta.id.key)
        explained = explained_groups(cached, prompt)
        # Of the other family no state was kept there.
        assert assert_as_plain(cached, prompt) == (192 if kind is GroupKind.KV else 0)
        assert cached.last is not None and cached.last.ended_by is not None
        assert (explained.hit_tokens, explained.ended_by) == (cached.last.hit_tokens, cached.last.ended_by)
        assert explained.first_missing == meta.id.key or kind is not GroupKind.KV
        if kind is GroupKind.STATE:
            assert cached.last.ended_by == name


def test_a_load_that_breaks_off_leaves_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(300)
    filled("qwen3_next", tmp_path, prompt)
    broken = Mock(side_effect=MemoryError("no room for states"))
    with attach(model_of("qwen3_next"), tmp_path, block_tokens=BLOCK) as cached:
        with monkeypatch.context() as patch:
            patch.setattr("kvtide.engines.transformers.groups.StateRoom.fill", broken)
            assert assert_as_plain(cached, prompt) == 0
        assert assert_as_plain(cached, prompt) == 256


def test_states_stay_exact_beside_a_lossy_codec(tmp_path: Path) -> None:
    prompt = prompt_of(300)
    filled("qwen3_next", tmp_path, prompt, codec="cachegen")
    with attach(model_of("qwen3_next"), tmp_path, block_tokens=BLOCK, codec="cachegen") as cached:
        groups = zip(cached.identity.groups, cached.prefixes.metas(prompt[0].numpy()), strict=True)
        stored = [(each.group.kind, codec_ids_of(cached.cache.tiers, metas)) for each, metas in groups]
        expected = {(GroupKind.KV, "cachegen-2"), (GroupKind.STATE, "lossless-2")}
        assert {(kind, codec) for kind, found in stored for codec, _ in found} == expected
        said(cached, prompt)
        assert cached.last is not None and cached.last.hit_tokens == 256
        ask = functools.partial(explained_groups, cached, prompt)
        assert ask(quality=1.0).hit_tokens == 256
        coarse = ask(quality=1e-6)
        assert (coarse.hit_tokens, coarse.verdict) == (0, MatchVerdict.COARSE)


def test_states_alone_leave_no_hook_and_answer_as_the_model_does_with_what_a_call_says(tmp_path: Path) -> None:
    prompt, model = prompt_of(300), model_of("mamba2")
    filled("mamba2", tmp_path, prompt)
    wanted: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.5, "pad_token_id": 0}
    with attach(model, tmp_path, block_tokens=BLOCK) as cached:
        # The penalty is for tokens of the whole prompt, also of those that are not run.
        assert torch.equal(cached.generate(prompt, **wanted), model.generate(prompt, **wanted))
        assert cached.last is not None and cached.last.hit_tokens == cached.hit_tokens(prompt) == 256
        assert not model._forward_pre_hooks
        assert cached.flush(FLUSH_S_MAX)
        assert assert_as_plain(cached, prompt_of(BLOCK - 1)) == 0


def test_a_state_of_too_many_rows_has_wider_ones() -> None:
    # 48 heads of 128 x 128, as Qwen3.5 27B has them.
    model, large = model_of("qwen3_next"), torch.randn(1, 48, 128, 128)
    cache = model(prompt_of(2)).past_key_values
    cache.layers[0].recurrent_states[0] = large.clone()
    room = StateRoom(group := model_groups(model, cache, BLOCK)[-1])
    room.write(0, read_states(cache, group))
    room.fill(cache, 2, large.device)
    assert torch.equal(cache.layers[0].recurrent_states[0], large)


def test_states_of_another_transformers_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = functools.partial(ModelIdentity, model_of("lfm2"), BLOCK, b"", b"model", is_exact=True)
    ours = identity().namespaces
    # As the code reads it: who imports transformers later may be handed another module of that name.
    monkeypatch.setattr("kvtide.engines.transformers.fingerprint.transformers.__version__", "6.0.1")
    is_ours = [one == other for one, other in zip(ours, identity().namespaces, strict=True)]
    assert is_ours == [not each.states for each in identity().groups]


@pytest.mark.parametrize("family", families("transformers", REFUSED))
def test_models_whose_states_do_not_go_on_are_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"not known to go on|cache of its own"):
        attach(model_of(family), tmp_path)


def test_model_over_several_devices_is_refused(tiny_model: Any) -> None:
    cache = tiny_model(torch.tensor([[0, 1]])).past_key_values
    cache.layers[-1].keys = cache.layers[-1].keys.to("meta")
    with pytest.raises(UnsupportedModel, match="its layers are on cpu, meta: load it onto one device"):
        model_groups(tiny_model, cache, BLOCK)


# Of several groups, of windows alone, of latents, of states alone.
@pytest.mark.parametrize("family", ["gemma3", "mistral", "deepseek_v3", "mamba2"])
@pytest.mark.parametrize(
    "options", [{"importance": 0.25}, {"importance": Impress(0.25)}, {"start_within_s": 0.5}, {"policy": "two-ended"}]
)
def test_what_takes_models_of_one_group_says_so(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="models of one group, not"):
        attach(model_of(family), tmp_path, **options)


@pytest.mark.parametrize("family", families("transformers", LOSSY))
def test_families_of_full_attention_load_in_part(family: str, tmp_path: Path) -> None:
    for hit_tokens in (0, 192):
        importance = Impress(0.25, is_guarded=False)
        with attach(model_of(family), tmp_path, block_tokens=64, importance=importance) as cached:
            cached.generate(prompt_of(200), max_new_tokens=1, do_sample=False)
            assert cached.flush(FLUSH_S_MAX) and cached.last is not None and cached.last.hit_tokens == hit_tokens
    assert cached.last.selected is not None and 0.25 <= cached.last.selected.tokens_share <= 1


def tensors_of(past: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for layer in past.layers:
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            found += [] if tensor is None else [tensor.clone()]
        for name in ("conv_states", "recurrent_states"):
            found += [each.clone() for each in getattr(layer, name, {}).values() if each is not None]
    return found


class Faulty:
    """Reads of a stack of tiers of which one in six of a group's goes wrong somehow. faults: how many did."""

    def __init__(self, read: Any, namespace: Namespace, seed: int) -> None:
        self._read, self._namespace, self._random, self.faults = read, namespace, random.Random(seed), 0

    def __call__(self, object_id: Any, buffer: memoryview, offset: int = 0) -> int | None:
        size: int | None = self._read(object_id, buffer, offset)
        fault = self._random.randrange(32)
        if size is None or object_id.namespace != self._namespace or fault > 4:
            return size
        self.faults += 1
        if fault == 0:
            raise OSError("a disk that fails")
        if fault == 1:
            return None
        if fault == 2:
            return self._random.randrange(size)
        place = self._random.randrange(min(size, len(buffer)))
        if fault == 3:
            buffer[place] ^= 1 << self._random.randrange(8)
            return size
        buffer[place : place + 64] = bytes(255 - each for each in buffer[place : place + 64])
        return size


# A family that has a group of each kind, and that group's name.
KINDS_OF_GROUPS = {
    "all tokens": ("llama", "attention 2x64"),
    "all tokens beside windows": ("gemma2", "attention 2x64"),
    "windows": ("gemma3", "attention 2x64 window 256"),
    "chunks": ("llama4", "attention 2x64 window 256"),
    "latents": ("deepseek_v3", "latent 64+512"),
    "states of linear attention": ("qwen3_next", "state float32"),
    "states of Mamba 2 alone": ("mamba2", "state float32"),
}


@pytest.mark.parametrize("kind", KINDS_OF_GROUPS)
def test_faulty_reads_of_a_group_never_give_a_wrong_tensor(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault_factor: int
) -> None:
    (family, name), prompt = KINDS_OF_GROUPS[kind], prompt_of(300)
    filled(family, tmp_path, prompt)
    limits = Limits(memory_bytes_max=1)
    with attach(model_of(family), tmp_path, block_tokens=BLOCK, limits=limits) as cached:
        good, outcomes, tiers = tensors_of(cached.restored(prompt)), Counter[bool](), cached.cache.tiers
        spaces = zip(cached.identity.groups, cached.identity.namespaces, strict=True)
        namespace = next(space for own, space in spaces if own.group.name == name)
        monkeypatch.setattr(tiers, "delete", lambda *arguments: False)
        faulty = Faulty(tiers.get_into, namespace, 1)
        monkeypatch.setattr(tiers, "get_into", faulty)
        while faulty.faults < FAULTS * fault_factor:
            found = tensors_of(cached.restored(prompt))
            outcomes[bool(found)] += 1
            if kind in ("all tokens", "latents"):
                # Full attention keeps what is before the block that did not come.
                pairs = zip(found, good[: len(found)], strict=True)
                assert all(torch.equal(one, other[:, :, : one.shape[2]]) for one, other in pairs)
            else:
                assert not found or all(map(torch.equal, found, good))
    assert outcomes[True] and outcomes[False]


def test_its_four_parts_make_one_file(gemma: LoadedModel, tmp_path: Path) -> None:
    data = gemma_file().read_bytes()
    assert (data[:4], len(data)) == (b"GGUF", 253113024)
    digest = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert hashlib.sha256(data).hexdigest() == digest
    assert gemma.tokenize("\n\nThe capital")[0] == 2
    # Transformers 5.19 forgets it, whose folder the others' would be.
    tokenizer = load_tokenizer(gemma.folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    assert tokenizer("The capital").input_ids[0] != 2
    # The whole file takes ten seconds to parse.
    writer = gguf.GGUFWriter(tmp_path / "begins.gguf", "gemma3")
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    _begin_texts(tokenizer, tmp_path / "begins.gguf")
    assert tokenizer("The capital").input_ids[:2] == [2, 818]


@pytest.mark.usefixtures("unhurried", "one_thread")
def test_a_restart_answers_as_the_model_does(gemma: LoadedModel, tmp_path: Path) -> None:
    # Behind the window of 512 tokens.
    prompt = torch.tensor([gemma.tokenize(evaluation_texts()[0].content)[:642]])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = gemma.model.generate(prompt, **settings)
    for restored in (0, 640):
        with attach(gemma.model, tmp_path, block_tokens=64, codec="lossless") as cached:
            assert torch.equal(cached.generate(prompt, **settings), plain)
            assert cached.last is not None and cached.last.hit_tokens == restored
            assert cached.flush(60)
