"""A tenant's reads while another, or a stranger, tries to stop the server, beside the same server's quiet.

Attackers are processes of their own (`siege_attack`), the server is `kvtide serve`; the tenant that is measured reads
one object of 1 MiB over and over on one connection. Two cores are enough since attackers that ask wait for answers:
what they can't be given they don't ask for.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from kvtide.block import KVDtype
from kvtide.keys import namespace_digest
from kvtide.server.auth import new_token
from kvtide.server.settings import ServerLimits
from kvtide.types import BlockKey, ObjectId
from kvtide_lab.bench.services import grant_words, kvtide_server, valkey_server
from kvtide_lab.bench.shaped import ShapedProxy
from kvtide_lab.bench.siege_attack import Attack
from kvtide_lab.bench.store_clients import bench_object
from kvtide_lab.measuring import peak_bytes, percentile

MIB = 1 << 20
# What a tenant may feel: so many times its quiet p99, but this much is nothing that a user notices.
P99_FACTOR_MAX = 10.0
P99_MS_MIN = 250.0
_LIMITS = ServerLimits(
    memory_bytes_max=128 * MIB, buffer_bytes_max=64 * MIB, tenant_buffer_bytes_max=32 * MIB, uploads_bytes_max=MIB
)
_DRAIN_S_MAX = 2.0
# Python's own end, and that of the tiers.
_END_S_MAX = 1.0
_WAIT_S_MAX = 10.0
_TENANTS = ("measured", "attacker", "second")
_NAMESPACE = namespace_digest(b"siege", KVDtype.FLOAT16, "bench", 16, b"")
_OBJECT_BYTES = MIB
_STALLED_BYTES = 12 * MIB
_KEYS_MAX = 4096


class SiegeRow(msgspec.Struct, frozen=True):
    """One attack: how long the other tenant's reads took, how many failed, the server's largest memory, its end.

    `rss_over_bound` is over what the server's limits add up to; `drain_s` is from SIGTERM, during the attack, to the
    server's end.
    """

    attack: str
    p50_ms: float
    p99_ms: float
    errors: int
    quiet_p99_ms: float
    rss_over_bound: float
    drain_s: float
    reads: int
    holds: bool


class SiegeResult(msgspec.Struct, frozen=True):
    """Every attack. `holds` if each row does: p99 within its bound, no errors, memory and drain within theirs."""

    rows: list[SiegeRow]
    holds: bool


class _Ground(NamedTuple):
    """A server under siege: where it is, its process, and who may ask it."""

    port: int
    process: subprocess.Popen[str]
    tokens: dict[str, str]

    def head(self, method: str, path: str, who: str = "", size: int | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: siege"]
        lines += [f"Authorization: Bearer {self.tokens[who]}"] if who else []
        lines += [] if size is None else [f"Content-Length: {size}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def ask(self, connection: http.client.HTTPConnection, method: str, path: str, who: str, body: bytes | None) -> int:
        connection.request(method, path, body, {"Authorization": f"Bearer {self.tokens[who]}"})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def _path(number: int) -> str:
    return f"/v1/{_NAMESPACE.hex()}/{number.to_bytes(32, 'big').hex()}"


def _exists(ground: _Ground, who: str) -> bytes:
    keys = [(1 << 200 | number).to_bytes(32, "big").hex() for number in range(_KEYS_MAX)]
    body = msgspec.json.encode({"keys": keys})
    return ground.head("POST", f"/v1/{_NAMESPACE.hex()}/exists", who, len(body)) + body


def _uploads(ground: _Ground) -> list[bytes]:
    return [ground.head("PUT", _path(100 + n), who, 32 * MIB) + b"x" for n, who in enumerate(_TENANTS[1:])]


def _stalled(ground: _Ground) -> Attack:
    requests = [ground.head("GET", _path(10 + number), "attacker") for number in range(8)]
    return Attack(requests=requests, connections=8, is_reading=False)


_Attacks = dict[str, Callable[[_Ground], Attack]]
ATTACKS: _Attacks = {
    "pipelined-401": lambda g: Attack(requests=[g.head("GET", "/v1")], connections=2, under_way=128),
    "silent-connections": lambda g: Attack(requests=[], connections=4096),
    "silent-uploads": lambda g: Attack(requests=_uploads(g), connections=32, connects_s_max=200),
    "stalled-readers": _stalled,
    "stalled-readers-behind": _stalled,
    "slow-tier": lambda g: Attack(requests=[_exists(g, "attacker")], connections=8, under_way=1),
    "frozen-centre": lambda g: Attack(
        requests=[g.head("GET", _path(1000 + number), "attacker") for number in range(24)], connections=24, under_way=1
    ),
    "exists-flood": lambda g: Attack(requests=[_exists(g, "attacker")], connections=8, under_way=1),
    "head-flood": lambda g: Attack(requests=[g.head("HEAD", _path(10), "attacker")], connections=32, under_way=1),
}
# Rows whose server has something behind its memory, and what.
_BEHIND = {"stalled-readers-behind": "valkey", "slow-tier": "slow valkey", "frozen-centre": "centre"}


def run(quick: bool, attacks: Sequence[str] = tuple(ATTACKS)) -> SiegeResult:
    """Measure each attack on a server of its own. ValueError for one that there is not."""
    unknown = set(attacks) - set(ATTACKS)
    if unknown:
        raise ValueError(f"no attack is called {', '.join(sorted(unknown))}, there are {', '.join(ATTACKS)}")
    quiet_s, attack_s = (0.5, 1.5) if quick else (3.0, 10.0)
    rows = [_measure(name, quiet_s, attack_s) for name in attacks]
    return SiegeResult(rows=rows, holds=all(row.holds for row in rows))


def _measure(name: str, quiet_s: float, attack_s: float) -> SiegeRow:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtide-siege-")))
        tokens = {tenant: new_token() for tenant in _TENANTS}
        options, freeze = stack.enter_context(_behind(_BEHIND.get(name, ""), folder, tokens))
        ground = stack.enter_context(_server(tokens, options))
        connection = http.client.HTTPConnection("127.0.0.1", ground.port, timeout=_WAIT_S_MAX)
        stack.callback(connection.close)
        _prepare(ground, connection, name)
        quiet = _read(ground, connection, quiet_s)
        freeze()
        with _attacking(ground, ATTACKS[name](ground)):
            found = _read(ground, connection, attack_s)
            rss = peak_bytes(ground.process.pid) / _LIMITS.resident_bytes_max
            drain_s = _end(ground.process)
    return _row(name, quiet, found, rss, drain_s)


class _Reads(NamedTuple):
    took_ms: list[float]
    errors: int


def _row(attack: str, quiet: _Reads, found: _Reads, rss_over_bound: float, drain_s: float) -> SiegeRow:
    quiet_ms, p99_ms = percentile(quiet.took_ms, 0.99), percentile(found.took_ms, 0.99)
    errors = quiet.errors + found.errors
    is_quick = p99_ms <= max(P99_FACTOR_MAX * quiet_ms, P99_MS_MIN)
    holds = is_quick and not errors and rss_over_bound <= 1.0 and drain_s <= _DRAIN_S_MAX + _END_S_MAX
    return SiegeRow(
        attack=attack,
        p50_ms=median(found.took_ms),
        p99_ms=p99_ms,
        errors=errors,
        quiet_p99_ms=quiet_ms,
        rss_over_bound=rss_over_bound,
        drain_s=drain_s,
        reads=len(found.took_ms),
        holds=holds,
    )


def _read(ground: _Ground, connection: http.client.HTTPConnection, seconds: float) -> _Reads:
    """Read the object over and over. A read that fails counts as one that took as long as that was."""
    took_ms: list[float] = []
    errors, stop_s = 0, time.monotonic() + seconds
    while time.monotonic() < stop_s:
        started_s = time.perf_counter()
        try:
            errors += ground.ask(connection, "GET", _path(1), "measured", None) != http.client.OK
        except (OSError, http.client.HTTPException):
            connection.close()
            errors += 1
        took_ms.append(1e3 * (time.perf_counter() - started_s))
    return _Reads(took_ms, errors)


def _prepare(ground: _Ground, connection: http.client.HTTPConnection, name: str) -> None:
    """Store what is read: the measured tenant's object, and what the attackers ask for."""
    objects = [(1, "measured", _OBJECT_BYTES)]
    if name.startswith("stalled") or name == "head-flood":
        objects += [(10 + number, "attacker", _STALLED_BYTES) for number in range(1 if name == "head-flood" else 8)]
    for number, who, size in objects:
        content = bench_object(ObjectId(_NAMESPACE, BlockKey(number.to_bytes(32, "big"))), bytes(size))
        status = ground.ask(connection, "PUT", _path(number), who, content)
        if status not in {http.client.OK, http.client.CREATED}:
            raise ValueError(f"the server does not store: {status}")
    for _ in range(3):
        # What lies behind comes up into memory.
        ground.ask(connection, "GET", _path(1), "measured", None)


@contextmanager
def _behind(kind: str, folder: Path, tokens: dict[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run what is behind a server. Yield lines of its configuration, and what makes it slow when all is stored."""
    tiers = 'tiers = ["memory://"{}]\n'
    with ExitStack() as stack:
        if kind == "valkey":
            port = stack.enter_context(valkey_server()).port
            yield f'tiers = ["valkey://127.0.0.1:{port}"]\n', lambda: None
        elif kind == "slow valkey":
            port = stack.enter_context(valkey_server()).port
            proxy = stack.enter_context(ShapedProxy(("127.0.0.1", port), lambda seconds: 1e9 * seconds))
            # A batch of 256 answers then takes a quarter of a second.
            yield (
                tiers.format(f', "valkey://127.0.0.1:{proxy.port}"'),
                lambda: proxy.restart(lambda seconds: 4e3 * seconds),
            )
        elif kind == "centre":
            centre = stack.enter_context(_server(tokens, tiers.format("")))
            stack.callback(centre.process.send_signal, signal.SIGCONT)
            token = folder / "token"
            token.write_text(tokens["region"])
            url = f"http://127.0.0.1:{centre.port}?token_file={token}"
            options = f'central = "{url}"\nmanifest = "{folder / "manifest"}"\n'
            yield tiers.format("") + options, lambda: centre.process.send_signal(signal.SIGSTOP)
        else:
            yield tiers.format(""), lambda: None


@contextmanager
def _server(tokens: dict[str, str], options: str) -> Iterator[_Ground]:
    """Run `kvtide serve` with these tenants."""
    tokens.setdefault("region", new_token())
    grants = [
        grant_words(tenant, token) + ('on_behalf_of = ["*"]\n' if tenant == "region" else "")
        for tenant, token in tokens.items()
    ]
    changed = ("memory_bytes_max", "buffer_bytes_max", "tenant_buffer_bytes_max", "uploads_bytes_max")
    limits = "".join(f"{name} = {getattr(_LIMITS, name)}\n" for name in changed)
    config = f"{options}[limits]\n{limits}drain_s_max = {_DRAIN_S_MAX}\n{''.join(grants)}"
    with kvtide_server(config) as (address, process):
        yield _Ground(int(address.rpartition(":")[2]), process, tokens)


@contextmanager
def _attacking(ground: _Ground, attack: Attack) -> Iterator[None]:
    command = [sys.executable, "-m", "kvtide_lab.bench.siege_attack", "127.0.0.1", str(ground.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(attack) + b"\n")
            process.stdin.flush()
            if process.stdout.readline() != b"ready\n":
                raise ValueError("the attack did not start; its reason is above")
            yield
        finally:
            process.kill()


def _end(process: subprocess.Popen[str]) -> float:
    """Ask a server to end, and return how long that took; the longest wait if it did not."""
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_DRAIN_S_MAX + _WAIT_S_MAX)
    return time.monotonic() - started_s
