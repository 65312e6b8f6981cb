"""The scenario of `deploy/`, as processes: the servers' own arguments, a real Prometheus on its own rules, a client."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.servers import ServerProcess, server_process

from kvtide.clock import SystemClock
from kvtide.testing.tier_suite import object_bytes, object_id, read_all
from kvtide.tier.pool.tier import pool_tier
from kvtide_lab.bench.services import free_ports, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
NAMES = ("one", "two", "three")


def yaml_of(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def answer(url: str) -> tuple[int, bytes]:
    """Return status and body of an answer; status 0 while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def arguments_of(command: list[str], places: dict[str, str]) -> list[str]:
    """Return a container's arguments with the addresses and folders that stand for its own here."""
    assert command[0] == "serve"
    for place, here in places.items():
        command = [each.replace(place, here) for each in command]
    return command[1:]


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """Run Prometheus on `deploy/`'s configuration, with other targets and a faster pulse."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus")
    settings = yaml_of("prometheus.yml")
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(DEPLOY / name) for name in settings["rule_files"]]
    settings["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    (port,) = free_ports(1)
    flags = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
        "log.level": "error",
    }
    with subprocess.Popen([program, *(f"--{name}={value}" for name, value in flags.items())]) as process:
        try:
            wait_until(lambda: answer(f"http://127.0.0.1:{port}/-/ready")[0] == 200, "Prometheus to be ready", 30)
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()


def ask(prometheus_url: str, expression: str) -> list[Any]:
    """Evaluate an expression, Grafana's variables filled in. AssertionError if Prometheus refuses it."""
    for name, value in {"$instance": ".*", "$__rate_interval": "1m", "$__range": "5m"}.items():
        expression = expression.replace(name, value)
    status, found = answer(f"{prometheus_url}/query?{urllib.parse.urlencode({'query': expression})}")
    assert status == 200, f"{expression}: {found!r}"
    return list(json.loads(found)["data"]["result"])


def pool_of_compose(stack: ExitStack, folder: Path) -> list[ServerProcess]:
    """Start the servers of the compose file, each by its own command."""
    services = yaml_of("compose.yaml")["services"]
    ports = dict(zip(NAMES, free_ports(3), strict=True))
    servers = []
    for name in NAMES:
        store, here = folder / name, f"127.0.0.1:{ports[name]}"
        store.mkdir()
        own = {"0.0.0.0:7422": "127.0.0.1:0", "/var/lib/kvtide": str(store), "0.0.0.0:7421": here}
        places = own | {f"{other}:7421": f"127.0.0.1:{ports[other]}" for other in NAMES}
        arguments = arguments_of(services[name]["command"], places)
        servers.append(stack.enter_context(server_process(*arguments, port=ports[name])))
    return servers


def test_compose_scenario_serves_and_is_watched_and_a_dead_server_is_an_alert(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = pool_of_compose(stack, tmp_path)
        watcher = stack.enter_context(prometheus(tmp_path, [str(server.address) for server in servers]))
        tier = pool_tier("pool://" + ",".join(str(server.address) for server in servers), SystemClock())
        tier.open()
        stack.callback(tier.close)
        assert all(tier.put_from(object_id(number), object_bytes(number)) for number in range(8))
        wait_until(lambda: len(ask(watcher, "up == 1")) == 3, "three targets", 30)
        wait_until(lambda: bool(ask(watcher, "kvtide_tier_objects > 0")), "objects", 30)
        panels = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
        for expression in (target["expr"] for panel in panels for target in panel["targets"]):
            ask(watcher, expression)
        servers[0].kill()
        assert [read_all(tier, number) for number in range(8)] == [object_bytes(number) for number in range(8)]
        wait_until(lambda: len(ask(watcher, "up == 1")) == 2, "a target that is down", 30)
        wait_until(lambda: bool(ask(watcher, 'ALERTS{alertname="KvtideDown"}')), "the alert", 30)


def test_pod_of_the_statefulset_becomes_ready_by_its_own_probes(tmp_path: Path) -> None:
    kinds = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "kvtide.yaml").read_text())}
    (tmp_path / "store").mkdir()
    settings = kinds["Secret"]["stringData"]["kvtide.toml"].replace("/var/lib/kvtide", str(tmp_path / "store"))
    # A machine of tests has less memory than a pod.
    settings = settings.replace("memory_bytes_max = 4294967296", "memory_bytes_max = 67108864")
    (tmp_path / "kvtide.toml").write_text(settings)
    (container,) = kinds["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    port, health = free_ports(2)
    places = {
        "/etc/kvtide/kvtide.toml": str(tmp_path / "kvtide.toml"),
        "0.0.0.0:7421": f"127.0.0.1:{port}",
        "0.0.0.0:7422": f"127.0.0.1:{health}",
        "kvtide.kvtide:7421": f"127.0.0.1:{port}",
        "$(POD_IP):7421": f"127.0.0.1:{port}",
    }
    with server_process(*arguments_of(container["args"], places), port=port):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            url = f"http://127.0.0.1:{health}{container[probe]['httpGet']['path']}"
            wait_until(lambda: answer(url)[0] == 200, probe, 20)  # noqa: B023
