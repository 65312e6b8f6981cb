"""A profile that finds its own way: calibrated into a store by one process, used by another that was told nothing."""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.store.test_profiles import codec_ids_of
from transformers import AutoModelForCausalLM

from kvtide.codec import Profile
from kvtide.engines import calibrate_command, option_bytes, read_profile
from kvtide.engines.calibrate import restored_kl
from kvtide.engines.calibrate.texts import evaluation_texts
from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.store.profiles import ProfileStore

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    # Of fewer experts the choice jumps with the smallest change: KL 5e-3 would take finer steps than tide has.
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": None},
}
BLOCK = 128
# Not among the texts that profiles are fitted on. A model without a tokenizer takes bytes.
TEXT = evaluation_texts()[0].content.encode()
JUDGED = torch.tensor([list(TEXT[:1000])])


def saved(family: str, folder: Path) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def kvtide(*words: str) -> None:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "kvtide.cli", *words, *(("--tokens", "1000") if words[0] == "calibrate" else ())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr


def loaded(folder: Path, dtype: str = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def stored_by(cached: CachedModel) -> list[str]:
    """Answer, and return the codec of each stored block."""
    cached.generate(JUDGED, max_new_tokens=2, do_sample=False)
    assert cached.flush(60)
    metas = cached.prefixes.metas(JUDGED[0].numpy())[0]
    return [codec for codec, _ in codec_ids_of(cached.cache.tiers, metas)]


@pytest.fixture(scope="module", params=FAMILIES)
def calibrated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder, and a store that holds its profile and nothing else."""
    tmp_path = tmp_path_factory.mktemp("calibrated")
    folder = saved(request.param, tmp_path / "model")
    kvtide("calibrate", str(folder), "--store", str(tmp_path / "store"))
    return folder, tmp_path / "store"


def test_calibrating_into_the_store_is_all_that_tide_needs(calibrated: tuple[Path, Path], tmp_path: Path) -> None:
    folder, store = calibrated[0], str(shutil.copytree(calibrated[1], tmp_path / "store"))
    model = loaded(folder)
    exact = attach(model, tmp_path / "exact", block_tokens=BLOCK)
    with attach(model, store, codec="tide", block_tokens=BLOCK) as cached, exact:
        assert stored_by(cached) == ["tide-1"] * (JUDGED.shape[1] // BLOCK)
        assert stored_by(exact) == ["lossless-2"] * (JUDGED.shape[1] // BLOCK)
        said = list(TEXT[1000:1064])
        assert 0 < restored_kl(cached, exact, JUDGED, said) <= 5e-3
    # The same weights in another type.
    with attach(loaded(folder, "bfloat16"), store, codec="tide", block_tokens=BLOCK) as cached:
        assert set(stored_by(cached)) == {"tide-1"}


def test_command_in_the_log_makes_the_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, store = loaded(saved("Llama", tmp_path / "model")), str(tmp_path / "store")
    options: dict[str, Any] = {"codec": "tide-light", "block_tokens": BLOCK, "fingerprint": b"\xffmine"}
    with caplog.at_level(logging.WARNING), attach(model, store, **options) as cached:
        assert set(stored_by(cached)) == {"lossless-2"}
        assert cached.cache.stats().blocks_without_profile == JUDGED.shape[1] // BLOCK
    (said,) = [each.message for each in caplog.records if each.name.startswith("kvtide")]
    command = shlex.split(said.partition(": ")[2])
    assert command[0] == "kvtide"
    kvtide(*command[1:])
    with attach(model, store, **options) as cached:
        stored_by(cached)
        assert cached.last is not None and cached.last.hit_tokens > 0
    with attach(model, f"{store}-other", **options) as cached:
        assert set(stored_by(cached)) == {"lossless-2"}
    tail = torch.cat([JUDGED.flip(1), JUDGED], dim=1)
    with attach(model, store, **options) as cached:
        cached.generate(tail, max_new_tokens=2, do_sample=False)
        assert cached.flush(60)
        assert {codec for codec, _ in codec_ids_of(cached.cache.tiers, cached.prefixes.metas(tail[0].numpy())[0])} == {
            "tide-1"
        }


@pytest.mark.parametrize("calibrated", ["Llama"], indirect=True)
def test_other_weights_do_not_take_the_profile(calibrated: tuple[Path, Path], tmp_path: Path) -> None:
    model, store = loaded(calibrated[0]), str(shutil.copytree(calibrated[1], tmp_path / "store"))
    with attach(model, store, codec="tide", block_tokens=BLOCK) as cached:
        assert set(stored_by(cached)) == {"tide-1"}
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert set(stored_by(cached)) == {"lossless-2"}


@pytest.mark.parametrize("calibrated", ["Llama"], indirect=True)
def test_profile_of_one_tenant_is_no_others(calibrated: tuple[Path, Path], tmp_path: Path) -> None:
    folder, store = calibrated[0], str(shutil.copytree(calibrated[1], tmp_path / "store"))
    model, file = loaded(folder), tmp_path / "mine.kvprofile"
    options: dict[str, Any] = {"codec": "tide", "block_tokens": BLOCK}
    with attach(model, store, **options) as cached:
        own = ProfileStore(cached.cache.tiers).read(cached.cache.profiles.codec.profile or b"")
    assert own is not None
    # Its curve says a twentieth of the loss: blocks keep its promise and lose more than anybody asked for.
    lying = dict(own.arrays) | {"curve": own.arrays["curve"] * np.array([1, 1, 0.05], dtype=np.float32)}
    layout = model_layout(model, BLOCK)
    file.write_bytes(Profile.make(own.kind, own.model, layout, (own.texts, own.tokens), lying).to_bytes())
    kvtide("profile", "put", str(file), "--model", str(folder), "--store", store)
    with attach(model, store, tenant_salt=b"mine", **options) as cached:
        assert set(stored_by(cached)) == {"lossless-2"}
    file.write_bytes(own.to_bytes())
    kvtide("profile", "put", str(file), "--model", str(folder), "--store", store, "--tenant-salt", "mine")
    with attach(model, store, tenant_salt=b"mine", **options) as cached:
        cached.generate(JUDGED.flip(1), max_new_tokens=2, do_sample=False)
        assert cached.flush(60)
        metas = cached.prefixes.metas(JUDGED.flip(1)[0].numpy())[0]
        assert set(codec_ids_of(cached.cache.tiers, metas)) == {("tide-1", own.digest)}


def test_command_names_fingerprints_and_no_passwords() -> None:
    command = calibrate_command("/no/folder", "http://user:secret@host:1", "tide-deep", b"\x00\x01", is_salted=True)
    expected = "kvtide calibrate MODEL_FOLDER --store http://…@host:1 --codec tide-deep --fingerprint hex:0001"
    expected += " --tenant-salt TENANT_SALT"
    assert shlex.split(command) == expected.split()
    for fingerprint in (b"mine", b"a b", b"hex:1", b"\xff"):
        words = shlex.split(calibrate_command("/", "s", "tide-layer", fingerprint, is_salted=False))
        assert option_bytes(words[-1]) == fingerprint


def test_memory_bound_of_calibration_holds(tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path / "model")
    words = ("calibrate", str(folder), "--store", str(tmp_path / "store"), "--memory-bytes", str(64 << 20))
    command = [sys.executable, "-m", "kvtide.cli", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode != 0
    assert not list((tmp_path / "store").rglob("*.seg"))


def test_calibration_stops_in_time_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder, store = saved("Llama", tmp_path / "model"), str(tmp_path / "store")
    words = ("calibrate", str(folder), "--store", store, "--tokens", "600")
    command = [sys.executable, "-m", "kvtide.cli", *words]
    stopped = subprocess.run([*command, "--seconds", "0.01"], capture_output=True, text=True, timeout=300, check=False)
    assert stopped.returncode == 2 and "run it again to go on" in stopped.stderr
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "curve" in ran.stderr
    assert not list((tmp_path / "home" / "kvtide" / "calibrations").iterdir())


def test_snippets_make_a_profile(tmp_path: Path) -> None:
    folder, file = saved("Llama", tmp_path / "model"), tmp_path / "mine.kvprofile"
    kvtide("calibrate", str(folder), "--snippets", "20", "--codec", "tide-light", "-o", str(file))
    # As many of random tokens, and one in six held out.
    assert read_profile(file).texts == 40 - 40 // 6
