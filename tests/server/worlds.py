"""Regions for tests, each a server in this process; who asks them, and for what."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.servers import RunningServer, ServerProcess, server_process
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.clock import SystemClock
from kvtide.server.auth import Grant, Scope, token_digest
from kvtide.server.logs import write_log
from kvtide.server.settings import ListenAddress, ServerSettings
from kvtide.tier.http.records import records_clients
from kvtide.types import Namespace
from kvtide.wire.protocol import RecordKind, RecordName
from kvtide_lab.bench.services import free_ports, wait_until

SPACE = object_id(1).namespace
GENERATION = f"/v1/records/generation/{SPACE.hex()}"
CHAT = "/v1/records/alias/chat"


def token_of(name: str) -> str:
    return f"{name}-{'0' * 32}"


def granted(tenant: str, *scopes: Scope, **more: Any) -> Grant:
    """Let a tenant in by its token, to everything unless scopes are named."""
    return Grant(tenant=tenant, scopes=list(scopes or Scope), token_sha256=token_digest(token_of(tenant)), **more)


def bearer(tenant: str) -> dict[str, Any]:
    """Return the header of `ask` that shows a tenant's token."""
    return {"Own_Authorization": f"Bearer {token_of(tenant)}"}


def launched(settings: ServerSettings, stack: ExitStack) -> RunningServer:
    """Start a server, also one that was stopped, as another process would; the stack stops it."""
    server = RunningServer(settings)
    server.start()
    stack.callback(server.stop)
    return server


class World:
    """A centre and two regions. The centre asks the regions where a client wants the latest."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        central: dict[str, Any] | None = None,
        scheme: str = "http://127.0.0.1",
        options: tuple[str, str] = ("", ""),
        **settings: object,
    ) -> None:
        ports = free_ports(3)
        down, up = options
        self.folder = folder
        regions = tuple(f"http://127.0.0.1:{port}{down}" for port in ports[1:])
        with pytest.MonkeyPatch.context() as patch:
            # A busy machine is no silent centre.
            for name in ("LATEST_S_MAX", "ASKED_S_MAX"):
                patch.setattr(f"kvtide.server.regions.{name}", 15.0)
            places = [f"127.0.0.1:{port}" for port in ports]
            self.centre = launched(ServerSettings(listen=places[0], regions=regions, **central or {}), stack)
            shared: dict[str, Any] = {"central": f"{scheme}:{ports[0]}{up}", **settings}
            self.regions = [
                launched(ServerSettings(listen=place, manifest=folder / f"manifest-{number}", **shared), stack)
                for number, place in enumerate(places[1:])
            ]
        recovery = self.centre.region.recovery
        wait_until(lambda: recovery.is_over, "the centre to have asked its regions")
        for each in self.regions:
            wait_until(lambda r=each.region: r.as_of_s() is not None, "a region to hear of its centre")  # type: ignore[misc]


@contextmanager
def region_processes(folder: Path) -> Iterator[list[ServerProcess]]:
    """Run a centre and two regions, each a process."""
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    centre = ["--region", urls[1], "--region", urls[2]]
    own = [["--central", urls[0], "--manifest", str(folder / f"manifest-{number}")] for number in (1, 2)]
    with ExitStack() as stack:
        words = zip(ports, [centre, *own], strict=True)
        servers = [stack.enter_context(server_process(*arguments, port=port)) for port, arguments in words]
        for server in servers[1:]:
            # A region says nothing of the latest before it has heard its centre's records; those wait for all regions.
            wait_until(lambda s=server: ask(s, "HEAD", 0, Force_Latest="1")[0].status == 404, "it to know the latest")  # type: ignore[misc]
        yield servers


def invalidate(region: str, namespace: Namespace) -> None:
    """Raise a namespace's generation for the first time."""
    (client,) = records_clients(region, SystemClock(), 10.0)
    with client:
        client.write(RecordName(RecordKind.GENERATION, namespace.hex()), "1")


class Place(NamedTuple):
    """A server elsewhere, to be asked like one of ours."""

    address: ListenAddress


def ask(
    server: RunningServer | ServerProcess | Place,
    method: str,
    what: int | str,
    body: bytes | None = None,
    **headers: str,
) -> tuple[HTTPResponse, bytes]:
    """Ask for an object by number, or for a path. A header `Own_X` goes as `X`, others with our prefix."""
    path = path_of(what) if isinstance(what, int) else what
    names = {key.replace("_", "-"): value for key, value in headers.items()}
    sent = {key[4:] if key.startswith("Own-") else f"Kvtide-{key}": value for key, value in names.items()}
    with closing(HTTPConnection(server.address.host, server.address.port, timeout=30)) as connection:
        connection.request(method, path, body, sent)
        # One that is cut holds its socket until it is closed itself.
        with connection.getresponse() as answer:
            return answer, answer.read()


def put(server: RunningServer | ServerProcess, number: int, size: int = 1000, **headers: str) -> None:
    assert ask(server, "PUT", number, object_bytes(number, size), **headers)[0].status == 201


def metric(server: RunningServer | ServerProcess, name: str, **headers: Any) -> float:
    """Return a line of `GET /metrics`, 0 if it is not there; of several tiers or tenants their sum."""
    lines = ask(server, "GET", "/metrics", **headers)[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def path_of(number: int) -> str:
    name = object_id(number)
    return f"/v1/{name.namespace.hex()}/{name.key.hex()}"


def exchange(server: RunningServer, data: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes."""
    with server.connect() as sock:
        sock.sendall(data)
        return b"".join(iter(partial(sock.recv, 65536), b""))


@contextmanager
def stalled(server: RunningServer | ServerProcess, request: bytes, unsent_bytes: Callable[[], float]) -> Iterator[None]:
    """Ask for a large body and take nothing of it: once no more of it is sent, its slice holds the only slot."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((server.address.host, server.address.port))
        sock.sendall(request)
        seen = [0.0]

        def stands_still() -> bool:
            time.sleep(0.1)
            seen.append(unsent_bytes())
            return 0 < seen[-1] == seen[-2]

        wait_until(stands_still, "the link to be full")
        yield


@contextmanager
def logged(logger: str, path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Give the lines that a logger has written so far."""
    write_log(logger, path)
    log = logging.getLogger(logger)
    try:
        yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    finally:
        for handler in log.handlers[:]:
            log.removeHandler(handler)
            with suppress(OSError):
                handler.close()
        log.setLevel(logging.NOTSET)
        log.propagate = True
