"""Clients and `kvtide serve` as processes on one link, under every policy: who gets how many bytes, who waits how long.

Real sockets, buffers and TCP. The link is the kernel's token bucket in a network namespace; where that is not allowed,
the token bucket of the server's scheduler alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec

from kvtide.block import KVDtype
from kvtide.keys import namespace_digest
from kvtide.server.auth import new_token
from kvtide.server.scheduler import POLICIES
from kvtide.types import BlockKey, ObjectId
from kvtide_lab.bench.services import grant_words, kvtide_server, open_link
from kvtide_lab.bench.store_clients import bench_object
from kvtide_lab.measuring import extremes
from kvtide_lab.sim.fairness import (
    ClientMix,
    FairnessReport,
    FairnessRow,
    FairnessSetup,
    Served,
    fairness_report,
    fairness_row,
)

_END_S_MAX = 60.0


class FairnessBenchResult(FairnessReport, frozen=True, kw_only=True):
    """The simulation's figures, measured: medians of several rounds, with the least and the most.

    `small_wait_p99_rounds` is in rounds of slices, under vtc. `pace` is the share of the link that
    the server's scheduler fills; 0 leaves the queue to the kernel.
    """

    rounds: int
    jain_vtc_spread: tuple[float, float]
    small_wait_p99_rounds: float
    small_wait_p99_rounds_spread: tuple[float, float]
    link: str
    pace: float


class _Counted(msgspec.Struct, frozen=True):
    """A client process's counts at its end."""

    sent_bytes: int
    waits_s: list[float]
    requests_s: list[float]


class _Place(msgspec.Struct, frozen=True):
    """The surroundings of one run: the words before each command, what the scheduler may send, a folder for files."""

    prefix: Sequence[str]
    sending_bits_s: float
    folder: Path


def run(setup: FairnessSetup, pace: float, rounds: int) -> FairnessBenchResult:
    """Measure every policy for `duration_s` in each round, in turns. ValueError for a `pace` outside [0, 1]."""
    if not 0 <= pace <= 1:
        raise ValueError(f"pace is a share of the link, 0 to 1, got {pace}")
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as made, ExitStack() as stack:
        try:
            prefix = stack.enter_context(open_link(setup.link_bits_s))
            place, link = _Place(prefix, pace * setup.link_bits_s, Path(made)), "tbf in a network namespace"
        except ValueError as error:
            pace = 1.0
            place, link = _Place([], setup.link_bits_s, Path(made)), f"token bucket in the sender ({error})"
        done = [{policy: _measure(policy, setup, place) for policy in POLICIES} for _ in range(rounds)]
    rows = [_median([each[policy] for each in done]) for policy in POLICIES]
    waits_rounds = [each["vtc"].small_wait_ms_p99 / (1e3 * setup.slice_round_s) for each in done]
    report = msgspec.structs.asdict(fairness_report(setup, rows))
    return FairnessBenchResult(
        **report,
        rounds=rounds,
        jain_vtc_spread=extremes([each["vtc"].jain for each in done]),
        small_wait_p99_rounds=median(waits_rounds),
        small_wait_p99_rounds_spread=extremes(waits_rounds),
        link=link,
        pace=pace,
    )


def _median(rows: Sequence[FairnessRow]) -> FairnessRow:
    """Return the row of medians, figure by figure."""
    columns = list(zip(*map(msgspec.structs.astuple, rows), strict=True))
    return FairnessRow(columns[0][0], *map(median, columns[1:]))


def _measure(policy: str, setup: FairnessSetup, place: _Place) -> FairnessRow:
    kinds = [kind for kind in setup.mix for _ in range(kind.clients)]
    tokens = [new_token() for _ in kinds]
    with kvtide_server(_configuration(policy, setup, tokens, place.sending_bits_s), place.prefix) as (address, _):
        counted = _run_clients(kinds, address, tokens, place, setup.duration_s)
    return fairness_row(policy, list(map(_served, kinds, counted)), setup.duration_s)


def _served(kind: ClientMix, connections: Sequence[_Counted]) -> Served:
    """Return what one client got over all of its connections."""
    return Served(
        kind.size,
        kind.weight,
        sum(each.sent_bytes for each in connections),
        [wait_s for each in connections for wait_s in each.waits_s],
        [request_s for each in connections for request_s in each.requests_s],
    )


def _configuration(policy: str, setup: FairnessSetup, tokens: Sequence[str], sending_bits_s: float) -> str:
    kinds = [kind for kind in setup.mix for _ in range(kind.clients)]
    grants = "".join(grant_words(f"client-{number}", token) for number, token in enumerate(tokens))
    weights = "".join(f"client-{number} = {kind.weight}\n" for number, kind in enumerate(kinds))
    sending = (
        f'policy = "{policy}"\nslots = {setup.slots}\ntenant_slots_max = {setup.slots}\n'
        f"slice_bytes = {setup.slice_bytes}\nlink_bits_s = {sending_bits_s}\n"
    )
    return f"{grants}[sending]\n{sending}[sending.weights]\n{weights}"


def _run_clients(
    kinds: Sequence[ClientMix], address: str, tokens: Sequence[str], place: _Place, duration_s: float
) -> list[list[_Counted]]:
    """Start a process for each connection, let all begin at once, and return what they counted, by client."""
    with ExitStack() as stack:
        clients = [
            [stack.enter_context(_client(kind, address, token, place, duration_s)) for _ in range(kind.connections)]
            for kind, token in zip(kinds, tokens, strict=True)
        ]
        processes = [process for each in clients for process in each]
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise ValueError("a client could not store its object; its reason is above")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = {process: process.communicate(timeout=duration_s + _END_S_MAX)[0] for process in processes}
    return [[msgspec.json.decode(said[process], type=_Counted) for process in each] for each in clients]


@contextmanager
def _client(
    kind: ClientMix, address: str, token: str, place: _Place, duration_s: float
) -> Iterator[subprocess.Popen[str]]:
    object_id = _object_id(kind.size)
    path = f"/v1/{object_id.namespace.hex()}/{object_id.key.hex()}"
    words = [address, token, path, str(_object_file(place, kind.size)), str(duration_s)]
    command = [*place.prefix, sys.executable, "-m", "kvtide_lab.bench.fairness_client", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _object_file(place: _Place, size: int) -> Path:
    """Return a file with an object of about `size` bytes: that and its header."""
    file = place.folder / f"{size}.kvt"
    if not file.exists():
        file.write_bytes(bench_object(_object_id(size), bytes(size)))
    return file


def _object_id(size: int) -> ObjectId:
    namespace = namespace_digest(b"bench", KVDtype.FLOAT16, "bench", 16, b"")
    return ObjectId(namespace, BlockKey(size.to_bytes(32, "big")))
