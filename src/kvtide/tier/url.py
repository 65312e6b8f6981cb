"""Tiers by URL: memory://, disk:///path, http://host:port, pool://…, valkey://host, s3://bucket.

A path that begins with `/`, `./`, `../` or `~` is a disk store too. `?seal=` keeps a store's objects encrypted, but for
memory's. device:// is the memory of a device that an engine hands in.
Invariant: what is wrong with a URL is a ValueError of one line, before anything is made or connected.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from kvtide.clock import Clock
from kvtide.config import Limits
from kvtide.evict import EvictionOrder, RankedOrder, Ranking, ScoreRanking, order_named
from kvtide.tier.base import POOL_SCHEMES, DeviceMemory, IsPinned, Tier
from kvtide.tier.ram import MemoryTier
from kvtide.tier.stack import TierStack

if TYPE_CHECKING:
    from kvtide.tier.http.records import RecordsClient
    from kvtide.tier.stack.invalidation import Invalidations

_DEVICE = "device://"
_MEMORY = "memory://"
# The policy of a disk whose segments go by age; what was used in them since may stay.
_OLDEST = "fifo"
# Schemes of what has records, and how long it may take to answer about them.
_SERVERS = ("http", "https", "http+unix", *POOL_SCHEMES)
OPERATION_S_MAX = 2.0


def open_tier(
    url: str,
    limits: Limits,
    clock: Clock,
    is_pinned: IsPinned,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
) -> Tier:
    """Return the tier, not yet opened; nothing is made or connected. ValueError for a URL that can't be used.

    What leaves memory and a device is decided by the URL's `?policy=`, by default by `ranking`, if there is one.
    """
    url, seal = _split_seal(url)
    if seal is not None:
        if url.startswith((_MEMORY, _DEVICE)):
            raise ValueError("memory is not sealed: its objects never leave the process")
        tier = open_tier(url, limits, clock, is_pinned)
        with _needing("seal"):
            from kvtide.tier.seal import sealed

            return sealed(tier, seal, clock)
    if (path := disk_path(url)) is not None:
        _check_folder(path)
        from kvtide.tier.disk import DiskTier

        policy = _policy_of(url)
        order_of = partial(order_named, policy, bytes_max=limits.disk_bytes_max)
        return DiskTier(path, limits.disk_bytes_max, clock, is_pinned, order_of=None if policy == _OLDEST else order_of)
    if url.startswith(_MEMORY):
        size = limits.memory_bytes_max
        return MemoryTier(size, clock, is_pinned, _order_of(url, clock, size, ranking))
    if url.startswith(_DEVICE):
        if device is None:
            raise ValueError("device:// is for engines that hand a device's memory to the cache")
        size = limits.device_bytes_max
        return device.tier(size, clock, is_pinned, _order_of(url, clock, size, ranking))
    scheme = _parts(url).scheme
    if scheme not in _HOUSES:
        expected = ", ".join(f"{known}://" for known in ("disk", "memory", *_HOUSES))
        raise ValueError(f"unknown store scheme {scheme!r}, expected one of {expected}")
    house, make = _HOUSES[scheme]
    # Its module is imported for a store that needs it.
    with _needing(house):
        made: Tier = getattr(import_module(f"kvtide.tier.{house}"), make)(url, clock)
    return made


def _split_seal(url: str) -> tuple[str, str | None]:
    if "seal=" in url:
        from kvtide.tier.seal import split_seal

        return split_seal(url)
    return url, None


def disk_path(url: str) -> Path | None:
    """Return the folder that a store URL or a path names; None for a store of another kind. ValueError if it is bad."""
    parts = _parts(url)
    if "://" not in url:
        if url.partition("/")[0] not in {"", ".", ".."} and not url.startswith("~"):
            raise ValueError(
                "expected a store URL such as memory://, disk:///path or http://host:port, "
                f"or a path that begins with /, ./, ../ or ~, got {url!r}"
            )
        return _expanded(url)
    if parts.scheme != "disk":
        return None
    if not parts.path or parts.netloc:
        raise ValueError(f"a disk store needs a path with three slashes, as in disk:///path, got {url!r}")
    if parts.fragment or (parts.query and _policy_of(url) is None):
        raise ValueError(
            f"a disk store takes ?policy=NAME and nothing else; write ? as %3F and # as %23 in its path, got {url!r}"
        )
    if "\0" in (path := os.fsdecode(unquote_to_bytes(parts.path))):
        raise ValueError(f"a disk store's path has no zero byte, got {url!r}")
    return Path(path)


def _expanded(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"no home directory for {str(path)!r}: {error}") from error


def _policy_of(url: str) -> str | None:
    """Return what `?policy=` says in the URL of memory, a device or a disk, None without. It may be unknown."""
    name, _, policy = _parts(url).query.partition("=")
    return policy if name == "policy" and "://" in url else None


def _parts(url: str) -> SplitResult:
    if not url:
        raise ValueError("a store URL must not be empty; give memory://, disk:///path or http://host:port")
    if url != url.strip() or not url.isprintable() or ("://" in url and " " in url):
        raise ValueError(
            f"a store URL has no blanks or control characters (%20 is a blank in a path), got {shown_url(url)!r}"
        )
    try:
        return urlsplit(_split_seal(url)[0])
    except ValueError as error:
        raise ValueError(f"{shown_url(url)!r} is no store URL: {error}") from error


def shown_url(url: str) -> str:
    """Return a URL without the password that it may hold."""
    return re.sub(r"//[^/]*@", "//…@", url)


def _check_folder(path: Path) -> None:
    """ValueError if a store can't be in this folder, as far as is known now: later faults are misses."""
    for each in (path, *path.absolute().parents):
        try:
            if not each.exists():
                if each.is_symlink():
                    raise ValueError(f"the store {path} can't be made: {each} is a link that leads nowhere")
                continue
            is_folder, is_here = each.is_dir(), each == path
            needed = os.R_OK | os.X_OK if is_here else os.W_OK | os.X_OK
            # Such as /proc and /sys: no file can be made there, whatever its mode says.
            is_pseudo = is_folder and os.statvfs(each).f_blocks == 0 and not _takes_files(each)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.ENAMETOOLONG}:
                raise ValueError(f"the store {path} can't be used: {error}") from error
            return
        if not is_folder:
            raise ValueError(f"the store {path} can't be used: {each} is not a directory")
        if is_pseudo or not os.access(each, needed):
            raise ValueError(f"the store {path} can't be {'used' if is_here else 'made'}: no permission in {each}")
        return


def _takes_files(folder: Path) -> bool:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _order_of(url: str, clock: Clock, bytes_max: int, ranking: Ranking | None) -> EvictionOrder:
    """Return the order of memory, of this machine or a device. ValueError for a URL that says more than a policy."""
    policy = _policy_of(url)
    scheme = _MEMORY if url.startswith(_MEMORY) else _DEVICE
    if url not in {scheme, f"{scheme}?policy={policy}"}:
        raise ValueError(f"{scheme} takes ?policy=NAME and nothing else, its size is a limit, got {url!r}")
    if policy is None and ranking is not None:
        # Whoever brings a ranking knows more of single objects than a policy over prefixes does.
        return RankedOrder(ranking)
    return order_named(policy, clock, bytes_max)


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    """Turn an import that fails for want of an optional package into advice."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"this store needs {error.name}: pip install 'kvtide[{extra}]'") from error


# Modules by scheme, which are also the names of the extras that they may need, and what makes a tier there.
_HOUSES = {
    **dict.fromkeys(("http", "https", "http+unix"), ("http", "http_tier")),
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), ("valkey", "ValkeyTier")),
    **dict.fromkeys(("s3", "gs", "az"), ("s3", "S3Tier")),
    **dict.fromkeys(POOL_SCHEMES, ("pool", "pool_tier")),
}


def stack_of(
    store: str | Path,
    limits: Limits,
    clock: Clock,
    is_pinned: IsPinned,
    ranking: Ranking | None = None,
    device: DeviceMemory | None = None,
) -> TierStack:
    """Return memory in front of what the URL names, as an engine wants it, and the device's, if it gives any, first.

    Several URLs with spaces between them are tiers, fastest first: `disk:///path http://host:7421`. A Path is a disk
    store in that folder. `ranking` as in `tiers_of`.
    """
    url = store if isinstance(store, str) else f"disk{_expanded(store).absolute().as_uri().removeprefix('file')}"
    if url != url.strip() or "  " in url:
        raise ValueError(f"expected a store URL, or several with one blank between them, got {shown_url(url)!r}")
    urls = url.split(" ") if "://" in url else [url]
    # What stands in front of a disk or memory of a policy follows it too.
    policy = _policy_of(urls[0]) if urls[0].startswith((_MEMORY, "disk:")) else None
    option = "" if policy in {None, _OLDEST} else f"?policy={policy}"
    front = [_DEVICE + option] if device is not None else []
    memory = [] if urls[0].startswith(_MEMORY) else [_MEMORY + option]
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
    """Return what the URLs name as one tier, fastest first, each as `open_tier` has it.

    If it `follows`, what servers among them declare invalid leaves device, memory and disk as well.
    """
    tiers = [open_tier(url, limits, clock, is_pinned, ranking, device) for url in urls]
    urls = [_split_seal(url)[0] for url in urls]
    demote_to = [tier for tier in tiers if tier.takes_evicted]
    invalidations = _invalidations(urls, tiers, clock) if follows else None
    return TierStack(
        tiers, ranking or ScoreRanking(lambda object_id: 1.0), demote_to=demote_to, invalidations=invalidations
    )


def _invalidations(urls: Sequence[str], tiers: Sequence[Tier], clock: Clock) -> Invalidations | None:
    servers = [url for url in urls if urlsplit(url).scheme in _SERVERS]
    own = [tier for tier in tiers if tier.is_own]
    if not servers or not own:
        return None
    roots = [path for url in urls if not url.startswith((_DEVICE, _MEMORY)) and (path := disk_path(url))]
    # What servers need is imported for a store that has one.
    from kvtide.tier.http.records import records_clients
    from kvtide.tier.stack.invalidation import Invalidations

    def clients() -> list[RecordsClient]:
        return [client for url in servers for client in records_clients(url, clock, OPERATION_S_MAX)]

    return Invalidations(clients, own, roots[0] / "invalidated" if roots else None, clock)
