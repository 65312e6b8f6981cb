from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from kvtide.clock import SystemClock
from kvtide_lab.bench import server


def test_small_round_measures_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OBJECT_BYTES": 64 << 10, "OBJECTS": 4, "CLIENTS": 2}.items():
        monkeypatch.setattr(server, name, value)
    monkeypatch.setattr(server, "_QUICK", server._Size(1, 0.1, 1))
    result = server.run(True, SystemClock())
    sides = {row.server for row in result.rows}
    has_nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin") is not None
    assert sides == {"kvtide disk", "kvtide memory", "floor"} | ({"nginx"} if has_nginx else set())
    keys = json.loads(msgspec.json.encode(result)).keys()
    assert {"get_cpu_s_per_gb_server", "put_cpu_s_per_gb_server", "get_vs_nginx", "get_cpu_vs_nginx"} <= keys
    assert result.put_cpu_vs_floor > 0 and (result.get_cpu_vs_nginx is None) is not has_nginx
