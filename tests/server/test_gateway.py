"""The server's routes and rules, over real sockets."""

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from email import message_from_bytes
from email.policy import HTTP
from pathlib import Path

import pytest
from tests.attacks.floods import head
from tests.server.worlds import CHAT, GENERATION, ask, exchange, path_of, put, stalled
from tests.servers import RunningServer, counted, running_server
from tests.stores import opened
from tests.suites.tier_suite import object_bytes, object_id

from kvtide.clock import SystemClock
from kvtide.outcomes import Choice, Decided, Why
from kvtide.server.scheduler import SchedulerSettings
from kvtide.server.settings import ServerLimits
from kvtide.tier.http.tier import http_tier
from kvtide.wire import version_tag
from kvtide_lab.bench.services import wait_until


@pytest.fixture
def server(local_url: str) -> Iterator[RunningServer]:
    limits = ServerLimits(object_bytes_max=1 << 20, buffer_bytes_max=2 << 20)
    with running_server(tiers=(local_url,), limits=limits) as running:
        yield running


def test_stored_object_comes_back_with_its_tag(server: RunningServer) -> None:
    data = object_bytes(1, 300_000)
    assert [ask(server, "PUT", 1, data)[0].status for _ in range(2)] == [201, 200]
    answer, content = ask(server, "GET", 1)
    assert (answer.status, content) == (200, data)
    tag = f'"{version_tag(data).hex()}"'
    assert answer.headers["ETag"] == tag
    answer, content = ask(server, "HEAD", 1)
    assert (answer.status, answer.headers["Content-Length"], content) == (200, "300000", b"")
    answer, content = ask(server, "GET", 1, Own_If_None_Match=f'"other", {tag}')
    assert (answer.status, content) == (304, b"")
    assert ask(server, "GET", 1, Own_If_None_Match='"other"')[0].status == 200


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("0-0", 0, 1), ("10-19", 10, 20), ("990-5000", 990, 1000), ("-5", 995, 1000), ("400-", 400, 1000)],
)
def test_range_is_served(server: RunningServer, asked: str, start: int, stop: int) -> None:
    put(server, 1)
    answer, content = ask(server, "GET", 1, Own_Range=f"bytes={asked}")
    assert (answer.status, content) == (206, object_bytes(1)[start:stop])
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/1000"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_many_ranges_come_as_parts_of_one_body(server: RunningServer, method: str) -> None:
    data = object_bytes(1, 300_000)
    ask(server, "PUT", 1, data)
    spans = [(4000 * number, 4000 * number + 3000) for number in range(64)]
    asked = "bytes=" + ",".join(f"{start}-{stop - 1}" for start, stop in spans)
    answer, content = ask(server, method, 1, Own_Range=asked)
    assert answer.status == 206
    assert answer.headers["Content-Range"] is None
    kind = answer.headers["Content-Type"]
    if method == "HEAD":
        assert (int(answer.headers["Content-Length"]) > 64 * 3000, content) == (True, b"")
        return
    parts = message_from_bytes(f"Content-Type: {kind}\r\n".encode() + content, policy=HTTP).iter_parts()
    assert [(part["Content-Range"], part.get_content()) for part in parts] == [
        (f"bytes {start}-{stop - 1}/300000", data[start:stop]) for start, stop in spans
    ]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        *((f"bytes={behind}", 416) for behind in ("1000-", "-0", "1000-,2000-")),
        # The last ones overlap, descend, have nothing between commas.
        *((asked, 400) for asked in ("bytes=5-4", "lines=0-1", "bytes=0-5,3-9", "bytes=5-6,0-1", "bytes=0-1,")),
        ("bytes=" + ",".join(f"{2 * n}-{2 * n}" for n in range(65)), 400),
    ],
)
def test_bad_range_is_refused(server: RunningServer, asked: str, status: int) -> None:
    put(server, 1)
    assert ask(server, "GET", 1, Own_Range=asked)[0].status == status


def test_longer_one_that_comes_meanwhile_stays(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (tier,) = server.store.open_tiers.values()
    fine, read = object_bytes(1, 2000), tier.get_into
    monkeypatch.setattr(tier, "can_lend", False)
    monkeypatch.setattr(tier, "get_into", lambda *args: (read(*args), tier.replace(args[0], fine))[0])
    assert ask(server, "PUT", 1, object_bytes(1, quality=0.5))[0].status == 201
    assert [ask(server, "GET", 1)[1] == fine for _ in range(2)] == [False, True]


def test_listing_goes_on_behind_a_key(server: RunningServer) -> None:
    for number in range(5):
        put(server, number)
    keys = sorted(object_id(number).key.hex() for number in range(5))
    listing = f"/v1/{object_id(0).namespace.hex()}"
    first = json.loads(ask(server, "GET", f"{listing}?limit=2")[1])
    rest = json.loads(ask(server, "GET", f"{listing}?after={keys[1]}")[1])
    assert [each["key"] for each in first["objects"] + rest["objects"]] == keys
    assert {each["size"] for each in rest["objects"]} == {1000}


def damaged(number: int, position: int) -> bytes:
    data = bytearray(object_bytes(number))
    data[position] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    "body",
    [b"", b"x" * 300, *(damaged(1, at) for at in (0, 60, 250, 290, 999)), object_bytes(2), object_bytes(1) + b"x"],
)
def test_body_that_is_not_the_named_object_is_never_visible(server: RunningServer, body: bytes) -> None:
    assert ask(server, "PUT", 1, body)[0].status == 422
    assert ask(server, "GET", 1)[0].status == 404


ZEROS = 64 * "0"
BAD_KEYS = (b"", b"{", b'{"keys": [1]}', b'{"keys": ["AB"]}', b'{"keys": ["\xfc"]}', b'{"keys": [], "more": 1}', b"[]")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        *(("GET", f"/v1/{name}", None, 400) for name in ("xy", f"{ZEROS}/{64 * 'A'}", f"{ZEROS}/{ZEROS}?x=1")),
        *(("GET", f"/v1/{name}", None, 400) for name in (f"{ZEROS}?x=1", "records?after=-1", "records?before=1")),
        ("GET", "/v1/records/profile/" + "p" * 65, None, 400),
        *(("GET", path, None, 404) for path in ("/v2", "/../etc/passwd")),
        *((method, path, None, 405) for method, path in (("POST", "/v1"), ("PUT", "/healthz"))),
        *((method, f"/v1/{ZEROS}/{name}", None, 405) for method, name in (("PATCH", ZEROS), ("GET", "exists"))),
        *(("POST", f"/v1/{ZEROS}/exists", body, 400) for body in BAD_KEYS),
        *(("PUT", path, b"1", 400) for path in (CHAT, "/v1/records/other/p", "/v1/records/generation/p")),
        *(("PUT", GENERATION, body, 400) for body in (b"-1", b"9" * 13)),
        *(
            ("PUT", "/v1/records/profile/p", body, status)
            for body, status in ((b"\xff", 400), (b"", 400), (bytes(1025), 413))
        ),
        *(("DELETE", path, None, status) for path, status in ((CHAT, 404), (GENERATION, 409))),
        ("PUT", "/v1/records", b"x", 405),
    ],
)
def test_wrong_path_method_or_body_is_refused(
    server: RunningServer, method: str, path: str, body: bytes | None, status: int
) -> None:
    answer, content = ask(server, method, path, body)
    assert answer.status == status
    assert json.loads(content)["error"]


def test_put_needs_a_length_within_the_bound(server: RunningServer) -> None:
    start = head("PUT", path_of(1), Connection="close").removesuffix(b"\r\n")
    for line, status in ((b"", 411), (b"Transfer-Encoding: chunked\r\n", 411), (b"Content-Length: 1048577\r\n", 413)):
        assert exchange(server, start + line + b"\r\n").startswith(b"HTTP/1.1 %d " % status)
    assert ask(server, "PUT", 1, object_bytes(1, 1 << 20))[0].status == 201


@pytest.mark.parametrize("here", [(), (0.5,)], ids=["nothing", "coarser"])
def test_body_that_is_held_back_is_asked_for_only_if_needed(server: RunningServer, here: tuple[float, ...]) -> None:
    for quality in here:
        assert ask(server, "PUT", 1, object_bytes(1, quality=quality))[0].status == 201
    asked = head("PUT", path_of(1), Content_Length=1000, Expect="100-continue")
    with server.connect() as sock:
        sock.sendall(asked)
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(object_bytes(1))
        assert sock.recv(1000).startswith(b"HTTP/1.1 201 ")
    assert exchange(server, asked).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    put(server, 1)
    heads = [head("GET", path_of(1), Range=f"bytes={n}-{n}") for n in range(16)]
    answers = exchange(server, b"".join([*heads, head("GET", "/healthz", Connection="close")]))
    bodies = re.split(rb"HTTP/1\.1 20.*?\r\n\r\n", answers, flags=re.S)
    assert b"".join(bodies) == object_bytes(1)[:16] + b"ok\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        *((begin + b"\r\n\r\n", 400) for begin in (b"GET / HTTP/1.1", b"GARBAGE", b"GET / HTTP/9.9\r\nHost: x")),
        *((b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n", 400) for line in (b"Host: y", b" folded: y")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"h%d: 1\r\n" % n for n in range(70)) + b"\r\n", 431),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ],
)
def test_ambiguous_head_is_refused_and_the_connection_closed(server: RunningServer, data: bytes, status: int) -> None:
    assert exchange(server, data).startswith(b"HTTP/1.1 %d " % status)


def test_buffers_that_are_all_in_use_are_a_503(server: RunningServer) -> None:
    begun = head("PUT", path_of(1), Content_Length=1 << 20) + b"x"
    with server.connect() as first, server.connect() as second:
        for sock in (first, second):
            sock.sendall(begun)
        wait_until(lambda: server.service.buffers.lent_bytes == 2 << 20, "the buffers to be lent")
        answer = exchange(server, begun)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in answer
    wait_until(lambda: server.service.buffers.lent_bytes == 0, "the buffers to be free")


def test_connections_above_the_bound_are_turned_away() -> None:
    limits = ServerLimits(connections_max=2)
    with running_server(limits=limits) as server, server.connect() as one, server.connect() as two:
        for sock in (one, two):
            sock.sendall(b"GET /v1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert exchange(server, b"").startswith(b"HTTP/1.1 503 ")


ONE_SLOT = SchedulerSettings(slots=1, tenant_slots_max=1)
HOG = head("GET", path_of(1))


def test_deadline_that_passes_in_the_queue_is_a_504() -> None:
    with running_server(sending=ONE_SLOT, limits=ServerLimits(stall_s_max=60)) as server:
        put(server, 1, 16 << 20)
        with stalled(server, HOG, lambda: counted(server, "kvtide_unsent_bytes")):
            assert ask(server, "GET", 1, Deadline_Ms="100")[0].status == 504


def test_stalled_reader_leaves_its_slot_to_others() -> None:
    with running_server(sending=ONE_SLOT) as server, server.connect() as hog:
        put(server, 1, 16 << 20)
        hog.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hog.sendall(HOG)
        wait_until(lambda: server.service.scheduler.slots_used == 1, "a send slot to be used")
        assert len(ask(server, "GET", 1)[1]) == 16 << 20


def test_draining_server_finishes_what_is_under_way(tmp_path: Path) -> None:
    data = object_bytes(1, 900_000)
    with running_server(tiers=(f"disk://{tmp_path}",)) as server:
        ask(server, "PUT", 1, data)
        with server.connect() as idle, server.connect() as busy:
            busy.sendall(head("PUT", path_of(2), Content_Length=1000) + object_bytes(2)[:10])
            wait_until(lambda: server.service.buffers.lent_bytes > 0, "a buffer to be lent")
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            assert idle.recv(1) == b""
            assert [ask(server, "GET", what)[0].status for what in ("/healthz", "/metrics", 1)] == [503] * 3
            busy.sendall(object_bytes(2)[10:])
            assert busy.recv(1000).startswith(b"HTTP/1.1 201 ")
            stopping.join()
    with running_server(tiers=(f"disk://{tmp_path}",)) as again:
        assert [ask(again, "GET", number)[1] for number in (1, 2)] == [data, object_bytes(2)]


def test_pages_tell_what_happened(server: RunningServer) -> None:
    put(server, 1)
    for asked in ("bytes=0-99", "bytes=100-199", "bytes=200-"):
        ask(server, "GET", 1, Own_Range=asked)
    for method, number in (("HEAD", 1), ("HEAD", 2), ("GET", 2)):
        ask(server, method, number)
    ask(server, "PUT", 2, damaged(2, 999))
    metrics = ask(server, "GET", "/metrics")[1].decode()
    assert 'kvtide_object_reads_total{result="found",tenant="(open)"} 1.0' in metrics
    assert 'kvtide_object_reads_total{result="absent",tenant="(open)"} 1.0' in metrics
    assert "kvtide_corrupt_objects_total 1.0" in metrics
    assert 'kvtide_sent_bytes_total{tenant="(open)"} 1000.0' in metrics
    assert 'kvtide_send_slots{state="used"} 0.0' in metrics


def test_what_clients_decided_is_counted_and_nonsense_refused(server: RunningServer) -> None:
    name, load = object_id(1).namespace, Decided(Choice.LOAD, Why.BOTH_ENDS)
    with opened(http_tier(server.url, SystemClock())) as tier:
        for counts in ({load: 7, Decided(Choice.RECOMPUTE, Why.LINK_SLOWER): 2}, {load: 1}, {}):
            tier.note_decisions(name, counts)
    metrics = ask(server, "GET", "/metrics")[1].decode()
    labels = f'namespace="{name.hex()[:12]}",reason="both_ends",tenant="(open)"'
    assert f'kvtide_prompt_tokens_total{{decision="load",{labels}}} 8.0' in metrics
    for path in ("/v1/bad", path_of(9), "/nothing"):
        # What comes with a request that is refused does not count.
        ask(server, "GET", path, Decisions="load:both_ends=5")
    assert counted(server, "kvtide_prompt_tokens_total", decision="load") == 8
    assert counted(server, "kvtide_prompt_tokens_total") == 10
    for nonsense in ("load=1", "load:both_ends=" + "9" * 2000):
        assert ask(server, "GET", "/v1", Decisions=nonsense)[0].status == 400


# A server at its start says what the machine lacks, and takes what the machine gives.


@pytest.mark.parametrize(("soft", "hard", "raised", "warnings"), [(1024, 10_000, 4096 + 256, 0), (512, 1024, 1024, 1)])
def test_descriptors_are_raised_as_far_as_the_connections_need_or_one_warning_says_what_to_do(
    soft: int, hard: int, raised: int, warnings: int
) -> None:
    script = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" -m kvtide.cli serve --listen 127.0.0.1:0'
    command = ["sh", "-c", script, sys.executable]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert " on " in process.stdout.readline()
        found = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0]
        process.terminate()
        log = process.stderr.read()
    assert found == raised
    texts = ("connections_max", "connections_max is 4096, descriptors are for 768", "LimitNOFILE")
    assert [log.count(text) for text in texts] == [warnings] * 3


# The transcript in docs/protocol.md is what curl and the server say.

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_says_what_the_page_shows() -> None:
    page = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    (console,) = re.findall(r"```console\n(.*?)```", page, flags=re.S)
    # Each command with what it prints.
    steps = [part.partition("\n") for part in re.split(r"^\$ ", console, flags=re.M)[1:]]
    assert len(steps) > 8
    marker = "=== next ==="
    script = "\n".join(f"{command}\necho '{marker}'" for command, *_ in steps)
    with running_server() as server:
        env = {"SERVER": server.url, "PATH": "/usr/bin:/bin"}
        ran = subprocess.run(
            ["bash", "-c", script], cwd=ROOT / "tests/golden", env=env, capture_output=True, text=True, check=True
        )
    came = ran.stdout.replace("\r\n", "\n").split(f"{marker}\n")
    assert [output for *_, output in steps] == came[:-1]
