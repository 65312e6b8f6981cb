"""What every send policy must do under a scheduler. Inherit and give a fixture `policy` that returns its name.

class TestVtc(SchedulerSuite):
    @pytest.fixture
    def policy(self): ...
"""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvtide.errors import QueueFull
from kvtide.server.scheduler import Scheduler, SchedulerSettings, Send, Slice

SLICE_BYTES = 100
# In the random walk, bodies reach to several slices.
_BODY_BYTES_MAX = 450
_TENANTS = "abc"


def scheduler_for(policy: str, slots: int = 1, **changes: object) -> Scheduler:
    """Return a scheduler with slices of 100 bytes whose tenants may hold every slot."""
    values = {"slots": slots, "slice_bytes": SLICE_BYTES, "tenant_slots_max": slots, **changes}
    return Scheduler(SchedulerSettings(policy=policy, **values), random.Random(5))  # type: ignore[arg-type]


def drain(scheduler: Scheduler, slices_max: int = 10_000) -> list[Slice]:
    """Send what is queued, one slice after the other; return the slices in the order of their grants."""
    granted: list[Slice] = []
    waiting = scheduler.grant(0.0)
    while waiting and len(granted) < slices_max:
        part = waiting.pop(0)
        granted.append(part)
        scheduler.finish(part, part.size, 0.0)
        waiting += scheduler.grant(0.0)
    return granted


class SchedulerSuite:
    """Conformance of a send policy."""

    def test_every_byte_is_sent_once_and_in_order(self, policy: str) -> None:
        scheduler = scheduler_for(policy, slots=2)
        sends = [scheduler.enqueue(tenant, tenant + "1", size, 0.0) for tenant in "abc" for size in (1, 100, 250)]
        position = dict.fromkeys(sends, 0)
        for part in drain(scheduler):
            assert part.offset == position[part.send]
            position[part.send] += part.size
        assert all(position[send] == send.size for send in sends)
        scheduler.check()

    def test_one_body_at_a_time_on_a_connection(self, policy: str) -> None:
        scheduler = scheduler_for(policy, slots=3)
        first, second = (scheduler.enqueue("a", "a1", 250, 0.0) for _ in range(2))
        order = [part.send for part in drain(scheduler)]
        assert order == sorted(order, key=[first, second].index)
        assert scheduler.slots_used == 0

    def test_nobody_starves_beside_a_flood(self, policy: str) -> None:
        scheduler = scheduler_for(policy, tenant_sends_max=3000)
        small = scheduler.enqueue("b", "b1", 50, 0.0)
        for number in range(2000):
            scheduler.enqueue("a", f"a{number}", 100, 0.0)
        assert any(part.send is small for part in drain(scheduler, 100))

    def test_higher_priority_goes_first_within_a_tenant(self, policy: str) -> None:
        scheduler = scheduler_for(policy)
        low = scheduler.enqueue("a", "a1", 50, 0.0)
        high = scheduler.enqueue("a", "a2", 50, 0.0, priority=1)
        assert [part.send for part in drain(scheduler)] == [high, low]

    def test_tenant_holds_no_more_slots_than_it_may(self, policy: str) -> None:
        scheduler = scheduler_for(policy, slots=4, tenant_slots_max=2)
        for number in range(5):
            scheduler.enqueue("a", f"a{number}", 50, 0.0)
        assert len(scheduler.grant(0.0)) == 2
        scheduler.enqueue("b", "b1", 50, 0.0)
        assert [part.send.tenant for part in scheduler.grant(0.0)] == ["b"]

    def test_more_than_a_tenant_may_queue_is_refused(self, policy: str) -> None:
        scheduler = scheduler_for(policy, tenant_sends_max=2)
        scheduler.enqueue("a", "a1", 50, 0.0)
        cancelled = scheduler.enqueue("a", "a1", 50, 0.0)
        with pytest.raises(QueueFull, match="tenant 'a'"):
            scheduler.enqueue("a", "a2", 50, 0.0)
        scheduler.enqueue("b", "b1", 50, 0.0)
        scheduler.cancel(cancelled)
        scheduler.enqueue("a", "a2", 50, 0.0)
        scheduler.check()

    def test_what_was_not_sent_is_granted_again(self, policy: str) -> None:
        scheduler = scheduler_for(policy)
        send = scheduler.enqueue("a", "a1", 80, 0.0)
        scheduler.finish(scheduler.grant(0.0)[0], 30, 1.0)
        (again,) = scheduler.grant(1.0)
        assert (again.send, again.offset, again.size) == (send, 30, 50)

    def test_cancelled_send_frees_its_slot_when_its_slice_ends(self, policy: str) -> None:
        scheduler = scheduler_for(policy)
        send, other = scheduler.enqueue("a", "a1", 250, 0.0), scheduler.enqueue("b", "b1", 50, 0.0)
        (part,) = scheduler.grant(0.0)
        victim = part.send
        scheduler.cancel(victim)
        scheduler.cancel(victim)
        assert scheduler.grant(0.0) == []
        scheduler.finish(part, 10, 0.0)
        assert {each.send for each in drain(scheduler)} == {send, other} - {victim}
        assert scheduler.loads() == []

    def test_bad_input_is_a_bug(self, policy: str) -> None:
        scheduler = scheduler_for(policy)
        with pytest.raises(AssertionError):
            scheduler.enqueue("a", "a1", 0, 0.0)
        scheduler.enqueue("a", "a1", 50, 0.0)
        (part,) = scheduler.grant(0.0)
        with pytest.raises(AssertionError):
            scheduler.finish(part, 51, 0.0)
        scheduler.finish(part, 50, 0.0)
        with pytest.raises(AssertionError):
            scheduler.finish(part, 50, 0.0)

    def test_accounts_hold_over_any_sequence_of_calls(self, policy: str) -> None:
        walk = type("Walk", (_Walk,), {"policy": policy})
        run_state_machine_as_test(walk, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))


class _Walk(RuleBasedStateMachine):
    """Any sequence of calls: bytes are accounted for, slots bounded and never idle while somebody could send."""

    policy: str

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_for(self.policy, slots=3, tenant_slots_max=2, weights={"a": 2.0, "b": 0.5})
        self.sends: list[Send] = []
        self.in_flight: list[Slice] = []
        self.now_s = 0.0
        self.sent: Counter[Send] = Counter()

    @rule(tenant=st.sampled_from(_TENANTS), client=st.integers(0, 2), size=st.integers(1, _BODY_BYTES_MAX))
    def enqueue(self, tenant: str, client: int, size: int) -> None:
        self.sends.append(self.scheduler.enqueue(tenant, f"{tenant}{client}", size, self.now_s, client % 2))

    @rule()
    def grant(self) -> None:
        self.now_s += 0.5
        self.in_flight += self.scheduler.grant(self.now_s)
        assert self.scheduler.grant(self.now_s) == []
        assert len(self.in_flight) == self.scheduler.slots_used <= 3
        if len(self.in_flight) < 3:
            assert not any(load.waiting_sends and self._could_send(load.tenant) for load in self.scheduler.loads())

    def _could_send(self, tenant: str) -> bool:
        """Whether a tenant below its slots has a connection with nothing in flight and something to send."""
        busy = {part.send.client for part in self.in_flight if part.send.tenant == tenant}
        waiting = {send.client for send in self.sends if send.tenant == tenant and self._is_waiting(send)}
        return len(busy) < 2 and bool(waiting - busy)

    def _is_waiting(self, send: Send) -> bool:
        return not send.is_cancelled and self.sent[send] < send.size

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        part = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        sent_bytes = data.draw(st.sampled_from([part.size, part.size, 0, part.size // 2]))
        self.scheduler.finish(part, sent_bytes, self.now_s)
        self.sent[part.send] += sent_bytes

    @precondition(lambda self: self.sends)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.cancel(data.draw(st.sampled_from(self.sends)))

    @invariant()
    def check(self) -> None:
        self.scheduler.check()
        assert all(self.sent[send] == send.sent_bytes for send in self.sends)

    def teardown(self) -> None:
        for part in self.in_flight:
            self.scheduler.finish(part, part.size, self.now_s)
        drain(self.scheduler)
        assert all(send.is_cancelled or send.sent_bytes == send.size for send in self.sends)
        assert self.scheduler.loads() == []
