"""The index of blocks, and a model of it that any order of calls is compared with."""

import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.suites import chain, namespace

from kvtide.clock import ManualClock
from kvtide.index import RadixIndex
from kvtide.keys import block_keys
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.policies import POLICIES, policy_named

NS = namespace()
OTHER = Namespace(b"o" * 32)


def index_of(blocks_max: int = 100, policy: str = "lru") -> RadixIndex:
    return RadixIndex(ManualClock(), policy_named(policy), blocks_max)


def test_prompt_that_is_held_as_a_whole_is_not_gone_through_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    index, keys = index_of(), chain(1, 2, 3)
    index.insert(NS, keys)
    monkeypatch.setattr(index._tree.run_of(keys[0]), "keys", range(3))
    assert all(map(index.is_held, keys))


def test_pin_of_a_middle_block_holds_what_is_before_it() -> None:
    index = index_of(4)
    keys = chain(1, 2, 3, 4)
    index.insert(NS, keys)
    index.pin(keys[1:2])
    assert index.victims(4) == [keys[3], keys[2]]
    index.check()
    index.unpin(keys[1:2])
    assert index.victims(4) == [keys[1], keys[0]]
    with pytest.raises(AssertionError, match="not pinned"):
        index.unpin(keys[1:2])


@pytest.mark.parametrize(
    ("space", "keys", "message"),
    [(NS, keys, "chain") for keys in (chain(1, 1)[:1] * 2, chain(1, 2, 3)[::-1], [*chain(1, 2), *chain(1)])]
    + [(OTHER, chain(1), "not as block 1")],
)
def test_keys_of_no_chain_of_their_namespace_are_refused(space: Namespace, keys: list[BlockKey], message: str) -> None:
    index = index_of()
    index.insert(NS, chain(1, 2, 3))
    with pytest.raises(ValueError, match=message):
        index.insert(space, keys)
    index.check()


def test_tiers_and_bounds_that_can_not_be_are_refused() -> None:
    for tier in (-1, 8):
        with pytest.raises(ValueError, match="from 0 to 7"):
            index_of().insert(NS, chain(1), tier=tier)
        with pytest.raises(ValueError, match="tier must be from 0 to 7"):
            index_of().place(chain(1)[0], tier)
    with pytest.raises(ValueError, match="blocks_max must not be negative"):
        index_of(-1)


def test_index_is_rebuilt_from_parents_first_and_passes_over_who_has_none() -> None:
    first, second, lost = chain(*range(6)), chain(0, 1, 9, 10), chain(77, 66)
    edges = [pairwise([BlockKey(NS), *keys]) for keys in (first, second)]
    blocks = {key: parent for rank in zip_longest(*edges) for parent, key in filter(None, rank)}
    index = index_of()
    found = [(ObjectId(NS, key), parent) for key, parent in [*blocks.items(), (lost[1], lost[0]), (lost[0], lost[0])]]
    assert index.restore(found) == 8
    assert (index.match(first), index.match(second), index.match(lost)) == (6, 4, 0)
    index.check()


def test_block_takes_bounded_memory() -> None:
    tracemalloc.start()
    index = index_of(20_000)
    for start in range(0, 20_000, 50):
        index.insert(NS, chain(start, *range(49)))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes / 20_000 <= 300


def test_threads_leave_it_consistent() -> None:
    index = index_of(50, "reuse")

    def work(seed: int) -> None:
        for number in range(300):
            keys = chain(number * seed % 7, *range(number % 9))
            index.pin(keys)
            index.insert(NS, keys)
            index.match(keys)
            index.unpin(keys)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, (1, 2, 3, 5)))
    index.victims(0)
    index.check()
    assert index.stats().pinned_blocks == 0


# The index against a dict: any order of matches, insertions, pins, removals and evictions gives the same answers.

TENANTS = (Namespace(b"a" * 32), Namespace(b"b" * 32))
prompts = st.tuples(st.sampled_from(TENANTS), st.lists(st.integers(0, 2), min_size=1, max_size=7))


class IndexMachine(RuleBasedStateMachine):
    """`held` is the model: the keys that are held, and a bit for each tier; `pins` what is pinned how often."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), blocks_max=st.sampled_from([0, 1, 5, 12]))
    def start(self, policy: str, blocks_max: int) -> None:
        self.clock = ManualClock()
        self.index = RadixIndex(self.clock, policy_named(policy), blocks_max)
        self.blocks_max = blocks_max
        self.held: dict[BlockKey, int] = {}
        self.pins: Counter[BlockKey] = Counter()
        self.pinned: list[list[BlockKey]] = []

    def lose(self, keys: list[BlockKey]) -> None:
        for key in keys:
            assert key not in self.pins
            del self.held[key]

    def place_all(self, keys: list[BlockKey], tier: int) -> None:
        self.held.update({key: self.held.get(key, 0) | 1 << tier for key in keys})

    def leading(self, keys: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.held), len(keys))

    @rule(prompt=prompts, tier=st.integers(0, 1), pause_s=st.sampled_from([0.0, 1.0, 300.0]))
    def insert(self, prompt: tuple[Namespace, list[int]], tier: int, pause_s: float) -> None:
        namespace, keys = prompt[0], block_keys(*prompt, 1)
        self.clock.advance(pause_s)
        evicted = self.index.insert(namespace, keys, tier=tier)
        self.place_all(keys, tier)
        self.lose(evicted)
        self.bound_holds()

    @rule(prompt=prompts, tier=st.integers(0, 2))
    def insert_block_by_block(self, prompt: tuple[Namespace, list[int]], tier: int) -> None:
        namespace, keys = prompt[0], block_keys(*prompt, 1)
        for position, key in enumerate(keys):
            if position and keys[position - 1] not in self.held:
                assert self.index.insert(namespace, [key], keys[position - 1], tier) == []
                return
            evicted = self.index.insert(namespace, [key], keys[position - 1] if position else None, tier)
            self.place_all([key], tier)
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
        self.pins.update(keys)

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
        # Those that are at 0 leave a Counter.
        self.pins -= Counter(keys)

    @rule(prompt=prompts, tier=st.integers(0, 2))
    def place(self, prompt: tuple[Namespace, list[int]], tier: int) -> None:
        key = block_keys(*prompt, 1)[-1]
        self.index.place(key, tier)
        self.place_all([key] if key in self.held else [], tier)

    @rule(prompt=prompts, tier=st.none() | st.integers(0, 2))
    def remove(self, prompt: tuple[Namespace, list[int]], tier: int | None) -> None:
        key = block_keys(*prompt, 1)[-1]
        if key in self.held:
            self.held[key] &= 0 if tier is None else ~(1 << tier)
        removed = self.index.remove(key, tier)
        assert bool(removed) == (self.held.get(key) == 0)
        for each in removed:
            del self.held[each]

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert self.index.stats().held_blocks == len(self.held)
        assert all(self.index.is_pinned(key) for key in self.pins)
        runs = {key: self.index._tree.run_of(key) for key in self.held}
        assert {key: run.tiers[run.keys.index(key)] for key, run in runs.items() if run is not None} == self.held

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
