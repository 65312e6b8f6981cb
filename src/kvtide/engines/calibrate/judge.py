"""Judges decoded caches, of all groups of a model, by what the model then says: a promise is for the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import Codec
from kvtide.engines.transformers import Context, ModelContexts
from kvtide.types import Section
from kvtide.wire import pack_object, parse_object

# The standard deviation of single texts' KL over their mean, .60 to .70 on 29 texts of all kinds, and how many texts of
# a calibration this counts as. Gains explain a fifth to a third of its square, which is left to be safe by.
_USUAL_DEVIATION, _USUAL_TEXTS = 0.65, 3
# The standard deviation of texts' gains in units, .4 to 1.0.
_USUAL_GAIN = 0.8
_KL_MIN = 1e-9


class CodedGroups(NamedTuple):
    """A context's blocks by group, decoded from objects that end at one refinement; bytes are of whole objects."""

    decoded: list[list[BlockBits]]
    stored_bytes: int
    raw_bytes: int

    @property
    def bits_per_element(self) -> float:
        """Return the bits that a value takes in objects."""
        item_bytes = self.decoded[0][0].itemsize
        return 8 * item_bytes * self.stored_bytes / self.raw_bytes


class WholeJudge:
    """One context of a model with its exact cache, and what the model says of what comes after it."""

    def __init__(self, contexts: ModelContexts, ids: Sequence[int], context_tokens: int) -> None:
        """ids: the context, whole blocks, and what comes after it."""
        self._contexts = contexts
        self._behind = ids[context_tokens:]
        self.context: Context = contexts.capture(ids[:context_tokens])
        self._exact = self._say(self.context.blocks)

    def kl(self, blocks: Sequence[Sequence[BlockBits]]) -> float:
        """Return the mean KL divergence of the next token, in nats, with these blocks of each group from the exact."""
        return float((self._exact.exp() * (self._exact - self._say(blocks))).sum(-1).mean())

    def _say(self, blocks: Sequence[Sequence[BlockBits]]) -> torch.Tensor:
        """Return log probabilities of the tokens after each of those behind the context, but the last."""
        with torch.inference_mode():
            past = self._contexts.restored(self.context, blocks)
            output = self._contexts.model(torch.tensor([self._behind[:-1]]), past_key_values=past, use_cache=True)
        said: torch.Tensor = output.logits[0].float().log_softmax(-1)
        return said


def coded_prefixes(codecs: Sequence[Codec], context: Context) -> Iterator[CodedGroups]:
    """Encode a context, each group by its codec, and yield it decoded from objects that end at each refinement."""
    encoded = [
        [codec.encode(meta, bits) for meta, bits in zip(metas, blocks, strict=True)]
        for codec, metas, blocks in zip(codecs, context.metas, context.blocks, strict=True)
    ]
    last = max(section.id.refinement for section in encoded[0][0])
    for refinement in range(last + 1):
        decoded, stored_bytes = [], 0
        for codec, metas, mine in zip(codecs, context.metas, encoded, strict=True):
            coded = [_decoded(codec, *each, refinement) for each in zip(metas, mine, strict=True)]
            decoded.append([bits for bits, _ in coded])
            stored_bytes += sum(size for _, size in coded)
        yield CodedGroups(decoded, stored_bytes, sum(bits.nbytes for blocks in decoded for bits in blocks))


def _decoded(codec: Codec, meta: BlockMeta, sections: Sequence[Section], refinement: int) -> tuple[BlockBits, int]:
    here = [section for section in sections if section.id.refinement <= refinement]
    packed = pack_object(meta, codec.codec_id, here, codec.profile)
    out: BlockBits = np.empty(meta.layout.shape, dtype=meta.layout.bits_dtype)
    codec.decode(meta, parse_object(packed, meta.id).sections(), out)
    return out, len(packed)


def upper_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what five texts of six don't exceed, a standard deviation above their mean, of values of (texts, rows).

    Few texts know neither well: what texts usually deviate counts as _USUAL_TEXTS. One text gives 2.1 times its value.
    """
    count, means = len(values), values.mean(axis=0)
    known = _USUAL_TEXTS + count - 1
    spread = np.square(values - means).sum(axis=0) + _USUAL_TEXTS * (_USUAL_DEVIATION * means) ** 2
    found: NDArray[np.float64] = means + np.sqrt(spread / (known - 1) * (1 + 1 / count))
    return found


def own_losses(
    gains: Sequence[NDArray[np.float64]], units: Sequence[int], kls: NDArray[np.float64]
) -> tuple[list[dict[str, NDArray[np.float32]]], NDArray[np.float64]]:
    """Return how loss goes with gains, as arrays of profiles (`OwnLoss`), and the KL of each row where gains are usual.

    gains: (texts, steps) of each profile; units: those steps; kls: (texts, rows). Rows are upper means. Few texts say
    little: _USUAL_TEXTS beside them deviate as usual, and tell nothing of a loss.
    """
    by_step, excess = list[NDArray[np.float64]](), list[NDArray[np.float64]]()
    for each in gains:
        off = each - each.mean(axis=0)
        squares = np.square(off).sum(axis=0) + _USUAL_TEXTS * _USUAL_GAIN**2
        spread = np.sqrt(squares / (len(each) + _USUAL_TEXTS))
        by_step.append(np.stack([np.array(units), each.mean(axis=0), spread], axis=1))
        excess.append((off / spread).mean(axis=1))
    found, logs = np.mean(excess, axis=0), np.log(np.maximum(kls, _KL_MIN))
    slopes = found @ (logs - logs.mean(axis=0)) / (np.square(found).sum() + _USUAL_TEXTS)
    deviation = max(float(slopes.mean()), 0.0)
    own = {"own_deviation": np.array([deviation], np.float32)}
    usual = upper_means(kls * np.exp(-deviation * found)[:, None])
    return [own | {"own_gains": each.astype(np.float32)} for each in by_step], usual
