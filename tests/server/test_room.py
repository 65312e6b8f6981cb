"""A server at its start says what the machine lacks, and takes what the machine gives."""

from __future__ import annotations

import resource
import subprocess
import sys


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
