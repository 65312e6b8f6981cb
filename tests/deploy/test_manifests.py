"""The files in `deploy/` by the tools that read them, and as processes: servers by their own arguments, Prometheus."""

import json
import shutil
import subprocess
import sys
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
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id, read_all

from kvtide.clock import SystemClock
from kvtide.server.settings import read_settings
from kvtide.tier.pool.tier import pool_tier
from kvtide_lab.bench.services import free_ports, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
SERIES = {
    'up{job="kvtide", instance="one:7421"}': "1 1 0 0 0",
    'up{job="kvtide", instance="two:7421"}': "1 1 1 1 1",
    'kvtide_corrupt_objects_total{instance="two:7421"}': "0 0 0 1 1",
}
# When, which alert, and for whom: who is silent, who is damaged.
ALERTS: list[tuple[str, str, list[dict[str, str]]]] = [
    ("1m", "KvtideDown", []),
    ("4m", "KvtideDown", [{"job": "kvtide", "instance": "one:7421"}]),
    ("2m", "KvtideCorruptObjects", []),
    ("4m", "KvtideCorruptObjects", [{"instance": "two:7421"}]),
]
WORKFLOWS = sorted((DEPLOY.parent / ".github" / "workflows").glob("*.yml"))


def tool(name: str, *arguments: object) -> None:
    """Run a tool of the extra `deploy`, or of the system; the test is skipped where there is none."""
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"needs {name}")
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120, cwd=DEPLOY
    )
    assert done.returncode == 0, done.stdout + done.stderr


def yaml_of(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def kinds() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes" / "kvtide.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.mark.parametrize(
    "words",
    [
        "hadolint Dockerfile",
        "check-jsonschema --builtin-schema vendor.compose-spec compose.yaml",
        f"check-jsonschema --builtin-schema vendor.github-workflows {' '.join(map(str, WORKFLOWS))}",
        f"zizmor --offline --no-progress {' '.join(map(str, WORKFLOWS))}",
        "kubernetes-validate --strict --quiet kubernetes/kvtide.yaml",
        "promtool check rules alerts.yml",
        "promtool check config prometheus.yml",
    ],
)
def test_file_is_what_its_tool_expects(words: str) -> None:
    tool(*words.split())


def test_dockerfile_copies_what_is_there_and_not_ignored() -> None:
    allowed = (DEPLOY.parent / ".dockerignore").read_text(encoding="utf-8").replace("!", "").split()
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert copied
    assert [name for name in copied if name not in allowed or not (DEPLOY.parent / name).exists()] == []


def test_compose_mounts_files_that_exist() -> None:
    services = yaml_of("compose.yaml")["services"]
    mounted = [mount.split(":")[0] for each in services.values() for mount in each["volumes"] if mount.startswith("./")]
    assert len(mounted) == 4
    assert [name for name in mounted if not (DEPLOY / name).exists()] == []


def test_kubernetes_names_agree() -> None:
    found = kinds()
    pods = found["StatefulSet"]["spec"]["template"]
    labels, name = pods["metadata"]["labels"], found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert found["StatefulSet"]["spec"]["serviceName"] == name
    secrets = {volume["secret"]["secretName"] for volume in pods["spec"]["volumes"]}
    assert secrets == {found["Secret"]["metadata"]["name"]}


def test_kubernetes_settings_are_the_servers_and_fit_the_pod(tmp_path: Path) -> None:
    found = kinds()
    (tmp_path / "kvtide.toml").write_text(found["Secret"]["stringData"]["kvtide.toml"])
    limits = read_settings(tmp_path / "kvtide.toml", {}).limits
    (container,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (claim,) = found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert limits.resident_bytes_max < int(container["resources"]["requests"]["memory"].removesuffix("Gi")) << 30
    assert limits.disk_bytes_max < int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30


def test_each_alert_says_what_to_do() -> None:
    groups = yaml_of("alerts.yml")["groups"]
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    named = {rule["alert"] for group in groups for rule in group["rules"]}
    assert named == {line.split("`")[1] for line in page.splitlines() if line.startswith("| `Kvtide")}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    groups = yaml_of("alerts.yml")["groups"]
    # What an alert says is not what this test is about.
    for rule in (rule for group in groups for rule in group["rules"]):
        rule.pop("annotations")
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump({"groups": groups}))
    series = [{"series": name, "values": values} for name, values in SERIES.items()]
    expected = [
        {"eval_time": at, "alertname": name, "exp_alerts": [{"exp_labels": labels} for labels in found]}
        for at, name, found in ALERTS
    ]
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": expected}]
    cases = {"evaluation_interval": "1m", "rule_files": ["alerts.yml"], "tests": tests}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    tool("promtool", "test", "rules", tmp_path / "cases.yml")


def test_unit_of_systemd_is_verified(tmp_path: Path) -> None:
    unit = (DEPLOY / "kvtide.service").read_text(encoding="utf-8")
    (tmp_path / "kvtide.service").write_text(unit.replace("/opt/kvtide/bin/kvtide", "/bin/true"))
    tool("systemd-analyze", "verify", tmp_path / "kvtide.service")


NAMES = ("one", "two", "three")


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


def test_compose_scenario_serves_and_is_watched_and_a_dead_server_is_an_alert(tmp_path: Path, stack: ExitStack) -> None:
    servers = pool_of_compose(stack, tmp_path)
    places = [str(server.address) for server in servers]
    with (
        prometheus(tmp_path, places) as watcher,
        opened(pool_tier(f"pool://{','.join(places)}", SystemClock())) as tier,
    ):
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
    found = kinds()
    (tmp_path / "store").mkdir()
    settings = found["Secret"]["stringData"]["kvtide.toml"].replace("/var/lib/kvtide", str(tmp_path / "store"))
    # A machine of tests has less memory than a pod.
    settings = settings.replace("memory_bytes_max = 4294967296", "memory_bytes_max = 67108864")
    (tmp_path / "kvtide.toml").write_text(settings)
    (container,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
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
