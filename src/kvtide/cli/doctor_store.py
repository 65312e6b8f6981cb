"""`kvtide doctor` on a store: its folder, or each of its servers; by which keys its objects are sealed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kvtide.cli.looking import listed, looking_at
from kvtide.cli.report import DoctorFinding, format_bytes
from kvtide.clock import SystemClock
from kvtide.config import Limits
from kvtide.errors import TierUnavailable
from kvtide.tier import disk_path, open_tier
from kvtide.tier.base import POOL_SCHEMES
from kvtide.tier.seal import Keyring, sealing_key_id, split_seal
from kvtide.types import BlockKey, Namespace, ObjectId

_LOW_DISK_BYTES = 2 << 30
# Objects whose seal is looked at, those used last.
SEALS_MAX = 200


def store_findings(url: str) -> list[DoctorFinding]:
    """Look at a store of any URL. ValueError for a URL that is none, or a folder that is no store."""
    path = disk_path(url)
    findings = _disk(path) if path is not None else [_server(each) for each in _each_server(url)]
    is_there = path is None or (path / "segments").is_dir()
    if is_there and any(finding.status == "ok" for finding in findings):
        findings += _seals(url)
    return findings


def _disk(path: Path) -> list[DoctorFinding]:
    existing = next(folder for folder in (path, *path.resolve().parents) if folder.exists())
    if not existing.is_dir():
        return [DoctorFinding("store", "bad", f"{existing} is not a directory")]
    free_bytes = shutil.disk_usage(existing).free
    is_low = free_bytes <= _LOW_DISK_BYTES
    findings = [DoctorFinding("disk", "bad" if is_low else "ok", f"{format_bytes(free_bytes)} free at {existing}")]
    if not os.access(existing, os.W_OK):
        findings.append(DoctorFinding("store", "bad", f"{existing} can't be written: blocks are read but never stored"))
    elif not path.exists():
        findings.append(DoctorFinding("store", "off", f"{path} does not exist yet"))
    elif not (path / "segments").is_dir():
        if any(path.iterdir()):
            raise ValueError(f"no store at {path}: it has other files and no folder named segments")
        findings.append(DoctorFinding("store", "off", f"{path} is empty, nothing was stored yet"))
    else:
        findings.append(DoctorFinding("store", "ok", str(path)))
    return findings


def _each_server(url: str) -> Iterator[str]:
    """Yield a URL for each server of a pool or of replicas; of others the URL itself."""
    parts = urlsplit(url)
    if parts.scheme in POOL_SCHEMES:
        from kvtide.tier.pool import server_urls

        try:
            yield from server_urls(split_seal(url)[0])
        except TierUnavailable as error:
            raise ValueError(f"the pool's servers can't be found out: {error}") from error
    elif parts.scheme in {"http", "https"}:
        yield from (parts._replace(netloc=each).geturl() for each in parts.netloc.split(","))
    else:
        yield url


def _server(url: str) -> DoctorFinding:
    """Ask one server for an object that nobody has, and what it holds."""
    clock = SystemClock()
    parts = urlsplit(url)
    subject = f"{parts.scheme}://{parts.netloc.rpartition('@')[2] or parts.path}"
    tier = open_tier(split_seal(url)[0], Limits(), clock, lambda key: False)
    try:
        tier.open()
        tier.contains(ObjectId(Namespace(os.urandom(32)), BlockKey(os.urandom(32))))
        started_s = clock.monotonic_s()
        tier.contains(ObjectId(Namespace(os.urandom(32)), BlockKey(os.urandom(32))))
        took_ms = 1e3 * (clock.monotonic_s() - started_s)
        stats = tier.stats()
    except TierUnavailable as error:
        is_ours = parts.scheme == "http" and parts.hostname in {"127.0.0.1", "localhost"}
        hint = f"kvtide serve --listen {parts.netloc}" if is_ours and "refused" in str(error) else ""
        return DoctorFinding(subject, "bad", str(error), hint)
    finally:
        tier.close()
    held = f"{stats.objects} objects, {format_bytes(stats.used_bytes)}"
    return DoctorFinding(subject, "ok", f"answers in {took_ms:.2g} ms, has {held}")


def _seals(url: str) -> list[DoctorFinding]:
    """Say by which keys objects are sealed, and whether we have them."""
    plain, source = split_seal(url)
    findings: list[DoctorFinding] = []
    known: set[str] = set()
    if source is not None:
        known = set(Keyring(source, SystemClock()).key_ids())
        path = Path(source.removeprefix("file:")).expanduser() if source.startswith("file:") else None
        if path is not None and path.stat().st_mode & 0o077:
            findings.append(DoctorFinding("seal", "bad", f"others can read the keys in {path}", f"chmod 600 {path}"))
    with looking_at(plain) as tier:
        infos = listed(tier)[:SEALS_MAX]
        counts = Counter((sealing_key_id(tier, info.id) or b"").hex() for info in infos)
    for key_id, count in sorted(counts.items()):
        share = f"{count} of {len(infos)} objects"
        if not key_id:
            status, detail = "bad" if known else "ok", f"{share} are not sealed" + (": misses" if known else "")
        elif key_id in known:
            status, detail = "ok", f"{share} are sealed by key {key_id}"
        elif known:
            status, detail = "bad", f"{share} are sealed by key {key_id}, which is not here: misses"
        else:
            status, detail = "bad", f"{share} are sealed by key {key_id}: misses without ?seal= on the URL"
        if key_id or known:
            findings.append(DoctorFinding("seal", status, detail))
    return findings
