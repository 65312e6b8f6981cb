"""Profiles in a store, and caches that find them there."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.codec.tide_profiles import LAYOUT, fitted
from tests.store.test_cache import Collector, fill, metas_of
from tests.stores import open_memory, stored_records
from tests.suites import smooth_bits
from typer.testing import CliRunner

from kvtide.block import BlockBits, BlockMeta, KVDtype
from kvtide.cli.app import app
from kvtide.clock import ManualClock
from kvtide.codec import AwaitingCodec, CodecRegistry, Profile, ProfileShape
from kvtide.codec.tide import TideCodec
from kvtide.config import Limits
from kvtide.store import profiles
from kvtide.store.cache import Cache, cache_for
from kvtide.store.load import MissReason, Whole
from kvtide.store.notes import VERSION_CODEC, write_note
from kvtide.store.profile_follower import LOOK_S, LOOK_S_MAX, RENEW_S, START_S_MAX
from kvtide.store.profiles import ProfileStore, ProfileVersion, newest_of, profile_name
from kvtide.store.storing import PendingBlock
from kvtide.tier import Tier
from kvtide.tier.breaker import caller_deadline_s
from kvtide.types import Section
from kvtide.wire import parse_object

pytestmark = pytest.mark.usefixtures("any_block_fits")

KIND, NAME = "tide-layer", profile_name(b"a model", b"")
FIRST, SECOND = fitted(LAYOUT), fitted(LAYOUT, blocks=7)


@pytest.fixture
def shelf() -> ProfileStore:
    return ProfileStore(open_memory())


def newest(store: ProfileStore, name: bytes = NAME) -> list[str]:
    return [each.digest for each in newest_of(store.versions(name, KIND))]


@pytest.mark.parametrize("piece_bytes", [1 << 10, 1 << 23])
def test_profile_comes_back_as_it_was(shelf: ProfileStore, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "PIECE_BYTES", piece_bytes)
    shelf.put(FIRST, [NAME], 1.0)
    found = shelf.read(FIRST.digest)
    assert found is not None and found.to_bytes() == FIRST.to_bytes()
    assert shelf.read(SECOND.digest) is None
    # A record may say any number of bytes.
    assert shelf.use(FIRST.digest, len(FIRST.to_bytes())) and not any(shelf.use(SECOND.digest, n) for n in (1, 1 << 60))


def test_last_put_is_the_newest_whatever_its_clock_says(shelf: ProfileStore) -> None:
    shelf.put(FIRST, [NAME, profile_name(b"other", b"")], 100.0)
    shelf.put(SECOND, [NAME], 50.0)
    assert newest(shelf) == [SECOND.digest.hex(), FIRST.digest.hex()]
    assert newest(shelf, profile_name(b"other", b"")) == [FIRST.digest.hex()]
    shelf.put(FIRST, [NAME], 60.0)
    shelf.put(FIRST, [NAME], 70.0)
    assert newest(shelf) == [FIRST.digest.hex(), SECOND.digest.hex()]
    assert len(shelf.versions(NAME, KIND)) == 3


def test_removed_profile_gives_way_to_the_one_before(shelf: ProfileStore) -> None:
    shelf.put(FIRST, [NAME], 1.0)
    shelf.put(SECOND, [NAME], 2.0)
    assert shelf.remove(SECOND.digest, 3.0) == 1
    assert newest(shelf) == [FIRST.digest.hex()]
    assert shelf.read(SECOND.digest) is None and shelf.read(FIRST.digest) is not None
    shelf.put(SECOND, [NAME], 4.0)
    assert newest(shelf)[0] == SECOND.digest.hex()


def test_bytes_of_another_digest_are_no_profile(shelf: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.put(SECOND, [NAME], 1.0)
    ids = profiles._piece_ids
    # A store that lies: under the first's names lie the second's bytes.
    monkeypatch.setattr(profiles, "_piece_ids", lambda digest, total: ids(SECOND.digest, total))
    monkeypatch.setattr(
        profiles, "_piece_id", lambda digest, number, own=profiles._piece_id: own(SECOND.digest, number)
    )
    assert shelf.read(FIRST.digest) is None


def test_damaged_piece_is_removed_and_put_again(tmp_path: Path) -> None:
    with cache_for(str(tmp_path), CodecRegistry().make("raw")) as cache:
        ProfileStore(cache.tiers).put(FIRST, [NAME], 1.0)
    for record in stored_records(tmp_path):
        if len(record.body()) > 4096:
            record.write_body(record.body()[:300])
    with cache_for(str(tmp_path), CodecRegistry().make("raw")) as again:
        store = ProfileStore(again.tiers)
        assert store.read(FIRST.digest) is None
        store.put(FIRST, [NAME], 2.0)
        assert store.read(FIRST.digest) is not None


def test_profile_too_large_for_a_store_is_refused(shelf: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "STORED_PROFILE_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="a store takes profiles of 1000 bytes"):
        shelf.put(FIRST, [NAME], 1.0)


def awaiting(store: Path | str, clock: ManualClock, memory_bytes_max: int = 1 << 26) -> Cache:
    registry = CodecRegistry()
    codec = registry.make_by_group("tide:1e-3", [ProfileShape(LAYOUT)])
    assert isinstance(codec, AwaitingCodec)
    return cache_for(str(store), codec, registry, Limits(memory_bytes_max=memory_bytes_max), clock)


def codec_ids_of(tier: Tier, metas: Sequence[BlockMeta]) -> list[tuple[str, bytes | None]]:
    """Return codec and profile of each of these blocks that is stored."""
    buffer, found = memoryview(bytearray(8 << 20)), []
    for meta in metas:
        if size := tier.get_into(meta.id, buffer):
            stored = parse_object(buffer[:size], meta.id)
            found.append((stored.codec_id, stored.profile))
    return found


def codec_ids(cache: Cache) -> list[tuple[str, bytes | None]]:
    return codec_ids_of(cache.tiers, metas_of(LAYOUT, 6))


def put(cache: Cache, profile: Profile) -> None:
    ProfileStore(cache.tiers).put(profile, [NAME], 1.0)


@contextmanager
def knowing(store: Path, clock: ManualClock) -> Iterator[Cache]:
    """A cache that has found the first profile in its store."""
    with awaiting(store, clock) as cache:
        put(cache, FIRST)
        cache.profiles.seek(b"a model", b"", "")
        yield cache


def test_blocks_are_lossless_until_a_profile_comes(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), awaiting(tmp_path, clock) as cache:
        cache.profiles.seek(b"a model", b"", "kvtide calibrate HERE")
        fill(cache, metas_of(LAYOUT, 2))
        clock.advance(LOOK_S)
        fill(cache, metas_of(LAYOUT, 3)[2:])
        assert cache.stats().blocks_without_profile == 3
        put(cache, FIRST)
        fill(cache, metas_of(LAYOUT, 4)[3:])
        clock.advance(LOOK_S)
        fill(cache, metas_of(LAYOUT, 5)[4:])
        assert codec_ids(cache) == [("lossless-2", None)] * 4 + [("tide-1", FIRST.digest)]
        assert cache.stats().blocks_unencodable == 0
        # Both kinds are of the quality that was asked for, and are loaded side by side.
        assert cache.load(metas_of(LAYOUT, 5), Whole(Collector())).blocks == 5
    assert [each.message for each in caplog.records] == [
        "blocks are stored losslessly until the store has a profile of this model: kvtide calibrate HERE"
    ]


def test_profile_is_found_at_the_start_and_a_newer_one_later(tmp_path: Path, clock: ManualClock) -> None:
    with knowing(tmp_path, clock) as cache:
        fill(cache, metas_of(LAYOUT, 1))
        put(cache, SECOND)
        clock.advance(RENEW_S)
        fill(cache, metas_of(LAYOUT, 2)[1:])
        assert [profile for _, profile in codec_ids(cache)] == [FIRST.digest, SECOND.digest]
        assert cache.load(metas_of(LAYOUT, 2), Whole(Collector())).blocks == 2


def test_old_profile_that_an_object_names_is_found_in_the_background(tmp_path: Path, clock: ManualClock) -> None:
    with knowing(tmp_path, clock) as writer:
        contents = fill(writer, metas_of(LAYOUT, 1))
        put(writer, SECOND)
    with awaiting(tmp_path, clock) as reader:
        reader.profiles.seek(b"a model", b"", "")
        missed = reader.load(metas_of(LAYOUT, 1), Whole(Collector()))
        assert (missed.blocks, missed.reason) == (0, MissReason.UNKNOWN_CODEC)
        fill(reader, metas_of(LAYOUT, 2)[1:])
        sink = Collector()
        assert reader.load(metas_of(LAYOUT, 2), Whole(sink)).blocks == 2
        assert np.abs(sink.blocks[0].view(np.float32) - contents[0].view(np.float32)).max() < 0.5


def test_blocks_of_a_profile_that_somebody_removed_give_way_to_new_ones(tmp_path: Path, clock: ManualClock) -> None:
    metas = metas_of(LAYOUT, 1)
    with knowing(tmp_path, clock) as writer:
        fill(writer, metas)
        ProfileStore(writer.tiers).remove(FIRST.digest, 2.0)
        put(writer, SECOND)
    with awaiting(tmp_path, clock) as reader:
        reader.profiles.seek(b"a model", b"", "")
        assert reader.load(metas, Whole(Collector())).reason is MissReason.UNKNOWN_CODEC
        reader.profiles.look()
        fill(reader, metas)
        assert codec_ids(reader) == [("tide-1", SECOND.digest)]
        assert reader.load(metas, Whole(Collector())).blocks == 1


def test_unknown_profile_is_looked_for_once_in_a_while(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with knowing(tmp_path, clock) as writer:
        fill(writer, metas_of(LAYOUT, 1))
        ProfileStore(writer.tiers).remove(FIRST.digest, 2.0)
    asked: list[bytes] = []
    monkeypatch.setattr(ProfileStore, "read", lambda self, digest: asked.append(digest))
    with awaiting(tmp_path, clock) as reader:
        for _ in range(3):
            assert reader.load(metas_of(LAYOUT, 1), Whole(Collector())).blocks == 0
            reader.profiles.look()
        assert asked == [FIRST.digest]
        clock.advance(LOOK_S)
        reader.load(metas_of(LAYOUT, 1), Whole(Collector()))
        reader.profiles.look()
        assert asked == [FIRST.digest] * 2


def test_model_that_changes_during_a_look_gets_no_profile_of_the_one_before(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = ProfileStore.versions
    with awaiting(tmp_path, clock) as cache:
        put(cache, FIRST)

        def changing(self: ProfileStore, name: bytes, kind: str, group: str) -> list[ProfileVersion]:
            monkeypatch.undo()
            cache.profiles.seek(b"other", b"", "")
            return versions(self, name, kind, group)

        monkeypatch.setattr(ProfileStore, "versions", changing)
        cache.profiles.seek(b"a model", b"", "")
        assert cache.profiles.is_waiting
        cache.profiles.look()
        assert cache.profiles.is_waiting


def test_profiles_in_memory_are_bounded(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.store.profile_follower.FOUND_MAX", 1)
    with knowing(tmp_path, clock) as cache:
        put(cache, SECOND)
        clock.advance(RENEW_S)
        cache.profiles.look()
        assert cache.profiles.codec.profile == FIRST.digest


def test_profile_that_left_the_store_by_age_is_put_again(tmp_path: Path, clock: ManualClock) -> None:
    with knowing(tmp_path, clock) as cache:
        for info in list(cache.tiers.objects()):
            if info.size > 4096:
                cache.tiers.delete(info.id, "evicted")
        store = ProfileStore(cache.tiers)
        assert store.read(FIRST.digest) is None
        clock.advance(RENEW_S)
        cache.profiles.look()
        assert store.read(FIRST.digest) is not None


def test_silent_store_costs_the_start_a_bounded_time(clock: ManualClock, tmp_path: Path) -> None:
    # Nobody listens there; what can't be asked is not there.
    with awaiting("http://127.0.0.1:9", clock) as cache:
        cache.profiles.seek(b"a model", b"", "kvtide calibrate HERE")
        fill(cache, metas_of(LAYOUT, 1))
        assert cache.stats().blocks_without_profile == 1


def test_start_waits_less_for_the_store_than_the_storing_thread(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def versions(*asked: object) -> list[ProfileVersion]:
        waits.append(caller_deadline_s() - clock.monotonic_s())
        return []

    monkeypatch.setattr(ProfileStore, "versions", versions)
    with awaiting(tmp_path, clock) as cache:
        cache.profiles.seek(b"a model", b"", "")
        clock.advance(LOOK_S)
        fill(cache, metas_of(LAYOUT, 1))
    assert waits == [START_S_MAX, LOOK_S_MAX]


@pytest.mark.parametrize("record", [b"{}", b"no json", b'{"name": "xy"}'])
def test_record_that_is_none_hides_no_profile(shelf: ProfileStore, record: bytes) -> None:
    shelf.put(FIRST, [NAME], 1.0)
    object_id = profiles._version_id(NAME, KIND, 1)
    assert write_note(shelf._tier, object_id, VERSION_CODEC, record)
    assert newest(shelf) == [FIRST.digest.hex()]
    assert len(shelf.all()) == 1


@pytest.mark.parametrize("installed", [(), (SECOND,)])
def test_installed_profile_or_none_serves_until_the_store_has_one_and_once_it_is_removed(
    installed: tuple[Profile, ...], tmp_path: Path, clock: ManualClock
) -> None:
    registry = CodecRegistry(installed)
    codec = registry.make_by_group("tide:1e-3", [ProfileShape(LAYOUT)])
    with cache_for(str(tmp_path), codec, registry, clock=clock) as cache:
        cache.profiles.seek(b"a model", b"", "")
        fill(cache, metas_of(LAYOUT, 1))
        put(cache, FIRST)
        clock.advance(LOOK_S)
        fill(cache, metas_of(LAYOUT, 2)[1:])
        ProfileStore(cache.tiers).remove(FIRST.digest, 2.0)
        clock.advance(RENEW_S)
        fill(cache, metas_of(LAYOUT, 3)[2:])
        without = ("tide-1", SECOND.digest) if installed else ("lossless-2", None)
        assert codec_ids(cache) == [without, ("tide-1", FIRST.digest), without]
        assert ProfileStore(cache.tiers).read(FIRST.digest) is None


def test_profile_of_another_shape_is_not_taken(tmp_path: Path, clock: ManualClock) -> None:
    other = fitted(replace(LAYOUT, kv_heads=2))
    with awaiting(tmp_path, clock) as cache:
        put(cache, other)
        cache.profiles.seek(b"a model", b"", "")
        fill(cache, metas_of(LAYOUT, 1))
        assert codec_ids(cache) == [("lossless-2", None)]


def test_profile_that_this_version_can_t_use_hides_no_older_one(tmp_path: Path, clock: ManualClock) -> None:
    with knowing(tmp_path, clock) as cache:
        put(cache, FIRST.with_arrays({"excess": np.zeros(1)}))
        cache.profiles.seek(b"a model", b"", "")
        assert cache.profiles.codec.profile == FIRST.digest


def test_awaiting_codec_takes_its_kind_alone() -> None:
    codec = CodecRegistry().make_by_group("tide-deep:1e-3", [ProfileShape(LAYOUT)])
    assert isinstance(codec, AwaitingCodec)
    assert (codec.quality, codec.is_lossless, codec.takes([FIRST])) == (1e-3, False, False)
    assert not codec.takes([fitted(replace(LAYOUT, kv_heads=2), "deep")])
    assert codec.takes([fitted(LAYOUT, "deep")])


class Encoder(TideCodec):
    """Gets some blocks wrong, after its own measurements: noise in what it then encodes."""

    is_broken = False

    def encode(self, meta: BlockMeta, bits: BlockBits) -> list[Section]:
        if self.is_broken:
            noise = np.random.default_rng(1).normal(0, 0.5, bits.shape).astype(np.float32)
            bits = (bits.view(np.float32) + noise).view(np.uint32)
        return super().encode(meta, bits)


@pytest.mark.parametrize("dtype", KVDtype)
@pytest.mark.parametrize("quality", [1e-4, 5e-3, 5e-2])
@pytest.mark.parametrize("cost", ["light", "layer", "deep"])
def test_good_blocks_keep_the_promise_when_they_are_decoded_again(cost: str, quality: float, dtype: KVDtype) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    codec = TideCodec(fitted(LAYOUT, cost, 60), quality)
    for position, meta in enumerate(metas_of(layout, 2)):
        bits = smooth_bits(layout, 50 + position)
        codec.check_decoded(meta, bits, codec.encode(meta, bits))


def test_block_that_breaks_the_promise_is_stored_losslessly_and_the_next_ones_are_checked(tmp_path: Path) -> None:
    codec = Encoder(FIRST, 1e-3)
    with cache_for(str(tmp_path), codec, CodecRegistry([FIRST])) as cache:
        metas = metas_of(LAYOUT, 6)
        fill(cache, metas[:2])
        # The first block is checked, the second is not.
        assert (cache.stats().blocks_checked, cache.stats().blocks_unencodable) == (1, 0)
        codec.is_broken = True
        cache.profiles._unchecked.clear()
        fill(cache, metas[2:4])
        assert (cache.stats().blocks_checked, cache.stats().blocks_unencodable) == (1, 2)
        codec.is_broken = False
        fill(cache, metas[4:])
        assert (cache.stats().blocks_checked, cache.stats().blocks_unencodable) == (2, 2)
        names = ["tide-1", "tide-1", "lossless-2", "lossless-2", "tide-1", "tide-1"]
        assert [name for name, _ in codec_ids(cache)] == names
    (said,) = doctor_on_profiles(tmp_path)
    assert said["status"] == "off" and said["detail"].startswith("2 of 6 blocks of test are stored losslessly: outside")


def doctor_on_profiles(store: Path) -> list[dict[str, str]]:
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--store", str(store)]).stdout)["rows"]
    return [each for each in findings if each["subject"] == "profile"]


def test_state_that_is_exact_beside_lossy_blocks_is_outside_of_no_promise(tmp_path: Path) -> None:
    states, rows = metas_of(replace(LAYOUT, tokens=1), 2), metas_of(LAYOUT, 2)
    with cache_for(str(tmp_path), TideCodec(FIRST, 1e-3), CodecRegistry([FIRST])) as cache:
        fill(cache, rows)
        bits = smooth_bits(states[0].layout, 1)
        assert cache.store([PendingBlock(each, lambda: lambda: bits, is_exact=True) for each in states]) == 2
        assert cache.flush(60)
    (said,) = doctor_on_profiles(tmp_path)
    assert said["detail"] == "all 2 blocks of test keep their profile's promise"


def test_blocks_of_a_model_that_has_no_profile_are_outside_of_no_promise(tmp_path: Path, clock: ManualClock) -> None:
    with awaiting(tmp_path, clock) as cache:
        fill(cache, metas_of(LAYOUT, 2))
    (said,) = doctor_on_profiles(tmp_path)
    assert said["status"] == "off" and "no profile of it yet, or none that fits" in said["detail"]


def test_what_can_not_be_decoded_is_not_stored_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = TideCodec.encode
    monkeypatch.setattr(TideCodec, "encode", lambda self, meta, bits: encode(self, meta, bits)[1:])
    with cache_for(str(tmp_path), TideCodec(FIRST, 1e-3), CodecRegistry([FIRST])) as cache:
        fill(cache, metas_of(LAYOUT, 1))
        assert codec_ids(cache) == [("lossless-2", None)]


def test_objects_of_a_profile_that_this_version_can_t_use_stay_in_the_store(tmp_path: Path) -> None:
    with cache_for(str(tmp_path), TideCodec(FIRST, 1e-2), CodecRegistry([FIRST])) as cache:
        metas = metas_of(LAYOUT, 2)
        fill(cache, metas)
    # As a later version may make it; the digest is what objects name.
    arrays = {name: array for name, array in FIRST.arrays.items() if name != "weight"}
    odd = msgspec.structs.replace(FIRST, arrays=arrays)
    assert odd.digest == FIRST.digest
    with cache_for(str(tmp_path), TideCodec(FIRST, 1e-2), CodecRegistry([odd])) as cache:
        assert cache.load(metas, Whole(lambda position, bits: None)).blocks == 0
        assert [name for name, _ in codec_ids(cache)] == ["tide-1", "tide-1"]
