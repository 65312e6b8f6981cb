"""Settings and their bounds. The only module that reads the environment."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

# The salt that keeps a tenant apart, for commands: their arguments are seen by all users of the machine.
TENANT_SALT_VARIABLE = "KVTIDE_TENANT_SALT"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of a cache in one place. ValueError for one not positive, too large or not whole (times may be)."""

    memory_bytes_max: int = 1 << 30
    disk_bytes_max: int = 16 << 30
    # Of an engine's device, where it hands its memory to the cache.
    device_bytes_max: int = 1 << 30
    # Blocks that wait to be encoded and stored, by the raw bytes that they keep alive.
    store_queue_bytes_max: int = 1 << 30
    # Memory that encoding one block may take besides the block; a codec that needs more gives way to `lossless`.
    encode_scratch_bytes_max: int = 256 << 20
    # Blocks that the index knows at most, at a few hundred bytes each.
    index_blocks_max: int = 1 << 20
    # Half the cores, two to eight: one thread copies 5 GB/s, disks and devices take more.
    load_threads: int = max(2, min(8, (os.cpu_count() or 1) // 2))
    # A load that has no deadline of its own is given up after this long.
    load_s_max: float = 30.0
    close_s_max: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, is_time = getattr(self, name), "_s_" in name
            most, kind = (threading.TIMEOUT_MAX, "") if is_time else (sys.maxsize, "whole ")
            if not (isinstance(value, (int, float) if is_time else int) and 0 < value <= most):
                raise ValueError(f"{name} must be a positive {kind}number up to {most:.0f}, got {value!r}")


def wait_passively() -> None:
    """Let the engine's threads, and those of child processes, sleep while they wait, unless the user said otherwise.

    Spinning threads cost a busy machine ten times their work: 4.8 s against 0.36 s for a suffix of 20 tokens beside one
    busy process. Works only before torch is imported, so that the command line calls it first.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def step_back(niceness: int) -> None:
    """Let this thread give way to others by so much, where a thread has a niceness of its own and may change it."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))


def cache_home() -> Path:
    """Return kvtide's directory in the user's cache directory; nothing is created. A user without a home has none."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - knows of no home
    return Path("/dev/null" if folder.startswith("~") else folder) / "kvtide"


def environment_variable(name: str) -> str | None:
    """Return a variable that the user names, None if it is not set."""
    return os.environ.get(name)
