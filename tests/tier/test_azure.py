"""The bucket tier on Azurite, Microsoft's own emulator, where it is installed: npm install --global azurite.

Without it there is nothing to collect: it comes from another ecosystem's registry, and S3 tests the same code.
"""

import base64
import hashlib
import hmac
import itertools
import shutil
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from urllib.parse import quote

import pytest
from tests.stores import opened
from tests.suites.tier_suite import TierSuite, object_bytes, object_id, read_all

from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.tier import Tier
from kvtide.tier.url import open_tier
from kvtide_lab.bench.services import BenchService, started

AZURITE = shutil.which("azurite-blob")
# The emulator's only account and its published key.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PREFIXES = itertools.count()


def make_container(port: int) -> None:
    date = formatdate(usegmt=True)
    what = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/kvtide\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), f"PUT{12 * chr(10)}{what}".encode(), hashlib.sha256).digest()
    key = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Authorization": key}
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/kvtide?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10):
        return


if AZURITE is not None:

    @pytest.fixture(scope="module")
    def server() -> Iterator[BenchService]:
        words = [str(AZURITE), "--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort"]
        with started(lambda port, folder: [*words, str(port), "--location", str(folder)]) as service:
            make_container(service.port)
            yield service

    class TestAzure(TierSuite):
        @pytest.fixture
        def tier(self, server: BenchService) -> Iterator[Tier]:
            place = f"endpoint=http://127.0.0.1:{server.port}/{ACCOUNT}&allow_http=true"
            url = f"az://kvtide/t{next(_PREFIXES)}?account_name={ACCOUNT}&account_key={quote(KEY, safe='')}&{place}"
            with opened(open_tier(url, Limits(), SystemClock(), lambda key: False)) as tier:
                yield tier

        def test_long_object_moves_in_parts(self, tier: Tier) -> None:
            data = object_bytes(1, 20_000_000)
            assert tier.put_from(object_id(1), data)
            assert tier.put_from(object_id(1), data)
            assert read_all(tier, 1, len(data) + 1) == data
