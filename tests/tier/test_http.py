from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import running_server
from tests.stores import opened

from kvtide.clock import SystemClock
from kvtide.server.settings import ServerLimits
from kvtide.testing.tier_suite import TIER_BYTES, TierSuite
from kvtide.tier import Tier
from kvtide.tier.http.tier import http_tier


class TestHttp(TierSuite):
    @pytest.fixture(params=["memory", "disk"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
        tiers = ("memory://",) if request.param == "memory" else (f"disk://{tmp_path}",)
        limits = ServerLimits(memory_bytes_max=TIER_BYTES, disk_bytes_max=TIER_BYTES)
        with running_server(tiers=tiers, limits=limits) as server, opened(http_tier(server.url, SystemClock())) as tier:
            yield tier
