from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import ServerProcess

from kvtide.clock import SystemClock
from kvtide.server.auth import token_digest
from kvtide.server.settings import read_settings
from kvtide.testing.tier_suite import object_bytes, object_id
from kvtide.tier.http.tier import http_tier

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtide.cli", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--listen", "nowhere"),
        ("--listen", "0.0.0.0:7421"),
        ("--listen", "203.0.113.1:7421", "--open-to-all"),
        ("--tier", "ftp://x"),
        ("--config", "/absent.toml"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    ran = run("serve", *arguments)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and "Traceback" not in ran.stderr


def test_server_is_warm_after_a_restart(tmp_path: Path) -> None:
    for is_first in (True, False):
        server = ServerProcess("--tier", "memory://", "--tier", f"disk://{tmp_path}")
        tier = http_tier(server.url, SystemClock())
        tier.open()
        assert tier.contains(object_id(1)) is not is_first
        assert tier.put_from(object_id(1), object_bytes(1))
        tier.close()
        assert server.terminate() == 0


def test_token_goes_with_its_digest() -> None:
    found = re.fullmatch(r"token        = (\S{43})\ntoken_sha256 = ([0-9a-f]{64})\n", run("token").stdout)
    assert found and token_digest(found[1]) == found[2]


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
