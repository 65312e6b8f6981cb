"""Sealed stores: the suite over the wrapper, damage of every kind, keys that come and go."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from tests.servers import hints_heard, running_server
from tests.store.load.test_whole import BIG, Layers, load
from tests.store.test_cache import fill, metas_of
from tests.stores import nothing_pinned, open_memory, opened, read_object
from tests.suites.tier_suite import TIER_BYTES, TierSuite, object_bytes, object_id, put_all, read_all

from kvtide.clock import ManualClock, SystemClock
from kvtide.config import Limits
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.evict import Hint
from kvtide.server.settings import ServerLimits
from kvtide.tier import Tier, open_tier
from kvtide.tier.disk import DiskTier
from kvtide.tier.stack import TierStack
from kvtide.types import Name, NamedId, ObjectId
from kvtide.wire import object_quality, parse_object
from kvtide_lab.wrapped import Counting

pytest.importorskip("cryptography")
from kvtide.tier.seal import SEALED_CODEC, Keyring, keys, sealing_key_id
from kvtide.tier.seal import tier as sealing
from kvtide.tier.seal.keys import HEAD_BYTES
from kvtide.tier.seal.tier import SealedTier

PIECE = sealing.PIECE_BYTES
ONE, TWO, THREE = (f"{number:064x}" for number in (1, 2, 3))
GOLDEN = Path(__file__).parents[1] / "golden" / "sealed-1.kvt"


def keyring(folder: Path, *lines: str) -> Keyring:
    (folder / "keys").write_text("\n".join(lines))
    return Keyring(f"file:{folder / 'keys'}", ManualClock())


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return keyring(tmp_path, ONE)


class TestSealedDisk(TierSuite):
    @pytest.fixture
    def tier(self, ring: Keyring, tmp_path: Path, clock: ManualClock) -> Iterator[Tier]:
        with opened(SealedTier(DiskTier(tmp_path / "store", TIER_BYTES, clock, nothing_pinned), ring)) as tier:
            yield tier


class TestSealedServer(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        (tmp_path / "keys").write_text(ONE)
        with running_server(tiers=("memory://",), limits=ServerLimits(memory_bytes_max=TIER_BYTES)) as server:
            url = f"{server.url}?seal=file:{tmp_path / 'keys'}"
            with opened(open_tier(url, Limits(), SystemClock(), nothing_pinned)) as tier:
                yield tier


def test_advice_reaches_the_server_below_a_seal(ring: Keyring) -> None:
    with running_server(tiers=("memory://",), limits=ServerLimits(memory_bytes_max=TIER_BYTES)) as server:
        remote = open_tier(server.url, Limits(), SystemClock(), nothing_pinned)
        with opened(TierStack([SealedTier(remote, ring)])) as stack:
            assert stack.note_request([object_id(1)], Hint(is_last=True)) and stack._adviser.wait(20)
            assert hints_heard(server) == 1
    assert not SealedTier(open_memory(), ring).takes_advice


def lay(tier: SealedTier, name: ObjectId, data: bytes | bytearray) -> None:
    """Put other bytes below."""
    tier.tier.delete(name, "removed")
    assert tier.tier.put_from(name, bytes(data))


def is_right_or_refused(tier: Tier, number: int, size: int) -> bool:
    """Tell whether what is read is a miss, refused by the object's checks, or exactly what was stored."""
    found = read_all(tier, number, size + 1)
    if found is None or found == object_bytes(number, size):
        return True
    try:
        parse_object(found, object_id(number)).sections()
    except CorruptPayload:
        return True
    return False


@pytest.mark.parametrize("size", [0, 1, 400, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_any_range_of_any_size_opens_to_the_plain_bytes(ring: Keyring, size: int) -> None:
    tier, plain, rng = SealedTier(open_memory(), ring), object_bytes(1, size), random.Random(size)
    assert tier.put_from(object_id(1), plain)
    assert [info.size for info in tier.objects()] == [size]
    for _ in range(40):
        offset, length = rng.randrange(size + 2), rng.randrange(1, size + 100)
        buffer = bytearray(length)
        assert tier.get_into(object_id(1), memoryview(buffer), offset) == len(plain[offset : offset + length])
        assert buffer[: len(plain[offset : offset + length])] == plain[offset : offset + length]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, 70_000), (PIECE, 3 * PIECE), (PIECE - 1, 3 * PIECE + 17)])
def test_range_is_handed_over_as_it_comes(ring: Keyring, start: int, stop: int) -> None:
    tier, plain, came = SealedTier(open_memory(), ring), object_bytes(1, 3 * PIECE + 17), bytearray()
    tier.put_from(object_id(1), plain)

    def take(part: memoryview) -> bool:
        came.extend(part)
        return True

    assert tier.read_range(object_id(1), start, stop, take)
    assert came == plain[start:stop]
    assert not tier.read_range(object_id(2), start, stop, take)
    assert not tier.read_range(object_id(1), 3 * PIECE, 4 * PIECE, take) and came[stop - start :] == plain[3 * PIECE :]


class Slow(DiskTier):
    """A disk on which something happens before the read that begins behind the first part."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 26, SystemClock(), nothing_pinned)
        self.between: Callable[[], object] = lambda: None
        self.reads = 0

    def get_into(self, object_id: ObjectId, buffer: memoryview, offset: int = 0) -> int | None:
        self.reads += 1
        if offset:
            between, self.between = self.between, lambda: None
            between()
        return super().get_into(object_id, buffer, offset)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(sealing, "AHEAD_PIECES", 2)
    with opened(Slow(tmp_path / "store")) as disk:
        yield disk


@pytest.mark.parametrize("size", [1, PIECE, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1, 7 * PIECE + 17])
@pytest.mark.parametrize("room", [2 * PIECE, 4 * PIECE, 9 * PIECE])
def test_object_read_ahead_from_a_disk_is_the_plain_one(ring: Keyring, slow: Slow, size: int, room: int) -> None:
    tier, plain, buffer = SealedTier(slow, ring), object_bytes(1, size), memoryview(bytearray(room))
    tier.put_from(object_id(1), plain)
    came = tier.get_into(object_id(1), buffer)
    assert came == min(len(plain), room)
    assert buffer[:came] == plain[:came]
    assert slow.reads == -(-came // (2 * PIECE))
    tier.check()


def test_object_that_leaves_or_is_written_anew_while_it_is_read_is_a_miss_or_whole(ring: Keyring, slow: Slow) -> None:
    tier, plain = SealedTier(slow, ring), object_bytes(1, 7 * PIECE)

    def write_anew() -> None:
        tier.delete(object_id(1), "test")
        tier.put_from(object_id(1), plain)

    tier.put_from(object_id(1), plain)
    slow.between = write_anew
    assert read_all(tier, 1) == plain
    slow.between = lambda: tier.delete(object_id(1), "test")
    assert read_all(tier, 1) is None


def test_fault_behind_the_first_part_and_closing_are_faults_of_the_read(ring: Keyring, slow: Slow) -> None:
    tier, plain = SealedTier(slow, ring), object_bytes(1, 7 * PIECE)
    tier.put_from(object_id(1), plain)
    slow.between = Mock(side_effect=TierUnavailable("a test"))
    with pytest.raises(TierUnavailable, match="a test"):
        read_all(tier, 1)
    tier._ahead.shutdown()
    with pytest.raises(TierUnavailable, match="closed"):
        read_all(tier, 1)
    tier.close()
    tier.open()
    assert read_all(tier, 1) == plain


def test_damage_behind_the_first_part_is_zeros_there(ring: Keyring, slow: Slow) -> None:
    tier, plain = SealedTier(slow, ring), object_bytes(1, 7 * PIECE)
    tier.put_from(object_id(1), plain)
    sealed = bytearray(sealing.sealed_bytes(len(plain)))
    slow.get_into(object_id(1), memoryview(sealed))
    for place in (0, 100):
        bad = bytearray(sealed)
        bad[HEAD_BYTES + 4 * sealing.STEP + place] ^= 1
        slow.delete(object_id(1), "test")
        slow.put_from(object_id(1), bad)
        assert read_all(tier, 1) == plain[: 4 * PIECE] + bytes(PIECE) + plain[5 * PIECE :]


def test_reading_of_a_range_ends_when_no_more_is_wanted(ring: Keyring) -> None:
    tier, parts = SealedTier(open_memory(), ring), []
    tier.put_from(object_id(1), object_bytes(1, 9 * PIECE))
    assert tier.read_range(object_id(1), 0, 9 * PIECE, lambda part: parts.append(len(part)) is not None)
    assert parts == [PIECE]


def test_range_reads_only_the_pieces_that_it_touches(ring: Keyring) -> None:
    below = Counting(open_memory())
    tier = SealedTier(below, ring)
    tier.put_from(object_id(1), object_bytes(1, 40 * PIECE))
    assert tier.get_into(object_id(1), memoryview(bytearray(PIECE)), 20 * PIECE + 5) == PIECE
    assert below.calls["get"] == 1 and below.bytes["get"] < 3 * PIECE


def test_nothing_plain_lies_in_the_store_but_what_servers_need(ring: Keyring) -> None:
    tier, plain = SealedTier(open_memory(), ring), object_bytes(1, 3 * PIECE, quality=0.01)
    tier.put_from(object_id(1), plain)
    tier.put_from(object_id(2), object_bytes(1, 3 * PIECE))
    below = read_object(tier.tier, object_id(1))
    assert not any(plain[at : at + 16] in below for at in range(304, len(plain) - 16, 997))
    assert b"made up" in plain and b"made up" not in below
    stored = parse_object(below, object_id(1))
    stored.sections()
    assert stored.codec_id == SEALED_CODEC and object_quality(below) == object_quality(plain)
    assert stored.meta.start == 0 and sealing_key_id(tier.tier, object_id(1)) == bytes.fromhex(ring.key_ids()[0])


def test_same_bytes_are_never_sealed_the_same_way_twice(ring: Keyring) -> None:
    one, other = SealedTier(open_memory(), ring), SealedTier(open_memory(), ring)
    for tier in (one, other):
        tier.put_from(object_id(1), bytes(2 * PIECE))
    a, b, step = read_object(one.tier, object_id(1)), read_object(other.tier, object_id(1)), PIECE + 48
    assert sum(x == y for x, y in zip(a[352:], b[352:], strict=True)) < len(a) // 50
    assert a[304 + 32 : 304 + 64] != a[304 + step + 32 : 304 + step + 64], "nor are equal pieces of one object"


def test_damaged_objects_are_misses_or_refused_never_wrong_bytes(ring: Keyring) -> None:
    tier, size, rng = SealedTier(open_memory(), ring), 2 * PIECE + 100, random.Random(7)
    tier.put_from(object_id(1), object_bytes(1, size))
    good = read_object(tier.tier, object_id(1))
    lengths = (1, 303, 304, 330, 352, 360, PIECE, 304 + PIECE + 48, 304 + PIECE + 60, len(good) - 1)
    damaged = [(bytes(good[:length]), f"cut at {length}", True) for length in lengths]
    for place in [*range(300, 360), *(rng.randrange(len(good)) for _ in range(60)), len(good) - 1]:
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        damaged.append((bytes(bad), f"flipped at {place}", bool(place >= 304)))
    for bad_bytes, why, is_lost in damaged:
        lay(tier, object_id(1), bad_bytes)
        assert is_right_or_refused(tier, 1, size), why
        assert not is_lost or read_all(tier, 1, size + 1) != object_bytes(1, size)


def test_swapped_objects_and_pieces_are_refused(ring: Keyring) -> None:
    tier, size = SealedTier(open_memory(), ring), 3 * PIECE
    put_all(tier, (1, 2), size)
    one, two = read_object(tier.tier, object_id(1)), read_object(tier.tier, object_id(2))
    lay(tier, object_id(1), two)
    # Not even where nobody looks at the object's own header.
    assert read_all(tier, 1, size + 1) == bytes(size)
    other, buffer = ObjectId(b"n" * 32, object_id(1).key), bytearray(1000)  # type: ignore[arg-type]
    tier.tier.put_from(other, bytes(one))
    assert tier.get_into(other, memoryview(buffer)) == 1000 and buffer == bytes(1000), "nor in another namespace"
    step = PIECE + 48
    first, second = slice(304, 304 + step), slice(304 + step, 304 + 2 * step)
    moved, mixed = bytearray(one), bytearray(one)
    moved[first], moved[second] = one[second], one[first]
    mixed[second] = two[second]
    for bad, zeros in ((moved, range(2 * PIECE)), (mixed, range(PIECE, 2 * PIECE))):
        lay(tier, object_id(1), bad)
        expected = bytearray(object_bytes(1, size))
        expected[zeros.start : zeros.stop] = bytes(len(zeros))
        assert read_all(tier, 1, size + 1) == expected


@pytest.mark.parametrize("verb", ["put_from", "replace"])
def test_wrong_key_is_said_once_and_stored_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, verb: str) -> None:
    below = open_memory()
    SealedTier(below, keyring(tmp_path, ONE)).put_from(object_id(1), object_bytes(1))
    ours = SealedTier(below, keyring(tmp_path, TWO))
    assert ours.contains(object_id(1))
    assert read_all(ours, 1) is None and read_all(ours, 1) is None
    assert len(caplog.records) == 1 and "lacks" in caplog.text and ONE not in caplog.text and TWO not in caplog.text
    assert not ours.contains(object_id(1)) and ours.contains_each([object_id(1)]) == [False]
    assert not ours.read_range(object_id(1), 0, 1000, lambda part: True)
    assert ours.stats().misses - below.stats().misses == 2
    assert getattr(ours, verb)(object_id(1), object_bytes(1)) and ours.contains(object_id(1))
    assert read_all(ours, 1) == object_bytes(1)


def test_keys_are_read_again_and_stay_if_the_file_is_gone(tmp_path: Path) -> None:
    clock, file = ManualClock(), tmp_path / "keys"
    file.write_text(ONE)
    ring = Keyring(f"file:{file}", clock)
    file.write_text(f"{ONE}\n{TWO}")
    first = ring.newest()
    clock.advance(keys.REREAD_S)
    second = ring.newest()
    assert first is not None and second is not None and first.id != second.id and ring.find(first.id) == first
    file.unlink()
    clock.advance(keys.REREAD_S)
    assert ring.newest() == second


@pytest.mark.parametrize("source", ["file:", "command:cat "])
@patch.object(keys, "COMMAND_S_MAX", 60.0)
def test_what_could_not_be_opened_is_found_once_its_key_is_here(tmp_path: Path, source: str) -> None:
    below, clock, file = open_memory(), ManualClock(), tmp_path / "keys"
    SealedTier(below, keyring(tmp_path, TWO)).put_from(object_id(1), object_bytes(1))
    file.write_text(ONE)
    ours = SealedTier(below, Keyring(f"{source}{file}", clock))
    assert read_all(ours, 1) is None and not ours.contains(object_id(1))
    file.unlink()
    if source != "file:":
        # The command waits until somebody writes; look-ups don't, and don't start another one.
        os.mkfifo(file)
        for _ in range(2):
            clock.advance(keys.REREAD_S)
            assert not ours.contains(object_id(1))
    renewing = [each for each in threading.enumerate() if each.name == "kvtide-keys"]
    assert len(renewing) == (source != "file:")
    file.write_text(f"{ONE}\n{TWO}")
    for each in renewing:
        each.join()
    clock.advance(keys.REREAD_S)
    assert ours.contains(object_id(1)) and ours.count_leading([object_id(1)]) == 1
    assert read_all(ours, 1) == object_bytes(1)


def test_tenants_have_keys_of_their_own(tmp_path: Path) -> None:
    below, ring = open_memory(), keyring(tmp_path, ONE, f"search {TWO}", f"chat {THREE}")
    tier, tenants = SealedTier(below, ring), ("search", "chat", "another")
    names = [NamedId.of(object_id(n), Name(tenant, object_id(n).namespace, 0)) for n, tenant in enumerate(tenants)]
    for number, name in enumerate(names):
        tier.put_from(name, object_bytes(number))
    sealed_by = [sealing_key_id(below, name) for name in names]
    assert [each and each.hex() for each in sealed_by] == [ring.key_ids()[key] for key in (1, 2, 0)]
    assert all(read_all(tier, number) == object_bytes(number) for number in range(3))
    with pytest.raises(TierUnavailable, match="no key for tenant ''"):
        SealedTier(below, keyring(tmp_path, f"search {TWO}")).put_from(object_id(9), object_bytes(9))


def test_keys_come_from_a_file_the_environment_or_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text(ONE)
    monkeypatch.setenv("OUR_KEYS", f"{ONE}\n")
    sources = (f"file:{tmp_path / 'keys'}", "env:OUR_KEYS", f"command:cat {tmp_path / 'keys'}")
    assert len({tuple(Keyring(source, ManualClock()).key_ids()) for source in sources}) == 1


BAD = "key file: file:/no/such/file env:NO_SUCH_VARIABLE command:false command:/no/such/program"


@pytest.mark.parametrize("source", ["", "command: ", *BAD.split()])
def test_missing_keys_are_a_users_mistake_at_the_start(source: str) -> None:
    with pytest.raises(ValueError, match="seal"):
        Keyring(source, ManualClock())


@pytest.mark.parametrize("content", ["", "# nothing", "abc", ONE[:-2], f"{ONE}0", f"a b {ONE}", "x" * 64])
def test_file_without_a_good_key_is_refused_without_showing_it(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keys") as caught:
        keyring(tmp_path, content)
    assert ONE[:-2] not in str(caught.value)


def test_url_seals_every_kind_of_store_but_memory(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(ONE)
    seal = f"seal=file:{tmp_path / 'keys'}"
    for url in (
        f"disk://{tmp_path / 'store'}?policy=lru&{seal}",
        f"http://127.0.0.1:9?{seal}&write=evicted",
        f"pool://127.0.0.1:9?replicas=1&{seal}",
        f"valkey://127.0.0.1:9?{seal}&ttl_s=5",
        f"s3://bucket?region=x&{seal}",
    ):
        tier = open_tier(url, Limits(), SystemClock(), nothing_pinned)
        assert isinstance(tier, SealedTier) and tier.takes_evicted == ("evicted" in url)
    for bad in (f"memory://?{seal}", f"disk:///x?{seal}&{seal}"):
        with pytest.raises(ValueError, match=r"sealed|one seal="):
            open_tier(bad, Limits(), SystemClock(), nothing_pinned)


def test_layers_of_a_sealed_block_come_one_after_the_other(tmp_path: Path, open_cache: Any) -> None:
    (tmp_path / "keys").write_text(ONE)
    url, metas = f"disk://{tmp_path / 'store'}?seal=file:{tmp_path / 'keys'}", metas_of(BIG, 2)
    blocks = fill(open_cache(url, "raw"), metas)
    came = Layers()
    assert load(open_cache(url, "raw"), metas, came).blocks == 2
    assert all((came.block(position, BIG.layers) == blocks[position]).all() for position in range(2))


def test_what_a_sealed_tier_evicts_is_offered_as_it_was(tmp_path: Path, ring: Keyring) -> None:
    offered: dict[ObjectId, bytes] = {}

    def take(name: ObjectId, size: int, fill_view: Any) -> None:
        data = bytearray(size)
        assert fill_view(memoryview(data))
        offered[name] = bytes(data)

    tier = SealedTier(open_memory(TIER_BYTES), ring)
    tier.offer_to(take)
    put_all(tier, range(40), 100_000)
    assert len(offered) > 20
    assert all(data == object_bytes(n, 100_000) for n in range(40) if (data := offered.get(object_id(n))) is not None)


def test_sealed_bytes_are_those_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda count: bytes(range(count)))
    tier = SealedTier(open_memory(), keyring(tmp_path, ONE))
    tier.put_from(object_id(1), object_bytes(1, 1000))
    assert read_object(tier.tier, object_id(1)) == GOLDEN.read_bytes()
    lay(tier, object_id(1), GOLDEN.read_bytes())
    assert read_all(tier, 1) == object_bytes(1, 1000)
