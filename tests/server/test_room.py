"""A server at its start says what the machine lacks, and takes what the machine gives."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.server.settings import ServerLimits, ServerSettings, check_memory, memory_bytes


def started(soft: int, hard: int) -> tuple[int, str]:
    """Start a server with so many descriptors; return how many it then has, and its log."""
    script = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" -m kvtide.cli serve --listen 127.0.0.1:0'
    command = ["sh", "-c", script, sys.executable]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert " on " in process.stdout.readline()
        found = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]
        process.terminate()
        return found, process.stderr.read()


def test_descriptors_are_raised_as_far_as_the_connections_need() -> None:
    found, log = started(1024, 10_000)
    assert found == 4096 + 256
    assert "connections_max" not in log


def test_too_few_descriptors_are_one_warning_that_says_what_to_do() -> None:
    found, log = started(512, 1024)
    assert found == 1024
    assert log.count("connections_max is 4096, descriptors are for 768") == 1
    assert "LimitNOFILE" in log


@pytest.mark.parametrize(("tiers", "is_too_much"), [(("memory://",), True), (("disk:///x",), False)])
def test_limits_above_the_memory_are_said(
    tiers: tuple[str, ...], is_too_much: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_memory(ServerSettings(tiers=tiers, limits=ServerLimits(memory_bytes_max=4 << 30)), 2 << 30)
    assert ("lower memory_bytes_max" in caplog.text) is is_too_much


def test_control_group_bounds_the_memory(tmp_path: Path) -> None:
    there = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == there
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 1 << 20
