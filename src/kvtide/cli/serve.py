"""`kvtide serve` and `kvtide token`: the cache server."""

from __future__ import annotations

import asyncio
import logging
import platform
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtide.clock import SystemClock
from kvtide.errors import TierUnavailable
from kvtide.server import (
    Member,
    Service,
    SettingsFile,
    backing_for,
    new_token,
    token_digest,
)
from kvtide.server.observe import ACCESS_LOGGER, AUDIT_LOGGER, write_log
from kvtide.server.settings import (
    DEFAULT_LISTEN,
    ListenAddress,
    ServerSettings,
    check_memory,
    memory_bytes,
    parse_address,
    read_settings,
    take_descriptors,
)
from kvtide.tier.pool import PoolServer, membership_of


def serve(
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file; flags go before it.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", help=f"host:port or unix:/path [{DEFAULT_LISTEN}].")] = None,
    tier: Annotated[list[str] | None, typer.Option("--tier", help="memory:// or disk:///path, fastest first.")] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="[https://]host:port where others of a pool reach it [--listen].")
    ] = None,
    near: Annotated[
        Path | None, typer.Option("--socket", help="A socket besides, for clients on this machine.")
    ] = None,
    central: Annotated[
        str | None, typer.Option("--central", help="The centre behind this regional server, http(s)://host:port.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="Where it notes what the centre has not got yet.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option("--records", help="Where it keeps generations [beside the manifest or on its disk].")
    ] = None,
    region_url: Annotated[
        list[str] | None, typer.Option("--region", help="A region of this centre, http://host:port; several times.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option("--pool", help="The pool that this server is of, as in its clients' URL.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Its name in the pool; default: where others reach it.")
    ] = None,
    access_log: Annotated[
        Path | None,
        typer.Option("--access-log", help="A line of JSON for each request goes there, and to no log else."),
    ] = None,
    audit_log: Annotated[
        Path | None, typer.Option("--audit-log", help="A line of JSON for each delete and written record.")
    ] = None,
    health: Annotated[
        str | None, typer.Option("--health", help="host:port for /livez and /readyz, apart from clients.")
    ] = None,
    open_to_all: Annotated[bool, typer.Option("--open-to-all", help="Listen for others without any token.")] = False,
) -> None:
    """Serve tiers over HTTP until SIGTERM, then finish what is under way. SIGHUP reads the file of settings anew."""
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
    _serve(read(), SettingsFile(config, read) if config else None, pool, name)


def _serve(settings: ServerSettings, source: SettingsFile | None, pool: str | None, name: str | None) -> None:
    """Open everything, serve until a signal, and close everything. ValueError for what can't be had."""
    take_descriptors(settings.limits)
    check_memory(settings, memory_bytes())
    clock = SystemClock()
    backing = backing_for(settings, clock)
    member = _member(settings, pool, name) if pool is not None else None
    service = Service(settings, backing, clock, member, source)
    try:
        for logger, path in ((ACCESS_LOGGER, settings.access_log), (AUDIT_LOGGER, settings.audit_log)):
            if path is not None:
                write_log(logger, path)
        backing.open()
        if member is not None:
            member.open()
        asyncio.run(_run(service, settings))
    except (OSError, TierUnavailable) as error:
        raise ValueError(f"can't serve: {error}") from error
    finally:
        if member is not None:
            member.close()
        backing.close()


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

    def say(address: ListenAddress) -> None:
        print(f"kvtide serves {', '.join(settings.tiers)} on {address}", flush=True)

    await service.run(stop, say)


def token() -> None:
    """Make a token: print it, for the client, and its SHA-256, for the server's configuration."""
    made = new_token()
    print(f"token        = {made}\ntoken_sha256 = {token_digest(made)}")
