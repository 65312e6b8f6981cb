"""States of a hybrid model beside its rows, simulated."""

from __future__ import annotations

import pytest

from kvtide_lab.sim import made_trace
from kvtide_lab.sim.groups import run_groups


@pytest.mark.parametrize(("policy", "gain"), [("lru", 0.01), ("mix", 0.03)])
def test_states_that_are_named_to_the_order_save_more(policy: str, gain: float) -> None:
    trace = made_trace("sessions", 600)
    named, alone = (run_groups(trace, policy, [0.1], state_tokens=(0,), are_named=each) for each in (True, False))
    assert named.rows[0].hit_rate > alone.rows[0].hit_rate + gain
