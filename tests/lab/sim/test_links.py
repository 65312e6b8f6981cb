from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide_lab.sim.links import GBIT, LINK_MODELS, Link, link_named, read_link

# 100 bytes/s, a pause, 300 bytes/s, again and again.
STEPS = Link("steps", [0, 1, 2, 3], [0, 100, 100, 400])


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("start_s", "size", "arrival_s"), [(0, 50, 0.5), (0, 100, 1), (0, 101, 2 + 1 / 300), (1.5, 30, 2.1), (0, 450, 3.5)]
)
def test_bytes_arrive_when_the_link_has_carried_them(start_s: float, size: int, arrival_s: float) -> None:
    assert STEPS.arrival_s(start_s, size) == pytest.approx(arrival_s)


@given(st.floats(0, 50), st.floats(1, 5000))
def test_arrival_undoes_carried(start_s: float, size: float) -> None:
    stop_s = STEPS.arrival_s(start_s, size)
    assert STEPS.carried(stop_s) - STEPS.carried(start_s) == pytest.approx(size, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "spread", "gaps"), [("lte", (0.65, 1.05), (0.015, 0.075)), ("wifi", (0.6, 1.0), (0.0, 0.0))]
)
def test_models_of_radio_links_are_as_uneven_as_they_say(
    name: str, spread: tuple[float, float], gaps: tuple[float, float]
) -> None:
    link = link_named(name, np.random.default_rng(5), 1e6)
    rates = np.diff([link.carried(tenth / 10) for tenth in range(6000)]) / 0.1
    assert spread[0] < rates.std() / rates.mean() < spread[1]
    assert gaps[0] <= np.mean(rates < 1e3) <= gaps[1]
    # The next tenth of a second is like this one, the next minute is not.
    near, far = (np.corrcoef(rates[:-lag], rates[lag:])[0, 1] for lag in (1, 600))
    assert near > 0.6 > 0.2 > far


@pytest.mark.parametrize("name", LINK_MODELS)
def test_models_have_the_mean_that_they_say_and_repeat(name: str) -> None:
    link, again = (link_named(name, np.random.default_rng(7), 3 * GBIT) for _ in range(2))
    lowest, highest = (2.0, 6.0) if "uniform" in name else (2.999, 3.001)
    assert lowest * GBIT < link.mean_bytes_per_s < highest * GBIT
    assert [link.carried(t) for t in (1, 77)] == [again.carried(t) for t in (1, 77)]


def test_mahimahi_counts_packets_in_their_milliseconds(tmp_path: Path) -> None:
    link = read_link(written(tmp_path, "0\n1\n1\n10\n", "a.down"))
    assert link.cycle_s == 0.01
    assert [link.carried(ms / 1e3) for ms in (1, 9, 10)] == pytest.approx([4500, 4500, 6000])
    assert link.arrival_s(0, 4501) > 0.009


@pytest.mark.parametrize("text", ["time,mbit\n0,8\n2,16\n", "# walked\n0 8\n2\t16 extra\n\n"])
def test_throughputs_hold_until_the_next_line(tmp_path: Path, text: str) -> None:
    link = read_link(written(tmp_path, text.replace("extra", "99")))
    assert link.cycle_s == 4
    assert [link.carried(at_s) for at_s in (1, 2, 4)] == pytest.approx([1e6, 2e6, 6e6])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no lines of a trace"),
        ("# only words\n", "no lines of a trace"),
        ("1\n2\nx\n", "line 3: could not convert"),
        ("5\n3\n", "must not fall"),
        ("1\n-3\n", "0 or more"),
        ("0,1\n1,nan\n", "line 2: expected 2 numbers"),
        ("0,1\n1\n", "line 2: expected 2 numbers"),
        ("0,1\n", "at least two lines"),
        ("0,1\n0,2\n", "growing times"),
        ("0,0\n1,0\n", "never carries anything"),
        ("1e999\n", "0 or more"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_link(written(tmp_path, text))
