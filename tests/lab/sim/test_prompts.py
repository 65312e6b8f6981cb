from __future__ import annotations

from pathlib import Path

import pytest

from kvtide_lab.sim.prompts import PromptSetup, run_prompts


def test_hit_rate_grows_almost_linearly_with_p() -> None:
    rates = [point.hit_rate for point in run_prompts(PromptSetup(), [0.1, 0.5, 1.0])]
    assert rates[0] == pytest.approx(0.07, abs=0.03)
    assert rates[1] == pytest.approx(0.45, abs=0.06)
    assert rates[2] == pytest.approx(0.95, abs=0.01)


def test_cache_costs_at_small_p_and_pays_at_large() -> None:
    rare, frequent = run_prompts(PromptSetup(), [0.1, 1.0])
    assert rare.items_per_s < rare.items_per_s_uncached
    assert frequent.items_per_s > 1.2 * frequent.items_per_s_uncached


def test_pool_of_zero_never_hits() -> None:
    assert run_prompts(PromptSetup(pool_blocks=0, requests=100), [1.0])[0].hit_rate == 0.0


def test_same_seed_gives_the_same_figures() -> None:
    setup = PromptSetup(requests=50, seed=3)
    assert run_prompts(setup, [0.5]) == run_prompts(setup, [0.5])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        run_prompts(PromptSetup(), [1.5])
    with pytest.raises(ValueError, match="at least 1"):
        PromptSetup(requests=0)
    with pytest.raises(ValueError, match="pool_blocks must not be negative"):
        PromptSetup(pool_blocks=-1)


def test_report_shows_every_point(tmp_path: Path) -> None:
    setup = PromptSetup(requests=20)
    points = run_prompts(setup, [0.2, 0.8])
    assert [point.p for point in points] == [0.2, 0.8]
