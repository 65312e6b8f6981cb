"""Simulators of placements, regions, prompts and fair sending: known outcomes come out, nothing to do is refused."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.types import BlockKey
from kvtide_lab.sim.fairness import FairnessSetup, Served, fairness_row, run_fairness
from kvtide_lab.sim.pool import run_pool
from kvtide_lab.sim.prompts import FreePool, PromptSetup, run_prompts
from kvtide_lab.sim.regions import SHARED_SHARES, SYNC_BYTES_S, run_regions


def test_table_shows_what_is_known_of_each_placement() -> None:
    report = run_pool(seed=3, counts=[8, 13], keys=50_000)
    rows = {(row.servers, row.distribution): row for row in report.rows}
    assert rows[8, "step 8"].mod == pytest.approx(8.0), "all keys on one server"
    assert rows[13, "step 8"].mod < 1.05, "a prime hides the step"
    assert rows[8, "step 8"].rendezvous < 1.1, "mixing hides it for any number"
    assert rows[8, "zipf"].rendezvous > 1.2
    assert all(row.less_loaded < 1.06 for row in report.rows)
    assert all(row.join_moved_mod > 0.85 for row in report.rows)
    assert report.moved_of_ideal_max <= 1.15
    assert len(report.rows) == 6


def test_centre_helps_more_the_more_regions_share_and_nothing_is_sent_twice() -> None:
    report = run_regions(seed=1, requests=400)
    rows = {(row.shared_share, row.sync_mb_s): row for row in report.rows}
    assert len(rows) == len(SHARED_SHARES) * len(SYNC_BYTES_S)
    for row in report.rows:
        assert row.own_hit_rate <= row.without_centre_hit_rate <= row.hit_rate
        assert row.synchronised_per_new_byte <= 1.0
    fast = SYNC_BYTES_S[-1] / 1e6
    gains = [rows[share, fast].hit_rate - rows[share, fast].without_centre_hit_rate for share in SHARED_SHARES]
    assert gains == sorted(gains) and gains[-1] > gains[0]
    assert rows[0.5, fast].waiting_blocks < rows[0.5, SYNC_BYTES_S[0] / 1e6].waiting_blocks


def test_hit_rate_grows_almost_linearly_with_p_and_the_cache_costs_at_small_p_and_pays_at_large() -> None:
    rare, even, frequent = run_prompts(PromptSetup(), [0.1, 0.5, 1.0])
    assert rare.hit_rate == pytest.approx(0.07, abs=0.03)
    assert even.hit_rate == pytest.approx(0.45, abs=0.06)
    assert frequent.hit_rate == pytest.approx(0.95, abs=0.01)
    assert rare.items_per_s < rare.items_per_s_uncached
    assert frequent.items_per_s > 1.2 * frequent.items_per_s_uncached
    # A pool of zero never hits.
    assert run_prompts(PromptSetup(pool_blocks=0, requests=100), [1.0])[0].hit_rate == 0.0


@pytest.mark.parametrize(
    "run",
    [lambda seed: run_pool(seed, [8], 10_000), lambda seed: run_prompts(PromptSetup(requests=50, seed=seed), [0.5])],
)
def test_same_seed_gives_the_same_figures(run: Callable[[int], object]) -> None:
    assert run(1) == run(1) != run(2)


def test_byte_fair_policies_share_what_the_others_do_not_and_small_bodies_wait_for_three_rounds_at_most() -> None:
    report = run_fairness(FairnessSetup(duration_s=10.0))
    assert report.jain_vtc >= 0.99
    assert report.jain_lottery < 0.7
    assert report.jain_fifo < 0.3
    waits = {row.policy: row.small_wait_ms_p99 for row in report.rows}
    assert waits["vtc"] <= 3 * report.slice_round_ms < waits["lottery"]


def test_jain_of_one_taker_is_one_over_the_clients() -> None:
    served = [Served(100, 1.0, sent, [], []) for sent in (800, 0, 0, 0)]
    row = fairness_row("fifo", served, 1.0)
    assert (row.jain, row.wait_ms_p99) == (0.25, 0.0)


def test_percentiles_are_of_the_smallest_bodies() -> None:
    small, large = Served(10, 1.0, 100, [n / 100 for n in range(100)], [0.5]), Served(99, 1.0, 100, [9.0] * 100, [9.0])
    row = fairness_row("vtc", [small, large], 1.0)
    assert (row.small_wait_ms_p50, row.small_wait_ms_p99, row.small_request_ms_p99) == (500.0, 990.0, 500.0)
    assert row.wait_ms_p99 == 9000.0


def numbered(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=60),
    st.integers(0, 5),
)
def test_pool_agrees_with_sorting(steps: list[tuple[int, int, int, bool]], blocks_max: int) -> None:
    """The oldest use goes first, of one time the longest prefix; a block back in use doesn't go."""
    pool, model = FreePool(blocks_max), dict[BlockKey, tuple[int, int]]()

    def first() -> BlockKey | None:
        return min(model, key=lambda each: (*model[each], each), default=None)

    for number, last_use_s, prefix_blocks, is_taken in steps:
        name = numbered(number)
        if is_taken or name in model:
            assert pool.take_back(name) == (model.pop(name, None) is not None)
            continue
        model[name] = (last_use_s, -prefix_blocks)
        expected = first() if len(model) > blocks_max else None
        assert pool.add(name, last_use_s, prefix_blocks) == expected
        model.pop(expected, None) if expected else None
        pool.check()
        assert len(pool) == len(model)
    for expected in [*sorted(model, key=lambda each: (*model[each], each)), None]:
        assert pool.evict() == expected
