"""Objects that come section by section: in any order, twice, from several, or never; right or refused, never wrong."""

import random
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pieces import PieceAnswer, Pieces, has, pack_frame, part, pieces, post
from tests.server.worlds import ask, bearer, granted, metric
from tests.servers import RunningServer, running_server
from tests.suites.tier_suite import object_id

from kvtide.clock import ManualClock
from kvtide.errors import RequestRefused
from kvtide.server.auth import Scope
from kvtide.server.objects import Upload, Uploads
from kvtide.server.quotas import Quota
from kvtide.server.settings import ServerLimits

GRANTS = (granted("search"), granted("chat"), granted("reader", Scope.READ))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    """A server of three tenants, one of whom only reads."""
    with running_server(grants=GRANTS, quotas={"chat": Quota(bytes_max=6000)}) as running:
        yield running


NUMBERS = count(1000)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sections_come_in_any_order_and_twice_and_are_served_as_far_as_they_are_here(
    server: RunningServer, data: st.DataObject
) -> None:
    what = pieces(next(NUMBERS), data.draw(st.integers(1, 7)), data.draw(st.integers(0, 300)))
    count = len(what.frames)
    order = data.draw(st.permutations([*range(count), *data.draw(st.lists(st.integers(0, count - 1), max_size=4))]))
    answer, here = post(server, what, what.head), set[int]()
    while answer.status == 202:
        lacking = [at for at in range(count) if at not in here]
        assert answer.missing == [at for at in lacking if what.stored.entries[at].size] or answer.missing == lacking
        assert not has(server, what)
        start = data.draw(st.integers(0, len(what.data) - 1))
        stop = data.draw(st.integers(start + 1, len(what.data)))
        touched = {
            at for at, each in enumerate(what.stored.entries) if each.offset < stop and start < each.offset + each.size
        }
        assert part(server, what, start, stop) == (what.data[start:stop] if touched <= here else None)
        sent, order = order[: (cut := data.draw(st.integers(1, 3)))], order[cut:]
        here.update(sent)
        answer = post(server, what, b"".join(what.frames[at] for at in sent))
    assert answer == PieceAnswer(201, [])
    assert ask(server, "GET", what.number)[1] == what.data
    assert post(server, what, what.head) == PieceAnswer(200, [])


def test_cut_request_counts_for_nothing_and_the_next_one_goes_on(server: RunningServer) -> None:
    what = pieces(2, size=20_000)
    post(server, what, what.head + what.frames[0])
    body = b"".join(what.frames[1:])
    for cut in (1, 96, 20_096, 20_100, len(body) - 1):
        with server.connect() as sock:
            sock.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (what.path.encode(), len(body)))
            sock.sendall(body[:cut])
        assert post(server, what, what.head) == PieceAnswer(202, list(range(1, 8)))
    assert post(server, what, body).status == 201


def test_two_versions_of_an_object_come_at_once_and_the_finer_one_stays(server: RunningServer) -> None:
    rough, fine = pieces(3, quality=1e-1), pieces(3, 6, quality=1e-3, filling=1)
    for each in (rough, fine):
        assert post(server, each, each.head).status == 202
    for at in range(6):
        for each in (rough, fine):
            assert post(server, each, each.frames[at]).status in {201, 202}
    assert ask(server, "GET", 3)[1] == fine.data
    assert post(server, rough, b"".join(rough.frames[6:])) == PieceAnswer(200, [])
    assert ask(server, "GET", 3)[1] == fine.data


def test_finer_object_takes_the_place_of_a_coarser_one(server: RunningServer) -> None:
    rough, fine = pieces(4, quality=1e-1), pieces(4, quality=1e-3)
    assert ask(server, "PUT", 4, rough.data)[0].status == 201
    assert post(server, rough, rough.head) == PieceAnswer(200, [])
    assert post(server, fine, fine.head).status == 202
    assert part(server, fine, 0, 10) == rough.data[:10], "what is whole is served first"
    assert post(server, fine, b"".join(fine.frames)).status == 201
    assert ask(server, "GET", 4)[1] == fine.data


def test_ranges_are_of_one_version_and_its_tag(server: RunningServer) -> None:
    first, second = pieces(5, filling=1), pieces(5, filling=2)
    for each in (first, second):
        post(server, each, each.head + (each.frames[1] if each is second else each.frames[0]))
    answer, content = ask(server, "GET", 5, Own_Range=f"bytes=0-{len(first.head) - 1}")
    assert content == first.head
    assert answer.headers["Content-Range"].endswith(f"/{len(first.data)}")
    tag = answer.headers["ETag"]
    entry = second.stored.entries[1]
    assert part(server, second, entry.offset, entry.offset + entry.size) is None
    for if_range, status in ((tag, 206), ('"other"', 404)):
        assert ask(server, "GET", 5, Own_Range="bytes=0-9", Own_If_Range=if_range)[0].status == status


def test_deleted_object_is_forgotten_half_way(server: RunningServer) -> None:
    what = pieces(6)
    post(server, what, what.head + what.frames[0])
    assert ask(server, "DELETE", 6)[0].status == 404
    assert part(server, what, 0, 9) is None
    assert post(server, what, what.frames[1]).status == 404


def test_bytes_that_do_not_belong_are_refused_and_what_came_stays() -> None:
    what, other = pieces(1), pieces(2)
    lying = pack_frame(other.stored, 0)[:16] + what.stored.version_tag + other.frames[0][32:]
    refusals = {
        "nothing": (b"", 422),
        "no object and no frame": (b"x" * 1000, 422),
        "cut head": (what.head[:300], 422),
        "changed table": (what.head[:260] + b"\xff" + what.head[261:], 422),
        "head of another object": (other.head, 422),
        "cut frame": (what.frames[0][:-1], 422),
        "longer frame": (what.frames[0] + b"x", 422),
        "damaged section": (what.frames[0][:-1] + bytes([what.frames[0][-1] ^ 1]), 422),
        "frame of another object behind a good one": (what.frames[0] + other.frames[0], 422),
        "section of another object under our tag": (lying, 422),
        "frame of what was not announced": (other.frames[0], 404),
        "more than an object may have": (b"x" * (2 << 20), 413),
    }
    with running_server(limits=ServerLimits(object_bytes_max=1 << 20)) as server:
        for name, (body, status) in refusals.items():
            post(server, what, what.head + what.frames[1])
            answer = post(server, what, body)
            assert answer.status == status, (name, answer)
            answer = post(server, what, what.head)
            assert answer.status == 202, name
            assert post(server, what, b"".join(what.frames[at] for at in answer.missing)).status == 201
            assert ask(server, "GET", 1)[1] == what.data
            assert ask(server, "DELETE", 1)[0].status == 204
            server.service.uploads.check()


def test_any_bytes_are_refused_or_right(server: RunningServer) -> None:
    rng = random.Random(1)
    what, other = pieces(7, 4, 60), pieces(8, 4, 60)
    link = HTTPConnection(server.address.host, server.address.port, timeout=20)
    frames = what.frames
    seeds = [what.head, what.head + frames[0], frames[1] + frames[2], other.frames[0], b"".join(frames)]
    statuses = set()
    for _ in range(400):
        body = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body))
            kind = rng.randrange(3)
            if kind == 0:
                body[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del body[at : at + rng.randrange(1, 200)]
            else:
                body[at:at] = rng.choice(seeds)[: rng.randrange(1, 200)]
            body = body or bytearray(b"x")
        link.request("POST", what.path, bytes(body))
        answer = link.getresponse()
        answer.read()
        statuses.add(answer.status)
        assert answer.status in {200, 201, 202, 404, 413, 422}
        if (found := ask(server, "GET", 7))[0].status == 200:
            assert found[1] == what.data
            ask(server, "DELETE", 7)
    assert {404, 422} <= statuses
    link.close()
    server.service.uploads.check()


def test_tenants_have_uploads_of_their_own(shared: RunningServer) -> None:
    what = pieces(1, size=100)
    assert post(shared, what, what.head + what.frames[0], **bearer("search")).status == 202
    assert post(shared, what, what.frames[1], **bearer("chat")).status == 404
    assert part(shared, what, 0, 9, **bearer("chat")) is None
    assert part(shared, what, 0, 9, **bearer("reader")) is None
    assert post(shared, what, what.head, **bearer("chat")).missing == list(range(8))
    assert post(shared, what, b"".join(what.frames[1:]), **bearer("search")).status == 201
    assert [has(shared, what, **bearer(who)) for who in ("search", "chat")] == [True, False]


def test_scope_and_quota_hold_as_for_whole_objects(shared: RunningServer) -> None:
    small, large = pieces(2, size=100), pieces(3, size=1000)
    assert post(shared, small, small.head, **bearer("reader")).status == 403
    assert post(shared, small, small.head).status == 401
    refused = post(shared, large, large.head, **bearer("chat"))
    assert (refused.status, "bytes_max is 6000" in refused.error) == (507, True)
    # A quota that fills up meanwhile.
    late = pieces(4, size=500)
    assert post(shared, late, late.head + late.frames[0], **bearer("chat")).status == 202
    assert ask(shared, "PUT", 5, pieces(5, size=400).data, **bearer("chat"))[0].status == 201
    assert post(shared, late, b"".join(late.frames), **bearer("chat")).status == 507
    assert post(shared, late, late.frames[0], **bearer("chat")).status == 404, "it is not kept"


def test_pieces_are_counted_as_bodies_are(shared: RunningServer) -> None:
    what = pieces(6, size=100)
    received = partial(metric, shared, 'kvtide_received_bytes_total{tenant="search"}', **bearer("search"))
    before = received()
    assert post(shared, what, what.head + b"".join(what.frames), **bearer("search")).status == 201
    assert received() - before == len(what.head) + sum(map(len, what.frames))


def uploads_of(**limits: int | float) -> tuple[Uploads, ManualClock]:
    clock, bounds = ManualClock(), ServerLimits(**limits)  # type: ignore[arg-type]
    return Uploads(lambda: bounds, clock.monotonic_s), clock


def test_memory_of_an_upload_is_made_before_two_threads_ask_for_it() -> None:
    what = pieces(1, 2, 60)
    upload = Upload(object_id(1), "a", what.stored, 0.0)
    upload.offer(memoryview(b"".join(what.frames)))
    assert upload.memory == what.data


def begin(uploads: Uploads, what: Pieces, owner: str) -> None:
    name = object_id(what.number)
    assert uploads.take(name, name, owner, memoryview(what.head), lambda stored: True) is not None


def kept(uploads: Uploads, *candidates: Pieces) -> list[int]:
    found = []
    for what in candidates:
        try:
            name = object_id(what.number)
            uploads.take(name, name, "anybody", memoryview(what.frames[0]), lambda stored: True)
            found.append(what.number)
        except RequestRefused as error:
            assert error.status == 404
    return found


def test_oldest_goes_first_when_there_are_too_many() -> None:
    uploads, clock = uploads_of(uploads_max=3)
    many = [pieces(number) for number in range(5)]
    for what in many:
        clock.advance(1)
        begin(uploads, what, "one")
    uploads.check()
    assert kept(uploads, *many) == [2, 3, 4]


def test_who_makes_up_many_uploads_loses_its_own() -> None:
    uploads, clock = uploads_of(uploads_max=4)
    quiet = pieces(0)
    begin(uploads, quiet, "quiet")
    for number in range(1, 20):
        clock.advance(1)
        begin(uploads, pieces(number), "greedy")
    assert kept(uploads, quiet) == [0]


def test_bytes_are_bounded_for_each_owner_and_for_all() -> None:
    # Some 8 KB of bookkeeping and 40 of bytes each.
    uploads, clock = uploads_of(tenant_uploads_bytes_max=110_000, uploads_bytes_max=250_000)
    own = [pieces(number, size=5000) for number in range(3)]
    for what in own:
        clock.advance(1)
        begin(uploads, what, "one")
    uploads.check()
    others = [pieces(number, size=5000) for number in range(10, 20)]
    for number, what in enumerate(others):
        clock.advance(1)
        begin(uploads, what, f"other-{number % 5}")
    uploads.check()
    assert 4 <= len(kept(uploads, *own, *others)) <= 5
    with pytest.raises(RequestRefused, match="may take 110000 bytes"):
        begin(uploads, pieces(30, size=50_000), "one")


def test_what_is_read_does_not_make_room() -> None:
    uploads, _ = uploads_of(uploads_max=1)
    first, second = pieces(1), pieces(2)
    begin(uploads, first, "one")
    lent = uploads.lend(object_id(1), "GET", {"range": "bytes=0-9"})
    with pytest.raises(RequestRefused) as refused:
        begin(uploads, second, "two")
    assert refused.value.status == 503
    lent.release()
    begin(uploads, second, "two")
    uploads.check()


def test_what_is_deleted_while_it_is_read_is_served_to_nobody_else() -> None:
    uploads, _ = uploads_of()
    begin(uploads, pieces(1), "one")
    asked = {"range": "bytes=0-9"}
    lent = uploads.lend(object_id(1), "GET", asked)
    uploads.drop(object_id(1))
    assert uploads.lend(object_id(1), "GET", asked) is None
    lent.release()
    assert kept(uploads, pieces(1)) == []
    uploads.check()


def test_what_rests_too_long_is_forgotten() -> None:
    uploads, clock = uploads_of(uploads_idle_s_max=10.0)
    first, second = pieces(1), pieces(2)
    begin(uploads, first, "one")
    clock.advance(6)
    begin(uploads, second, "one")
    clock.advance(6)
    uploads.drop_idle()
    assert kept(uploads, first, second) == [2]


def test_tables_cost_what_they_take() -> None:
    uploads, _ = uploads_of(uploads_bytes_max=1 << 20, tenant_uploads_bytes_max=1 << 20)
    with pytest.raises(RequestRefused, match="may take"):
        begin(uploads, pieces(1, sections=2000, size=1), "one")


def test_server_names_the_bounds_in_its_memory() -> None:
    small, large = ServerLimits(uploads_bytes_max=1), ServerLimits(uploads_bytes_max=1 + (1 << 20))
    assert large.resident_bytes_max - small.resident_bytes_max == 1 << 20
