"""Links whose throughput changes: models, and traces in public formats. A link repeats itself when it ends."""

from __future__ import annotations

import bisect
import gzip
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKET_BYTES = 1500
TRACE_BYTES_MAX = 64 << 20
_MODEL_S = 600.0
GBIT = 1e9 / 8


class Link:
    """A link by what it has carried: `sent[i]` bytes up to `times[i]` seconds, straight lines between.

    times and sent start with 0; times grow, sent does not fall and ends above 0. ValueError otherwise.
    """

    def __init__(self, name: str, times: Sequence[float], sent: Sequence[float]) -> None:
        if len(times) != len(sent) or len(times) < 2 or times[0] or sent[0]:
            raise ValueError(f"link {name}: expected times and bytes from 0 on, got {len(times)} and {len(sent)}")
        if not (np.diff(times) > 0).all() or not (np.diff(sent) >= 0).all() or not math.isfinite(times[-1]):
            raise ValueError(f"link {name}: times must grow and bytes must not fall")
        if not 0 < sent[-1] < math.inf:
            raise ValueError(f"link {name} never carries anything")
        self.name = name
        self._times = list(times)
        self._sent = list(sent)

    @property
    def cycle_s(self) -> float:
        """Return the seconds after which the link repeats itself."""
        return self._times[-1]

    @property
    def mean_bytes_per_s(self) -> float:
        """Return the mean rate."""
        return self._sent[-1] / self._times[-1]

    def scaled(self, bytes_per_s: float) -> Link:
        """Return the same ups and downs around another mean."""
        factor = bytes_per_s / self.mean_bytes_per_s
        return Link(self.name, self._times, [factor * each for each in self._sent])

    def carried(self, at_s: float) -> float:
        """Return the bytes that pass until `at_s`."""
        cycles, rest = divmod(at_s, self._times[-1])
        i = min(bisect.bisect_right(self._times, rest), len(self._times) - 1) - 1
        share = (rest - self._times[i]) / (self._times[i + 1] - self._times[i])
        return cycles * self._sent[-1] + self._sent[i] + share * (self._sent[i + 1] - self._sent[i])

    def arrival_s(self, start_s: float, size: float) -> float:
        """Return when the last of `size` bytes is through that are sent from `start_s` on, and nothing beside them."""
        cycles, rest = divmod(self.carried(start_s) + size, self._sent[-1])
        # The first time at which so much has passed; at the end of a cycle, that one.
        if not rest:
            cycles, rest = cycles - 1, self._sent[-1]
        i = bisect.bisect_left(self._sent, rest) - 1
        share = (rest - self._sent[i]) / (self._sent[i + 1] - self._sent[i])
        return cycles * self._times[-1] + self._times[i] + share * (self._times[i + 1] - self._times[i])


def _from_rates(name: str, interval_s: NDArray[Any], bytes_per_s: NDArray[Any]) -> Link:
    times = np.concatenate([[0.0], np.cumsum(interval_s)])
    sent = np.concatenate([[0.0], np.cumsum(interval_s * bytes_per_s)])
    return Link(name, times.tolist(), sent.tolist())


def _uniform(rng: np.random.Generator, mean: float) -> Link:
    # CacheGen, section 7: a rate for each chunk. One of 1,500 tokens takes about 0.1 s at the mean of this range.
    intervals = np.full(round(_MODEL_S / 0.1), 0.1)
    return _from_rates("uniform", intervals, rng.uniform(0.1, 10, len(intervals)) * GBIT)


def _log_uniform(rng: np.random.Generator, mean: float) -> Link:
    intervals = np.full(round(_MODEL_S / 0.25), 0.25)
    return _from_rates("log-uniform", intervals, 10 ** rng.uniform(-1, 1, len(intervals)) * GBIT)


def _ar(rng: np.random.Generator, count: int, kept: float, spread: float) -> NDArray[np.float64]:
    """Return an AR(1) series around 0: each value keeps a share of the last, all spread alike."""
    values = rng.normal(0, spread, count)
    for i in range(1, count):
        values[i] = kept * values[i - 1] + math.sqrt(1 - kept * kept) * values[i]
    return values


def _ar1(rng: np.random.Generator, mean: float) -> Link:
    intervals = np.full(round(_MODEL_S / 0.1), 0.1)
    logs = _ar(rng, len(intervals), 0.95, 0.64)
    # From a sixtieth of the median to four times as much.
    return _from_rates("ar1", intervals, np.clip(np.exp(logs), 1 / 60, 4)).scaled(mean)


def _on_off(rng: np.random.Generator, mean: float) -> Link:
    # On for a second in the mean, off for half a second.
    pairs = round(_MODEL_S / 1.5)
    intervals = np.maximum(1e-3, rng.exponential(np.tile([1.0, 0.5], pairs)))
    return _from_rates("on-off", intervals, np.tile([1.0, 0.0], pairs)).scaled(mean)


def _lte(rng: np.random.Generator, mean: float) -> Link:
    # Shadowing over seconds, fading within them, and gaps of a third of a second: as three public traces of drives
    # (docs/benchmarks/streaming.md has their figures and these).
    count = round(_MODEL_S / 0.1)
    logs = _ar(rng, count, 0.97, 0.5) + _ar(rng, count, 0.6, 0.5)
    rates = np.minimum(np.exp(logs), 3.5)
    for start in np.flatnonzero(rng.random(count) < 0.015).tolist():
        rates[start : start + 1 + round(rng.exponential(2.0))] = 0.0
    return _from_rates("lte", np.full(count, 0.1), rates).scaled(mean)


# Of 802.11n's eight rates of one stream, in the lowest one's.
_WIFI_RATES = np.array([1, 2, 3, 4, 6, 8, 9, 10], dtype=np.float64)
_WIFI_NEIGHBOURS = 3


def _wifi(rng: np.random.Generator, mean: float) -> Link:
    # The sender's rate goes up and down a ladder, and others that send for two seconds in six share the air alike.
    count = round(_MODEL_S / 0.1)
    steps, places = rng.choice([-1, 0, 0, 0, 1], count), np.zeros(count, dtype=np.int64)
    place = len(_WIFI_RATES) - 2
    for i, step in enumerate(steps.tolist()):
        place = places[i] = min(len(_WIFI_RATES) - 1, max(0, place + step))
    sharing = np.ones(count)
    for _ in range(_WIFI_NEIGHBOURS):
        lengths = rng.exponential(np.tile([40.0, 20.0], count)).astype(int) + 1
        sharing += np.repeat(np.tile([0, 1], count), lengths)[:count]
    return _from_rates("wifi", np.full(count, 0.1), _WIFI_RATES[places] / sharing).scaled(mean)


# The two that the literature states as a range, 0.1 to 10 Gbit/s, keep it whatever the mean asked for.
LINK_MODELS: Mapping[str, Callable[[np.random.Generator, float], Link]] = MappingProxyType(
    {
        "constant": lambda rng, mean: _from_rates("constant", np.array([_MODEL_S]), np.array([mean])),
        "uniform": _uniform,
        "log-uniform": _log_uniform,
        "ar1": _ar1,
        "on-off": _on_off,
        "lte": _lte,
        "wifi": _wifi,
    }
)


def link_named(name: str, rng: np.random.Generator, mean_bytes_per_s: float) -> Link:
    """Return a link drawn from a model. ValueError for an unknown name; the message lists the known ones."""
    try:
        return LINK_MODELS[name](rng, mean_bytes_per_s)
    except KeyError:
        raise ValueError(f"unknown link {name!r}, expected a file or one of {', '.join(LINK_MODELS)}") from None


def read_link(path: Path) -> Link:
    """Read a trace, gzipped or not.

    Mahimahi: a whole number a line, the millisecond at which one packet of 1,500 bytes may pass. Otherwise two numbers
    a line, by comma or blanks: seconds, and Mbit/s until the next line; a first line of words and lines that start
    with # are passed over, and the last line lasts as long as the one before it. ValueError, with the line, for
    anything else.
    """
    lines = [(number, line) for number, line in enumerate(_read(path).splitlines(), 1) if line.strip()]
    lines = [(number, line) for number, line in lines if not line.lstrip().startswith("#")]
    if lines and not re.match(r"\s*[-+.\d]", lines[0][1]):
        del lines[0]
    if not lines:
        raise ValueError(f"{path.name} has no lines of a trace")
    fields = [(number, re.split(r"[,;\s]+", line.strip())) for number, line in lines]
    columns = len(fields[0][1])
    try:
        return _mahimahi(path.name, fields) if columns == 1 else _throughputs(path.name, fields)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _read(path: Path) -> str:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        data: bytes = file.read(TRACE_BYTES_MAX + 1)
    if len(data) > TRACE_BYTES_MAX:
        raise ValueError(f"{path.name} is longer than {TRACE_BYTES_MAX} bytes")
    return data.decode("utf-8", errors="replace")


def _numbers(fields: Sequence[tuple[int, list[str]]], columns: int) -> NDArray[np.float64]:
    rows = []
    for number, texts in fields:
        try:
            row = [float(text) for text in texts]
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if len(row) < columns or not all(math.isfinite(each) and each >= 0 for each in row[:columns]):
            raise ValueError(f"line {number}: expected {columns} numbers of 0 or more, got {' '.join(texts)!r}")
        rows.append(row[:columns])
    return np.array(rows)


def _mahimahi(name: str, fields: Sequence[tuple[int, list[str]]]) -> Link:
    millis = _numbers(fields, 1)[:, 0]
    if (np.diff(millis) < 0).any():
        raise ValueError("the milliseconds of a mahimahi trace must not fall")
    # Packets of millisecond t pass in (t - 1, t]; those of 0 are counted in the first.
    moments, packets = np.unique(np.maximum(millis, 1), return_counts=True)
    passed_ms, sent = [0.0], [0.0]
    for moment, count in zip(moments.tolist(), packets.tolist(), strict=True):
        if moment - 1 > passed_ms[-1]:
            passed_ms.append(moment - 1)
            sent.append(sent[-1])
        passed_ms.append(moment)
        sent.append(sent[-1] + PACKET_BYTES * count)
    return Link(name, [each / 1e3 for each in passed_ms], sent)


def _throughputs(name: str, fields: Sequence[tuple[int, list[str]]]) -> Link:
    seconds, mbit_s = _numbers(fields, 2).T
    if len(seconds) < 2 or not (np.diff(seconds) > 0).all():
        raise ValueError("expected at least two lines, with growing times")
    intervals = np.diff(seconds)
    return _from_rates(name, np.append(intervals, intervals[-1]), mbit_s * 1e6 / 8)
