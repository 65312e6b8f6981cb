"""What a register of doors is made of: capabilities that have one, those that have none yet, and tables of them."""

from collections.abc import Iterator, Mapping
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


def table(text: str, names: Mapping[str, str]) -> tuple[Capability, ...]:
    """Read capabilities, a row each: name | option | documented | proven on | Source | proven by, if elsewhere.

    An indented line goes on with the row, at its next cell. names: what `@name` in a cell stands for.
    """
    found = []
    for name, option, documented, proven_on, source, *proof in cells(text, names):
        found.append(Capability(name, option, documented, proven_on, Source[source], *proof))
    return tuple(found)


def left_table(text: str) -> tuple[Left, ...]:
    """Read what has no door yet: name | option, perhaps | opens with | Source."""
    return tuple(Left(name, option, opens, Source[source]) for name, option, opens, source in cells(text, {}))


def cells(text: str, names: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the cells of each row. KeyError for an `@name` that stands for nothing."""
    for row in text.strip().replace("\n    ", " | ").splitlines():
        yield [names[cell] if cell.startswith("@") else cell for cell in row.split(" | ")]
