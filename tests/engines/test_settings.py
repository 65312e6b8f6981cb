"""A connector's options, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.codec.tide_profiles import fitted

from kvtide.block import BlockLayout, KVDtype
from kvtide.engines import installed_profiles
from kvtide.engines.settings import ConnectorSettings

KERNELS: dict[str, object] = {"device_kernels": True}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "store"),
        ({"store": "memory://", "codex": "raw"}, "codex"),
        ({"store": "memory://", "load": "later"}, "load"),
        ({"store": "memory://", "block_tokens": -1}, "block_tokens"),
        ({"store": "memory://", "match_s_max": 0.0}, "match_s_max"),
        ({"store": "memory://", "load_threads": 0}, "load_threads"),
        (
            {"store": "memory://", "device_kernels": True, "device_multiprocessors": 0},
            r">= 1 - at `\$.device_multiprocessors`",
        ),
        ({"store": "memory://", **KERNELS, "device_bytes_max": -1}, r">= 0 - at `\$.device_bytes_max`"),
        ({"store": "memory://", "device_multiprocessors": 8}, "device_multiprocessors .* needs device_kernels"),
        ({"store": "memory://", "device_bytes_max": 1 << 30}, "device_bytes_max .* needs device_kernels"),
        ({"store": "memory://", "device_kernels": "yes"}, "device_kernels"),
    ],
)
def test_bad_options_are_refused_with_their_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ConnectorSettings.parse(options)


def test_options_that_the_engine_s_device_does_not_take_are_refused() -> None:
    layers, kernels = (
        ConnectorSettings.parse({"store": "memory://", **each}) for each in ({"load": "layers"}, KERNELS)
    )
    layers.check_device("cpu")
    kernels.check_device("cuda")
    with pytest.raises(ValueError, match="layers is for engines on a processor"):
        layers.check_device("cuda")
    with pytest.raises(ValueError, match="device_kernels is for engines on a CUDA device, this one is on cpu"):
        kernels.check_device("cpu")


def test_kernels_are_for_those_who_ask() -> None:
    assert not ConnectorSettings.parse({"store": "memory://"}).device_kernels
    assert ConnectorSettings.parse({"store": "memory://", **KERNELS, "device_bytes_max": 1}).device_kernels


def test_blocks_are_whole_pages() -> None:
    settings = ConnectorSettings.parse({"store": "memory://"})
    assert [settings.block_tokens_for(page) for page in (16, 48, 128, 256)] == [128, 96, 128, 256]
    with pytest.raises(ValueError, match="multiple of the engine's page"):
        ConnectorSettings.parse({"store": "memory://", "block_tokens": 24}).block_tokens_for(16)


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
    assert [each.request_options(params).is_latest for each in (one, every) for params in ({}, asked)] == [
        False,
        True,
        True,
        True,
    ]
