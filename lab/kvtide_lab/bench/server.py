"""The cache server beside nginx with the same files and a raw-socket floor: throughput and CPU seconds of the server.

One client, this process, asks all of them in the same way and in turn within each round, so that ratios are of one
moment. CPU is what the scheduler says of the server's threads, to the microsecond.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtide.clock import Clock, SystemClock
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.http.peer import Endpoint, HttpAnswer, HttpConnection, Patience
from kvtide.types import ObjectId
from kvtide.wire.http import pack_request_head
from kvtide_lab.bench.disk import made_objects
from kvtide_lab.bench.services import BenchService, started, wait_until
from kvtide_lab.measuring import together

OBJECT_BYTES = 4 << 20
OBJECTS = 32
CLIENTS = 4
_EXCHANGE_S_MAX = 30.0
_LIMITS = {
    "memory_bytes_max": 256 << 20,
    "buffer_bytes_max": 128 << 20,
    "uploads_bytes_max": 1 << 20,
    "connections_max": 1200,
    "tenant_connections_max": 1200,
}


class _Size(NamedTuple):
    rounds: int
    get_s: float
    passes: int


_QUICK, _FULL = _Size(3, 1.0, 2), _Size(7, 3.0, 6)

Made = Sequence[tuple[ObjectId, bytearray]]


class ServerBenchRow(msgspec.Struct, frozen=True):
    """One server, medians over the rounds. `put` is None for nginx."""

    server: str
    get_gb_s: float
    get_cpu_s_per_gb: float
    put_gb_s: float | None
    put_cpu_s_per_gb: float | None


class ServerBenchResult(msgspec.Struct, frozen=True):
    """Headline figures are those of the disk tier, whose files nginx serves; ratios are medians over the rounds."""

    get_cpu_s_per_gb_server: float
    put_cpu_s_per_gb_server: float
    get_vs_nginx: float | None
    get_cpu_vs_nginx: float | None
    get_vs_floor: float
    put_cpu_vs_floor: float
    rounds: int
    clients: int
    object_bytes: int
    note: str
    rows: list[ServerBenchRow]


class _Rate(NamedTuple):
    gb_s: float
    cpu_s_per_gb: float


class _Side(NamedTuple):
    name: str
    service: BenchService
    gets: list[_Rate]
    puts: list[_Rate]


def run(quick: bool, clock: Clock | None = None) -> ServerBenchResult:
    """Measure all sides; without nginx the result says so."""
    clock = clock or SystemClock()
    rounds, get_s, passes = _QUICK if quick else _FULL
    made = made_objects(OBJECT_BYTES, OBJECTS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtide-bench-")))
        sides = _sides(stack, folder, made)
        for number in range(rounds):
            for side in sides if number % 2 else sides[::-1]:
                if side.name != "nginx":
                    side.puts.append(_puts(side, made, passes, clock))
                side.gets.append(_gets(side, made, get_s, clock))
        by_name = {side.name: side for side in sides}
    disk, floor = by_name["kvtide disk"], by_name["floor"]
    nginx = by_name.get("nginx")
    return ServerBenchResult(
        get_cpu_s_per_gb_server=statistics.median(rate.cpu_s_per_gb for rate in disk.gets),
        put_cpu_s_per_gb_server=statistics.median(rate.cpu_s_per_gb for rate in disk.puts),
        get_vs_nginx=_rate_ratio(disk.gets, nginx.gets) if nginx else None,
        get_cpu_vs_nginx=_cpu_ratio(disk.gets, nginx.gets) if nginx else None,
        get_vs_floor=_rate_ratio(disk.gets, floor.gets),
        put_cpu_vs_floor=_cpu_ratio(disk.puts, floor.puts),
        rounds=rounds,
        clients=CLIENTS,
        object_bytes=OBJECT_BYTES,
        note="" if nginx else "nginx is not installed: apt-get install nginx-light",
        rows=[_row(side) for side in sides],
    )


def _sides(stack: ExitStack, folder: Path, made: Made) -> list[_Side]:
    python = [sys.executable, "-m"]
    config = folder / "kvtide.toml"
    config.write_text("[limits]\n" + "".join(f"{name} = {value}\n" for name, value in _LIMITS.items()))

    def kvtide(url: str) -> Callable[[int, Path], Sequence[str]]:
        serve = [*python, "kvtide.cli", "serve", "--config", str(config), "--tier", url]
        return lambda port, _: [*serve, "--listen", f"127.0.0.1:{port}"]

    floor = [*python, "kvtide_lab.bench.server_floor"]
    sides = [
        _Side("kvtide disk", stack.enter_context(started(kvtide(f"disk://{folder}/store"))), [], []),
        _Side("kvtide memory", stack.enter_context(started(kvtide("memory://"))), [], []),
        _Side(
            "floor",
            stack.enter_context(started(lambda port, _: [*floor, str(port), str(OBJECT_BYTES), str(OBJECTS)])),
            [],
            [],
        ),
    ]
    nginx = shutil.which("nginx", path=f"{os.defpath}:/usr/sbin:/sbin")
    if nginx:
        root = folder / "files"
        for name, packed in made:
            path = root / _path(name).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed)
        sides.append(_Side("nginx", stack.enter_context(_nginx(nginx, root)), [], []))
    return sides


@contextmanager
def _nginx(nginx: str, root: Path) -> Iterator[BenchService]:
    def command(port: int, folder: Path) -> Sequence[str]:
        config = folder / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes {os.cpu_count()}; pid {folder}/pid; error_log {folder}/errors;\n"
            "events { worker_connections 2048; }\n"
            "http { access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;\n"
            f"  server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n"
        )
        return [nginx, "-c", str(config)]

    # Its workers run as another user, who must be able to read the files.
    for path in (root, root.parent):
        path.chmod(0o755)
    with started(command) as service:
        workers = _processes(service.pid)[1:]
        try:
            yield service
        finally:
            os.kill(service.pid, signal.SIGTERM)
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "nginx to end")


def _path(name: ObjectId) -> str:
    return f"/v1/{name.namespace.hex()}/{name.key.hex()}"


class _Client:
    """One connection and the buffer that it reads into."""

    def __init__(self, port: int, clock: Clock) -> None:
        self._clock = clock
        self._link = HttpConnection(Endpoint("127.0.0.1", port))
        self._link.open(self._patience())
        self._buffer = aligned_buffer(OBJECT_BYTES)

    def _patience(self) -> Patience:
        return Patience(self._clock, self._clock.monotonic_s() + _EXCHANGE_S_MAX)

    def ask(self, method: str, name: ObjectId, body: bytearray | bytes = b"") -> HttpAnswer:
        """Send a request and read the answer."""
        length = [("Content-Length", len(body))] if body else []
        head = pack_request_head(method, _path(name), [("Host", "bench"), *length])
        return self._link.exchange(head, body, self._buffer if method == "GET" else None, self._patience())

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


def _gets(side: _Side, made: Made, seconds: float, clock: Clock) -> _Rate:
    """Read objects from as many connections as there are clients for a while, files from the page cache."""
    done = [0] * CLIENTS
    clients = [_Client(side.service.port, clock) for _ in range(CLIENTS)]
    for name, _ in made:
        clients[0].ask("GET", name)
    stop_s = clock.monotonic_s() + seconds

    def work(position: int) -> None:
        turn = position
        while clock.monotonic_s() < stop_s:
            answer = clients[position].ask("GET", made[turn % OBJECTS][0])
            assert (answer.status, answer.size) == (200, OBJECT_BYTES)
            done[position] += 1
            turn += CLIENTS

    rate = _timed(side.service, work, lambda: sum(done) * OBJECT_BYTES, clock)
    for client in clients:
        client.close()
    return rate


def _puts(side: _Side, made: Made, passes: int, clock: Clock) -> _Rate:
    """Store every object from several connections, and again after removing them, as often as told."""
    clients = [_Client(side.service.port, clock) for _ in range(CLIENTS)]
    rates = []
    for _ in range(passes):
        if side.name != "floor":
            for name, _ in made:
                clients[0].ask("DELETE", name)

        def work(position: int) -> None:
            for name, packed in made[position::CLIENTS]:
                assert clients[position].ask("PUT", name, packed).status == 201

        rates.append(_timed(side.service, work, lambda: OBJECTS * OBJECT_BYTES, clock))
    for client in clients:
        client.close()
    return _Rate(statistics.fmean(rate.gb_s for rate in rates), statistics.fmean(rate.cpu_s_per_gb for rate in rates))


def _timed(service: BenchService, work: Callable[[int], None], bytes_done: Callable[[], int], clock: Clock) -> _Rate:
    cpu_s, started_s = _cpu_s(service.pid), clock.monotonic_s()
    together(work, CLIENTS)
    took_s, cpu_s = clock.monotonic_s() - started_s, _cpu_s(service.pid) - cpu_s
    return _Rate(bytes_done() / 1e9 / took_s, cpu_s / (bytes_done() / 1e9))


def _processes(pid: int) -> list[int]:
    """Return a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [pid, *map(int, children.split())]


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a server's threads, its children's included."""
    total_ns = 0
    for process in _processes(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            total_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total_ns / 1e9


def _rate_ratio(ours: Sequence[_Rate], theirs: Sequence[_Rate]) -> float:
    return statistics.median(one.gb_s / other.gb_s for one, other in zip(ours, theirs, strict=True))


def _cpu_ratio(ours: Sequence[_Rate], theirs: Sequence[_Rate]) -> float:
    return statistics.median(one.cpu_s_per_gb / other.cpu_s_per_gb for one, other in zip(ours, theirs, strict=True))


def _row(side: _Side) -> ServerBenchRow:
    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    return ServerBenchRow(
        server=side.name,
        get_gb_s=statistics.median(rate.gb_s for rate in side.gets),
        get_cpu_s_per_gb=statistics.median(rate.cpu_s_per_gb for rate in side.gets),
        put_gb_s=median([rate.gb_s for rate in side.puts]),
        put_cpu_s_per_gb=median([rate.cpu_s_per_gb for rate in side.puts]),
    )
