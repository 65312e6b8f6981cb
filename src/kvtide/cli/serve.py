"""`kvtide serve` and `token`: the cache server; `kvtide invalidate` and `record`: what may change on it."""

from __future__ import annotations

import asyncio
import logging
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kvtide.cli.report import JsonOption, read_json, say
from kvtide.clock import SystemClock
from kvtide.errors import RequestRefused, TierUnavailable
from kvtide.server import Service, backing_for, new_token, token_digest, write_logs
from kvtide.server.settings import DEFAULT_LISTEN, ServerSettings, parse_address, read_settings, take_descriptors
from kvtide.tier.files import Files
from kvtide.tier.http.records import RecordsClient, backed_up, raise_generation, records_clients, restore
from kvtide.tier.pool import Member, PoolServer, membership_of
from kvtide.wire.protocol import Record, RecordKind, RecordName


def serve(
    config: Annotated[Path | None, typer.Option(help="A TOML file; flags go before it.")] = None,
    listen: Annotated[str | None, typer.Option(help=f"host:port or unix:/path [{DEFAULT_LISTEN}].")] = None,
    tier: Annotated[list[str] | None, typer.Option(help="memory:// or disk:///path, fastest first.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="[https://]host:port where others of a pool reach it [--listen].")
    ] = None,
    near: Annotated[Path | None, typer.Option("--socket", help="A socket too, for clients on this machine.")] = None,
    central: Annotated[
        str | None, typer.Option(help="The centre behind this regional server, http(s)://host:port.")
    ] = None,
    manifest: Annotated[Path | None, typer.Option(help="Notes what the centre has not got yet.")] = None,
    records: Annotated[
        Path | None, typer.Option(help="Keeps generations [beside the manifest or on its disk].")
    ] = None,
    region_url: Annotated[
        list[str] | None, typer.Option("--region", help="A region of this centre, http://host:port; several times.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="The pool that it is of, as in its clients' URL.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name in the pool [where others reach it].")] = None,
    access_log: Annotated[Path | None, typer.Option(help="Gets a line of JSON a request.")] = None,
    audit_log: Annotated[
        Path | None, typer.Option(help="Gets a line of JSON for each delete and written record.")
    ] = None,
    health: Annotated[str | None, typer.Option(help="host:port for /livez and /readyz, apart from clients.")] = None,
    open_to_all: Annotated[bool, typer.Option("--open-to-all", help="Listen for others without any token.")] = False,
) -> None:
    """Serve tiers over HTTP until SIGTERM, then finish what is under way. SIGHUP reads the file of settings again."""
    given: dict[str, object] = {
        "listen": listen,
        "advertise": advertise,
        "socket_path": near and near.absolute(),
        "tiers": tier,
        "central": central,
        "manifest": manifest,
        "records": records,
        "regions": region_url,
        "is_open_to_all": open_to_all,
        "health": health,
        "audit_log": audit_log and audit_log.absolute(),
        "access_log": access_log and access_log.absolute(),
    }
    changes = {key: value for key, value in given.items() if value}
    # Few and about what the operator did.
    logging.getLogger("kvtide.server").setLevel(logging.INFO)
    read = partial(read_settings, config, changes)
    _serve(read(), read if config else None, pool, name)


def _serve(
    settings: ServerSettings, read: Callable[[], ServerSettings] | None, pool: str | None, name: str | None
) -> None:
    """Open everything, serve until a signal, and close everything. ValueError for what can't be had."""
    take_descriptors(settings.limits)
    clock = SystemClock()
    backing = backing_for(settings, clock)
    member = _member(settings, pool, name) if pool is not None else None
    service = Service(settings, backing, clock, member, read)
    with closing(backing), nullcontext() if member is None else closing(member):
        try:
            write_logs(settings.access_log, settings.audit_log)
            backing.open()
            if member is not None:
                member.open()
            asyncio.run(_run(service, settings))
        except (OSError, TierUnavailable) as error:
            raise ValueError(f"can't serve: {error}: kvtide doctor --store URL says who answers there") from error


def _member(settings: ServerSettings, pool: str, name: str | None) -> Member:
    """Return this server's place in a pool. It is known there by an address that others reach."""
    scheme, mark, place = (settings.advertise or settings.listen).rpartition("://")
    address = parse_address(place)
    if address.path or address.host in {"0.0.0.0", "::"} or address.port == 0:
        raise ValueError(f"a server of a pool needs host:port that others reach, got {address}: --advertise HOST:PORT")
    if mark and scheme not in {"http", "https"}:
        raise ValueError(f"a server is reached by http or https, got {settings.advertise!r}")
    is_tls = scheme == "https" if mark else settings.tls is not None
    near = str(settings.socket_path or "")
    way: Literal["http", "https"] = "https" if is_tls else "http"
    me = PoolServer(name or str(address), str(address), host=platform.node(), socket_path=near, scheme=way)
    return Member(me, membership_of(pool))


async def _run(service: Service, settings: ServerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    tiers = ", ".join(settings.tiers)
    await service.run(stop, lambda address: print(f"kvtide serves {tiers} on {address}", flush=True))


def token() -> None:
    """Make a token: print it, for the client, and its SHA-256, for the server's configuration."""
    made = new_token()
    print(f"token        = {made}\ntoken_sha256 = {token_digest(made)}")


ServerOption = Annotated[str, typer.Option("--server", help="http(s)://host:port or pool://…, as engines use it.")]


@contextmanager
def _clients(url: str) -> Iterator[Sequence[RecordsClient]]:
    """Open a client of each server. ValueError for a bad URL, and for whatever a server says or does not say."""
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(client) for client in records_clients(url, SystemClock())]
    except (TierUnavailable, RequestRefused) as error:
        raise ValueError(f"{error}: kvtide doctor --store URL looks at the servers") from error


def invalidate(
    namespace: Annotated[str, typer.Argument(help="64 hex digits, or an alias for them.")],
    server: ServerOption,
    as_json: JsonOption = False,
) -> None:
    """Make all older blocks of a namespace misses, on these servers and in every region of their centre."""
    with _clients(server) as clients:
        if len(namespace) != 64:
            found = clients[0].read(RecordName.parse(RecordKind.ALIAS, namespace), is_latest=True)
            if found is None:
                raise ValueError(f"{namespace!r} is neither a namespace nor an alias for one")
            namespace = found.value
        generation = raise_generation(clients, RecordName.parse(RecordKind.GENERATION, namespace).name)
    line = f"{namespace[:12]}… is at generation {generation}: its older blocks are misses"
    say({"server": server, "namespace": namespace, "generation": generation}, as_json, line)


def record(
    server: ServerOption,
    kind: Annotated[RecordKind | None, typer.Argument(help="generation, alias or profile.")] = None,
    name: Annotated[str | None, typer.Argument(help="The record's name; of a generation the namespace.")] = None,
    value: Annotated[str | None, typer.Argument(help="What to write; without it the latest is read.")] = None,
    is_removed: Annotated[bool, typer.Option("--remove", help="Remove the alias or profile.")] = False,
    backup: Annotated[Path | None, typer.Option(help="Write all records that we may see there.")] = None,
    restored: Annotated[Path | None, typer.Option("--restore", help="Write the records of such a file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read, write or remove a small named record; back all of them up, or restore them."""
    if backup is not None or restored is not None:
        if kind is not None or is_removed or (backup is not None and restored is not None):
            raise ValueError("give a record's kind and name, or --backup FILE, or --restore FILE")
        with _clients(server) as clients:
            if backup is not None:
                if not backup.is_file() and (backup.exists() or backup.is_symlink()):
                    raise ValueError(f"{backup} is no file that may be replaced")
                kept, what = backed_up(clients), "backed up"
                Files().save(backup.resolve(), msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
            elif restored is not None:
                kept, what = read_json(restored, list[Record], f"{restored} holds no records:"), "restored"
                restore(clients, kept)
        _say(f"{len(kept)} records {what}", as_json, server, records=len(kept))
        return
    if kind is None or name is None:
        raise ValueError("a record has a kind and a name, as in: kvtide record alias chat")
    if is_removed and value is not None:
        raise ValueError("a record is written or removed, not both")
    with _clients(server) as clients:
        known = RecordName.parse(kind, name)
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
        say({"server": server, **said}, as_json)
    else:
        print(shown)
