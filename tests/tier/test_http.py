from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import running_server

from kvtide.clock import SystemClock
from kvtide.server.settings import ServerLimits
from kvtide.testing.tier_suite import TIER_BYTES, TierSuite
from kvtide.tier import Tier
from kvtide.tier.http.tier import http_tier


class TestHttpOverMemory(TierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        with running_server(tiers=("memory://",), limits=ServerLimits(memory_bytes_max=TIER_BYTES)) as server:
            tier = http_tier(server.url, SystemClock())
            tier.open()
            yield tier
            tier.check()
            tier.close()


class TestHttpOverDisk(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        limits = ServerLimits(disk_bytes_max=TIER_BYTES)
        with running_server(tiers=(f"disk://{tmp_path}",), limits=limits) as server:
            tier = http_tier(server.url, SystemClock())
            tier.open()
            yield tier
            tier.check()
            tier.close()
