"""Records that may change: the file they are in, and what a server answers about them."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.server.worlds import CHAT, GENERATION, SPACE, ask, put
from tests.servers import RunningServer, running_server
from tests.suites.tier_suite import object_bytes

from kvtide.clock import ManualClock, SystemClock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server.records import Records
from kvtide.server.regions import Manifest
from kvtide.tier.http.peer import HttpAnswer
from kvtide.tier.http.records import records_clients
from kvtide.wire.protocol import CHANGES_MAX, RECORD_BYTES_MAX, Record, RecordKind, RecordName

NAME = RecordName(RecordKind.GENERATION, SPACE.hex())
ALIAS = RecordName(RecordKind.ALIAS, "chat")


def opened(path: Path | None = None) -> closing[Records]:
    records = Records(path, ManualClock())
    records.open()
    return closing(records)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_file_gives_back_what_was_written(tmp_path: Path) -> None:
    with opened(tmp_path / "records") as first:
        first.write("a", NAME, "3")
        first.write("", ALIAS, "x" * 64)
        last = first.write("", ALIAS, "y" * 64)
        first.check()
    with opened(tmp_path / "records") as second:
        assert (second.generation("a", SPACE), second.generation("b", SPACE)) == (3, 0)
        assert second.get("", ALIAS) == last
        assert second.write("", ALIAS, "z").version > last.version
        second.check()


def test_generation_never_sinks(tmp_path: Path) -> None:
    with opened(tmp_path / "records") as records:
        records.write("", NAME, "5")
        assert records.write("", NAME, "4").value == "5"
        records.adopt([Record("", *NAME, "2", 10**18)])
        assert records.generation("", SPACE) == 5
        records.adopt([Record("", *NAME, "6", 1)])
        assert records.generation("", SPACE) == 6
        # A centre that had lost it, and tells it again, is news of it.
        records.begin_anew()
        records.adopt([Record("", *NAME, "6", 1)])
        assert [each.version for each in records.changes(lambda tenant: True, 0).records] == [1]


def test_older_news_of_a_record_are_ignored() -> None:
    with opened() as records:
        records.adopt([Record("", *ALIAS, "new", 20)])
        records.adopt([Record("", *ALIAS, "old", 10)])
        found = records.get("", ALIAS)
    assert found is not None and found.value == "new"


def test_file_cut_off_anywhere_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with opened(path) as records:
        records.write("", NAME, "1")
        whole = path.stat().st_size
        records.write("", NAME, "2")
    data = path.read_bytes()
    for size in range(whole, len(data) - 1, 5):
        path.write_bytes(data[:size])
        with opened(path) as again:
            assert again.generation("", SPACE) == 1
    for place in range(0, len(data), 9):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with opened(path) as again:
            assert again.generation("", SPACE) in {0, 1, 2}, "a damaged line says nothing"


def test_killed_writer_has_kept_what_it_acknowledged(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvtide.clock import SystemClock\n"
        "from kvtide.server.records import Records; from kvtide.wire.protocol import RecordKind, RecordName\n"
        "records = Records(Path(sys.argv[1]), SystemClock()); records.open()\n"
        "for n in range(1, 10**9):\n"
        "    records.write('', RecordName(RecordKind.GENERATION, 64 * 'a'), str(n)); print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path / "records"], stdout=subprocess.PIPE, text=True)
    said = [int(process.stdout.readline()) for _ in range(50)][-1]
    process.kill()
    process.wait()
    process.stdout.close()
    with opened(tmp_path / "records") as again:
        assert again.generation("", type(SPACE)(b"\xaa" * 32)) >= said


def test_second_server_that_ends_at_once_costs_the_first_one_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "records") as first:
        first.write("", ALIAS, "x" * 64)
        with opened(tmp_path / "records"):
            pass  # the port is taken
        first.write("", NAME, "1")
        first.write("a", NAME, "2")
    with opened(tmp_path / "records") as again:
        assert (again.generation("", SPACE), again.generation("a", SPACE)) == (1, 2)
        assert again.get("", ALIAS) is not None


def test_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.records.LINES_MAX", 20)
    with opened(tmp_path / "records") as records:
        for number in range(1, 200):
            records.write("", NAME, str(number))
        assert (tmp_path / "records").stat().st_size < 22 * 250
    with opened(tmp_path / "records") as again:
        assert again.generation("", SPACE) == 199


def test_records_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.server.records.RECORDS_TENANT_MAX", 2)
    monkeypatch.setattr("kvtide.server.records.RECORDS_MAX", 3)
    monkeypatch.setattr("kvtide.server.records.RECORDS_RESERVED", 0)
    monkeypatch.setattr("kvtide.server.records._ALL_MAX", 3)
    with opened() as records:
        for tenant, name in (("a", "1"), ("a", "2"), ("b", "1")):
            records.write(tenant, RecordName(RecordKind.PROFILE, name), "x")
        for tenant in ("a", "c"):
            with pytest.raises(RequestRefused, match="a tenant may have 2 aliases and profiles, 3 in all"):
                records.write(tenant, RecordName(RecordKind.PROFILE, "9"), "x")
        with pytest.raises(RequestRefused, match="more than 3"):
            records.adopt([Record("d", RecordKind.PROFILE, "9", "x", 1)])
        assert records.write("a", RecordName(RecordKind.PROFILE, "1"), "new").value == "new"


def test_full_disk_changes_nothing(tmp_path: Path) -> None:
    path, old = tmp_path / "records", resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as records:
        records.write("", NAME, "1")
        records.settle()
        for room in (0, 40):
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, old[1]))
            with pytest.raises(RequestRefused, match="can't be written"):
                records.write("", NAME, "2")
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert records.generation("", SPACE) == 1
    with opened(path) as again:
        assert (again.generation("", SPACE), again.is_complete) == (1, True)


@pytest.mark.parametrize(
    ("condition", "holds_without", "holds_with"),
    [
        ({}, True, True),
        ({"if-match": "*"}, False, True),
        ({"if-match": '"99"'}, False, False),
        ({"if-none-match": "*"}, True, False),
    ],
)
def test_conditional_writes(condition: dict[str, str], holds_without: bool, holds_with: bool) -> None:
    for has_one, holds in ((False, holds_without), (True, holds_with)):
        with opened() as records:
            if has_one:
                records.write("", ALIAS, "there")
            try:
                records.write("", ALIAS, "new", condition)
                assert holds
            except RequestRefused as error:
                assert error.status == 412 and not holds


def test_record_is_written_read_and_listed(server: RunningServer) -> None:
    assert ask(server, "GET", CHAT)[0].status == 404
    written, _ = ask(server, "PUT", CHAT, SPACE.hex().encode())
    tag = str(written.getheader("ETag"))
    answer, content = ask(server, "GET", CHAT)
    assert (answer.status, content.strip(), answer.getheader("ETag")) == (200, SPACE.hex().encode(), tag)
    assert ask(server, "GET", CHAT, Own_If_None_Match=tag)[0].status == 304
    assert ask(server, "PUT", CHAT, SPACE.hex().encode(), Own_If_Match='"9"')[0].status == 412
    assert ask(server, "PUT", GENERATION, b"1")[0].status == 200
    listed = json.loads(ask(server, "GET", "/v1/records")[1])
    found = [(each["kind"], each["value"]) for each in listed["records"]]
    assert found == [("alias", SPACE.hex()), ("generation", "1")]
    last = listed["records"][-1]["version"]
    answer, content = ask(server, "GET", f"/v1/records?after={last}")
    tag = str(answer.getheader("ETag"))
    assert json.loads(content)["records"] == []
    assert ask(server, "GET", f"/v1/records?after={last}", Own_If_None_Match=tag)[0].status == 304


def test_invalidated_blocks_are_misses_and_may_be_stored_anew(tmp_path: Path) -> None:
    disk = (f"disk://{tmp_path}/store",)
    with running_server(tiers=disk) as server:
        put(server, 1)
        assert ask(server, "PUT", GENERATION, b"1")[0].status == 200
        assert ask(server, "GET", 1)[0].status == 404
        assert json.loads(ask(server, "GET", "/v1")[1])["namespaces"] == []
    with running_server(tiers=disk) as server:
        assert ask(server, "GET", 1)[0].status == 404, "also after a restart"
        put(server, 1)
        assert ask(server, "GET", 1)[1] == object_bytes(1)
        assert json.loads(ask(server, "GET", "/v1")[1])["namespaces"] == [SPACE.hex()]


def test_object_of_another_generation_is_refused(server: RunningServer) -> None:
    ask(server, "PUT", GENERATION, b"2")
    assert ask(server, "PUT", 1, object_bytes(1), Generation="1")[0].status == 409
    put(server, 1, Generation="2")
    assert ask(server, "GET", 1, Generation="1")[0].status == 404
    assert ask(server, "GET", 1, Generation="x")[0].status == 400
    for leap in ("3", "999999999999", "999999999999999999"):
        assert [ask(server, method, 1, Generation=leap)[0].status for method in ("GET", "HEAD")] == [404, 404]
    assert ask(server, "GET", 1)[0].status == 200
    assert server.records.generation("", SPACE) == 2, "a GET writes nothing"
    put(server, 1, Generation="3")
    assert server.records.generation("", SPACE) == 3, "who may write may say that it has risen"


def test_server_without_a_place_for_records_writes_none(tmp_path: Path) -> None:
    tiers = (f"http+unix://{tmp_path}/elsewhere",)
    with running_server(tiers=tiers) as server:
        answer, content = ask(server, "PUT", GENERATION, b"1")
        assert answer.status == 409 and b"--records" in content
    with running_server(tiers=tiers, records=tmp_path / "records") as server:
        assert ask(server, "PUT", GENERATION, b"1")[0].status == 200


def test_clock_that_went_back_does_not_hide_changes() -> None:
    clock = ManualClock()
    records = Records(None, clock)
    clock.advance(100.0)
    first = records.write("", ALIAS, "x" * 64)
    records._clock = ManualClock()
    assert records.write("", NAME, "1").version > first.version
    assert [each.kind for each in records.changes(lambda tenant: True, first.version).records] == ["generation"]


def test_long_lists_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.wire.protocol.CHANGES_MAX", 3)
    records = Records(None, SystemClock())
    for number in range(7):
        records.write("", RecordName(RecordKind.PROFILE, str(number)), "x")
    after, came = 0, []
    while True:
        part = records.changes(lambda tenant: True, after)
        came += [each.name for each in part.records]
        if part.is_whole:
            break
        after = part.records[-1].version
    assert came == [str(number) for number in range(7)]


def test_no_tenant_s_records_are_too_long_for_who_follows_all(server: RunningServer) -> None:
    for number in range(CHANGES_MAX):
        name = RecordName(RecordKind.PROFILE, f"{number:064}")
        server.records.write("a", name, name.kind.checked(RECORD_BYTES_MAX * b"\x01"))
    server.records.write("b", NAME, "1")
    (client,) = records_clients(server.url, SystemClock())
    with client:
        assert len(client.changes().records) == CHANGES_MAX + 1


ODD = b'{"records": [{"tenant": "", "kind": "%s", "name": "x", "value": "1", "version": 1}], "is_whole": true}'
DEEP = b'{"x": ' + 100_000 * b"["


@pytest.mark.parametrize("body", [b"nonsense", DEEP, *(ODD % kind for kind in (b"other", b"generation", b"alias"))])
def test_centre_that_talks_nonsense_is_a_fault(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    (client,) = records_clients("http://127.0.0.1:9", SystemClock())
    answers = {"etag": '"1"'}
    monkeypatch.setattr(client, "call", lambda call, patience: HttpAnswer(200, answers, len(body), body))
    with pytest.raises(TierUnavailable, match="can't be read"):
        client.changes(0)
    with pytest.raises(TierUnavailable, match="can't be read"):
        client.read(NAME)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["records", "records.new", "manifest"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    odd = tmp_path / name
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "device":
        odd.symlink_to("/dev/zero")
    else:
        odd.mkdir()
    file: Manifest | Records = Manifest(odd) if name == "manifest" else Records(tmp_path / "records", ManualClock())
    with pytest.raises(OSError, match=r"regular file|symbolic links|s a directory|No such device"):
        file.open()
