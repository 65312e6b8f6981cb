from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_cli import refused

from kvtide.clock import SystemClock
from kvtide.server.settings import read_settings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.http.tier import http_tier

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "words",
    [
        "--listen nowhere",
        "--listen 0.0.0.0:7421",
        "--listen 203.0.113.1:7421 --open-to-all",
        "--tier ftp://x",
        "--config /absent.toml",
    ],
)
def test_bad_arguments_are_one_line(words: str) -> None:
    refused("serve", *words.split())


def test_example_configuration_is_valid() -> None:
    settings = read_settings(ROOT / "deploy/kvtide.toml", {})
    assert [grant.tenant for grant in settings.grants] == ["search", "operators"]
    assert settings.sending.weights == {"search": 2.0}


def test_unix_socket_serves_and_is_taken_over_from_a_killed_server(tmp_path: Path) -> None:
    path = tmp_path / "kvtide.sock"
    for _ in range(2):
        command = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", f"unix:{path}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and str(path) in process.stdout.readline()
            tier = http_tier(f"http+unix://{path}", SystemClock())
            tier.open()
            assert tier.put_from(object_id(1), object_bytes(1)) and tier.contains(object_id(1))
            tier.close()
            process.kill()
