"""Send policies under a scheduler: what every one must do, and what each does by itself."""

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvtide.errors import RequestRefused
from kvtide.server.scheduler import POLICIES, Flow, Scheduler, SchedulerSettings, Send, Slice, VtcPolicy

SLICE_BYTES = 100
# In the random walk, bodies reach to several slices.
_BODY_BYTES_MAX = 450
_TENANTS = "abc"


def scheduler_for(policy: str, slots: int = 1, **changes: object) -> Scheduler:
    """Return a scheduler with slices of 100 bytes whose tenants may hold every slot."""
    values = {"slots": slots, "slice_bytes": SLICE_BYTES, "tenant_slots_max": slots, **changes}
    return Scheduler(SchedulerSettings(policy=policy, **values), random.Random(5))  # type: ignore[arg-type]


def drain(scheduler: Scheduler, slices_max: int = 10_000) -> list[Slice]:
    """Send what is queued, one slice after the other, so that none stays in flight; return them in order of grants."""
    granted: list[Slice] = []
    waiting = scheduler.grant(0.0)
    while waiting:
        part = waiting.pop(0)
        granted.append(part)
        scheduler.finish(part, part.size, 0.0)
        waiting += scheduler.grant(0.0) if len(granted) < slices_max else []
    return granted


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
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

    def test_more_than_a_tenant_may_queue_is_refused(self, policy: str) -> None:
        scheduler = scheduler_for(policy, tenant_sends_max=2)
        scheduler.enqueue("a", "a1", 50, 0.0)
        cancelled = scheduler.enqueue("a", "a1", 50, 0.0)
        with pytest.raises(RequestRefused, match="'a' has 2 sends"):
            scheduler.enqueue("a", "a2", 50, 0.0)
        scheduler.enqueue("b", "b1", 50, 0.0)
        scheduler.cancel(cancelled)
        scheduler.enqueue("a", "a2", 50, 0.0)
        scheduler.check()

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
    """Any sequence of calls: bytes go once and in order, slots are bounded and never idle while somebody could send."""

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
        granted = self.scheduler.grant(self.now_s)
        assert all(part.offset == self.sent[part.send] and not part.send.is_cancelled for part in granted)
        self.in_flight += granted
        assert max(Counter(part.send.owner for part in self.in_flight).values(), default=0) <= 2
        assert self.scheduler.grant(self.now_s) == []
        assert len(self.in_flight) == self.scheduler.slots_used <= 3
        if len(self.in_flight) < 3:
            assert not any(flow.waiting and self._could_send(flow.owner) for flow in self.scheduler.flows())

    def _could_send(self, tenant: str) -> bool:
        """Whether a tenant below its slots has a connection with nothing in flight and something to send."""
        busy = {part.send.client for part in self.in_flight if part.send.owner == tenant}
        waiting = {send.client for send in self.sends if send.owner == tenant and self._is_waiting(send)}
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
        assert not self.scheduler.flows()


def shares(scheduler: Scheduler, bodies: dict[str, int], slices: int, connections: int = 2) -> Counter[str]:
    """Keep a body of each tenant queued on each of its connections; return the bytes of each after so many slices."""
    sent: Counter[str] = Counter()
    for tenant, size in bodies.items():
        for connection in range(connections):
            scheduler.enqueue(tenant, f"{tenant}{connection}", size, 0.0)
    for _ in range(slices):
        (part,) = scheduler.grant(0.0)
        scheduler.finish(part, part.size, 0.0)
        sent[part.send.owner] += part.size
        if not part.send.unsent_bytes:
            scheduler.enqueue(part.send.owner, part.send.client, part.send.size, 0.0)
    return sent


@pytest.mark.parametrize("weights", [{}, {"a": 4.0, "b": 2.0, "d": 0.5}])
def test_bytes_are_shared_by_weight_whatever_the_sizes(weights: dict[str, float]) -> None:
    sent = shares(scheduler_for("vtc", weights=weights), {"a": 3200, "b": 100, "c": 70, "d": 30}, 4000)
    served = [sent[tenant] / weights.get(tenant, 1.0) for tenant in "abcd"]
    assert max(served) - min(served) <= (4 if weights else 2) * SLICE_BYTES


def test_who_comes_back_gets_its_share_and_no_more() -> None:
    scheduler = scheduler_for("vtc")
    scheduler.enqueue("late", "l", 100, 0.0)
    drain(scheduler)
    scheduler.enqueue("busy", "b", 50_000, 0.0)
    drain(scheduler, 200)
    scheduler.enqueue("late", "l", 50_000, 0.0)
    sent = Counter(part.send.owner for part in drain(scheduler, 100))
    # It has a credit of eight slices, as it would between two requests.
    assert sent.total() == 100 and abs(sent["late"] - sent["busy"] - 8) <= 2


def test_stalled_reader_saves_up_no_claim() -> None:
    scheduler = scheduler_for("vtc", slots=2, tenant_slots_max=2)
    scheduler.enqueue("stalled", "x", 10**6, 0.0)
    (stuck,) = scheduler.grant(0.0)
    scheduler.enqueue("steady", "y", 10**6, 0.0)
    drain(scheduler, 1000)
    scheduler.finish(stuck, stuck.size, 0.0)
    for number in range(20):
        scheduler.enqueue("stalled", f"x{number}", 10**6, 0.0)
    sent = Counter(part.send.owner for part in drain(scheduler, 200))
    assert sent["steady"] >= 90


def test_only_sent_bytes_are_charged() -> None:
    # One reader takes a tenth of each slice: its tenant gets as many bytes as the other, in ten times as many slices.
    scheduler, sent = scheduler_for("vtc"), Counter[str]()
    for tenant in "ab":
        scheduler.enqueue(tenant, tenant, 10**6, 0.0)
    for _ in range(1100):
        (part,) = scheduler.grant(0.0)
        sent_bytes = part.size // 10 if part.send.owner == "a" else part.size
        scheduler.finish(part, sent_bytes, 0.0)
        sent[part.send.owner] += sent_bytes
    assert abs(sent["a"] - sent["b"]) <= 2 * SLICE_BYTES


def test_few_bytes_more_than_a_slice_need_no_turn_of_their_own() -> None:
    for size, slices in ((150, [150]), (151, [100, 51]), (450, [100, 100, 100, 150])):
        scheduler = scheduler_for("vtc")
        scheduler.enqueue("a", "a", size, 0.0)
        assert [part.size for part in drain(scheduler)] == slices


@pytest.mark.parametrize(("tenants", "size"), [("a", SLICE_BYTES), ("abc", SLICE_BYTES + 3)])
def test_who_leaves_after_each_body_gains_and_loses_nothing(tenants: str, size: int) -> None:
    # Each small body is asked for when the one before it is out, so that its tenant leaves and comes back all the time.
    sent = shares(scheduler_for("vtc"), {"large": 10**7, **dict.fromkeys(tenants, size)}, 2000, connections=1)
    assert max(sent.values()) - min(sent.values()) <= 2 * SLICE_BYTES


def test_link_rate_paces_the_grants() -> None:
    # 800 bits a second: a slice of 100 bytes each second, and one granted ahead.
    scheduler = scheduler_for("vtc", slots=4, link_bits_s=800.0)
    for client in "abcde":
        scheduler.enqueue(client, client, 100, 10.0)
    parts = scheduler.grant(10.0)
    assert (len(parts), scheduler.next_grant_s()) == (2, 11.0)
    assert scheduler.grant(10.9) == []
    assert len(scheduler.grant(11.0)) == 1
    scheduler.finish(parts[0], 40, 11.0)
    assert scheduler.next_grant_s() == pytest.approx(11.4)
    assert len(scheduler.grant(20.0)) == 2
    scheduler.check()


def test_next_grant_is_none_unless_the_link_alone_holds_it_up() -> None:
    for rate in (800.0, 0.0):
        scheduler = scheduler_for("vtc", link_bits_s=rate)
        assert scheduler.next_grant_s() is None
        scheduler.enqueue("a", "a", 200, 0.0)
        scheduler.grant(0.0)
        assert scheduler.next_grant_s() is None


def test_tenants_that_left_are_remembered_within_a_bound() -> None:
    policy = VtcPolicy(SLICE_BYTES, random.Random(0))
    for number in range(5000):
        flow = Flow(f"tenant-{number}", 1.0)
        policy.enter(flow)
        policy.charge(flow, 10)
        policy.leave(flow)
    assert len(policy._left) <= 1024


def test_fifo_sends_whole_bodies_in_order_of_arrival() -> None:
    scheduler = scheduler_for("fifo")
    bodies = (("b", 900), ("a", 10), ("b", 5))
    sends = [scheduler.enqueue(tenant, f"{tenant}{size}", size, 0.0) for tenant, size in bodies]
    assert [(part.send, part.size) for part in drain(scheduler)] == [(send, send.size) for send in sends]


def test_lottery_draws_by_the_softmax_of_inverse_waiting_requests() -> None:
    # Four, one and two requests wait: softmax of 1/4, 1 and 1/2.
    exponentials = {"a": math.exp(1 / 4), "b": math.exp(1.0), "c": math.exp(1 / 2)}
    drawn, rng = Counter[str](), random.Random(3)
    for _ in range(3000):
        scheduler = Scheduler(SchedulerSettings(policy="lottery", slots=1), rng)
        for tenant in "aaaabcc":
            scheduler.enqueue(tenant, tenant, 10, 0.0)
        drawn[scheduler.grant(0.0)[0].send.owner] += 1
    for tenant, each in exponentials.items():
        assert drawn[tenant] / 3000 == pytest.approx(each / sum(exponentials.values()), abs=0.03)


def test_wait_is_the_time_to_the_first_slice_and_flows_say_what_is_here() -> None:
    scheduler = scheduler_for("vtc")
    send = scheduler.enqueue("a", "a", 200, 1.0)
    (part,) = scheduler.grant(3.5)
    scheduler.finish(part, part.size, 4.0)
    scheduler.grant(9.0)
    assert send.wait_s == 2.5
    for number in range(2):
        scheduler.enqueue("a", f"a{number}", 150, 0.0)
    (flow,) = scheduler.flows()
    assert (flow.owner, flow.waiting, flow.in_flight, flow.unsent_bytes) == ("a", 2, 1, 400)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: 0}, "must be positive") for name in ("slots", "slice_bytes", "tenant_sends_max", "tenant_slots_max")),
        *(({"weights": {"a": weight}}, "tenant 'a'") for weight in (0.0, -1.0, math.nan, math.inf, 1e-9)),
        *(({"link_bits_s": rate}, "link_bits_s") for rate in (-1.0, math.inf, math.nan)),
        ({"policy": "random"}, "expected one of fifo, lottery, vtc"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerSettings(**changes)
