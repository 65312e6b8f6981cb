"""`kvtide ping URL`: round trip and rate of a store, and from which prefix length on loading pays."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_bytes, narrow_table
from kvtide.cli.store import listed, looking_at, rows_of
from kvtide.clock import Clock, SystemClock
from kvtide.tier import ObjectInfo, Tier
from kvtide.types import BlockKey, Namespace, ObjectId

# Objects of which the rate is taken, the largest ones, and how long that may take.
OBJECTS_MAX = 16
READ_S_MAX = 5.0
# Engines for which the table says whether loading pays, in tokens a second of prefill.
PREFILLS = (500.0, 5000.0, 50000.0)


class PingRow(msgspec.Struct, frozen=True):
    """An engine that prefills so fast, and the shortest prefix that is loaded faster; None: no prefix is."""

    prefill_tokens_s: float
    pays_from_tokens: int | None


class PingResult(msgspec.Struct, frozen=True):
    """The measured times and rates; None where nothing is stored that could be read."""

    store: str
    round_trip_s: float
    round_trip_spread_s: tuple[float, float]
    objects_read: int
    read_bytes: int
    bytes_s: float | None
    bytes_a_token: float | None
    tokens_s: float | None
    rows: list[PingRow]


def ping(
    url: Annotated[str, typer.Argument(help="A store's URL or folder.")],
    tries: Annotated[int, typer.Option("--tries", min=1, max=1000)] = 20,
    prefill: Annotated[
        list[float] | None, typer.Option("--prefill-tokens-s", help="Speed of your engine; several times.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure round trip and rate of a store, and say from which prefix length on loading pays. Stores nothing."""
    if any(not each > 0 for each in prefill or ()):
        raise ValueError("an engine's speed is positive")
    with looking_at(url) as tier:
        result = _measured(url, tier, tries, prefill or PREFILLS, SystemClock())
    if as_json:
        emit_json(result)
        return
    low, high = result.round_trip_spread_s
    CONSOLE.print(f"round trip {_ms(result.round_trip_s)}, {tries} times, {_ms(low)} to {_ms(high)}")
    if result.bytes_s is None or result.tokens_s is None:
        CONSOLE.print("rate unknown: no block can be read there yet; store a prompt and ping again")
        return
    CONSOLE.print(
        f"rate {format_bytes(result.bytes_s)}/s, one reader: {result.objects_read} objects, "
        f"{format_bytes(result.read_bytes)}"
    )
    CONSOLE.print(f"its blocks have {format_bytes(result.bytes_a_token or 0)} a token: {result.tokens_s:,.0f} tokens/s")
    table = narrow_table(">engine prefills", ">loading pays from")
    for row in result.rows:
        start = "never" if row.pays_from_tokens is None else f"{row.pays_from_tokens:,} tokens"
        table.add_row(f"{row.prefill_tokens_s:,.0f} tokens/s", start)
    CONSOLE.print(table)
    CONSOLE.print("Decoding is not counted; engines measure it and decide for each load.")


def _measured(url: str, tier: Tier, tries: int, prefills: Sequence[float], clock: Clock) -> PingResult:
    def asked_s() -> float:
        started_s = clock.monotonic_s()
        tier.contains(ObjectId(Namespace(os.urandom(32)), BlockKey(os.urandom(32))))
        return clock.monotonic_s() - started_s

    # The first one connects.
    asked_s()
    times = [asked_s() for _ in range(tries)]
    infos = listed(tier, order="size")[:OBJECTS_MAX]
    blocks = [row for row in rows_of(tier, infos) if row.tokens]
    read = _read(tier, infos, clock) if blocks else _Read(0, 0, 0.0)
    bytes_s = read.size / read.took_s if read.took_s else None
    bytes_a_token = sum(row.stored_bytes for row in blocks) / sum(row.tokens for row in blocks) if blocks else None
    tokens_s = bytes_s / bytes_a_token if bytes_s and bytes_a_token else None
    trip_s = statistics.median(times)
    block_tokens = max((row.tokens for row in blocks), default=1)
    rows = [PingRow(each, pays_from(trip_s, tokens_s, each, block_tokens)) for each in prefills] if tokens_s else []
    spread = (min(times), max(times))
    return PingResult(url, trip_s, spread, read.objects, read.size, bytes_s, bytes_a_token, tokens_s, rows)


class _Read(msgspec.Struct, frozen=True):
    objects: int
    size: int
    took_s: float


def _read(tier: Tier, infos: Sequence[ObjectInfo], clock: Clock) -> _Read:
    buffer = memoryview(bytearray(max(info.size for info in infos)))
    objects = size = 0
    started_s = clock.monotonic_s()
    for info in infos:
        came = tier.get_into(info.id, buffer)
        objects, size = objects + (came is not None), size + (came or 0)
        if clock.monotonic_s() - started_s > READ_S_MAX:
            break
    return _Read(objects, size, clock.monotonic_s() - started_s)


def pays_from(round_trip_s: float, load_tokens_s: float, prefill_tokens_s: float, block_tokens: int) -> int | None:
    """Return the shortest run of blocks that loads, round trip included, before it is computed; None if none does."""
    saved_s = 1 / prefill_tokens_s - 1 / load_tokens_s
    return (math.floor(round_trip_s / saved_s / block_tokens) + 1) * block_tokens if saved_s > 0 else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
