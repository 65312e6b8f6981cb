"""Counts what the fault suite did and prints it as one JSON line at the end."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MEMORY = Path("/dev/shm")


@dataclass
class Tally:
    """Faults injected, and what became of them. Whatever is wrong or lost fails its test too."""

    faults: int = 0
    wrong_bytes: int = 0
    lost_committed: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def count(self, kind: str, wrong_bytes: int, lost_committed: int) -> None:
        self.faults += 1
        self.wrong_bytes += wrong_bytes
        self.lost_committed += lost_committed
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1

    def judge(
        self, kind: str, found: Mapping[Any, bytes | None], contents: Mapping[Any, bytes], kept: Iterable[Any], why: str
    ) -> None:
        """Count a fault. AssertionError if what is found is not what was stored, or what must be there is not."""
        wrong = sum(data not in (None, contents[each]) for each, data in found.items())
        lost = sum(found[each] is None for each in kept)
        self.count(kind, wrong, lost)
        assert (wrong, lost) == (0, 0), why

    def note(self, name: str, figure: float) -> None:
        """Keep a measured figure for the line at the end."""
        self.figures.setdefault(name, []).append(round(figure, 4))


_TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[_TALLY]


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if files there can be written around the page cache, for stores by the thousand."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as name:
        folder = Path(name)
        try:
            os.close(os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        except OSError:
            folder = tmp_path
        yield folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash[_TALLY]
    if tally.faults:
        counts = {"faults": tally.faults, "wrong_bytes": tally.wrong_bytes, "lost_committed": tally.lost_committed}
        terminalreporter.write_line(json.dumps({**counts, **tally.by_kind, **tally.figures}))
