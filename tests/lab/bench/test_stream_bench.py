import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.codec.tide_profiles import fitted

from kvtide.engines.transformers import model_layout
from kvtide.engines.transformers.streaming import StreamedPrefill
from kvtide.plan.policies import POLICIES
from kvtide_lab.bench import stream
from kvtide_lab.bench.stream import LinkRoute, StreamBenchRow, StreamSize, StreamWorld, kept_blocks, verdict_of
from kvtide_lab.sim.links import Link

pytestmark = pytest.mark.usefixtures("any_block_fits")

SIZE = StreamSize(context_tokens=256, block_tokens=32, answer_tokens=32, texts=1)
FAST = LinkRoute(Link("fast", [0, 100], [0, 100e9]))
COMPUTE = StreamedPrefill.compute
# 0 is padding.
TEXTS = [[1 + (number * i * i + 3 * i) % 255 for i in range(400)] for number in (7, 11)]


def slowly(engine: StreamedPrefill, start: int, stop: int, is_wanted: Callable[[], bool]) -> bool:
    for _ in range(50):
        time.sleep(0.01)
        if not is_wanted():
            return False
    return COMPUTE(engine, start, stop, is_wanted)


def test_every_policy_is_judged_by_the_model_on_what_came(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tiny model is faster than any link.
    monkeypatch.setattr(StreamedPrefill, "compute", slowly)
    monkeypatch.setattr(StreamWorld, "recompute_s", lambda world, text: 60.0)
    profile = fitted(model_layout(tiny_model, SIZE.block_tokens))
    doors = stream.all_doors("tide:1e-3:3")
    result = stream.run(tiny_model, TEXTS, [profile], [FAST], doors, SIZE, lambda step, done, total: None)
    rows = {row.policy: row for row in result.rows}
    assert list(rows) == ["recompute", "whole", "to 5e-3", *POLICIES]
    assert (rows["recompute"].kl_model, rows["recompute"].bytes, rows["recompute"].share_computed) == (0.0, 0, 1.0)
    whole = rows["whole"]
    assert whole.share_computed == 0.0 and whole.bytes > 10_000 and whole.kl_law is not None
    # Its cache is the codec's, and not the exact one.
    assert 0 < whole.kl_model < 1 and 0 < whole.kl_copy < 1
    streamed = [rows[name] for name in ("to 5e-3", "layered")]
    assert all(row.share_computed < 1 and row.bytes > 10_000 and row.kl_model > 0 for row in streamed)
    assert rows["cachegen"].kl_law is None
    assert result.ttft_within == 1.0


def row(policy: str, ttft_s: float, kl: float, law: float | None = None, link: str = "slow") -> StreamBenchRow:
    codec = {"recompute": "", "cachegen": "cachegen:1-4"}.get(policy, "tide:9e-4:3")
    return StreamBenchRow(policy, codec, link, ttft_s, kl, 2 * kl, law, 1, 0.0)


PLAIN, RIVAL = row("recompute", 2.0, 0.0), row("cachegen", 1.0, 0.02)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([row("layered", 0.9, 0.01, 0.012)], (1.0, 1.0, 1.0)),
        ([row("layered", 0.9, 0.011, 0.02)], (1.0, 0.0, 0.0)),
        ([row("layered", 1.5, 0.001, 0.001), row("whole", 2.5, 0.001, 0.01)], (0.5, 0.0, 0.5)),
        ([row("two-ended", 1.0, 0.0, 0.0)], (1.0, 1.0, None)),
        ([], (None, 0.0, None)),
    ],
)
def test_verdict_may_be_against_us(ours: list[StreamBenchRow], verdict: tuple[float | None, ...]) -> None:
    found = verdict_of([PLAIN, RIVAL, *ours], deadline_s=1.0)
    assert found == verdict


def test_late_is_late_by_the_later_of_deadline_and_recomputing() -> None:
    rows = [PLAIN, row("whole", 2.05, 0.0), row("layered", 2.2, 0.0)]
    assert verdict_of(rows, deadline_s=1.0).ttft_within == 0.5
    assert verdict_of(rows, deadline_s=3.0).ttft_within == 1.0


def report(here: tuple[int, ...]) -> Any:
    return SimpleNamespace(fetch=SimpleNamespace(progress=SimpleNamespace(here=here)))


def test_blocks_keep_what_came_of_their_chunks() -> None:
    assert kept_blocks(None, [0, 1], 3, refinements=3) == [3, 3, 4]
    assert kept_blocks(report((1, 2, 4, 1)), [0, 1, 2, 3], 4, refinements=3) == [0, 1, 3, 0]
    # The first two blocks are one chunk that was computed.
    assert kept_blocks(report((0, 2, 4)), [2, 3], 4, refinements=3) == [4, 4, 1, 3]
    assert kept_blocks(report((2, 4)), [1, 2], 3, refinements=3) is None
