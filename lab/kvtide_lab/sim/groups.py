"""A hybrid model's cache on a trace: keys and values of every block, states at some; what keeping these saves.

Both groups share one holder of bytes and its order, as a memory tier's objects do; a hit is what `group.hit_of` says,
and states are kept where `group.state_cuts` has the engine keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import msgspec
from rich.table import Table

from kvtide.clock import ManualClock
from kvtide.evict import EvictionOrder, order_named
from kvtide.group import hit_of, part_keys, state_cuts
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_lab.sim.replay import capacity_blocks
from kvtide_lab.sim.workload import Trace, tenant_namespace

# Tokens between states that are kept whatever the prompts; 0: none but at prompts' ends and where prompts branch.
STATE_TOKENS = (0, 512, 2048, 4096, 16384)
# A state's bytes in those of a block's keys and values: 75 MB beside 12.6 MB (36 and 12 layers of Qwen3-Next, 512
# tokens of bfloat16).
STATE_BLOCKS = 6.0
_BLOCK_BYTES = 1 << 12


class GroupsRow(msgspec.Struct, frozen=True):
    """One distance between states at one capacity, in bytes of so many blocks without any state.

    hit_rate: blocks restored. rows_hit_rate: blocks whose keys and values were there. state_share: of the bytes held,
    in the mean. cuts: passes that a prompt's prefill is cut into beside the last, in the mean.
    """

    capacity_share: float
    state_tokens: int
    hit_rate: float
    rows_hit_rate: float
    state_share: float
    cuts: float


class GroupsReport(msgspec.Struct, frozen=True):
    """All distances for each capacity."""

    trace: str
    policy: str
    state_blocks: float
    rows: list[GroupsRow]


class OrderedRoom:
    """Objects under a bound of bytes, and the order in which they leave."""

    def __init__(self, order: EvictionOrder, bytes_max: int) -> None:
        self.order = order
        self.sizes: dict[ObjectId, int] = {}
        self.used_bytes = 0
        self._bytes_max = bytes_max

    def put(self, object_id: ObjectId, parent: BlockKey, size: int) -> None:
        """Hold an object, if it is worth what must leave for it."""
        if object_id in self.sizes or size > self._bytes_max or not self.order.wants(object_id):
            return
        with closing(self.order.victims(lambda each: True)) as leaving:
            while self.used_bytes + size > self._bytes_max and (gone := next(leaving, None)) is not None:
                self.used_bytes -= self.sizes.pop(gone)
        self.sizes[object_id] = size
        self.used_bytes += size
        self.order.enter(object_id, parent, size)


def run_groups(
    trace: Trace,
    policy: str,
    shares: Sequence[float],
    state_blocks: float = STATE_BLOCKS,
    state_tokens: Sequence[int] = STATE_TOKENS,
    are_named: bool = True,
) -> GroupsReport:
    """Replay a trace for every capacity and distance between states. ValueError unless `state_blocks` is positive.

    are_named: whether requests tell the order which state goes on from which block.
    """
    if not state_blocks > 0:
        raise ValueError(f"a state's size must be positive, got {state_blocks}")
    rows = [_row(trace, policy, share, tokens, state_blocks, are_named) for share in shares for tokens in state_tokens]
    return GroupsReport(trace.name, policy, state_blocks, rows)


def _row(trace: Trace, policy: str, share: float, state_tokens: int, state_blocks: float, are_named: bool) -> GroupsRow:
    clock, bytes_max = ManualClock(trace.requests[0].at_s), capacity_blocks(trace, share) * _BLOCK_BYTES
    held = OrderedRoom(order_named(policy, clock, bytes_max), bytes_max)
    state_bytes, every = int(state_blocks * _BLOCK_BYTES), -(-state_tokens // trace.block_tokens)
    asked = hits = rows_hits = cuts = 0
    state_share = 0.0
    for at_s, tenant, keys, _ in trace.requests:
        clock.advance(at_s - clock.monotonic_s())
        rows_space = tenant_namespace(tenant)
        states_space = Namespace(bytes(each ^ 0xFF for each in rows_space))
        rows = [ObjectId(rows_space, key) for key in keys]
        states = [ObjectId(states_space, key) for key in part_keys(states_space, keys)]
        held.order.note_request(rows_space, keys, states=[states] if are_named else ())
        hit = hit_of([[each in held.sizes for each in group] for group in (rows, states)], [0, 1], [0])
        for used in [*rows[: hit.blocks], *states[max(0, hit.blocks - 1) : hit.blocks]]:
            held.order.note_use(used)
        for block, each in enumerate(rows):
            held.put(each, BlockKey(keys[block - 1] if block else rows_space), _BLOCK_BYTES)
        kept = state_cuts(hit.blocks, len(keys), hit.known, every)
        for block in kept:
            held.put(states[block - 1], BlockKey(states_space), state_bytes)
        asked, hits, rows_hits, cuts = asked + len(keys), hits + hit.blocks, rows_hits + hit.known, cuts + len(kept)
        in_states = sum(size for each, size in held.sizes.items() if size == state_bytes) if not cuts % 64 else None
        state_share = in_states / held.used_bytes if in_states is not None and held.used_bytes else state_share
    requests = len(trace.requests)
    return GroupsRow(share, state_tokens, hits / asked, rows_hits / asked, state_share, cuts / requests)


def render_groups(report: GroupsReport) -> Table:
    """Return the rows as a table."""
    table = Table(title=f"{report.trace}, {report.policy}: states of {report.state_blocks:g} blocks' bytes each")
    for column in ("capacity", "a state every", "hit rate", "of keys and values", "states' bytes", "cuts a prompt"):
        table.add_column(column, justify="right")
    for row in report.rows:
        every = f"{row.state_tokens:,} tokens" if row.state_tokens else "prompt, branch"
        cells = (f"{row.hit_rate:.4f}", f"{row.rows_hit_rate:.4f}", f"{row.state_share:.3f}", f"{row.cuts:.2f}")
        table.add_row(f"{100 * row.capacity_share:g} %", every, *cells)
    return table
