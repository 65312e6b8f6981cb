"""A request never fails for the cache's sake: before `open`, while closing, after it, in a fork, without threads."""

import copy
import gc
import multiprocessing
import socket
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.doors.user import PROMPT, answer
from tests.engines.paged import pools
from tests.joints.changes import CHANGES, USES, make_model, use_cache
from tests.joints.conftest import HoldBack, attached, in_part, no_threads
from tests.joints.operations import in_child
from tests.joints.truth import prefill
from tests.store.test_cache import OpenCache, fill, metas_of
from tests.suites import smooth_bits
from transformers import GenerationConfig

from kvtide.block import BlockLayout
from kvtide.engines.transformers.importance import Ways
from kvtide.store import BlockSource, PendingBlock
from kvtide.store.cache import Cache
from kvtide.store.load import MissReason, Whole
from kvtide_lab.bench.services import valkey_server

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def store(tiny_model: Any, tmp_path: Path) -> Path:
    answer(tiny_model, tmp_path, PROMPT)
    return tmp_path


def test_without_threads_requests_run(tiny_model: Any, store: Path) -> None:
    plain = tiny_model.generate(PROMPT, **GREEDY)
    with attached(tiny_model, store) as cached:
        with no_threads():
            assert torch.equal(cached.generate(PROMPT, **GREEDY), plain)
            assert cached.last is not None and cached.last.hit_tokens == 0
        assert torch.equal(cached.generate(PROMPT, **GREEDY), plain)
        assert cached.last.hit_tokens == 96


def test_a_cache_that_opened_without_threads_stores_once_there_are_some(tiny_model: Any, tmp_path: Path) -> None:
    with no_threads():
        cached = attached(tiny_model, tmp_path)
        cached.cache.open()
        assert torch.equal(cached.generate(PROMPT, **GREEDY), tiny_model.generate(PROMPT, **GREEDY))
    cached.generate(PROMPT, **GREEDY)
    assert cached.last is not None and cached.last.blocks_queued == 6
    cached.cache.close()


def test_before_open_and_after_close_everything_is_a_miss(tiny_model: Any, store: Path) -> None:
    plain = tiny_model.generate(PROMPT, **GREEDY)
    cached = attached(tiny_model, store)
    for _ in range(2):
        assert cached.hit_tokens(PROMPT) == 0
        assert torch.equal(cached.generate(PROMPT, **GREEDY), plain)
        assert cached.last is not None and (cached.last.hit_tokens, cached.last.blocks_queued) == (0, 0)
        assert cached.restored(PROMPT).get_seq_length() == 0
        assert cached.flush(1)
        with cached:
            assert cached.hit_tokens(PROMPT) == 96


def test_closing_beside_loads_makes_them_misses(layout: BlockLayout, open_cache: OpenCache) -> None:
    metas = metas_of(layout, 8)
    fill(open_cache(codec="raw"), metas)

    def load_until_closed(cache: Cache) -> None:
        while cache.load(metas, Whole(lambda position, bits: None)).reason is not MissReason.CLOSED:
            cache.match([meta.id for meta in metas])

    for pause_s in (0.0, 0.001, 0.003, 0.01, 0.03):
        cache = open_cache(codec="raw")
        with ThreadPoolExecutor(3) as pool:
            loading = [pool.submit(load_until_closed, cache) for _ in range(3)]
            time.sleep(pause_s)
            cache.close()
            for each in loading:
                each.result(30)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_misses_at_once_and_writes_nothing(
    layout: BlockLayout, open_cache: OpenCache, tmp_path: Path
) -> None:
    metas = metas_of(layout, 4)
    cache = open_cache(tmp_path, "raw", load_s_max=300, close_s_max=300)
    pending = [PendingBlock(meta, lambda: lambda: smooth_bits(layout, 1)) for meta in metas]
    fill(cache, metas[:2])
    before = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*"))

    def child() -> None:
        report = cache.load(metas[:2], Whole(lambda position, bits: None))
        found = (report.reason, cache.match([meta.id for meta in metas]), cache.store(pending), cache.flush(60))
        cache.close()
        assert found == (MissReason.CLOSED, 0, 0, True)

    # While another thread holds the locks that the child inherits.
    with cache.guarded.counts._lock, cache._counts._lock:
        in_child(child)
    assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*")) == before
    assert cache.load(metas[:2], Whole(lambda position, bits: None)).blocks == 2


def run(script: str, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(store)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


ENDS = """
import atexit, sys
from kvtide.store import PendingBlock, cache_for
from kvtide.block import BlockLayout, KVDtype
from kvtide.codec import LosslessCodec
from tests.suites import smooth_bits
from tests.store.test_cache import metas_of

layout = BlockLayout(layers=3, tokens=16, kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32)
metas = metas_of(layout, 40)
pending = [PendingBlock(m, lambda: lambda: smooth_bits(layout, 1)) for m in metas]
cache = cache_for(sys.argv[1], LosslessCodec())
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise SystemError('the engine has failed')"])
def test_a_process_that_ends_without_close_stores_what_is_queued(end: str, tmp_path: Path) -> None:
    run(f"{ENDS}cache.open()\ncache.store(pending)\n{end}", tmp_path)
    check = "with cache:\n    print(cache.match([meta.id for meta in metas]))\n"
    assert run(ENDS + check, tmp_path).stdout.strip() == "40"


def test_at_interpreter_shutdown_loads_are_misses(tmp_path: Path) -> None:
    script = f"""{ENDS}
atexit.register(lambda: print(cache.load(metas, None).reason, cache.store(pending)))
cache.open()
cache.store(pending)
"""
    ended = run(script, tmp_path)
    assert (ended.returncode, ended.stdout.strip()) == (0, "MissReason.CLOSED 0"), ended.stderr


def test_a_child_of_multiprocessing_ends_at_once(layout: BlockLayout, open_cache: OpenCache) -> None:
    cache = open_cache(codec="raw")
    fill(cache, metas_of(layout, 1))
    with pytest.warns(DeprecationWarning) if sys.version_info >= (3, 12) else nullcontext():
        child = multiprocessing.get_context("fork").Process(target=cache.close)
        child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("is_in_config", [False, True])
def test_outputs_of_every_token_have_a_part_for_every_token(
    name: str, is_in_config: bool, tiny_model: Any, store: Path
) -> None:
    model, arguments = copy.deepcopy(tiny_model), {**GREEDY, "return_dict_in_generate": True}
    model.set_attn_implementation("eager")
    if is_in_config:
        settings = {**model.generation_config.to_dict(), name: True}
        arguments["generation_config"] = model.generation_config.from_dict(settings)
    else:
        arguments[name] = True
    with attached(model, store) as cached:
        found = cached.generate(PROMPT, **arguments)
        field = name.removeprefix("output_")
        assert found[field][0][0].shape == model.generate(PROMPT, **arguments)[field][0][0].shape
        assert cached.last is not None and name in str(cached.last.bypass)


def test_calls_are_those_of_the_plain_model(tiny_model: Any, store: Path) -> None:
    plain, config = tiny_model.generate(PROMPT, **GREEDY), GenerationConfig(**GREEDY, pad_token_id=0)
    with attached(tiny_model, store) as cached:
        assert torch.equal(cached.generate(PROMPT, config), plain)
        assert torch.equal(cached.generate(inputs=PROMPT, **GREEDY), plain)
        assert torch.equal(cached.generate(input_ids=PROMPT, generation_config=config), plain)
        for names in (
            ("past_key_values",),
            ("past_key_values", "attention_mask", "position_ids", "inputs_embeds"),
            ("stopping_criteria", "logits_processor", "generation_config", "streamer"),
        ):
            unset: dict[str, Any] = dict.fromkeys(names)
            assert torch.equal(cached.generate(PROMPT, **GREEDY, **unset), plain)
            assert cached.last is not None and cached.last.hit_tokens == 96
        embedded = {"inputs_embeds": tiny_model.model.embed_tokens(PROMPT), **GREEDY}
        assert torch.equal(cached.generate(**embedded), tiny_model.generate(**embedded))


# What one request has computed the next one finds, whether it is stored by then or not.

TWENTY_TOKENS: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
SHORT = {**TWENTY_TOKENS, "max_new_tokens": 6, "min_new_tokens": 6}


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_every_turn_finds_the_turns_before_it(codec: str, tiny_model: Any, tmp_path: Path, held_back: HoldBack) -> None:
    talk = torch.randint(1, 256, (1, 40), generator=torch.Generator().manual_seed(3))
    with attached(tiny_model, tmp_path, codec=codec) as cached:
        gate = held_back(cached.cache)
        for turn in range(5):
            said = cached.generate(talk, **TWENTY_TOKENS)
            assert torch.equal(said, tiny_model.generate(talk, **TWENTY_TOKENS))
            # The last token of an answer has not been run.
            assert cached.last.hit_tokens == ((talk.shape[1] - 11) // 16 * 16 if turn else 0)
            talk = torch.cat([said, talk[:, :10]], dim=1)
        # Closing waits for what is queued.
        gate.set()


def test_block_that_waits_is_not_queued_again(layout: BlockLayout, open_cache: OpenCache, held_back: HoldBack) -> None:
    cache = open_cache("memory://")
    gate, captured = held_back(cache), []

    def capture() -> BlockSource:
        captured.append(1)
        return lambda: smooth_bits(layout, 1)

    blocks = [PendingBlock(meta, capture) for meta in metas_of(layout, 2)]
    assert cache.store(blocks) == cache.store(blocks) == 2
    gate.set()
    assert cache.flush(60) and (len(captured), cache.stats().blocks_stored) == (2, 2)
    cache.check()


def test_what_was_queued_and_not_stored_is_a_miss(tiny_model: Any, tmp_path: Path) -> None:
    with attached(tiny_model, tmp_path) as cached:
        cached.cache.tiers.put_from = lambda *rest: False  # type: ignore[method-assign]
        cached.generate(PROMPT, max_new_tokens=2)
        assert cached.flush(60) and cached.hit_tokens(PROMPT) == 0


def test_connectors_find_what_their_workers_queued(open_cache: OpenCache, tmp_path: Path, held_back: HoldBack) -> None:
    engine = pools.ToyEngine(open_cache, str(tmp_path))
    held_back(engine.worker.cache)
    engine.worker.cache.flush = lambda timeout_s: True  # type: ignore[method-assign]
    engine.compute("a", pools.PROMPT)
    assert engine.load("b", pools.PROMPT)[0::2] == (24, set())
    engine.finish("a")
    engine.finish("b")


def test_importance_stores_what_is_new(tiny_model: Any, tmp_path: Path) -> None:
    hits = []
    with in_part(tiny_model, tmp_path) as cached:
        for tokens in (40, 70, 100, 100):
            cached.generate(PROMPT[:, :tokens], max_new_tokens=2)
            assert cached.flush(60) and cached.last is not None
            hits.append(cached.last.hit_tokens)
    assert hits == [0, 32, 64, 96]


def test_importance_loads_whole_what_is_faster_whole(tiny_model: Any, tmp_path: Path) -> None:
    def selects(known: tuple[float, float]) -> bool:
        with in_part(tiny_model, tmp_path) as cached:
            for is_part, seconds in zip((True, False), known, strict=True):
                for is_near in (False, True):
                    cached._importance.ways.note(is_part, is_near, 1000, seconds, cached._clock.monotonic_s())
            cached.generate(PROMPT, max_new_tokens=2)
            assert cached.flush(60) and cached.last is not None
            return cached.last.selected is not None

    assert not selects((1.0, 2.0))  # Nothing is stored yet.
    assert selects((1.0, 2.0))
    assert not selects((2.0, 1.0))


def test_ways_try_both_and_keep_to_the_faster() -> None:
    ways, chosen = Ways(), []
    for now_s in range(4):
        is_part = ways.is_part_faster(is_near=False, now_s=now_s)
        ways.note(is_part, False, 1000, 2.0 if is_part else 1.0, now_s)
        chosen.append(is_part)
    assert chosen == [True, False, False, False]


@pytest.mark.parametrize(("part_s", "is_taken"), [(0.98, False), (0.9, True)])
def test_a_part_that_gains_next_to_nothing_is_not_taken(part_s: float, is_taken: bool) -> None:
    ways = Ways()
    ways.note(True, False, 1000, part_s, 0.0)
    ways.note(False, False, 1000, 1.0, 0.0)
    assert ways.is_part_faster(False, 0.0) == is_taken


def test_two_models_with_importance_do_not_touch_each_other(tiny_model: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    models = [tiny_model, other]

    def answers(number: int) -> list[torch.Tensor]:
        with in_part(models[number], tmp_path / str(number)) as cached:
            # What is learnt would change what is selected.
            cached._importance.learner.note = lambda *arguments: False  # type: ignore[method-assign]
            cached.generate(PROMPT, **SHORT)
            assert cached.flush(60)
            found = []
            for _ in range(8):
                cached._importance.ways = Ways()
                cached._importance.refused_s.clear()
                found.append(cached.generate(PROMPT, **SHORT))
                assert cached.last is not None and cached.last.selected is not None
            return found

    alone = [answers(number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(answers, range(2)))
    for one, both in zip(alone, together, strict=True):
        assert all(torch.equal(answer, one[0]) for answer in (*one, *both))


# What is stored under a prompt's keys is that prompt's cache of this very model, whatever is done to either later.

WITH_CACHE = {**GREEDY, "return_dict_in_generate": True}


@pytest.mark.parametrize("use", USES)
def test_use_of_the_returned_cache_changes_nothing_that_was_queued(
    use: str, tiny_model: Any, tmp_path: Path, held_back: HoldBack
) -> None:
    with attached(tiny_model, tmp_path) as cached:
        gate = held_back(cached.cache)
        use_cache(use, tiny_model, cached.generate(PROMPT, **WITH_CACHE).past_key_values, PROMPT, back=60)
        gate.set()
    plain = prefill(tiny_model, PROMPT)
    with attached(tiny_model, tmp_path) as again:
        restored = again.restored(PROMPT)
        assert restored.get_seq_length() == 96
        for one, other in zip(restored.layers, plain.layers, strict=True):
            assert torch.allclose(one.keys, other.keys[:, :, :96], atol=1e-5)
            assert torch.allclose(one.values, other.values[:, :, :96], atol=1e-5)
        assert torch.equal(again.generate(PROMPT, **GREEDY), tiny_model.generate(PROMPT, **GREEDY))


def test_queued_blocks_keep_no_cache_alive(tiny_model: Any, tmp_path: Path, held_back: HoldBack) -> None:
    with attached(tiny_model, tmp_path) as cached:
        gate = held_back(cached.cache)
        output = cached.generate(PROMPT, **WITH_CACHE)
        layers = [weakref.ref(layer.keys) for layer in output.past_key_values.layers]
        del output
        gc.collect()
        assert cached.last is not None and cached.last.blocks_queued == 6
        assert not any(layer() is not None for layer in layers)
        gate.set()


def test_loadings_that_differ_in_buffers_alone_share_nothing(tiny_model: Any, tmp_path: Path) -> None:
    """As `from_pretrained(dtype=bfloat16)`, which keeps frequencies in float32, and `.to(bfloat16)`, which does not."""
    cast = copy.deepcopy(tiny_model).to(torch.bfloat16)
    loaded = copy.deepcopy(cast)
    loaded.model.rotary_emb.inv_freq = tiny_model.model.rotary_emb.inv_freq.clone()
    answer(cast, tmp_path, PROMPT)
    with attached(loaded, tmp_path) as cached:
        assert cached.hit_tokens(PROMPT) == 0
    assert answer(copy.deepcopy(loaded), tmp_path, PROMPT).hit_tokens == 0


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("is_inferred", [False, True])
def test_changed_model_is_another_model_until_it_is_changed_back(kind: str, is_inferred: bool, tmp_path: Path) -> None:
    with torch.inference_mode(is_inferred):
        model = make_model()
    ids = PROMPT % model.config.vocab_size
    with attached(model, tmp_path) as cached:
        plain = cached.generate(ids, **GREEDY)
        assert cached.flush(60)
        with CHANGES[kind](model):
            answer = cached.generate(ids, **GREEDY)
            assert cached.last is not None and cached.last.hit_tokens == 0
            assert torch.equal(answer, model.generate(ids, **GREEDY))
            # Nor does what it computes now go under the old name, or the old answer to the new one.
            assert torch.equal(cached.generate(ids, **GREEDY), answer)
    with attached(model, tmp_path) as cached:
        assert torch.equal(cached.generate(ids, **GREEDY), plain)


def test_a_fingerprint_of_the_users_own_names_the_model_until_it_changes(tiny_model: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    with attached(model, tmp_path, fingerprint=b"release 7") as cached:
        cached.generate(PROMPT, **GREEDY)
        assert cached.flush(60) and cached.hit_tokens(PROMPT) == 96
        model.model.layers[1].self_attn.k_proj.weight.data.mul_(1.5)
        cached.generate(PROMPT, **GREEDY)
        assert cached.last is not None and cached.last.hit_tokens == 0
        cached.weights_changed(b"release 8")
        assert cached.hit_tokens(PROMPT) == 0


def test_autocast_is_left_alone(tiny_model: Any, tmp_path: Path) -> None:
    with attached(tiny_model, tmp_path) as cached, torch.autocast("cpu", torch.bfloat16):
        cached.generate(PROMPT, **GREEDY)
        assert cached.last is not None and "autocast" in str(cached.last.bypass)


def test_padding_that_transformers_hides_is_hidden(tiny_model: Any, tmp_path: Path) -> None:
    padded = torch.tensor([[0] * 8 + list(range(1, 60))])
    with attached(tiny_model, tmp_path) as cached:
        hits = []
        for _ in range(2):
            assert torch.equal(cached.generate(padded, **GREEDY), tiny_model.generate(padded, **GREEDY))
            assert cached.last is not None and cached.last.bypass is None
            hits.append(cached.last.hit_tokens)
            assert cached.flush(60)
        # Its tokens alone have names: the padding before them is nobody's.
        assert hits == [0, 48]
        assert cached.hit_tokens(padded[:, 8:]) == 48
        padded[0, 20] = 0
        assert torch.equal(cached.generate(padded, **GREEDY), tiny_model.generate(padded, **GREEDY))
        assert "hides tokens" in str(cached.last.bypass)


def test_valkey_holds_the_finest(tiny_model: Any) -> None:
    with valkey_server() as valkey:
        for codec, expected in (("cachegen:4", 0), ("cachegen:1", 0), ("cachegen:4", 96), ("cachegen:1", 96)):
            found = answer(tiny_model, f"valkey://127.0.0.1:{valkey.port}", PROMPT, codec=codec)
            assert found.hit_tokens == expected


def test_look_up_waits_once_for_a_silent_server_and_finds_what_is_here(
    tmp_path: Path, layout: BlockLayout, open_cache: OpenCache
) -> None:
    metas = metas_of(layout, 3)
    fill(open_cache(tmp_path), metas[:2])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cache = open_cache(f"disk://{tmp_path} http://127.0.0.1:{silent.getsockname()[1]}")
        started_s = time.monotonic()
        assert [cache.match([meta.id for meta in metas], wait_s=0.3) for _ in range(9)] == 9 * [2]
        # Without the memory of it nine times as long.
        assert 0.3 <= time.monotonic() - started_s < 2.7
