import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.tier.valkey.resp import LINE_BYTES_MAX, Refusal, RespSocket, pack_command

Pair = tuple[RespSocket, socket.socket]


def connected(wait_s_max: float = 0.2) -> Pair:
    ours, theirs = socket.socketpair()
    return RespSocket(ours, wait_s_max, SystemClock()), theirs


@pytest.fixture
def pair() -> Iterator[Pair]:
    resp, peer = connected()
    with resp._socket, peer:
        yield resp, peer


def received(data: bytes, buffer: bytearray | None = None) -> object:
    """What one reply gives; the peer has closed."""
    resp, peer = connected()
    with resp._socket:
        with peer:
            peer.sendall(data)
        return resp.receive(None if buffer is None else memoryview(buffer))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"+OK\r\n", 0),
        (b":12\r\n", 12),
        (b"$-1\r\n", None),
        (b"_\r\n", None),
        (b"$0\r\n\r\n", 0),
        (b"-MOVED 7 a:1\r\n", Refusal("MOVED", "MOVED 7 a:1")),
    ],
)
def test_short_replies_are_read(data: bytes, expected: object) -> None:
    assert received(data) == expected


def test_string_lands_in_the_buffer() -> None:
    buffer = bytearray(16)
    assert received(b"$5\r\nhe\r\no\r\n", buffer) == 5
    assert buffer == b"he\r\no" + bytes(11)


@pytest.mark.parametrize("size", [17, 1100, 200_000])
def test_what_does_not_fit_is_dropped(size: int, pair: Pair) -> None:
    resp, peer = pair
    buffer = memoryview(bytearray(16))
    sender = threading.Thread(target=peer.sendall, args=(b"$%d\r\n%s\r\n:7\r\n" % (size, b"a" * size),))
    sender.start()
    assert resp.receive(buffer) == size
    assert buffer == b"a" * 16
    assert resp.receive() == 7
    sender.join()


@pytest.mark.parametrize("size", [1, 1000, 1024, 1025, 300_000])
def test_pipelined_strings_of_any_size_are_kept_apart(size: int, pair: Pair) -> None:
    resp, peer = pair
    bodies = [bytes([number]) * (size + number) for number in range(3)]
    data = b"".join(b":1\r\n$%d\r\n%s\r\n" % (len(body), body) for body in bodies)
    sender = threading.Thread(target=peer.sendall, args=(data,))
    sender.start()
    for body in bodies:
        buffer = memoryview(bytearray(size + 3))
        assert resp.receive() == 1
        assert resp.receive(buffer) == len(body)
        assert buffer[: len(body)] == body
    sender.join()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"$536870913\r\n", "expected"),
        (b"$-2\r\n", "expected"),
        (b"$x\r\n", "expected"),
        (b"$1_0\r\n", "expected"),
        (b"$99999999999999999999\r\n", "expected"),
        (b":\r\n", "expected"),
        (b"*1\r\n", "expected"),
        (b"\r\n", "expected"),
        (b"HTTP/1.1\r\n", "expected"),
        (b":5\r\n", "expected a string"),
        (b"$3\r\nhello\r\n", "expected the end"),
        (b"+" * 2 * LINE_BYTES_MAX, "reply's line"),
    ],
)
def test_reply_that_is_none_or_no_string_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(TierUnavailable, match=message):
        received(data, bytearray(16))


@pytest.mark.parametrize("data", [b"", b"$5", b"$5\r\nhel", b"$5\r\nhello"])
def test_peer_that_closes_is_a_fault(data: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        received(data)


@given(st.binary(max_size=80))
@example(b"$16\r\n" + bytes(16))
def test_any_bytes_end_in_a_reply_or_a_fault(data: bytes) -> None:
    try:
        reply = received(data, bytearray(16))
    except (TierUnavailable, OSError):
        return
    assert reply is None or isinstance(reply, Refusal) or (isinstance(reply, int) and reply >= -(10**18))


def test_silent_peer_is_given_up(pair: Pair) -> None:
    with pytest.raises(OSError):
        pair[0].receive(memoryview(bytearray(1)))


def test_peer_that_takes_a_little_now_and_then_is_given_up() -> None:
    """It takes something in time for each call; this value would take it 13 s."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as ours:
        for each in (server, ours):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF if each is server else socket.SO_SNDBUF, 4096)
        ours.connect(server.getsockname())
        peer, _ = server.accept()

        def take() -> None:
            for _ in range(80):
                if ended.wait(0.05) or not peer.recv(4096):
                    break

        reader = threading.Thread(target=take)
        reader.start()
        with peer, pytest.raises(OSError):
            RespSocket(ours, 0.4, SystemClock()).send([bytes(1 << 20)])
        was_in_time = reader.is_alive()
        ended.set()
        reader.join()
    assert was_in_time


def test_large_words_are_sent_uncopied(pair: Pair) -> None:
    body = bytes(5000)
    parts = pack_command(b"SET", b"key", body)
    assert any(part is body for part in parts)
    assert b"".join(map(bytes, parts)) == b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$5000\r\n" + body + b"\r\n"
    pair[0].send(parts)
    assert pair[1].recv(10_000, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == b"".join(map(bytes, parts))


def test_more_parts_than_the_kernel_takes_at_once_are_sent(pair: Pair) -> None:
    sender = threading.Thread(target=pair[0].send, args=([b"part"] * 3000,))
    sender.start()
    assert pair[1].recv(12_000, socket.MSG_WAITALL) == b"part" * 3000
    sender.join()
