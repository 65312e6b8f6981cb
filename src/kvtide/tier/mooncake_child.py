"""Mooncake's native client in a process of its own, started by `mooncake.py` and run by its path.

Its one word: settings as JSON. A thread for each lane takes a request from the lane's socket (JSON: a verb and its
words), moves bytes between store and the lane's memory, and answers with numbers; negative ones are Mooncake's codes.
Invariant: it ends when its parent closes the control socket or dies.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import threading
from socket import SOCK_DGRAM, getaddrinfo, socket
from typing import Any

PARENT_CHECK_S = 1.0
# Of KEYS_MAX keys with the longest prefix; each request takes a buffer of that size for a moment.
REQUEST_BYTES_MAX = 1 << 16
# Mooncake's code for a range that does not lie within the object, too.
_INVALID_PARAMS = -600


class _LaneServer:
    """The verbs on one lane's memory, at `address`."""

    def __init__(self, store: Any, config: Any, address: int) -> None:
        self._store = store
        self._config = config
        self._address = address

    def read(self, key: str, offset: int, size: int) -> list[int]:
        """Return how many bytes of the range were read: fewer where the object ends."""
        # A range that begins further on is mostly one of a header that was read, and within the object.
        came = self._range(key, offset, size) if offset and size else _INVALID_PARAMS
        if came == _INVALID_PARAMS:
            total = self._store.get_size(key)
            wanted = min(size, total - offset)
            came = self._range(key, offset, wanted) if wanted > 0 else min(total, 0)
        return [came]

    def _range(self, key: str, offset: int, size: int) -> int:
        ((came,),) = self._store.get_into_ranges([self._address], [[key]], [[[0]]], [[[offset]]], [[[size]]])[0]
        return int(came)

    def read_ranges(self, key: str, offsets: list[int], sizes: list[int]) -> list[int]:
        """Return how many bytes of each range were read, one behind the other; codes where the object ends."""
        places = [sum(sizes[:number]) for number in range(len(sizes))]
        found = self._store.get_into_ranges([self._address], [[key]], [[places]], [[offsets]], [[sizes]])
        return [int(came) for came in found[0][0]]

    def put(self, key: str, size: int) -> list[int]:
        """Store what lies in the lane; 0 also for an object that is here already, which is kept."""
        return [self._store.put_from(key, self._address, size, self._config)]

    def replace(self, key: str, size: int) -> list[int]:
        """Store what lies in the lane in an object's place; 1 if there is none."""
        is_here = self._store.is_exist(key)
        return [self._store.upsert_from(key, self._address, size, self._config) if is_here == 1 else 1 - is_here]

    def exist(self, *keys: str) -> list[int]:
        """Return 1 for each object that is here, 0 for each that is not."""
        return list(self._store.batch_is_exist(list(keys)))

    def remove(self, key: str) -> list[int]:
        """Remove an object, also one that somebody read just now."""
        return [self._store.remove(key, True)]

    def serve(self, lane: socket) -> None:
        """Answer until the other end is closed."""
        while request := lane.recv(REQUEST_BYTES_MAX):
            verb, *words = json.loads(request)
            lane.send(json.dumps(getattr(self, verb)(*words)).encode())


def address_towards(master: str) -> str:
    """Return this machine's address as it is when it asks the master; nothing is sent."""
    host, _, port = master.rpartition(":")
    family, *_, there = getaddrinfo(host.strip("[]"), int(port), type=SOCK_DGRAM)[0]
    with socket(family, SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def connected(settings: dict[str, Any]) -> Any:
    """Load the library and connect. ConnectionError, ImportError or OSError that says why it can't be done."""
    # Before the library is loaded: it reads them then.
    for name, value in settings["environment"].items():
        os.putenv(name, value)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    host, *rest, master = settings["setup"]
    if code := store.setup(host or address_towards(master), *rest, master):
        raise ConnectionError(f"the master at {master} can't be reached or refuses, Mooncake's error {code}")
    return store


def serve(store: Any, settings: dict[str, Any], memory: mmap.mmap) -> None:
    """Start a thread for each lane. OSError if the protocol can't use their memory."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.replica_num = settings["replicas"]
    size, lanes = settings["lane_bytes"], settings["lanes"]
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if code := store.register_buffer(base, size * len(lanes)):
        raise OSError(f"memory can't be registered with {settings['setup'][4]}, Mooncake's error {code}")
    for number, lane in enumerate(lanes):
        server = _LaneServer(store, config, base + number * size)
        threading.Thread(target=server.serve, args=[socket(fileno=lane)], daemon=True).start()


def main() -> None:
    """Connect, say so (or why not) on the control socket, and serve until its other end is closed."""
    settings = json.loads(sys.argv[1])
    parent = os.getppid()
    control = socket(fileno=settings["control"])
    try:
        store = connected(settings)
        memory = mmap.mmap(settings["memory"], settings["lane_bytes"] * len(settings["lanes"]))
        serve(store, settings, memory)
    except (ImportError, OSError) as error:
        control.sendall(str(error).encode()[:4096])
        return
    control.sendall(b"ready")
    control.settimeout(PARENT_CHECK_S)
    while os.getppid() == parent:
        try:
            control.recv(1)
            break
        except TimeoutError:
            continue
    store.close()
    # Threads may be in calls that never end, and destructors wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
