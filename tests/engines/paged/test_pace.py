"""Load or compute: what the measured speeds say."""

from __future__ import annotations

import pytest

from kvtide.engines.paged.pace import DEADLINE_S_MIN, MEMORY_S, Throughput
from kvtide.engines.paged.settings import ConnectorSettings


def test_loads_are_tried_while_a_speed_is_unknown() -> None:
    pace = Throughput(10.0)
    assert pace.is_load_faster(1000, 0.0)
    pace.note_prefill(1000, 1.0, 0.0)
    assert pace.is_load_faster(1000, 0.0)


def test_slower_load_is_declined_until_its_speed_is_forgotten() -> None:
    pace = Throughput(10.0)
    pace.note_prefill(1000, 1.0, 0.0)
    pace.note_load(1000, 2.0, 0.0)
    assert not pace.is_load_faster(1000, 1.0)
    assert pace.is_load_faster(1000, MEMORY_S + 1)


def test_newer_samples_weigh_more() -> None:
    pace = Throughput(10.0)
    pace.note_prefill(1000, 1.0, 0.0)
    pace.note_load(1000, 2.0, 0.0)
    pace.note_load(1000, 0.1, 1.0)
    assert pace.is_load_faster(1000, 1.0)


def test_short_steps_say_nothing() -> None:
    pace = Throughput(10.0)
    pace.note_prefill(8, 1.0, 0.0)
    pace.note_load(8, 100.0, 0.0)
    assert pace.deadline_s(100_000, 0.0) == 10.0


def test_deadline_is_what_computing_would_take_within_bounds() -> None:
    pace = Throughput(10.0)
    assert pace.deadline_s(1000, 0.0) == 10.0
    pace.note_prefill(1000, 1.0, 0.0)
    assert pace.deadline_s(2000, 0.0) == 2.0
    assert pace.deadline_s(50_000, 0.0) == 10.0
    assert pace.deadline_s(1, 0.0) == DEADLINE_S_MIN


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
        ({"store": "memory://", "device_kernels": True, "device_multiprocessors": 0}, "device_multiprocessors must"),
        ({"store": "memory://", "device_kernels": True, "device_bytes_max": -1}, "device_bytes_max not negative"),
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
