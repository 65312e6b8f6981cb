"""Stores of any URL as commands open them; `kvtide stats`, `ls`, `rm` and `ping`."""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from kvtide.cli.report import CONSOLE, JsonOption, format_age, format_bytes, narrow_table, say
from kvtide.clock import Clock, SystemClock
from kvtide.config import Limits, cache_home
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.store import NOTES
from kvtide.tier import ObjectInfo, Tier, disk_path, open_tier
from kvtide.tier.buffers import aligned_buffer
from kvtide.tier.disk import DiskTier
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import StoredObject, header_and_table_bytes, parse_header, parse_object

DEFAULT_STORE = str(cache_home() / "demo-store")
# Objects that are read at the same time: a far store takes its time for each.
READERS = 8
# Most objects have header and table in so many bytes: one read.
_HEAD_BYTES = 4096
# Objects whose headers `stats` reads unless it is told otherwise; objects that `ls` shows.
STATS_LIMIT = 10_000
LS_LIMIT = 50
# Engines may have given a disk more room than is usual: no command makes it smaller.
LIMITS = Limits(disk_bytes_max=1 << 62)
# Objects of which `ping` takes the rate, the largest ones, and how long that may take.
OBJECTS_MAX = 16
READ_S_MAX = 5.0
# Engines for which `ping` says whether loading pays, in tokens a second of prefill.
PREFILLS = (500.0, 5000.0, 50000.0)
_Order = Literal["use", "size", "key"]

StoreOption = Annotated[
    str, typer.Option("--store", help="A path, disk://, http(s)://, pool://, valkey:// or s3:// URL, with options.")
]
HeadsOption = Annotated[int, typer.Option(min=0, help="Objects whose headers are read, newest first; 0: all.")]
NamespaceOption = Annotated[str, typer.Option(help="Leading hex digits: of these namespaces alone.")]


def looking_at(url: str) -> AbstractContextManager[Tier]:
    """Open an existing store to look at it: nothing in it changes. ValueError if it is not there or does not answer."""
    tier = _tier_at(url)
    below = below_seal(tier)
    return _opened(tier, below.open_read_only if isinstance(below, DiskTier) else tier.open)


def changing(url: str) -> AbstractContextManager[Tier]:
    """Open an existing store to change it. ValueError as in `looking_at`."""
    tier = _tier_at(url)
    return _opened(tier, tier.open)


def adding(url: str) -> AbstractContextManager[Tier]:
    """Open a store to add to it; a folder is made. ValueError for memory of this process, or if it does not answer."""
    if url.startswith("memory://"):
        raise ValueError("memory:// is gone when this command ends: give a store that engines open too")
    tier = open_tier(url, LIMITS, SystemClock(), lambda key: False)
    return _opened(tier, tier.open)


def below_seal(tier: Tier) -> Tier:
    """The tier that a sealed one wraps; another one as it is."""
    return getattr(tier, "tier", tier)


def _tier_at(url: str) -> Tier:
    if url.startswith("memory://"):
        raise ValueError("memory:// is the memory of one process: ask its server: --store http://HOST:PORT")
    path = disk_path(url)
    if path is not None and not (path / "segments").is_dir():
        what = "kvtide demo stores a chat" if url == DEFAULT_STORE else "kvtide doctor --store URL looks at the place"
        raise ValueError(f"no store at {path}: it has no folder named segments, nothing was ever stored there: {what}")
    return open_tier(url, LIMITS, SystemClock(), lambda key: False)


@contextmanager
def _opened(tier: Tier, action: Callable[[], None]) -> Iterator[Tier]:
    try:
        action()
        yield tier
    except TierUnavailable as error:
        raise ValueError(f"{error}: kvtide doctor --store URL says what mends it") from error
    finally:
        tier.close()


def read_header(tier: Tier, object_id: ObjectId) -> StoredObject | None:
    """Read and verify header and section table alone. None and CorruptPayload as in `read_object`."""
    buffer = memoryview(bytearray(_HEAD_BYTES))
    size = tier.get_into(object_id, buffer)
    if size == len(buffer) < (needed := header_and_table_bytes(buffer)):
        buffer = memoryview(bytearray(needed))
        size = tier.get_into(object_id, buffer)
    if size is None:
        return None
    stored = parse_header(buffer[:size])
    if stored.meta.id.key != object_id.key:
        raise CorruptPayload(f"asked for {object_id}, the bytes are those of {stored.meta.id}")
    return stored


def read_object(tier: Tier, object_id: ObjectId) -> StoredObject | None:
    """Read and verify an object. None if absent; CorruptPayload if it is another key's (namespaces may be hashed)."""
    if (header := read_header(tier, object_id)) is None:
        return None
    # One byte more than it says, so that what is too long shows; a header that says too much takes no memory.
    buffer = aligned_buffer(header.object_bytes + 1)
    if (size := tier.get_into(object_id, buffer)) is None:
        return None
    stored = parse_object(buffer[:size], header.meta.id)
    stored.sections()
    return stored


class ObjectRow(msgspec.Struct, frozen=True):
    """One object in a listing; `problem` is empty for a good one. quality: the KL it was stored for, 0 for exact."""

    namespace: str
    key: str
    model: str = ""
    codec: str = ""
    start: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    age_s: float = 0.0
    problem: str = ""
    profile: str = ""
    quality: float = 0.0


def listed(tier: Tier, namespace: str = "", order: _Order = "use") -> list[ObjectInfo]:
    """List objects of namespaces that begin so: newest use, largest or smallest key first."""
    infos = [info for info in tier.objects() if info.id.namespace.hex().startswith(namespace.lower())]
    return sorted(infos, key=lambda info: ({"use": -info.last_use_s, "size": -info.size, "key": 0}[order], info.id))


def rows_of(tier: Tier, infos: Sequence[ObjectInfo], is_verified: bool = False) -> list[ObjectRow]:
    """Read headers, or all bytes, of objects; those that went away meanwhile are left out."""
    look = partial(_row, tier, SystemClock().wall_s(), is_verified)
    with ThreadPoolExecutor(READERS, thread_name_prefix="kvtide-look") as readers:
        return list(filter(None, readers.map(look, infos)))


def _row(tier: Tier, now_s: float, is_verified: bool, info: ObjectInfo) -> ObjectRow | None:
    names, age_s = (info.id.namespace.hex(), info.id.key.hex()), now_s - info.last_use_s
    plain = partial(ObjectRow, *names, stored_bytes=info.size, age_s=age_s)
    try:
        stored = (read_object if is_verified else read_header)(tier, info.id)
    except CorruptPayload as error:
        return plain(problem=str(error))
    if stored is None:
        is_here = below_seal(tier) is not tier and below_seal(tier).contains(info.id)
        return plain(problem="sealed by a key that is not here: kvtide doctor") if is_here else None
    if stored.codec_id in NOTES:
        # It holds no tokens of its own.
        return plain(NOTES[stored.codec_id], stored.codec_id)
    meta, profile = stored.meta, stored.profile.hex() if stored.profile else ""
    sizes = (meta.layout.tokens, meta.layout.raw_bytes)
    return plain(meta.model, stored.codec_id, meta.start, *sizes, profile=profile, quality=stored.quality)


def stats(
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    limit: HeadsOption = STATS_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """Show how much a store holds, by namespace and codec."""
    with looking_at(url) as tier:
        infos = listed(tier, namespace)
        rows = rows_of(tier, infos[: limit or None])
    groups: dict[tuple[str, str, str], list[ObjectRow]] = {}
    for row in rows:
        if not row.problem:
            groups.setdefault((row.namespace, row.model, row.codec), []).append(row)
    summary, shown = list[dict[str, object]](), list[tuple[str, ...]]()
    for (space, model, codec), members in sorted(groups.items()):
        sizes = ((row.tokens, row.raw_bytes, row.stored_bytes) for row in members)
        tokens, raw_bytes, stored_bytes = map(sum, zip(*sizes, strict=True))
        ratio, count = raw_bytes / stored_bytes, len(members)
        names = {"namespace": space, "model": model, "codec": codec, "objects": count, "tokens": tokens}
        summary.append({**names, "raw_bytes": raw_bytes, "stored_bytes": stored_bytes, "ratio": ratio})
        shown.append((space[:12], model, codec, str(count), str(tokens), format_bytes(stored_bytes), f"{ratio:.2f}"))
    problems, total = sum(bool(row.problem) for row in rows), sum(info.size for info in infos)
    counts = {"objects": len(infos), "looked_into": len(rows), "stored_bytes": total, "problems": problems}
    columns = ("namespace", "model", "codec", ">blocks", ">tokens", ">stored", ">ratio")
    lines = [f"{len(infos)} objects, {format_bytes(total)}"]
    if len(rows) < len(infos):
        lines.append(f"The table counts the {len(rows)} used last; --limit 0 for all.")
    if problems:
        lines.append(f"{problems} objects can't be read; `kvtide ls` names them.")
    say({"store": url, **counts, "rows": summary}, as_json, narrow_table(columns, shown), *lines)


def ls(
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    order: Annotated[_Order, typer.Option("--sort", help="Newest use, largest, or by key.")] = "use",
    limit: Annotated[int, typer.Option(min=0, help="Objects to show; 0: all.")] = LS_LIMIT,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte of them and check it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the objects of a store, newest use first."""
    with looking_at(url) as tier:
        infos = listed(tier, namespace, order)
        rows = rows_of(tier, infos[: limit or None], verify)
    shown = []
    for row in rows:
        span = f"[{row.start}, {row.start + row.tokens})" if row.tokens else ""
        names = (row.namespace[:8], row.key[:16], span, "broken" if row.problem else row.codec)
        shown.append((*names, format_bytes(row.stored_bytes), format_age(row.age_s)))
    table = narrow_table(("namespace", "key", "tokens", "codec", ">stored", ">used"), shown)
    lines = [f"{row.key[:16]}: {escape(row.problem)}" for row in rows if row.problem]
    if len(rows) < len(infos):
        lines.append(f"{len(rows)} of {len(infos)} objects; --limit 0 for all, --sort for others first.")
    say({"store": url, "objects": len(infos), "rows": rows}, as_json, table, *lines)


def rm(
    prefixes: Annotated[list[str] | None, typer.Argument(help="Leading hex digits of keys or namespaces.")] = None,
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Remove every object.")] = False,
    is_sure: Annotated[bool, typer.Option("--yes", help="Don't ask before --all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove objects by leading hex digits (at least 4) of their key or namespace."""
    chosen = [prefix.lower() for prefix in prefixes or []]
    if bool(chosen) == everything:
        raise ValueError("name what to remove by hex digits of key or namespace, as kvtide ls has them, or give --all")
    for prefix in chosen:
        if len(prefix) < 4 or set(prefix) - set("0123456789abcdef"):
            raise ValueError(f"expected at least 4 hex digits, as kvtide ls shows them, got {prefix!r}")
    with changing(url) as tier:
        infos = listed(tier, namespace)
        if everything and not is_sure:
            if as_json or sys.stdin is None or not sys.stdin.isatty():
                raise ValueError(f"--all would remove {len(infos)} objects and nobody can be asked: add --yes")
            size = format_bytes(sum(info.size for info in infos))
            if not typer.confirm(f"Remove all {len(infos)} objects, {size}, of {url}?"):
                CONSOLE.print("nothing removed")
                return
        named = [info for info in infos if any(each.hex().startswith(tuple(chosen or [""])) for each in info.id)]
        gone = {info: tier.delete(info.id, "removed") for info in named}
        removed = [info.size for info, is_gone in gone.items() if is_gone]
        if kept := sum(tier.contains(info.id) for info, is_gone in gone.items() if not is_gone):
            raise ValueError(f"{kept} objects could not be removed, {len(removed)} were: a token needs the scope write")
    line = f"removed {len(removed)} objects, {format_bytes(sum(removed))}"
    say({"store": url, "removed": len(removed), "removed_bytes": sum(removed)}, as_json, line)


def ping(
    url: StoreOption = DEFAULT_STORE,
    tries: Annotated[int, typer.Option(min=1, max=1000, help="Round trips that are measured.")] = 20,
    prefill: Annotated[
        list[float] | None, typer.Option("--prefill-tokens-s", help="Speed of your engine; several times.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure round trip and rate of a store, and say from which prefix length on loading pays. Stores nothing."""
    if any(not 0 < each < math.inf for each in prefill or ()):
        raise ValueError("an engine's speed is positive and finite")
    clock = SystemClock()
    with looking_at(url) as tier:
        # The first one connects.
        asked_s(tier, clock)
        times = [asked_s(tier, clock) for _ in range(tries)]
        infos = listed(tier, order="size")[:OBJECTS_MAX]
        blocks = [row for row in rows_of(tier, infos) if row.tokens]
        objects, size, took_s = _read(tier, infos, clock) if blocks else (0, 0, 0.0)
    trip_s, spread_s = statistics.median(times), (min(times), max(times))
    bytes_s = size / took_s if took_s else None
    bytes_a_token = sum(row.stored_bytes for row in blocks) / sum(row.tokens for row in blocks) if blocks else None
    tokens_s = bytes_s / bytes_a_token if bytes_s and bytes_a_token else None
    block_tokens, speeds = max((row.tokens for row in blocks), default=1), prefill or PREFILLS
    pays = [(each, pays_from(trip_s, tokens_s, each, block_tokens)) for each in speeds] if tokens_s else []
    trip, low, high = (f"{seconds * 1e3:.3g} ms" for seconds in (trip_s, *spread_s))
    shown: list[object] = [f"round trip {trip}, {tries} times, {low} to {high}"]
    if bytes_s and bytes_a_token and tokens_s:
        rows = [(f"{each:,.0f} tokens/s", f"{least:,} tokens" if least else "never") for each, least in pays]
        shown += [
            f"rate {format_bytes(bytes_s)}/s, one reader: {objects} objects, {format_bytes(size)}",
            f"its blocks have {format_bytes(bytes_a_token)} a token: {tokens_s:,.0f} tokens/s",
            narrow_table((">engine prefills", ">loading pays from"), rows),
            "Decoding is not counted; engines measure it and decide for each load.",
        ]
    else:
        shown.append("rate unknown: no block can be read there yet; store a prompt and ping again")
    result = {
        **{"store": url, "round_trip_s": trip_s, "round_trip_spread_s": spread_s, "objects_read": objects},
        **{"read_bytes": size, "bytes_s": bytes_s, "bytes_a_token": bytes_a_token, "tokens_s": tokens_s},
        "rows": [{"prefill_tokens_s": each, "pays_from_tokens": least} for each, least in pays],
    }
    say(result, as_json, *shown)


def asked_s(tier: Tier, clock: Clock) -> float:
    """Look for an object that nobody has; return the seconds that it took."""
    started_s = clock.monotonic_s()
    tier.contains(ObjectId(Namespace(os.urandom(32)), BlockKey(os.urandom(32))))
    return clock.monotonic_s() - started_s


def _read(tier: Tier, infos: Sequence[ObjectInfo], clock: Clock) -> tuple[int, int, float]:
    """Read objects while there is time: their number, bytes, and the seconds that it took."""
    buffer = memoryview(bytearray(max(info.size for info in infos)))
    objects, size, started_s = 0, 0, clock.monotonic_s()
    for info in infos:
        came = tier.get_into(info.id, buffer)
        objects, size = objects + (came is not None), size + (came or 0)
        if clock.monotonic_s() - started_s > READ_S_MAX:
            break
    return objects, size, clock.monotonic_s() - started_s


def pays_from(round_trip_s: float, load_tokens_s: float, prefill_tokens_s: float, block_tokens: int) -> int | None:
    """The shortest prefix, in whole blocks, that loads, round trip included, before it is computed; None if none."""
    saved_s = 1 / prefill_tokens_s - 1 / load_tokens_s
    return (math.floor(round_trip_s / saved_s / block_tokens) + 1) * block_tokens if saved_s > 0 else None
