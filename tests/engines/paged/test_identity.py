"""Fingerprints of weight files: any change of a byte or setting shows; unchanged files are not read again."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from kvtide.engines.gate import WriteGate
from kvtide.engines.paged import identity
from kvtide.engines.settings import ConnectorSettings

LOCAL = ("/var/cache", "disk:///c", "memory://")


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


def test_unchanged_file_is_read_once(folder: Path) -> None:
    first = identity.files_fingerprint(folder, {})
    with patch.object(identity, "_read_digest", side_effect=AssertionError("read again")):
        assert identity.files_fingerprint(folder, {}) == first


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
    ("store", "codec"), [*((each, "raw") for each in LOCAL), *((each, "lossless") for each in ("http://h:1", "s3://b"))]
)
def test_codec_suits_the_store_unless_it_is_given(store: str, codec: str) -> None:
    assert ConnectorSettings.parse({"store": store}).codec == codec
    assert ConnectorSettings.parse({"store": store, "codec": "tide"}).codec == "tide"
