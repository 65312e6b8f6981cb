"""The index against a dict: any order of matches, insertions, pins, removals and evictions gives the same answers."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex
from kvtide.keys import block_keys
from kvtide.types import BlockKey, Namespace
from kvtide_lab.sim.policies import POLICIES, policy_named

TENANTS = (Namespace(b"a" * 32), Namespace(b"b" * 32))
prompts = st.tuples(st.sampled_from(TENANTS), st.lists(st.integers(0, 2), min_size=1, max_size=7))


class IndexMachine(RuleBasedStateMachine):
    """`held` is the model: the keys that are held, whose they are; `pins` what is pinned how often."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        blocks_max=st.sampled_from([0, 1, 5, 12]),
    )
    def start(self, policy: str, blocks_max: int) -> None:
        self.clock = ManualClock()
        self.index = RadixIndex(self.clock, policy_named(policy), blocks_max)
        self.blocks_max = blocks_max
        self.held: dict[BlockKey, Namespace] = {}
        self.pins: dict[BlockKey, int] = {}
        self.pinned: list[list[BlockKey]] = []

    def lose(self, keys: list[BlockKey]) -> None:
        for key in keys:
            assert key not in self.pins
            del self.held[key]

    def leading(self, keys: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.held), len(keys))

    @rule(prompt=prompts, tier=st.integers(0, 1), pause_s=st.sampled_from([0.0, 1.0, 300.0]))
    def insert(self, prompt: tuple[Namespace, list[int]], tier: int, pause_s: float) -> None:
        namespace, tokens = prompt
        keys = block_keys(namespace, tokens, 1)
        self.clock.advance(pause_s)
        evicted = self.index.insert(namespace, keys, tier=tier)
        self.held.update(dict.fromkeys(keys, namespace))
        self.lose(evicted)
        self.bound_holds()

    @rule(prompt=prompts)
    def insert_block_by_block(self, prompt: tuple[Namespace, list[int]]) -> None:
        namespace, tokens = prompt
        keys = block_keys(namespace, tokens, 1)
        for position, key in enumerate(keys):
            if position and keys[position - 1] not in self.held:
                assert self.index.insert(namespace, [key], keys[position - 1]) == []
                return
            evicted = self.index.insert(namespace, [key], keys[position - 1] if position else None)
            self.held[key] = namespace
            self.lose(evicted)

    @rule(prompt=prompts)
    def match(self, prompt: tuple[Namespace, list[int]]) -> None:
        keys = block_keys(*prompt, 1)
        assert self.index.match(keys) == self.leading(keys)

    @rule(prompt=prompts)
    def pin(self, prompt: tuple[Namespace, list[int]]) -> None:
        keys = block_keys(*prompt, 1)
        self.index.pin(keys)
        self.pinned.append(keys)
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + 1

    @rule(prompt=prompts, count=st.integers(0, 9))
    def evict_what_was_matched(self, prompt: tuple[Namespace, list[int]], count: int) -> None:
        keys = block_keys(*prompt, 1)
        matched = keys[: self.index.match(keys)]
        self.index.pin(matched)
        evicted = self.index.victims(count)
        assert not set(evicted) & set(matched)
        assert len(evicted) <= count
        self.lose(evicted)
        self.index.unpin(matched)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        keys = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.index.unpin(keys)
        for key in keys:
            self.pins[key] -= 1
            if not self.pins[key]:
                del self.pins[key]

    @rule(prompt=prompts)
    def remove(self, prompt: tuple[Namespace, list[int]]) -> None:
        removed = self.index.remove(block_keys(*prompt, 1)[-1])
        for key in removed:
            del self.held[key]

    @rule(tokens=prompts)
    def other_tenant_never_hits(self, tokens: tuple[Namespace, list[int]]) -> None:
        for tenant in TENANTS:
            keys = block_keys(tenant, tokens[1], 1)
            matched = keys[: self.index.match(keys)]
            assert all(self.held[key] == tenant for key in matched)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert self.index.stats().held_blocks == len(self.held)
        assert all(self.index.is_pinned(key) for key in self.pins)

    def bound_holds(self) -> None:
        in_use = sum(1 for key in self.held if self._is_in_use(key))
        assert len(self.held) <= max(self.blocks_max, in_use)

    def _is_in_use(self, key: BlockKey) -> bool:
        run = self.index._tree.run_of(key)
        assert run is not None
        below = [key for other in self.index._tree.below(run) for key in other.keys[: other.held]]
        start = run.keys.index(key)
        return any(other in self.pins for other in below if other not in run.keys[:start])


IndexMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase
