"""The files in `deploy/` by the tools that read them: Docker, compose, Kubernetes, Prometheus, systemd."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtide.server.settings import read_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
# Prometheus' own tool runs these on the alerts: who is silent, who is damaged, who has filled what it may have.
ALERT_CASES = {
    "evaluation_interval": "1m",
    "tests": [
        {
            "interval": "1m",
            "input_series": [
                {"series": 'up{job="kvtide", instance="one:7421"}', "values": "1 1 0 0 0"},
                {"series": 'up{job="kvtide", instance="two:7421"}', "values": "1 1 1 1 1"},
                {"series": 'kvtide_corrupt_objects_total{instance="two:7421"}', "values": "0 0 0 1 1"},
            ],
            "alert_rule_test": [
                {"eval_time": "1m", "alertname": "KvtideDown", "exp_alerts": []},
                {
                    "eval_time": "4m",
                    "alertname": "KvtideDown",
                    "exp_alerts": [{"exp_labels": {"job": "kvtide", "instance": "one:7421"}}],
                },
                {"eval_time": "2m", "alertname": "KvtideCorruptObjects", "exp_alerts": []},
                {
                    "eval_time": "4m",
                    "alertname": "KvtideCorruptObjects",
                    "exp_alerts": [{"exp_labels": {"instance": "two:7421"}}],
                },
            ],
        }
    ],
}


def tool(name: str, *arguments: object) -> None:
    """Run a tool of the extra `deploy`, or of the system; the test is skipped where there is none."""
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"needs {name}")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvtide.yaml").read_text(encoding="utf-8")))


def test_dockerfile_is_linted() -> None:
    tool("hadolint", DEPLOY / "Dockerfile")


def test_dockerfile_copies_what_is_there_and_not_ignored() -> None:
    allowed = (DEPLOY.parent / ".dockerignore").read_text(encoding="utf-8").replace("!", "").split()
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert copied
    assert [name for name in copied if name not in allowed or not (DEPLOY.parent / name).exists()] == []


def test_compose_file_follows_its_schema() -> None:
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_workflows_follow_their_schema() -> None:
    workflows = sorted((DEPLOY.parent / ".github" / "workflows").glob("*.yml"))
    tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)


def test_compose_mounts_files_that_exist() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounted = [mount.split(":")[0] for each in services.values() for mount in each["volumes"] if mount.startswith("./")]
    assert len(mounted) == 4
    assert [name for name in mounted if not (DEPLOY / name).exists()] == []


def test_kubernetes_manifests_follow_their_schemas() -> None:
    tool("kubernetes-validate", "--strict", "--quiet", DEPLOY / "kubernetes" / "kvtide.yaml")


def test_kubernetes_names_agree() -> None:
    kinds = {each["kind"]: each for each in manifests()}
    pods = kinds["StatefulSet"]["spec"]["template"]
    labels, name = pods["metadata"]["labels"], kinds["Service"]["metadata"]["name"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert kinds["StatefulSet"]["spec"]["serviceName"] == name
    secrets = {volume["secret"]["secretName"] for volume in pods["spec"]["volumes"]}
    assert secrets == {kinds["Secret"]["metadata"]["name"]}


def test_kubernetes_settings_are_the_servers_and_fit_the_pod(tmp_path: Path) -> None:
    kinds = {each["kind"]: each for each in manifests()}
    (tmp_path / "kvtide.toml").write_text(kinds["Secret"]["stringData"]["kvtide.toml"])
    limits = read_settings(tmp_path / "kvtide.toml", {}).limits
    (container,) = kinds["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (claim,) = kinds["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert limits.resident_bytes_max < int(container["resources"]["requests"]["memory"].removesuffix("Gi")) << 30
    assert limits.disk_bytes_max < int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30


@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml")])
def test_prometheus_files_are_checked(arguments: tuple[str, str, str]) -> None:
    tool("promtool", *arguments[:2], DEPLOY / arguments[2])


def test_each_alert_says_what_to_do() -> None:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    named = {rule["alert"] for group in groups for rule in group["rules"]}
    assert named == {line.split("`")[1] for line in page.splitlines() if line.startswith("| `Kvtide")}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    # What an alert says is not what this test is about.
    for rule in (rule for group in groups for rule in group["rules"]):
        rule.pop("annotations")
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump({"groups": groups}))
    (tmp_path / "cases.yml").write_text(yaml.safe_dump({**ALERT_CASES, "rule_files": ["alerts.yml"]}))
    tool("promtool", "test", "rules", tmp_path / "cases.yml")


def test_unit_of_systemd_is_verified(tmp_path: Path) -> None:
    unit = (DEPLOY / "kvtide.service").read_text(encoding="utf-8")
    (tmp_path / "kvtide.service").write_text(unit.replace("/opt/kvtide/bin/kvtide", "/bin/true"))
    tool("systemd-analyze", "verify", tmp_path / "kvtide.service")
