"""`kvtide invalidate` and `kvtide record`: what may change on servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from kvtide.cli.report import CONSOLE, emit_json
from kvtide.cli.store import JsonOption
from kvtide.clock import SystemClock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.tier.records import RecordsClient, raise_generation, records_clients
from kvtide.wire.records import RecordKind, RecordName, record_name

__all__ = ["invalidate", "record"]

ServerOption = Annotated[str, typer.Option("--server", help="http(s)://host:port or pool://…, as engines use it.")]


@contextmanager
def _clients(url: str) -> Iterator[Sequence[RecordsClient]]:
    """Open a client of each server. ValueError for a bad URL, and for whatever a server says or does not say."""
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(client) for client in records_clients(url, SystemClock())]
    except (TierUnavailable, RequestRefused) as error:
        raise ValueError(str(error)) from error


def invalidate(
    namespace: Annotated[str, typer.Argument(help="64 hex digits, or an alias for them.")],
    server: ServerOption,
    as_json: JsonOption = False,
) -> None:
    """Make all older blocks of a namespace misses, on these servers and in every region of their centre."""
    with _clients(server) as clients:
        if len(namespace) != 64:
            found = clients[0].read(_name(RecordKind.ALIAS, namespace), is_latest=True)
            if found is None:
                raise ValueError(f"{namespace!r} is neither a namespace nor an alias for one")
            namespace = found.value
        generation = raise_generation(clients, _name(RecordKind.GENERATION, namespace).name)
    if as_json:
        emit_json({"server": server, "namespace": namespace, "generation": generation})
    else:
        CONSOLE.print(f"{namespace[:12]}… is at generation {generation}: its older blocks are misses")


def record(
    kind: Annotated[RecordKind, typer.Argument(help="generation, alias or profile.")],
    name: Annotated[str, typer.Argument(help="The record's name; of a generation the namespace.")],
    server: ServerOption,
    value: Annotated[str | None, typer.Argument(help="What to write; without it the latest is read.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read or write a small named record."""
    known = _name(kind, name)
    with _clients(server) as clients:
        if value is not None:
            written = [client.write(known, value) for client in clients]
            found = written[0]
        else:
            read = clients[0].read(known, is_latest=True)
            if read is None:
                raise ValueError(f"there is no {kind} {name!r}")
            found = read
    if as_json:
        emit_json({"server": server, "kind": kind, "name": name, "value": found.value, "version": found.version})
    else:
        print(found.value)


def _name(kind: RecordKind, name: str) -> RecordName:
    try:
        return record_name(kind, name)
    except RequestRefused as error:
        raise ValueError(str(error)) from error
