"""How servers of a pool are reached: under TLS, where they advertise; and etcd under TLS with a user."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.server.worlds import ask, path_of
from tests.servers import running_server

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.server.settings import TlsSettings
from kvtide.testing.tier_suite import object_bytes, object_id, read_all
from kvtide.tier.pool import Member
from kvtide.tier.pool.membership import EtcdMembership, StaticMembership, membership_of
from kvtide.tier.pool.placement import Placement, PoolMap, PoolServer
from kvtide.tier.pool.tier import pool_tier, server_urls
from kvtide_lab.bench.services import BenchService, free_ports, started, wait_until


def test_pool_of_servers_under_tls_is_used_by_one_url(certificates: Path) -> None:
    tls = TlsSettings(cert_file=certificates / "server.pem", key_file=certificates / "server.key")
    with running_server(tls=tls) as one, running_server(tls=tls) as other:
        places = ",".join(str(server.address) for server in (one, other))
        url = f"pool://{places}?scheme=https&ca_file={certificates / 'ca.pem'}"
        tier = pool_tier(url, SystemClock())
        tier.open()
        assert tier.put_from(object_id(1), object_bytes(1))
        assert read_all(tier, 1) == object_bytes(1)
        tier.close()
        assert all(each.startswith("https://") for each in server_urls(url))


def test_who_asks_the_wrong_server_is_sent_to_https_where_that_is_spoken() -> None:
    servers = tuple(PoolServer(name, f"{name}:7421", scheme="https") for name in "abc")
    pool = PoolMap(1, servers, replicas=1)
    owner = servers[Placement(pool).owners(object_id(1).key)[0]]
    member = Member(next(each for each in servers if each != owner), StaticMembership(pool))
    with running_server(member) as server:
        member.open()
        answer, _ = ask(server, "GET", 1)
        member.close()
    assert (answer.status, answer.headers["Location"]) == (307, f"https://{owner.address}{path_of(1)}")


def etcd_words(port: int, folder: Path, certificates: Path) -> Sequence[str]:
    client, peer = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{free_ports(1)[0]}"
    place = ["--listen-client-urls", client, "--advertise-client-urls", client]
    peers = ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    tls = ["--cert-file", str(certificates / "server.pem"), "--key-file", str(certificates / "server.key")]
    return ["etcd", "--data-dir", str(folder / "etcd"), *place, *peers, *tls]


@pytest.fixture(scope="module")
def etcd(certificates: Path) -> Iterator[BenchService]:
    if shutil.which("etcd") is None:
        pytest.skip("no etcd; apt install etcd-server")
    with started(lambda port, folder: etcd_words(port, folder, certificates)) as service:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        for path, words in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            url = f"https://127.0.0.1:{service.port}/v3/auth/{path}"
            request = urllib.request.Request(url, json.dumps(words).encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10, context=context).close()
        yield service


def source(etcd: BenchService, certificates: Path, user: Path | None) -> EtcdMembership:
    options = f"etcd_ca_file={certificates / 'ca.pem'}" + (f"&etcd_user_file={user}" if user else "")
    found = membership_of(f"pool+etcds://127.0.0.1:{etcd.port}/pool?{options}")
    assert isinstance(found, EtcdMembership)
    return found


def test_etcd_under_tls_lets_its_user_in_and_nobody_else(
    etcd: BenchService, certificates: Path, tmp_path: Path
) -> None:
    user = tmp_path / "user"
    user.write_text("root:secret\n")
    stop, server = threading.Event(), PoolServer("a", "a:7421", scheme="https")
    registering = threading.Thread(target=source(etcd, certificates, user).register, args=(server, stop))
    registering.start()
    reader = source(etcd, certificates, user)

    def is_there() -> bool:
        try:
            return reader.read().servers == (server,)
        except ValueError:
            return False

    wait_until(is_there, "the server in the map")
    # A token that etcd takes no longer is asked for anew.
    reader._token = "over.1"
    assert is_there()
    with pytest.raises(TierUnavailable):
        source(etcd, certificates, None).read()
    stop.set()
    registering.join()


@pytest.mark.parametrize("options", ["?etcd_ca_file=/absent", "?etcd_user_file=/absent", "?scheme=ftp"])
def test_bad_ways_to_reach_a_pool_are_an_error_at_once(options: str) -> None:
    with pytest.raises(ValueError, match=r"etcd|scheme"):
        membership_of(f"pool+etcd://127.0.0.1:1/pool{options}")


def test_server_of_a_pool_must_be_reached_by_others_and_may_advertise_where(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kvtide.cli", "serve", "--listen", "0.0.0.0:0", "--open-to-all"]
    pool = ["--pool", f"pool+file://{tmp_path / 'pool.json'}"]
    ran = subprocess.run([*words, *pool], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, "--advertise" in ran.stderr, ran.stderr.count("\n")) == (2, True, 1)
    with subprocess.Popen([*words, *pool, "--advertise", "https://node-a:7421"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and b" on " in process.stdout.readline()
        process.terminate()
