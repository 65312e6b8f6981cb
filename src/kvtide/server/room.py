"""What the machine gives a server: descriptors and memory, compared with what its limits let it take."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

from kvtide.server.http import FILES_MAX
from kvtide.server.settings import ServerLimits, ServerSettings

_log = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")


def take_descriptors(limits: ServerLimits) -> None:
    """Let this process have as many descriptors as its connections and files need, as far as the system allows."""
    wanted = limits.connections_max + FILES_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Return how much memory this process may have: the machine's, or what its control group leaves it."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        # The word `max` is no bound.
        if text.isdecimal():
            found = min(found, int(text))
    return found


def check_memory(settings: ServerSettings, there_bytes: int) -> None:
    """Warn if the limits let the server take more memory than there is."""
    limits = settings.limits
    has_memory = any(url.startswith("memory://") for url in settings.tiers)
    wanted = limits.resident_bytes_max - (0 if has_memory else limits.memory_bytes_max)
    if wanted > there_bytes:
        _log.warning(
            "the limits let this server take %.1f GiB of memory and there are %.1f: lower memory_bytes_max, "
            "buffer_bytes_max or connections_max",
            wanted / 2**30,
            there_bytes / 2**30,
        )
