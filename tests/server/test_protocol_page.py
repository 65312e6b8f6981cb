"""The transcript in docs/protocol.md is what curl and the server say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.servers import running_server

ROOT = Path(__file__).parent.parent.parent


def transcript() -> list[tuple[str, str]]:
    """Return the page's commands, each with what it prints."""
    page = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    found = re.search(r"```console\n(.*?)```", page, flags=re.S)
    assert found
    parts = re.split(r"^\$ ", found[1], flags=re.M)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_says_what_the_page_shows() -> None:
    steps = transcript()
    assert len(steps) > 8
    marker = "=== next ==="
    script = "\n".join(f"{command}\necho '{marker}'" for command, _ in steps)
    with running_server() as server:
        ran = subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT / "tests/golden",
            env={"SERVER": server.url, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
    came = ran.stdout.replace("\r\n", "\n").split(f"{marker}\n")
    assert [output for _, output in steps] == came[:-1]
