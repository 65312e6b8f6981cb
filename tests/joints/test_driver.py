"""Random interleavings of all that users do with caches, against the plain model (see `driver`)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS, SECONDS_NIGHTLY = 15, 600
SEED = 20261122
# To start and to end beside the time of the run; a hung step ends the driver before.
SLACK_S = 200


@pytest.mark.timeout(SECONDS_NIGHTLY + 2 * SLACK_S)
def test_no_order_of_operations_gives_a_wrong_answer_or_an_error(request: pytest.FixtureRequest) -> None:
    is_nightly = request.config.getoption("--nightly")
    seconds, seed = (SECONDS_NIGHTLY, int(time.time())) if is_nightly else (SECONDS, SEED)
    command = [sys.executable, "-m", "tests.joints.driver", "--seconds", str(seconds), "--seed", str(seed)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds + SLACK_S)
    print(ran.stderr, ran.stdout)
    found = json.loads(ran.stdout)
    assert (found["wrong_answers"], found["failed"], ran.returncode) == (0, 0, 0), ran.stderr
    assert found["steps"] > 25
