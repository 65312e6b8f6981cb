"""Tiers by URL: memory://, disk:///path, http://host, pool://…, valkey://host, s3://bucket. A bare path: disk.

device:// is the memory of a device that an engine hands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvtide.clock import Clock
from kvtide.config import Limits
from kvtide.tier.base import IsPinned, Tier
from kvtide.tier.device import DeviceMemory, DeviceTier
from kvtide.tier.disk import DiskTier
from kvtide.tier.http import HttpTier, http_tier
from kvtide.tier.invalidation import Invalidations
from kvtide.tier.memory import MemoryTier
from kvtide.tier.pool_url import POOL_SCHEMES, pool_tier
from kvtide.tier.ranking import Ranking, ScoreRanking
from kvtide.tier.records import RecordsClient, records_clients
from kvtide.tier.stack import TierStack

__all__ = ["open_tier", "stack_of", "tiers_of"]

_DEVICE = "device://"
_MEMORY = "memory://"
# Schemes of what has records, and how long it may take to answer about them.
_SERVERS = ("http", "https", "http+unix", *POOL_SCHEMES)
OPERATION_S_MAX = 2.0


def open_tier(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    """Return the tier, not yet opened. ValueError for an unknown scheme or a URL that lacks what its scheme needs."""
    if not url:
        raise ValueError("a store URL must not be empty; give memory://, disk:///path or http://host:port")
    if "://" not in url:
        return DiskTier(Path(url), limits.disk_bytes_max, clock, is_pinned)
    scheme = urlsplit(url).scheme
    if scheme not in _OPENERS:
        expected = ", ".join(f"{known}://" for known in _OPENERS)
        raise ValueError(f"unknown store scheme {scheme!r}, expected one of {expected}")
    return _OPENERS[scheme](url, limits, clock, is_pinned)


def _memory(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    return MemoryTier(limits.memory_bytes_max, clock, is_pinned)


def _disk(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    parts = urlsplit(url)
    if not parts.path or parts.netloc:
        raise ValueError(f"a disk store needs a path with three slashes, as in disk:///path, got {url!r}")
    return DiskTier(Path(unquote(parts.path)), limits.disk_bytes_max, clock, is_pinned)


def _valkey(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    with _needing("valkey"):
        from kvtide.tier.valkey import ValkeyTier
    return ValkeyTier(url, clock)


def _s3(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    with _needing("s3"):
        from kvtide.tier.s3 import S3Tier
    return S3Tier(url, clock)


def _http(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    return http_tier(url, clock)


def _pool(url: str, limits: Limits, clock: Clock, is_pinned: IsPinned) -> Tier:
    return pool_tier(url, clock)


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    """Turn an import that fails for want of an optional package into advice."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"this store needs {error.name}: pip install 'kvtide[{extra}]'") from error


_OPENERS: dict[str, Callable[[str, Limits, Clock, IsPinned], Tier]] = {
    "memory": _memory,
    "disk": _disk,
    **dict.fromkeys(("http", "https", "http+unix"), _http),
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), _valkey),
    **dict.fromkeys(("s3", "gs", "az"), _s3),
    **dict.fromkeys(POOL_SCHEMES, _pool),
}


def stack_of(
    url: str,
    limits: Limits,
    clock: Clock,
    is_pinned: IsPinned,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
) -> TierStack:
    """Return memory in front of what the URL names, as an engine wants it, and the device's, if it gives any, first.

    Several URLs with spaces between them are tiers, fastest first: `disk:///path http://host:7421`. `ranking` as in
    `tiers_of`.
    """
    urls = url.split(" ") if " " in url and "://" in url else [url]
    front = [_DEVICE] if device is not None else []
    memory = [] if urls[0].startswith(_MEMORY) else [_MEMORY]
    return tiers_of([*front, *memory, *urls], limits, clock, is_pinned, ranking, device, follows=True)


def tiers_of(
    urls: Sequence[str],
    limits: Limits,
    clock: Clock,
    is_pinned: IsPinned,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
    follows: bool = False,
) -> TierStack:
    """Return what the URLs name as one tier, fastest first. ValueError for `device://` without a device.

    What stays on the device and in memory is decided by uses times important tokens, all tokens counting alike, or by
    `ranking`. If it `follows`, what servers among them declare invalid leaves device, memory and disk as well.
    """
    ranking = ranking or ScoreRanking(lambda object_id: 1.0)
    tiers: list[Tier] = []
    for url in urls:
        if url == _DEVICE:
            if device is None:
                raise ValueError("device:// is for engines that hand a device's memory to the cache")
            tiers.append(DeviceTier(limits.device_bytes_max, clock, is_pinned, device, ranking))
            continue
        tier = open_tier(url, limits, clock, is_pinned)
        is_memory = isinstance(tier, MemoryTier)
        tiers.append(MemoryTier(limits.memory_bytes_max, clock, is_pinned, ranking) if is_memory else tier)
    is_demoted = any(isinstance(tier, HttpTier) and tier.takes_evicted for tier in tiers)
    invalidations = _invalidations(urls, tiers, clock) if follows else None
    return TierStack(tiers, ranking, demote_to=[HttpTier.name] if is_demoted else (), invalidations=invalidations)


def _invalidations(urls: Sequence[str], tiers: Sequence[Tier], clock: Clock) -> Invalidations | None:
    servers = [url for url in urls if urlsplit(url).scheme in _SERVERS]
    own = [tier for tier in tiers if isinstance(tier, DeviceTier | MemoryTier | DiskTier)]
    roots = [tier.root for tier in own if isinstance(tier, DiskTier)]

    def clients() -> list[RecordsClient]:
        return [client for url in servers for client in records_clients(url, clock, OPERATION_S_MAX)]

    return Invalidations(clients, own, roots[0] / "invalidated" if roots else None, clock) if servers and own else None
