"""Groups: layers of a model whose cache is of one kind, shape and reach. A block has a part of each group.

A part is an object of its own, in its group's namespace (decision 0021); a plain model's parts are its blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from kvtide.block import BlockLayout
from kvtide.types import BlockKey, Namespace, ObjectId

# The group of the rows of all layers, where an engine's blocks have them together, whatever each layer attends to.
ALL_ROWS = "rows of all layers"
# States are kept no more often where nobody says otherwise: a prompt that branches between two computes half of it.
STATE_TOKENS_MIN = 4096


class GroupKind(StrEnum):
    """KV: keys and values of tokens. LATENT: one row a token, which makes both. STATE: a layer's, after all so far."""

    KV = "kv"
    LATENT = "latent"
    STATE = "state"


class LayerGroup(NamedTuple):
    """Layers whose cache is of one kind, shape and reach.

    name: unique in its model, as `stats` and `explain` say it. layout: of one part; a state's has one token.
    reach_tokens: how far before a hit's end its parts must be there; 0 for all the way.

        LayerGroup("window 256", GroupKind.KV, (0, 2), BlockLayout(2, 64, 8, 128, KVDtype.BFLOAT16), reach_tokens=255)
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    layout: BlockLayout
    reach_tokens: int = 0

    def reach_blocks(self, block_tokens: int) -> int:
        """Return the number of parts before a hit's end that must be there; 0 for all."""
        return 1 if self.kind is GroupKind.STATE else -(-self.reach_tokens // block_tokens)

    @property
    def text(self) -> str:
        """Return what tells the group's parts from all others, for its namespace."""
        layout = self.layout
        shape = f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}"
        return f"{shape} {self.kind.value} of {list(self.layers)} reach={self.reach_tokens} {self.name}"


def row_group(layers: Sequence[int], layout: BlockLayout, window: int = 0, latent: str = "") -> LayerGroup:
    """Return layers that keep rows of tokens, named alike in every engine, so that one profile serves all.

    window: in tokens, 0 for none. latent: the dims that make up a row of which keys and values are made, as "64+512".
    """
    kept = f"latent {latent}" if latent else f"attention {layout.kv_heads}x{layout.head_dim}"
    name = f"{kept}{f' window {window}' if window else ''}"
    kind = GroupKind.LATENT if latent else GroupKind.KV
    return LayerGroup(name, kind, tuple(layers), layout, max(0, window - 1))


class Parts(NamedTuple):
    """The parts of one group of a prompt, one a block. is_sparse: some blocks have none, and each stands alone."""

    ids: Sequence[ObjectId]
    reach: int = 0
    is_sparse: bool = False


class Hit(NamedTuple):
    """Leading blocks that can be restored, and the group that ended it. known: other prompts began with these."""

    blocks: int
    ended_by: int | None = None
    known: int = 0


def hit_of(present: Sequence[Sequence[bool]], reaches: Sequence[int], rows: Sequence[int] = ()) -> Hit:
    """Return the longest hit: the most blocks L such that each group has its last min(reach, L) parts before L.

    present: of each group, whether the part of each block is there. reaches: 0 for all. rows: the groups that are not
    sparse, for `known`. The group that ended it is the first without which one block more, or the next hit, would hold.
    ValueError for groups of different lengths.

        hit_of([[True, True, True], [False, True, False]], [0, 1]) == Hit(2, 1)
    """
    if len(present) != len(reaches) or len({len(parts) for parts in present}) > 1:
        raise ValueError(f"every group needs a reach and equally many parts, got {list(map(len, present))}")
    good = [_good_ends(parts, reach) for parts, reach in zip(present, reaches, strict=True)]
    blocks = len(present[0]) if present else 0
    known = next((end for end in range(blocks, 0, -1) if all(good[row][end - 1] for row in rows)), 0) if rows else 0
    ended_by = None
    for end in range(blocks, 0, -1):
        failing = next((group for group, ends in enumerate(good) if not ends[end - 1]), None)
        if failing is None:
            return Hit(end, ended_by, known)
        ended_by = failing
    return Hit(0, ended_by, known)


def _good_ends(parts: Sequence[bool], reach: int) -> list[bool]:
    """Return for each block whether a hit may end after it, as far as this group goes."""
    lengths = accumulate(parts, lambda length, is_here: length + 1 if is_here else 0, initial=0)
    return [length >= min(reach or end, end) for end, length in enumerate(lengths)][1:]


def part_keys(namespace: Namespace, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return the keys of a group's parts of blocks: a hash of the group's namespace and each block's key."""
    return [BlockKey(hashlib.sha256(namespace + key).digest()) for key in keys]


def state_every(state_bytes: float, token_bytes: float) -> int:
    """Return after how many tokens a state is kept: states take no more room than the rows between them, if any."""
    return max(STATE_TOKENS_MIN, round(state_bytes / token_bytes)) if token_bytes else STATE_TOKENS_MIN
