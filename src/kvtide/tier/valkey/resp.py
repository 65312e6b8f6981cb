"""RESP, the protocol of Valkey and Redis, on a connected socket: bodies go between the wire and the caller's memory.

Invariant: a length that the peer claims never decides how much memory is taken; the caller's buffer is the bound.
"""

from __future__ import annotations

import math
import ssl
import struct
from collections.abc import Sequence
from socket import MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL, SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, socket
from typing import NamedTuple

from kvtide.clock import Clock
from kvtide.errors import TierUnavailable
from kvtide.tier.base import Buffer

STRING_BYTES_MAX = 512 << 20
_DROP_BYTES = 64 << 10
# A body that comes more slowly is given up.
BYTES_S_MIN = 1_000_000
# No wait is shorter: of less than a microsecond the kernel makes one without an end.
WAIT_S_MIN = 1e-3
# A reply's line: a number, OK, or an error's text.
LINE_BYTES_MAX = 1024
_END = b"\r\n"
# The kernel takes no more buffers at once.
_PARTS_MAX = 1024


class Refusal(NamedTuple):
    """An error that the server answered with: its first word, and all of it."""

    code: str
    text: str


def pack_command(*words: Buffer) -> list[Buffer]:
    """Return a command as buffers to send; words of some length are not copied."""
    parts: list[Buffer] = []
    head = b"*%d\r\n" % len(words)
    for word in words:
        head += b"$%d\r\n" % len(word)
        if len(word) <= LINE_BYTES_MAX:
            head += bytes(word) + _END
        else:
            parts += [head, word]
            head = _END
    return [*parts, head]


class RespSocket:
    """Commands and replies on one connection. After any exception the connection must not be used again.

    A call fails with an OSError when nothing moves for `wait_s_max`, or N bytes take N / BYTES_S_MIN more, or at the
    moment that `give_up_at` was told.
    """

    def __init__(self, connected: socket, wait_s_max: float, clock: Clock) -> None:
        self._socket = connected
        self._wait_s_max = wait_s_max
        self._clock = clock
        self._line = memoryview(bytearray(LINE_BYTES_MAX))
        # Received and not yet used: line[start:stop].
        self._start = self._stop = 0
        self.is_tls = isinstance(connected, ssl.SSLSocket)
        self._give_up_s = math.inf
        self._bound_waits(wait_s_max)

    def give_up_at(self, give_up_s: float) -> None:
        """Let calls from now on end by that moment of the clock too; infinity: by their own bounds alone."""
        self._give_up_s = give_up_s
        if give_up_s == math.inf and self._bound_s != self._wait_s_max:
            self._bound_waits(self._wait_s_max)

    def _bound_waits(self, wait_s: float) -> None:
        """Let no call of the socket wait longer in all, however often bytes come meanwhile."""
        self._bound_s = wait_s
        if self.is_tls:
            self._socket.settimeout(wait_s)
            return
        # The kernel's own time-outs leave the socket blocking, so that one call moves a whole body.
        wait = struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(SOL_SOCKET, SO_RCVTIMEO, wait)
        self._socket.setsockopt(SOL_SOCKET, SO_SNDTIMEO, wait)

    def _before_call(self, give_up_s: float = math.inf) -> None:
        """Bound the next call of the socket. TimeoutError if it is too late for one."""
        now_s = self._clock.monotonic_s()
        if now_s > min(give_up_s, self._give_up_s - WAIT_S_MIN):
            raise TimeoutError("the deadline passed before all bytes had moved")
        if self._give_up_s < math.inf:
            self._bound_waits(min(self._give_up_s - now_s, self._wait_s_max))

    def is_idle(self) -> bool:
        """Tell whether the peer has neither sent anything nor closed. Not under TLS, where that can't be seen."""
        try:
            self._socket.recv(1, MSG_PEEK | MSG_DONTWAIT)
        except BlockingIOError:
            return self._start == self._stop
        return False

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all of the parts."""
        give_up_s = self._clock.monotonic_s() + self._wait_s_max + sum(map(len, parts)) / BYTES_S_MIN
        if self.is_tls:
            for part in parts:
                left = memoryview(part)
                while left:
                    self._before_call(give_up_s)
                    left = left[self._socket.send(left) :]
            return
        rest = [memoryview(part) for part in parts]
        while rest:
            self._before_call(give_up_s)
            sent = self._socket.sendmsg(rest[:_PARTS_MAX])
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def receive(self, buffer: memoryview | None = None) -> int | Refusal | None:
        """Read a number, 0 for OK, None for null, a refusal, or a string's length with its bytes in `buffer`.

        With a buffer a string is expected; what does not fit is read and dropped. TierUnavailable for any other reply,
        and for a string of more than STRING_BYTES_MAX.
        """
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = _number(rest)
            into = memoryview(bytearray()) if buffer is None else buffer
            return None if size == -1 else self._read_string(into, size)
        if kind == b":" and buffer is None:
            return _number(rest)
        if kind == b"+":
            return 0
        if kind == b"_":
            return None
        if kind == b"-":
            text = rest.decode(errors="replace")
            return Refusal(text.partition(" ")[0], text)
        expected = "a RESP reply" if buffer is None else "a string in reply"
        raise TierUnavailable(f"expected {expected}, got {line[:40]!r}")

    def _read_string(self, buffer: memoryview, size: int) -> int:
        if not 0 <= size <= STRING_BYTES_MAX:
            raise TierUnavailable(f"expected a string of at most {STRING_BYTES_MAX} bytes, the server announces {size}")
        give_up_s = self._clock.monotonic_s() + self._wait_s_max + size / BYTES_S_MIN
        kept = min(size, len(buffer))
        self._fill(buffer[:kept], give_up_s)
        dropped = memoryview(bytearray(min(size - kept, _DROP_BYTES)))
        for start in range(kept, size, _DROP_BYTES):
            self._fill(dropped[: size - start], give_up_s)
        if self._read_line() != b"":
            raise TierUnavailable("expected the end of a string, got more bytes than were announced")
        return size

    def _fill(self, view: memoryview, give_up_s: float) -> None:
        done = min(len(view), self._stop - self._start)
        view[:done] = self._line[self._start : self._start + done]
        self._start += done
        flags = 0 if self.is_tls else MSG_WAITALL
        while done < len(view):
            self._before_call(give_up_s)
            done += self._received(self._socket.recv_into(view[done:], 0, flags))

    def _read_line(self) -> bytes:
        while True:
            held = bytes(self._line[self._start : self._stop])
            line, end, _ = held.partition(_END)
            if end:
                self._start += len(line) + len(_END)
                return line
            self._line[: len(held)] = held
            self._start, self._stop = 0, len(held)
            if self._stop == LINE_BYTES_MAX:
                raise TierUnavailable(f"expected a reply's line of at most {LINE_BYTES_MAX} bytes, got {held[:40]!r}…")
            self._before_call()
            self._stop += self._received(self._socket.recv_into(self._line[self._stop :]))

    def _received(self, count: int) -> int:
        if count == 0:
            raise ConnectionResetError("the server closed the connection in the middle of a reply")
        return count


def _number(digits: bytes) -> int:
    sign, magnitude = (-1, digits[1:]) if digits.startswith(b"-") else (1, digits)
    if not (magnitude.isdigit() and len(magnitude) <= 18):
        raise TierUnavailable(f"expected a number in a RESP reply, got {digits[:40]!r}")
    return sign * int(magnitude)
