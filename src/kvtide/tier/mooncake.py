"""Objects in Mooncake's distributed store: one key, one value, in the memory of the stores that its master knows.

A URL is `mooncake://HOST[:PORT][?OPTION=VALUE…]` of the master. Invariant: bytes come to the caller's memory only after
the store has said that all of the range was read.

Mooncake's native client can't be left in the middle of a call: it waits for up to a minute, holds the interpreter's
lock while it connects, and writes to its buffer whenever it likes. So it has a process of its own (mooncake_child.py),
which moves bytes between the store and memory that both share. A lane whose answer did not come in time is used by
nobody until it has come; a process that keeps a lane for too long is killed, and another one started.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, SOCK_SEQPACKET, socket, socketpair
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvtide.clock import Clock
from kvtide.errors import TierFull, TierUnavailable
from kvtide.tier.background import Repeater
from kvtide.tier.base import Buffer, CountingTier, ObjectInfo, RangeRead
from kvtide.tier.breaker import caller_deadline_s
from kvtide.tier.buffers import copy_bytes
from kvtide.types import BlockKey, Namespace, ObjectId, TierStats

_PORT = 50051
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_NAME = re.compile(r"([0-9a-f]{64}):([0-9a-f]{64})")
_METRIC = re.compile(r"^(master_\w+) (\d+)", re.MULTILINE)
# Keys in one look-up, which the child takes in one message, and in one question about sizes, which has them in its URL.
KEYS_MAX = 256
LISTED_MAX = 20
METRICS_BYTES_MAX = 1 << 20
KEY_BYTES_MAX = 4096
LIST_S_MAX = 30.0
# Mooncake's codes of an object that is not here, or not yet, or no longer; and of one that finds no room.
_ABSENT = frozenset({-703, -704, -710, -712})
_NO_ROOM = frozenset({-10, -200})
LANES = 4
ANSWER_BYTES_MAX = 1 << 12
# What a call may take besides the wait for the store: its bytes at this rate.
RATE_BYTES_S_MIN = 16 << 20
START_S_MAX = 10.0
# A socket that is to wait for less would not wait at all, which is another mode.
WAIT_S_MIN = 0.001
# How often the process is looked after, and how long after a failed start the next one begins.
TEND_S = 0.1
RETRY_S = 0.5
CLOSE_S_MAX = 1.0
# What the child says once it is connected; anything else is why it is not.
READY = "ready"
WORDS_BYTES_MAX = 4096


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a URL. ValueError for one out of its range.

    admin: the port of the master's HTTP, for listings and figures. metadata, protocol, devices, host: as Mooncake's
    client takes them. `wait_s_max`: a call that takes longer, besides its bytes, has failed.
    """

    prefix: str = "kvtide"
    admin: int = 9003
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    replicas: int = 1
    value_bytes_max: int = 64 << 20
    wait_s_max: float = 2.0

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix takes 1 to 64 letters, digits and _.:-, got {self.prefix!r}")
        if not (1 <= self.replicas <= 16 and 0 < self.value_bytes_max <= 1 << 30 and 0 < self.wait_s_max < 3600):
            raise ValueError(
                "expected 1 to 16 replicas, value_bytes_max of at most 1 GiB and 0 < wait_s_max < 3600, "
                f"got {self.replicas}, {self.value_bytes_max} and {self.wait_s_max}"
            )
        if not 0 < self.admin < 1 << 16:
            raise ValueError(f"expected a port for admin, got {self.admin}")


class MooncakeTarget(NamedTuple):
    """A parsed URL: the master, and options."""

    host: str
    port: int
    options: MooncakeOptions

    def __str__(self) -> str:
        return f"mooncake://{self.host}:{self.port}"


def parse_mooncake_url(url: str) -> MooncakeTarget:
    """Parse a URL. ValueError that says what is wrong."""
    parts = urlsplit(url)
    host, _, port = parts.netloc.partition(":")
    number = int(port) if port.isdecimal() else 0 if port else _PORT
    if not _HOST.fullmatch(host) or not 0 < number < 1 << 16 or parts.path.strip("/"):
        raise ValueError(f"expected mooncake://HOST[:PORT][?OPTION=VALUE…] of the master, got {url!r}")
    try:
        options = msgspec.convert(dict(parse_qsl(parts.query, keep_blank_values=True)), MooncakeOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"options of mooncake://{parts.netloc}: {error}") from error
    return MooncakeTarget(host, number, options)


class _Replica(msgspec.Struct):
    size_: int


class _Listed(msgspec.Struct):
    values: list[_Replica] | None = None


class _Listing(msgspec.Struct):
    """The replicas of keys in memory, as the master lists them."""

    data: dict[str, _Listed]


class MooncakeTier(CountingTier):
    """A tier in a store that others may use too: what it stores begins with the URL's prefix. The master evicts.

    ValueError for a bad URL, ModuleNotFoundError without Mooncake's package.
    """

    name = "mooncake"
    is_batched = can_replace = True

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__()
        self._target = target = parse_mooncake_url(url)
        if importlib.util.find_spec("mooncake") is None:
            raise ModuleNotFoundError("Mooncake's client", name="mooncake-transfer-engine-non-cuda")
        self._options = options = target.options
        limit, master = options.value_bytes_max, f"{target.host}:{target.port}"
        setup = (options.host, options.metadata, 0, limit, options.protocol, options.devices, master)
        self._client = MooncakeClient(setup, options.replicas, limit, options.wait_s_max, clock)
        self._clock = clock
        self._evicted_before = 0

    def open(self) -> None:
        """Connect; a master that can't be reached now is tried again and again."""
        self._client.open()
        self._evicted_before = self._figures().get("master_evicted_key_count", 0)

    def close(self) -> None:
        self._client.close()

    def contains(self, object_id: ObjectId) -> bool:
        """Ask the master, to which a store that died is alive until its `client_ttl` is over."""
        return self.contains_each([object_id])[0]

    def contains_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        present: list[bool] = []
        for start in range(0, len(object_ids), KEYS_MAX):
            keys = [self._key(object_id) for object_id in object_ids[start : start + KEYS_MAX]]
            with self._lane() as lane:
                answers = lane.ask(0, "exist", *keys)
                if min(answers) < 0:
                    raise self._fault(min(answers), "look-up")
            present += [answer == 1 for answer in answers]
        return present

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        """Read a range, through memory that is shared with the client; in pieces if it is longer than that."""
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        key, done, is_over = self._key(object_id), 0, False
        with self._lane() as lane:
            while not is_over:
                view = lane.view[: len(buffer) - done]
                (came,) = lane.ask(len(view), "read", key, offset + done, len(view))
                if came in _ABSENT:
                    self._note(is_hit=False)
                    return None
                if came < 0:
                    raise self._fault(came, f"read of {object_id}")
                copy_bytes(buffer[done : done + came], view[:came])
                done += came
                is_over = came < len(view) or done == len(buffer)
        self._note(is_hit=True)
        return done

    def get_ranges_into(self, object_id: ObjectId, ranges: Sequence[RangeRead]) -> list[int] | None:
        """Read several ranges by one call; one after the other if the object ends within one, or they are too long."""
        offsets, sizes = [offset for offset, _ in ranges], [len(buffer) for _, buffer in ranges]
        with self._lane() as lane:
            is_fitting = sum(sizes) <= len(lane.view)
            words = ("read_ranges", self._key(object_id), offsets, sizes)
            came = lane.ask(sum(sizes), *words) if is_fitting else []
            if came == sizes:
                at = 0
                for _, buffer in ranges:
                    copy_bytes(buffer, lane.view[at : at + len(buffer)])
                    at += len(buffer)
        if came != sizes:
            found = [self.get_into(object_id, buffer, offset) for offset, buffer in ranges]
            return None if None in found else [size or 0 for size in found]
        self._note(is_hit=True)
        return sizes

    def put_from(self, object_id: ObjectId, buffer: Buffer) -> bool:
        """Store an object unless it is here. TierFull if it is larger than the URL allows, or nobody has room."""
        return self._put(object_id, buffer, "put")

    def replace(self, object_id: ObjectId, buffer: Buffer) -> bool:
        return self._put(object_id, buffer, "replace")

    def _put(self, object_id: ObjectId, buffer: Buffer, verb: str) -> bool:
        limit = self._options.value_bytes_max
        if len(buffer) > limit:
            raise TierFull(f"{object_id} has {len(buffer)} bytes, a value of the mooncake tier may have {limit}")
        if not len(buffer):
            return False
        with self._lane() as lane:
            copy_bytes(lane.view[: len(buffer)], buffer)
            (code,) = lane.ask(len(buffer), verb, self._key(object_id), len(buffer))
            if code < 0:
                raise self._fault(code, f"{verb} of {object_id}")
        return code == 0

    def delete(self, object_id: ObjectId, reason: str) -> bool:
        """Remove an object, also while others read it: they find out by its checksums."""
        with self._lane() as lane:
            (code,) = lane.ask(0, "remove", self._key(object_id))
            if code < 0 and code not in _ABSENT:
                raise self._fault(code, f"removal of {object_id}")
        if code == 0:
            self._removals.note(object_id, reason)
        return code == 0

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what is stored under the prefix, with last uses unknown. Not for the hot path: it walks all keys."""
        prefix, names = f"{self._options.prefix}:", dict[str, ObjectId]()
        with self._asked_master("/get_all_keys", LIST_S_MAX) as answer:
            while line := answer.readline(KEY_BYTES_MAX).decode(errors="replace").rstrip("\n"):
                name = _NAME.fullmatch(line.removeprefix(prefix)) if line.startswith(prefix) else None
                if name:
                    namespace, key = (bytes.fromhex(digits) for digits in name.groups())
                    names[line] = ObjectId(Namespace(namespace), BlockKey(key))
                if len(names) == LISTED_MAX:
                    yield from self._infos(names)
                    names.clear()
        yield from self._infos(names)

    def _infos(self, names: dict[str, ObjectId]) -> Iterator[ObjectInfo]:
        if not names:
            return
        with self._asked_master(f"/batch_query_keys?keys={','.join(names)}", LIST_S_MAX) as answer:
            found = msgspec.json.decode(answer.read(METRICS_BYTES_MAX), type=_Listing).data
        for key, listed in found.items():
            if key in names and listed.values:
                yield ObjectInfo(names[key], listed.values[0].size_, 0.0)

    def stats(self) -> TierStats:
        """Return the master's figures, all keys of it, and this process's counters. Zeros while it can't be asked."""
        figures = self._figures()
        names = ("key_count", "allocated_bytes", "total_capacity_bytes")
        objects, used, total = (figures.get(f"master_{name}", 0) for name in names)
        evictions = max(0, figures.get("master_evicted_key_count", 0) - self._evicted_before)
        return TierStats(self.name, objects, used, total, self._hits, self._misses, evictions, self._faults.total)

    def _figures(self) -> dict[str, int]:
        if not self._client.is_connected():
            return {}
        try:
            with self._asked_master("/metrics", self._options.wait_s_max) as answer:
                text = answer.read(METRICS_BYTES_MAX).decode(errors="replace")
        except TierUnavailable:
            return {}
        return {name: int(figure) for name, figure in _METRIC.findall(text)}

    @contextmanager
    def _asked_master(self, path: str, wait_s_max: float) -> Iterator[HTTPResponse]:
        """Ask the master by HTTP. TierUnavailable if it does not answer as it should, until the `with` is left."""
        wait_s = min(wait_s_max, caller_deadline_s() - self._clock.monotonic_s())
        place = f"the master's HTTP at {self._target.host}:{self._options.admin} (option admin)"
        connection = HTTPConnection(self._target.host, self._options.admin, timeout=max(wait_s, 0.001))
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise TierUnavailable(f"{place} answers {answer.status} to {path[:40]}")
            yield answer
        except (OSError, HTTPException, msgspec.MsgspecError) as error:
            raise TierUnavailable(f"{place} can't be asked: {error}") from error
        finally:
            connection.close()

    def _key(self, object_id: ObjectId) -> str:
        return f"{self._options.prefix}:{object_id.namespace.hex()}:{object_id.key.hex()}"

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        with self._faults, self._client.lane() as lane:
            yield lane

    def _fault(self, code: int, what: str) -> TierUnavailable:
        """Return the error that a code of Mooncake's is for us."""
        kind = TierFull if code in _NO_ROOM else TierUnavailable
        return kind(f"{self._target}: {what} failed, Mooncake's code {code}")


class Lane:
    """One call at a time: a socket to the child, and memory that it shares. `due_s`: when the answer must be here."""

    def __init__(self, connection: socket, view: memoryview, clock: Clock, wait_s_max: float) -> None:
        self.view = view
        self.due_s: float | None = None
        self._connection = connection
        self._clock = clock
        self._wait_s_max = wait_s_max

    def ask(self, moved_bytes: int, *words: str | int | list[int]) -> list[int]:
        """Return the answer to a request that moves so many bytes. TierUnavailable if it does not come in time."""
        self.due_s = self._clock.monotonic_s() + self._wait_s_max + moved_bytes / RATE_BYTES_S_MIN
        try:
            self._connection.settimeout(self._wait_s_max)
            self._connection.send(msgspec.json.encode(words))
            return self._answer(min(self.due_s, caller_deadline_s()) - self._clock.monotonic_s())
        except TimeoutError as error:
            raise TierUnavailable(f"no answer of Mooncake to {words[0]} in time") from error
        except OSError as error:
            raise TierUnavailable(f"Mooncake's client ended during {words[0]}") from error

    def _answer(self, wait_s: float) -> list[int]:
        self._connection.settimeout(max(wait_s, WAIT_S_MIN))
        answer = self._connection.recv(ANSWER_BYTES_MAX)
        if not answer:
            raise ConnectionError
        self.due_s = None
        return msgspec.json.decode(answer, type=list[int])

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def has_answer(self) -> bool:
        """Receive the answer to a call that nobody waits for any more, if it is here. OSError if it never will be."""
        with suppress(TimeoutError):
            self._answer(WAIT_S_MIN)
        return self.due_s is None


class _Child:
    """A running process with its lanes. settings: what it takes besides their descriptors and size."""

    def __init__(self, settings: Mapping[str, Any], lane_bytes: int, clock: Clock, wait_s_max: float) -> None:
        self._clock = clock
        self._wait_s_max = wait_s_max
        memory = os.memfd_create("kvtide-mooncake")
        pairs = [socketpair(AF_UNIX, SOCK_SEQPACKET) for _ in range(LANES + 1)]
        try:
            os.ftruncate(memory, LANES * lane_bytes)
            view = memoryview(mmap.mmap(memory, LANES * lane_bytes))
            control, *lanes = [theirs.fileno() for _, theirs in pairs]
            inherited = {"control": control, "lanes": lanes, "memory": memory}
            words = msgspec.json.encode({**settings, **inherited, "lane_bytes": lane_bytes})
            script = str(Path(__file__).with_name("mooncake_child.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, words.decode()],
                pass_fds=[control, *lanes, memory],
                stdin=subprocess.DEVNULL,
                # The library logs every miss there; MC_LOG_DIR in the environment keeps what it says in files.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(memory)
            for _, theirs in pairs:
                theirs.close()
        self._control, *ours = [mine for mine, _ in pairs]
        views = [view[at : at + lane_bytes] for at in range(0, LANES * lane_bytes, lane_bytes)]
        self._free = [Lane(mine, part, clock, wait_s_max) for mine, part in zip(ours, views, strict=True)]
        self._late: list[Lane] = []
        self._changed = threading.Condition()
        self.problem: str | None = "Mooncake's client is starting"

    def wait_ready(self) -> None:
        """Wait until it can be used; `problem` says why it can't."""
        self._control.settimeout(START_S_MAX)
        try:
            said = self._control.recv(WORDS_BYTES_MAX).decode() or "Mooncake's client ended while it connected"
        except OSError:
            said = "the master does not answer"
        with self._changed:
            self.problem = None if said == READY else said

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Lend a lane. TierUnavailable if none is free in time."""
        with self._changed:
            left_s = min(self._wait_s_max, caller_deadline_s() - self._clock.monotonic_s())
            if left_s <= 0 or not self._changed.wait_for(lambda: self._free or self.problem, left_s) or self.problem:
                raise TierUnavailable(self.problem or f"all {LANES} lanes to Mooncake are in use")
            lane = self._free.pop()
        try:
            yield lane
        finally:
            with self._changed:
                if self.problem is not None:
                    lane.close()
                else:
                    (self._free if lane.due_s is None else self._late).append(lane)
                    self._changed.notify()

    def is_well(self) -> bool:
        """Take back lanes whose late answers came. False if the process ended or keeps one for too long."""
        now_s = self._clock.monotonic_s()
        with self._changed:
            try:
                came = [lane for lane in self._late if lane.has_answer()]
            except OSError:
                return False
            self._late = [lane for lane in self._late if lane not in came]
            self._free += came
            self._changed.notify(len(came))
            return self._process.poll() is None and not any(now_s > (lane.due_s or now_s) for lane in self._late)

    def end(self, problem: str, wait_s: float) -> None:
        """Let it close and, if it takes longer, kill it. Its callers get TierUnavailable. Idempotent."""
        with self._changed:
            self.problem = problem
            self._changed.notify_all()
        with suppress(OSError):
            self._control.shutdown(SHUT_RDWR)
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        # Those that are lent are closed when they come back.
        with self._changed:
            for lane in (*self._free, *self._late):
                lane.close()
            self._free, self._late = [], []


class MooncakeClient:
    """Keeps one child process running between `open` and `close`. Safe to use from several threads.

    setup: arguments of the native client's own. In a fork of the process nothing is asked.
    """

    def __init__(
        self, setup: Sequence[str | int], replicas: int, lane_bytes: int, wait_s_max: float, clock: Clock
    ) -> None:
        wait_ms = str(max(1, int(wait_s_max * 500)))
        environment = {
            # So that a silent master ends a call, and not the process: half of what we wait.
            "MC_RPC_TIMEOUT_MS": wait_ms,
            "MC_RPC_CONNECT_TIMEOUT_MS": wait_ms,
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        }
        self._settings = {"setup": setup, "replicas": replicas, "environment": environment}
        self._lane_bytes = lane_bytes
        self._wait_s_max = wait_s_max
        self._clock = clock
        self._child: _Child | None = None
        self._problem = "Mooncake's client is not open in this process"
        self._pid = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._tried = threading.Event()
        self._tender = Repeater(self._tend, "kvtide-mooncake")

    def open(self) -> None:
        """Start the process and wait until it is connected, or could not be: that is tried again and again."""
        self._pid, self._is_closing = os.getpid(), False
        self._tried.clear()
        self._tender.open()
        self._tried.wait(START_S_MAX)

    def close(self) -> None:
        """End the process. Idempotent; a fork leaves its parent's alone."""
        if self._pid != os.getpid():
            return
        self._tender.stop()
        with self._lock:
            self._is_closing = True
            child, self._child = self._child, None
        if child is not None:
            child.end("Mooncake's client is closed", CLOSE_S_MAX)
        self._tender.close()

    def lane(self) -> AbstractContextManager[Lane]:
        """Lend a lane for a call. TierUnavailable if there is no connection, or no lane is free in time."""
        child = self._child
        if child is None or self._pid != os.getpid():
            raise TierUnavailable(self._problem)
        return child.lane()

    def is_connected(self) -> bool:
        """True if calls go through now."""
        child = self._child
        return child is not None and child.problem is None

    def _tend(self) -> float:
        """Start a process where none is well."""
        child = self._child
        if child is not None and child.problem is None and child.is_well():
            return TEND_S
        if child is not None:
            child.end(child.problem or "Mooncake's client hung and was ended", 0.0)
        with self._lock:
            if self._is_closing:
                return RETRY_S
            self._child = None
            try:
                self._child = _Child(self._settings, self._lane_bytes, self._clock, self._wait_s_max)
            except OSError as error:
                self._problem = f"Mooncake's client can't be started: {error}"
        if self._child is not None:
            self._child.wait_ready()
        self._tried.set()
        return TEND_S if self.is_connected() else RETRY_S
