"""The contenders beside kvtide in the engine bench: how each is configured, started and waited for."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvtide_lab.bench.engine_process import kvtide_transfer
from kvtide_lab.bench.services import end, kvtide_server, open_link, wait_until
from kvtide_lab.config import engine_environment

PEERS = ("native", "lmcache")
LINK_CODECS = ("raw", "tide")
LOSSLESS = "kvtide lossless"
MEMORY_BYTES = 512 << 20
SETTLE_S_MAX = 60.0
SERVER_S_MAX = 120.0
TRIM_EVERY_S = 0.1
# Peers' settings, and folders.
_SMALL_FILE_BYTES = 1 << 16


class StoreRoom(NamedTuple):
    """Host memory and disk that a contender may take for what it stores. None: as much disk as it wants."""

    memory_bytes: int = MEMORY_BYTES
    disk_bytes: int | None = None

    def options(self) -> dict[str, int]:
        """Return kvtide's options for it. What waits to be stored takes half of the memory where that is short."""
        if self.disk_bytes is None:
            return {"memory_bytes_max": self.memory_bytes}
        half = self.memory_bytes // 2
        return {"memory_bytes_max": half, "store_queue_bytes_max": half, "disk_bytes_max": self.disk_bytes}


class Contender(NamedTuple):
    """A way to serve. `server` is a command that runs beside the engine; `health_url` answers once it is up.

    What was stored outlives a restart: in `folder`, or (None, kvtide's alone) wherever the store's URL says. `prefix`
    are the words before the engine's command where its store is behind a link. `is_brief`: only restarts are measured.
    """

    name: str
    python: Path
    transfer: Mapping[str, Any] | None
    folder: Path | None = None
    server: tuple[str, ...] = ()
    health_url: str = ""
    prefix: tuple[str, ...] = ()
    is_brief: bool = False

    @property
    def is_peer(self) -> bool:
        """Tell whether it is what a user would pick instead."""
        return self.name in PEERS

    @property
    def is_kvtide(self) -> bool:
        """Tell whether kvtide's connector is in it."""
        return (self.transfer or {}).get("kv_connector") == "KVTideConnector"


def contenders(
    python: Path, lmcache_python: Path | None, peers: tuple[str, ...], work: Path, memory_bytes: int = MEMORY_BYTES
) -> list[Contender]:
    """Return plain vLLM, kvtide, kvtide with `lossless` and the chosen peers, each with its store under `work`.

    memory_bytes: of the peers; their disk is as large as `kept_within` leaves it.

    ValueError for an unknown peer, and for LMCache without an environment that has it.
    """
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}, expected none or some of {', '.join(PEERS)}")
    disk = kvtide_transfer(str(work / "kvtide"), memory_bytes_max=MEMORY_BYTES)
    folder = work / "lossless"
    lossless = further(LOSSLESS, python, "lossless", str(folder))._replace(folder=folder, is_brief=True)
    found = [Contender("plain", python, None), Contender("kvtide", python, disk, work / "kvtide"), lossless]
    if "native" in peers:
        found.append(Contender("native", python, _native(work / "native", memory_bytes), work / "native"))
    if "lmcache" in peers:
        if lmcache_python is None:
            raise ValueError("LMCache runs in an environment of its own: give --lmcache-python")
        found.append(_lmcache(lmcache_python, work / "lmcache", memory_bytes))
    return found


def further(name: str, python: Path, codec: str, url: str) -> Contender:
    """Return kvtide with another codec on another store."""
    return Contender(name, python, kvtide_transfer(url, codec=codec, memory_bytes_max=MEMORY_BYTES))


@contextmanager
def link_contenders(python: Path, mbit_s: float, work: Path) -> Iterator[list[Contender]]:
    """Run a server behind a link of that rate and yield kvtide with each of LINK_CODECS there; none for a rate of 0.

    ValueError for a negative rate, and where the system allows no such link.
    """
    if mbit_s < 0:
        raise ValueError(f"a link's rate must be positive, or 0 for none, got {mbit_s}")
    if mbit_s == 0:
        yield []
        return
    tiers = f'tiers = ["disk://{work / "server"}"]\n'
    with open_link(mbit_s * 1e6) as prefix, kvtide_server(tiers, prefix) as (address, _):
        url = f"http://127.0.0.1:{address.rpartition(':')[2]}"
        found = [further(link_name(codec), python, codec, url) for codec in LINK_CODECS]
        yield [each._replace(prefix=tuple(prefix), is_brief=True) for each in found]


def link_name(codec: str) -> str:
    """Return the name of the contender that has this codec behind the link."""
    return f"kvtide {codec}, link"


def _native(folder: Path, memory_bytes: int) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2}
    config = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "kvtide_lab.vllm.cpu_offload",
        "cpu_bytes_to_use": memory_bytes,
        "secondary_tiers": [tier],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}


def _lmcache(python: Path, folder: Path, memory_bytes: int) -> Contender:
    # No port is asked for: one that is taken ends the bench with the server's own message.
    port, http_port = random.sample(range(20_000, 32_000), 2)
    adapter = json.dumps({"type": "fs", "base_path": str(folder)})
    size = f"--l1-size-gb {memory_bytes / 2**30:.3f} --chunk-size 256"
    server = f"server --host 127.0.0.1 --port {port} --http-port {http_port} {size}"
    modes = "--supported-transfer-mode auto --eviction-policy LRU --disable-observability"
    command = (str(python.parent / "lmcache"), *server.split(), *modes.split(), "--l2-adapter", adapter)
    config = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}
    return Contender("lmcache", python, transfer, folder, command, f"http://127.0.0.1:{http_port}/healthcheck")


@contextmanager
def side_server(contender: Contender, log: Path) -> Iterator[int | None]:
    """Run the contender's server, if it has one, and yield its process id. RuntimeError if it does not come up."""
    if not contender.server:
        yield None
        return
    if contender.folder is not None:
        contender.folder.mkdir(parents=True, exist_ok=True)
    environment = engine_environment({"LMCACHE_TRACK_USAGE": "false"})
    with log.open("ab") as output:
        process = subprocess.Popen(contender.server, stdout=output, stderr=output, env=environment)
    try:
        wait_until(
            lambda: _answers(contender.health_url, process), f"an answer at {contender.health_url}", SERVER_S_MAX
        )
        yield process.pid
    finally:
        end(process, 30)


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"what should answer at {url} has ended")
    try:
        urllib.request.urlopen(url, timeout=1.0).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def kept_within(folder: Path | None, bytes_max: int | None) -> Iterator[None]:
    """Keep a folder below a bound where nobody else does: files whose last use is longest ago are deleted."""
    is_over = threading.Event()

    def keep() -> None:
        while not is_over.wait(TRIM_EVERY_S) and folder is not None and bytes_max is not None:
            trim(folder, bytes_max)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def trim(folder: Path, bytes_max: int) -> None:
    """Delete files, those used longest ago first, until the others have no more than so many bytes."""
    files = []
    for path in folder.rglob("*"):
        # One that is being written gets another name.
        with suppress(FileNotFoundError):
            stat = path.stat()
            files.append((max(stat.st_atime_ns, stat.st_mtime_ns), stat.st_size, path))
    excess = sum(size for _, size, _ in files) - bytes_max
    for _, size, path in sorted(files):
        if excess > 0 and size > _SMALL_FILE_BYTES:
            path.unlink(missing_ok=True)
            excess -= size


def settle(folder: Path | None) -> None:
    """Wait until nothing has been written to the folder for half a second."""
    if folder is None:
        return
    give_up_s, before, quiet_s = time.monotonic() + SETTLE_S_MAX, -1, 0.0
    while quiet_s < 0.5 and time.monotonic() < give_up_s:
        now = sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
        quiet_s = quiet_s + 0.1 if now == before else 0.0
        before = now
        time.sleep(0.1)


def drop_page_cache(folder: Path) -> None:
    """Make the next reading of the folder's files come from the disk, as after a restart of the machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
