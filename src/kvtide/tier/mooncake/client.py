"""Mooncake's client in a child process, and the lanes on which threads use it.

The native client can't be left in the middle of a call: it waits for up to a minute, holds the interpreter's lock while
it connects, and writes to its buffer whenever it likes. So it has a process of its own (child.py), which moves bytes
between the store and memory that both share. Invariant: a lane whose answer did not come in time is used by nobody
until it has come. A process that keeps a lane for too long is killed, and another one started.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, SOCK_SEQPACKET, socket, socketpair

import msgspec

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.tier.background import Repeater
from kvtide.tier.breaker import caller_deadline_s

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


class _Settings(msgspec.Struct):
    """The child's words. setup: arguments of the native client's own. control, lanes, memory: inherited descriptors."""

    setup: Sequence[str | int]
    replicas: int
    lane_bytes: int
    environment: dict[str, str]
    control: int = -1
    lanes: Sequence[int] = ()
    memory: int = -1


class Lane:
    """One call at a time: a socket to the child, and memory that it shares. `due_s`: when the answer must be here."""

    def __init__(self, connection: socket, view: memoryview) -> None:
        self._connection = connection
        self.view = view
        self.due_s: float | None = None

    def ask(self, clock: Clock, wait_s_max: float, moved_bytes: int, *words: str | int | list[int]) -> list[int]:
        """Send a request and return its answer. TierUnavailable if that is not here in time, or never will be."""
        self.due_s = clock.monotonic_s() + wait_s_max + moved_bytes / RATE_BYTES_S_MIN
        try:
            self._connection.settimeout(wait_s_max)
            self._connection.send(msgspec.json.encode(words))
            return self._answer(min(self.due_s, caller_deadline_s()) - clock.monotonic_s())
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
    """A running process with its lanes."""

    def __init__(self, settings: _Settings) -> None:
        lane_bytes = settings.lane_bytes
        memory = os.memfd_create("kvtide-mooncake")
        pairs = [socketpair(AF_UNIX, SOCK_SEQPACKET) for _ in range(LANES + 1)]
        try:
            os.ftruncate(memory, LANES * lane_bytes)
            view = memoryview(mmap.mmap(memory, LANES * lane_bytes))
            control, *lanes = [theirs.fileno() for _, theirs in pairs]
            settings = msgspec.structs.replace(settings, control=control, lanes=lanes, memory=memory)
            script = str(Path(__file__).with_name("child.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, msgspec.json.encode(settings).decode()],
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
        starts = range(0, LANES * lane_bytes, lane_bytes)
        self._free = [Lane(mine, view[at : at + lane_bytes]) for mine, at in zip(ours, starts, strict=True)]
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
    def lane(self, clock: Clock, wait_s_max: float) -> Iterator[Lane]:
        """Lend a lane. TierUnavailable if none is free in time."""
        with self._changed:
            left_s = min(wait_s_max, caller_deadline_s() - clock.monotonic_s())
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

    def is_well(self, now_s: float) -> bool:
        """Take back lanes whose late answers came. False if the process ended or keeps one for too long."""
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
    """Calls to the child process, of which there is one between `open` and `close`. Safe to use from several threads.

    setup: the arguments of the native client's own, from its address on. In a fork of the process nothing is asked.
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
        self._settings = _Settings(setup, replicas, lane_bytes, environment)
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

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Lend a lane for a call. TierUnavailable if there is no connection, or nobody may wait any more."""
        child = self._child
        if child is None or self._pid != os.getpid():
            raise TierUnavailable(self._problem)
        with child.lane(self._clock, self._wait_s_max) as lane:
            yield lane

    def ask(self, lane: Lane, moved_bytes: int, *words: str | int | list[int]) -> list[int]:
        """Ask on a lane, waiting as long as a call that moves so many bytes may take."""
        return lane.ask(self._clock, self._wait_s_max, moved_bytes, *words)

    def is_connected(self) -> bool:
        """Tell whether calls go through now."""
        child = self._child
        return child is not None and child.problem is None

    def _tend(self) -> float:
        """Start a process where none is well."""
        child = self._child
        if child is not None and child.problem is None and child.is_well(self._clock.monotonic_s()):
            return TEND_S
        if child is not None:
            child.end(child.problem or "Mooncake's client hung and was ended", 0.0)
        with self._lock:
            if self._is_closing:
                return RETRY_S
            self._child = None
            try:
                self._child = _Child(self._settings)
            except OSError as error:
                self._problem = f"Mooncake's client can't be started: {error}"
        if self._child is not None:
            self._child.wait_ready()
        self._tried.set()
        return TEND_S if self.is_connected() else RETRY_S
