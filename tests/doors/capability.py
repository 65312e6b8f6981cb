"""What a register of doors is made of: capabilities that have one, and those that have none yet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where the wish comes from: work that kvtide builds on, or kvtide itself."""

    CACHEGEN = "CacheGen"
    ASCEND = "LMCache-Ascend's CacheGen"
    IMPRESS = "IMPRESS"
    OFFLOADING = "the offloading study"
    PREFIX = "the hash prefix report"
    OURS = "kvtide"


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that a user can switch on.

    option: as the user writes it; each word of it stands in the documentation. documented: `file: heading`.
    proven_on: what the test runs on. proven_by: the test (`file::name`), for one outside of tests/doors.
    """

    name: str
    option: str
    documented: str
    proven_on: str
    source: Source
    proven_by: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """Something that no user can switch on yet. option: as it might be written. opens_with: what would open it."""

    name: str
    option: str
    opens_with: str
    source: Source
