"""One client of the fairness bench, a process of its own: stores its object, then asks for it again and again.

Usage: python -m kvtide_lab.bench.fairness_client HOST:PORT TOKEN PATH OBJECT_FILE SECONDS

Says `ready` when the object is stored, begins when a line comes, and ends with one line of JSON.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from pathlib import Path

_READ_BYTES = 64 << 10


def _ask(connection: http.client.HTTPConnection, method: str, path: str, token: str, body: bytes | None = None) -> None:
    connection.request(method, path, body, {"Authorization": f"Bearer {token}"})


def main(address: str, token: str, path: str, object_file: str, seconds: str) -> None:
    """Run the client; see the module."""
    connection = http.client.HTTPConnection(address, timeout=60)
    _ask(connection, "PUT", path, token, Path(object_file).read_bytes())
    answer = connection.getresponse()
    if answer.status not in {200, 201}:
        sys.exit(f"PUT {path} gives {answer.status}: {answer.read(200)!r}")
    answer.read()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    received, waits_s, requests_s = 0, [], []
    buffer = memoryview(bytearray(_READ_BYTES))
    stop_s = time.monotonic() + float(seconds)
    now_s = time.monotonic()
    while now_s < stop_s:
        asked_s = now_s
        _ask(connection, "GET", path, token)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            sys.exit(f"GET {path} gives {answer.status}: {answer.read(200)!r}")
        waits_s.append(time.monotonic() - asked_s)
        while now_s < stop_s and (count := answer.readinto(buffer)):
            received += count
            now_s = time.monotonic()
        if now_s < stop_s:
            requests_s.append(now_s - asked_s)
    json.dump({"sent_bytes": received, "waits_s": waits_s, "requests_s": requests_s}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
