"""`kvtide invalidate` and `kvtide record`: what may change on servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtide.cli.report import CONSOLE, JsonOption, emit_json
from kvtide.clock import SystemClock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.tier.records import RecordsClient, backed_up, raise_generation, records_clients, restore
from kvtide.wire.records import Record, RecordKind, RecordName, record_name

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
    server: ServerOption,
    kind: Annotated[RecordKind | None, typer.Argument(help="generation, alias or profile.")] = None,
    name: Annotated[str | None, typer.Argument(help="The record's name; of a generation the namespace.")] = None,
    value: Annotated[str | None, typer.Argument(help="What to write; without it the latest is read.")] = None,
    is_removed: Annotated[bool, typer.Option("--remove", help="Remove the alias or profile.")] = False,
    backup: Annotated[Path | None, typer.Option("--backup", help="Write all records that we may see there.")] = None,
    restored: Annotated[Path | None, typer.Option("--restore", help="Write the records of such a file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read, write or remove a small named record; back all of them up, or restore them."""
    if backup is not None or restored is not None:
        if kind is not None or is_removed or (backup is not None and restored is not None):
            raise ValueError("give a record's kind and name, or --backup FILE, or --restore FILE")
        with _clients(server) as clients:
            count = _back_up(clients, backup) if backup is not None else _restore(clients, restored)
        _say(f"{count} records {'backed up' if backup is not None else 'restored'}", as_json, server, records=count)
        return
    if kind is None or name is None:
        raise ValueError("a record has a kind and a name, as in: kvtide record alias chat")
    if is_removed and value is not None:
        raise ValueError("a record is written or removed, not both")
    known = _name(kind, name)
    with _clients(server) as clients:
        if is_removed:
            found = next(filter(None, [client.remove(known) for client in clients]), None)
        elif value is not None:
            found, *_ = [client.write(known, value) for client in clients]
        else:
            found = clients[0].read(known, is_latest=True)
    if found is None:
        raise ValueError(f"there is no {kind} {name!r}")
    shown = f"{kind} {name} is removed" if is_removed else found.value
    _say(shown, as_json, server, kind=kind, name=name, value=found.value, version=found.version)


def _say(shown: str, as_json: bool, server: str, **said: object) -> None:
    if as_json:
        emit_json({"server": server, **said})
    else:
        print(shown)


def _back_up(clients: Sequence[RecordsClient], path: Path) -> int:
    records = backed_up(clients)
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(records)) + b"\n")
    aside.replace(path)
    return len(records)


def _restore(clients: Sequence[RecordsClient], path: Path | None) -> int:
    assert path is not None
    try:
        records = msgspec.json.decode(path.read_bytes(), type=list[Record])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no records: {error}") from error
    restore(clients, records)
    return len(records)


def _name(kind: RecordKind, name: str) -> RecordName:
    try:
        return record_name(kind, name)
    except RequestRefused as error:
        raise ValueError(str(error)) from error
