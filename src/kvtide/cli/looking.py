"""Stores of any URL as commands open them, and what lies in them, read without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Annotated

import msgspec
import typer

from kvtide.clock import SystemClock
from kvtide.config import Limits, cache_home
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.explain import read_header, read_object
from kvtide.store import NOTES
from kvtide.tier import ObjectInfo, Tier, disk_path, open_tier
from kvtide.tier.disk import DiskTier

DEFAULT_STORE = str(cache_home() / "demo-store")
# Objects that are read at the same time: what is far away takes its time for each.
READERS = 8

StoreOption = Annotated[
    str, typer.Option("--store", help="A path, disk://, http(s)://, pool://, valkey:// or s3:// URL, with its options.")
]
HeadsOption = Annotated[
    int, typer.Option("--limit", min=0, help="Objects whose headers are read, newest first; 0: all.")
]
NamespaceOption = Annotated[str, typer.Option("--namespace", help="Leading hex digits: of these namespaces alone.")]


def looking_at(url: str) -> AbstractContextManager[Tier]:
    """Open an existing store to look at it: nothing in it changes. ValueError if it is not there or does not answer."""
    tier = _tier_at(url)
    below = below_seal(tier)
    return _opened(tier, below.open_read_only if isinstance(below, DiskTier) else tier.open)


def changing(url: str) -> AbstractContextManager[Tier]:
    """Open an existing store to change it. ValueError as in `looking_at`."""
    tier = _tier_at(url)
    return _opened(tier, tier.open)


def below_seal(tier: Tier) -> Tier:
    """Return the tier that a sealed one wraps; another one as it is."""
    return getattr(tier, "tier", tier)


def _tier_at(url: str) -> Tier:
    """Return the tier of a store, not yet opened; nothing is made."""
    if url.startswith("memory://"):
        raise ValueError("memory:// is the memory of one process: ask the server that has it, http://host:port")
    path = disk_path(url)
    if path is not None and not path.is_dir():
        raise ValueError(f"no store at {path}: it is not a directory")
    if path is not None and not (path / "segments").is_dir():
        raise ValueError(f"no store at {path}: it has no folder named segments, nothing was ever stored there")
    return open_tier(url, Limits(), SystemClock(), lambda key: False)


@contextmanager
def _opened(tier: Tier, action: Callable[[], None]) -> Iterator[Tier]:
    try:
        action()
        yield tier
    except TierUnavailable as error:
        raise ValueError(str(error)) from error
    finally:
        tier.close()


class ObjectRow(msgspec.Struct, frozen=True):
    """One object in a listing; `problem` is empty for a good one."""

    namespace: str
    key: str
    model: str
    codec: str
    start: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    age_s: float
    problem: str
    profile: str = ""


def listed(tier: Tier, namespace: str = "", order: str = "use") -> list[ObjectInfo]:
    """Return what a store lists of namespaces that begin so: newest use, largest or smallest key first."""
    infos = [info for info in tier.objects() if info.id.namespace.hex().startswith(namespace.lower())]
    orders: dict[str, Callable[[ObjectInfo], tuple[object, ...]]] = {
        "use": lambda info: (-info.last_use_s, info.id),
        "size": lambda info: (-info.size, info.id),
        "key": lambda info: (info.id,),
    }
    return sorted(infos, key=orders[order])


def rows_of(tier: Tier, infos: Sequence[ObjectInfo], is_verified: bool = False) -> list[ObjectRow]:
    """Read headers, or all bytes, of objects; those that went away meanwhile are left out."""
    now_s = SystemClock().wall_s()
    with ThreadPoolExecutor(READERS, thread_name_prefix="kvtide-look") as readers:
        rows = readers.map(partial(_row, tier, now_s, is_verified), infos)
        return [row for row in rows if row is not None]


def _row(tier: Tier, now_s: float, is_verified: bool, info: ObjectInfo) -> ObjectRow | None:
    plain = partial(ObjectRow, info.id.namespace.hex(), info.id.key.hex())
    age_s = now_s - info.last_use_s
    try:
        stored = (read_object if is_verified else read_header)(tier, info.id)
    except CorruptPayload as error:
        return plain("", "", 0, 0, 0, info.size, age_s, str(error))
    if stored is None:
        is_here = below_seal(tier) is not tier and below_seal(tier).contains(info.id)
        why = "sealed by a key that is not here: kvtide doctor"
        return plain("", "", 0, 0, 0, info.size, age_s, why) if is_here else None
    if stored.codec_id in NOTES:
        # It holds no tokens of its own.
        return plain(NOTES[stored.codec_id], stored.codec_id, 0, 0, 0, info.size, age_s, "")
    meta, profile = stored.meta, stored.profile.hex() if stored.profile else ""
    layout = meta.layout
    sizes = (layout.tokens, layout.raw_bytes, info.size)
    return plain(meta.model, stored.codec_id, meta.start, *sizes, age_s, "", profile)
