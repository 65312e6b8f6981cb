"""The main job on the real model, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A dozen processes that load torch and the model, the first of which converts it.
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]
KEYS = {
    "machine",
    "cpu",
    "commit",
    "command",
    "prompt_tokens",
    "hit_tokens",
    "cold_ttft_s",
    "warm_ttft_s",
    "speedup",
    "identical_tokens",
    "raw_bytes",
    "stored_bytes",
    "codec",
}


def test_demo_restores_every_full_block_and_answers_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide.cli", "demo", "--store", str(tmp_path / "store"), "--json"]
    # A shorter text than the demo's own, for time's sake; the speed is judged by the demo itself, not here.
    command += ["--prefix-tokens", "600", "--answer-tokens", "8"]
    for is_second in (False, True):
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
        assert run.returncode == 0, run.stderr
        result = json.loads(run.stdout)
        assert set(result) >= KEYS
        assert result["hit_tokens"] == 512
        assert result["identical_tokens"] is True
        assert result["was_warm"] is is_second
        assert 0 < result["stored_bytes"] < result["raw_bytes"]
        tide = result["tide"]
        assert tide["codec"] == "tide" and tide["hit_tokens"] == 512
        assert 5 * tide["stored_bytes"] < result["stored_bytes"]
        assert 0 < tide["kl"] < 0.1
        assert ("from an earlier run" in run.stderr) is is_second
    assert (tmp_path / "store.png").read_bytes().startswith(b"\x89PNG")
