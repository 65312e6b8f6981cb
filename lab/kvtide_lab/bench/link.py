"""A link of a given rate between processes of this machine: loopback in a network namespace of its own, behind tbf."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# The bucket holds what the link sends in 2 ms, and never less than two of the largest packets.
_BUCKET_S = 0.002
_BUCKET_BYTES_MIN = 128 << 10
# As much as a few slices: a shorter queue drops them, and a lost last packet costs a timeout of 200 ms.
_QUEUE_MS = 40


@contextmanager
def open_link(bits_s: float) -> Iterator[Sequence[str]]:
    """Yield the words to put before a command so that it runs where loopback is the link.

    ValueError where the system does not allow that, or lacks `unshare`, `nsenter`, `ip` or `tc`.
    """
    bucket = max(_BUCKET_BYTES_MIN, int(bits_s / 8 * _BUCKET_S))
    script = (
        "ip link set lo up mtu 1500 && "
        f"tc qdisc add dev lo root tbf rate {int(bits_s)}bit burst {bucket}b latency {_QUEUE_MS}ms && "
        "echo ready && exec cat"
    )
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]
    try:
        # Lives as long as its standard input is open, and the namespace as long as it.
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        raise ValueError(f"a link needs unshare: {error}") from error
    with holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise ValueError("this system does not allow a network namespace with a token bucket")
        yield ["nsenter", "--target", str(holder.pid), "--user", "--net", "--preserve-credentials"]
