"""Processes of servers that hang: stopped as they are, and going on later."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtide_lab.bench.services import wait_until


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        # Threads stop one by one: beside a busy neighbour the last ones still answer for a while.
        wait_until(lambda: _are_stopped(pid), f"all threads of {pid} to stop")
        yield
    finally:
        # Who hung may have been ended for it.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _are_stopped(pid: int) -> bool:
    try:
        stats = [path.read_text(encoding="ascii") for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        # One ended meanwhile.
        return False
    return all(stat.rpartition(")")[2].split()[0] in "Tt" for stat in stats)
