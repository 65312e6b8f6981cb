"""The Valkey tier beside a raw socket that speaks just enough RESP, and beside redis-py, all on one server.

The clients move the same values in turns, a few at a time; ratios are medians over rounds.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from socket import IPPROTO_TCP, TCP_NODELAY, create_connection

import msgspec

from kvtide.tier.buffers import aligned_buffer
from kvtide_lab.bench.services import valkey_server
from kvtide_lab.bench.store_clients import StoreClient, TierClient, Took, move
from kvtide_lab.measuring import in_turns, quartiles

_VALUE_BYTES = 4 << 20
_VALUES = 32
_SLICE = 4
_THREADS = (1, 4)
_SEED = 6


class ValkeyBenchRow(msgspec.Struct, frozen=True):
    """One client with so many threads, each with a connection of its own; medians. CPU time is the client's alone."""

    client: str
    threads: int
    put_gb_s: float
    get_gb_s: float
    put_cpu_s_per_gb: float
    get_cpu_s_per_gb: float


class ValkeyBenchResult(msgspec.Struct, frozen=True):
    """Ratios with one thread, then all rows; the spread is the quartiles over rounds."""

    get_vs_raw_resp: float
    put_vs_raw_resp: float
    get_vs_redis_py: float
    get_vs_raw_resp_spread: tuple[float, float]
    put_vs_raw_resp_spread: tuple[float, float]
    get_vs_redis_py_spread: tuple[float, float]
    get_vs_redis_py_4_threads: float
    server: str
    value_bytes: int
    rounds: int
    rows: list[ValkeyBenchRow]


class _Raw:
    """As little as can be done: one blocking socket, one buffer that is used again, no checks."""

    def __init__(self, port: int) -> None:
        self._socket = create_connection(("127.0.0.1", port))
        self._socket.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._view = aligned_buffer(_VALUE_BYTES + 64)

    def put(self, number: int, value: bytes) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$6\r\nraw%03d\r\n$%d\r\n" % (number, len(value))
        parts = [memoryview(head), memoryview(value), memoryview(b"\r\n")]
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]
        self._socket.recv(64)

    def get(self, number: int) -> memoryview:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$6\r\nraw%03d\r\n" % number)
        done = self._socket.recv_into(self._view)
        start = bytes(self._view[:32]).index(b"\r\n") + 2
        stop = start + int(bytes(self._view[1 : start - 2])) + 2
        while done < stop:
            done += self._socket.recv_into(self._view[done:stop])
        return self._view[start : stop - 2]

    def close(self) -> None:
        self._socket.close()


class _RedisPy:
    """redis-py as it comes, with its C parser if that is installed."""

    def __init__(self, port: int) -> None:
        import redis

        self._client = redis.Redis(port=port, protocol=2)

    def put(self, number: int, value: bytes) -> None:
        self._client.set(f"red{number:03}", value)

    def get(self, number: int) -> bytes:
        found = self._client.get(f"red{number:03}")
        assert isinstance(found, bytes)
        return found

    def close(self) -> None:
        self._client.close()


_CLIENTS: dict[str, Callable[[int], StoreClient]] = {
    "raw": _Raw,
    "kvtide": lambda port: TierClient(f"valkey://127.0.0.1:{port}", _VALUE_BYTES),
    "redis-py": _RedisPy,
}


# Figures by verb, client and threads.
_Case = tuple[str, str, int]
_Figures = dict[_Case, list[Took]]


def run(quick: bool) -> ValkeyBenchResult:
    """Start a server and measure. Quick means fewer rounds. ValueError if no server or no redis-py is installed."""
    rounds = 5 if quick else 15
    rng = random.Random(_SEED)
    values = [rng.randbytes(_VALUE_BYTES) for _ in range(_VALUES)]
    figures: _Figures = {}
    with _flushed_server() as (port, flush, version):
        clients = {name: [make(port) for _ in range(max(_THREADS))] for name, make in _CLIENTS.items()}
        try:
            for threads, number in itertools.product(_THREADS, range(rounds + 1)):
                found = _round(number, threads, clients, values, flush)
                # The first round takes memory from the system.
                for key, measured in found.items() if number else ():
                    figures.setdefault(key, []).append(measured)
        finally:
            for client in itertools.chain.from_iterable(clients.values()):
                client.close()
    get_raw, put_raw = _ratios(figures, "get", "raw", 1), _ratios(figures, "put", "raw", 1)
    get_redis = _ratios(figures, "get", "redis-py", 1)
    return ValkeyBenchResult(
        get_vs_raw_resp=statistics.median(get_raw),
        put_vs_raw_resp=statistics.median(put_raw),
        get_vs_redis_py=statistics.median(get_redis),
        get_vs_raw_resp_spread=quartiles(get_raw),
        put_vs_raw_resp_spread=quartiles(put_raw),
        get_vs_redis_py_spread=quartiles(get_redis),
        get_vs_redis_py_4_threads=statistics.median(_ratios(figures, "get", "redis-py", 4)),
        server=version,
        value_bytes=_VALUE_BYTES,
        rounds=rounds,
        rows=[_row(figures, name, threads) for threads in _THREADS for name in _CLIENTS],
    )


@contextmanager
def _flushed_server() -> Iterator[tuple[int, Callable[[], object], str]]:
    try:
        import redis
    except ModuleNotFoundError as error:
        raise ValueError("bench valkey needs redis: pip install 'kvtide[valkey]'") from error
    with ExitStack() as stack:
        server = stack.enter_context(valkey_server())
        client = stack.enter_context(redis.Redis(port=server.port, protocol=2))
        info = client.info("server")
        version = info.get("valkey_version") or info["redis_version"]
        yield server.port, client.flushall, f"{info.get('server_name', 'redis')} {version}"


def _round(
    number: int,
    threads: int,
    clients: dict[str, list[StoreClient]],
    values: Sequence[bytes],
    flush: Callable[[], object],
) -> dict[_Case, Took]:
    flush()
    names = list(clients)
    found: dict[_Case, Took] = {}
    for verb in ("put", "get"):
        times = dict.fromkeys(names, Took(0.0, 0.0))
        for start in range(0, len(values), _SLICE):
            for name in in_turns(names, number + start // _SLICE):
                took = move(clients[name][:threads], verb, range(start, start + _SLICE), values)
                times[name] = times[name].plus(took)
        for name in names:
            found[verb, name, threads] = times[name]
    wrong = sum(clients[name][0].get(n) != values[n] for name in names for n in range(0, len(values), 7))
    assert wrong == 0, f"{wrong} wrong values"
    return found


def _ratios(figures: _Figures, verb: str, other: str, threads: int) -> list[float]:
    pairs = zip(figures[verb, "kvtide", threads], figures[verb, other, threads], strict=True)
    return [theirs.wall_s / ours.wall_s for ours, theirs in pairs]


def _row(figures: _Figures, client: str, threads: int) -> ValkeyBenchRow:
    puts, gets = figures["put", client, threads], figures["get", client, threads]
    moved_gb = _VALUES * _VALUE_BYTES / 1e9
    return ValkeyBenchRow(
        client=client,
        threads=threads,
        put_gb_s=moved_gb / statistics.median(each.wall_s for each in puts),
        get_gb_s=moved_gb / statistics.median(each.wall_s for each in gets),
        put_cpu_s_per_gb=statistics.median(each.cpu_s for each in puts) / moved_gb,
        get_cpu_s_per_gb=statistics.median(each.cpu_s for each in gets) / moved_gb,
    )
