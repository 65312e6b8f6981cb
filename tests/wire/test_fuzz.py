"""Fuzz targets for requests and objects: driven by Atheris for a bounded time, and by mutated good inputs anywhere."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.wire.fuzz_targets import TARGETS, seeds

ROOT = Path(__file__).parents[2]
# CI gives the native fuzzers a minute each; these share ten seconds.
FUZZ_S = max(1, int(os.environ.get("KVTIDE_FUZZ_S", "6")) // 12)
SEED = 20261121


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the data with up to four bytes changed, dropped, repeated or put in."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(made) + 1) for _ in range(2))
        made[at:end] = rng.choice((b"", made[at:end] * 2, bytes(end - at), rng.randbytes(end - at)))[: 1 << 16]
    return bytes(made)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_good_input_is_taken_or_refused(name: str) -> None:
    rng = random.Random(SEED)
    for data in seeds(name):
        TARGETS[name](data)
        for _ in range(1000):
            TARGETS[name](mutated(data, rng))


@pytest.mark.parametrize("name", TARGETS)
def test_atheris_finds_nothing(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="Atheris is not installed")
    for number, data in enumerate(seeds(name)):
        (tmp_path / str(number)).write_bytes(data)
    options = [f"-max_total_time={FUZZ_S}", f"-seed={SEED}", f"-artifact_prefix={tmp_path}/"]
    fuzzer = [sys.executable, "-m", "tests.wire.fuzz", name, str(tmp_path), *options]
    # libFuzzer bounds its highest resident memory, which a program that is executed inherits: through a shell it is a
    # shell's, not that of this process with all that the tests before have loaded.
    command = ["sh", "-c", '"$@"; exit $?', "sh", *fuzzer]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=FUZZ_S + 200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "DONE" in run.stderr
