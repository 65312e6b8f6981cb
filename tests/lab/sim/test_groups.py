"""States of a hybrid model beside its rows, simulated."""

from __future__ import annotations

import pytest

from kvtide.evict.policies import PolicyOrder
from kvtide_lab.sim import groups, made_trace
from kvtide_lab.sim.groups import run_groups


@pytest.mark.parametrize(("policy", "gain"), [("lru", 0.01), ("mix", 0.03)])
def test_states_that_are_named_to_the_order_save_more(
    policy: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "STATE_TOKENS", (0,))
    trace, note_request = made_trace("sessions", 600), PolicyOrder.note_request
    named = run_groups(trace, policy, [0.1]).rows[0]
    monkeypatch.setattr(PolicyOrder, "note_request", lambda self, space, keys, states: note_request(self, space, keys))
    alone = run_groups(trace, policy, [0.1]).rows[0]
    assert named.hit_rate > alone.hit_rate + gain
