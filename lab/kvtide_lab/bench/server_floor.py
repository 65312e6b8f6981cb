"""The least that a server can do: threads that move bodies between sockets and memory, without looking at anything.

Run as `python -m kvtide_lab.bench.server_floor PORT BYTES COUNT`. It answers GET with the next of COUNT bodies in
memory and takes PUT into one of them; both of BYTES bytes.
"""

from __future__ import annotations

import itertools
import socketserver
import sys

from kvtide.tier.buffers import aligned_buffer

_HEAD_BYTES_MAX = 4096


class FloorServer(socketserver.ThreadingTCPServer):
    """Serves `count` bodies of `size` bytes."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, size: int, count: int) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.bodies = [aligned_buffer(size) for _ in range(count)]
        for body in self.bodies:
            body[:] = b"\5" * size
        self.turns = itertools.count()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server, sock = self.server, self.request
        assert isinstance(server, FloorServer)
        while True:
            head = b""
            while b"\r\n\r\n" not in head:
                data = sock.recv(_HEAD_BYTES_MAX)
                if not data:
                    return
                head += data
            body = server.bodies[next(server.turns) % len(server.bodies)]
            if head.startswith(b"PUT "):
                done = len(head) - head.index(b"\r\n\r\n") - 4
                while done < len(body):
                    done += sock.recv_into(body[done:])
                sock.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")
            else:
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
                sock.sendall(body)


if __name__ == "__main__":
    FloorServer(*map(int, sys.argv[1:4])).serve_forever()
