"""Contexts as a model's groups of layers keep them, and caches made of them again: what profiles are fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtide.block import BlockBits, BlockLayout, BlockMeta
from kvtide.codec import ProfileShape
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import AllRows
from kvtide.engines.transformers.groups import (
    ModelGroup,
    RestoredRoom,
    StateRoom,
    block_bits,
    groups_of,
    halves_of,
    profile_shapes,
    read_states,
)
from kvtide.errors import UnsupportedModel
from kvtide.group import GroupKind
from kvtide.keys import block_keys
from kvtide.types import BlockKey, Namespace, ObjectId


class Context(NamedTuple):
    """A prefilled context, exact: full blocks of each group of rows, and the states after its last token."""

    metas: list[list[BlockMeta]]
    blocks: list[list[BlockBits]]
    states: list[BlockBits]

    @property
    def tokens(self) -> int:
        """Return how many tokens it has."""
        return len(self.metas[0]) * self.metas[0][0].layout.tokens


class ModelContexts:
    """A model, asked what it keeps of contexts, by group. `shapes`: of the groups of rows. UnsupportedModel, too."""

    def __init__(self, model: Any, block_tokens: int) -> None:
        self.model = model
        groups = groups_of(model, block_tokens)
        self._rows = [each for each in groups if each.rows]
        self._states = [each for each in groups if each.states]
        self.shapes: list[ProfileShape] = profile_shapes(groups)

    def rotaries(self) -> list[Rotary | None]:
        """Return how the keys of each group of rows turn. UnsupportedModel where that is unknown."""
        config = self.model.config.to_dict()
        return [_rotary(each, config) for each in self._rows]

    def all_rows(self) -> AllRows | None:
        """Return the rows of all groups as blocks of all layers have them; None for a plain model or many shapes."""
        groups = [each.group for each in self._rows]
        shapes = {(each.layout.kv_heads, each.layout.head_dim, each.kind) for each in groups}
        if not self.shapes[0].group or len(shapes) > 1 or groups[0].kind is not GroupKind.KV:
            return None
        numbers = sorted(number for each in groups for number in each.layers)
        places = tuple(tuple(map(numbers.index, each.layers)) for each in groups)
        layout = groups[0].layout
        whole = BlockLayout(len(numbers), layout.tokens, layout.kv_heads, layout.head_dim, layout.dtype)
        return AllRows(whole, places, _rotary_of(self.model.config.to_dict(), numbers))

    def capture(self, ids: Sequence[int]) -> Context:
        """Prefill token ids, whole blocks of them, and return what is kept."""
        past = DynamicCache(config=self.model.config)
        for layer in past.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        with torch.no_grad():
            self.model(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
        metas = [_metas(ids, each) for each in self._rows]
        blocks = [[block_bits(past, meta, each) for meta in mine] for each, mine in zip(self._rows, metas, strict=True)]
        return Context(metas, blocks, [read_states(past, each) for each in self._states])

    def restored(self, context: Context, blocks: Sequence[Sequence[BlockBits]] | None = None) -> DynamicCache:
        """Return a cache of a context, or of these blocks in place of its own, by group; states are the context's."""
        past = DynamicCache(config=self.model.config)
        parts = [*(context.blocks if blocks is None else blocks), *([states] for states in context.states)]
        for each, mine in zip([*self._rows, *self._states], parts, strict=True):
            tokens = context.tokens
            room = RestoredRoom(each.group.layout, tokens, group=each) if each.rows else StateRoom(each)
            for position, bits in enumerate(mine):
                room.write(position, bits)
            room.fill(past, tokens, self.model.device)
        return past

    def ask_gradients(self, past: DynamicCache) -> list[list[torch.Tensor]]:
        """Make a restored cache's keys and values ask for gradients, and no weights; return them by group and layer."""
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        found = []
        for each in self._rows:
            found.append(list[torch.Tensor]())
            for layer in (past.layers[number] for number in each.group.layers):
                layer.keys, layer.values = (
                    tensor.detach().clone().requires_grad_(True) for tensor in (layer.keys, layer.values)
                )
                found[-1] += [layer.keys, layer.values]
        return found

    def halves(self, group: int, keys: torch.Tensor, values: torch.Tensor) -> NDArray[np.float32]:
        """Return tensors of a layer of a group of rows as a block has them: (2, tokens, kv_heads, head_dim)."""
        parts = (tensor[0].float().transpose(0, 1).contiguous().numpy() for tensor in (keys, values))
        rows = self._rows[group].rows
        assert rows is not None
        return np.stack(halves_of(rows, *parts))


def _metas(ids: Sequence[int], group: ModelGroup) -> list[BlockMeta]:
    # Objects are made only to be measured: any namespace will do.
    namespace, layout = Namespace(bytes(32)), group.group.layout
    keys = [BlockKey(namespace), *block_keys(namespace, np.array(ids, dtype=np.uint32), layout.tokens)]
    return [
        BlockMeta(ObjectId(namespace, key), parent, number * layout.tokens, layout)
        for number, (parent, key) in enumerate(pairwise(keys))
    ]


def _rotary(group: ModelGroup, config: dict[str, Any]) -> Rotary | None:
    found = _rotary_of(config, group.group.layers)
    if found is None or group.group.kind is GroupKind.KV:
        return found
    rows, dims = group.rows, found.dim_stop - found.dim_start
    if rows is None or rows.value != (1, dims) or rows.key != (1, found.dim_start):
        raise UnsupportedModel(f"keys can't be turned back: {group.group.name} is no latent beside {dims} rotated dims")
    # They come first in a row.
    return Rotary(found.pairs, 0, dims, found.kinds, found.layer_kinds)


def _rotary_of(config: dict[str, Any], layers: Sequence[int]) -> Rotary | None:
    try:
        return Rotary.from_config(config, layers)
    except ValueError as error:
        raise UnsupportedModel(f"keys can't be turned back: {error}") from error
