"""Processes: how etcd is started, how a server hangs and goes on later, and what memory of ours is there."""

import ctypes
import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvtide_lab.bench.services import free_ports, wait_until


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


def etcd_words(port: int, folder: Path, certificates: Path | None = None) -> list[str]:
    """Return the command of an etcd, under TLS if there are certificates. Skips the test where there is none."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd; apt install etcd-server")
    client = f"http{'s' if certificates else ''}://127.0.0.1:{port}"
    peer = f"http://127.0.0.1:{free_ports(1)[0]}"
    place = ["--listen-client-urls", client, "--advertise-client-urls", client]
    peers = ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    tls: list[str] = []
    if certificates:
        tls = [f"--cert-file={certificates / 'server.pem'}", f"--key-file={certificates / 'server.key'}"]
    return ["etcd", "--data-dir", str(folder / "etcd"), *place, *peers, *tls]


def resident_bytes(taken: memoryview) -> int:
    """Return how much of it the kernel has given."""
    address, pages = np.frombuffer(taken, np.uint8).ctypes.data, -(-len(taken) // mmap.PAGESIZE)
    is_here = (ctypes.c_ubyte * pages)()
    begin = address - address % mmap.PAGESIZE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(taken)), is_here) == 0
    return sum(each & 1 for each in is_here) * mmap.PAGESIZE
