"""Judges decoded caches, of all groups of a model, by what the model then says, and what it minds, by gradients.

At the best sharing of bits a head's share of the KL is its share of the weighted squared error. A head whose share of
the KL is larger gets larger weights, so that its steps are finer; one whose share is smaller gets smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta, KVDtype
from kvtide.codec import Codec
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import APART_TOKENS
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
    """A context's blocks by group, decoded from objects that end at one refinement, and what a value takes in these."""

    decoded: list[list[BlockBits]]
    bits_per_element: float


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
        return output.logits[0].float().log_softmax(-1)


def coded_prefixes(codecs: Sequence[Codec], context: Context) -> Iterator[CodedGroups]:
    """Encode a context, each group by its codec, and yield it decoded from objects that end at each refinement."""
    encoded = [
        [codec.encode(meta, bits) for meta, bits in zip(metas, blocks, strict=True)]
        for codec, metas, blocks in zip(codecs, context.metas, context.blocks, strict=True)
    ]
    for refinement in range(1 + max(section.id.refinement for section in encoded[0][0])):
        decoded, stored_bytes = [], 0
        for codec, metas, mine in zip(codecs, context.metas, encoded, strict=True):
            coded = [_decoded(codec, *each, refinement) for each in zip(metas, mine, strict=True)]
            decoded.append([bits for bits, _ in coded])
            stored_bytes += sum(size for _, size in coded)
        yield CodedGroups(decoded, 8 * stored_bytes / sum(bits.size for blocks in decoded for bits in blocks))


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


Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
# Labels drawn from the model's own distribution, as the Fisher information wants it.
_SAMPLES = 2
# Texts that shares are measured on, at most, tokens after their contexts, and the step of their blocks in units.
SHARED_TEXTS, SHARE_TOKENS, SHARE_UNITS = 32, 256, -17
# Few texts don't know shares well: only a part of what they say is followed, and none counts as less than a tenth of
# the error's. By 8, 16 and 24 of 32 texts powers of .4 to .8 leave .74 to .78, .67 to .74 and .65 to .73 of the others'
# KL; larger powers take more bits at a step.
FOLLOWED, RATIO_MIN = 0.6, 0.1


def cache_sensitivity(
    contexts: ModelContexts,
    context: Context,
    continuation: Sequence[int],
    rotaries: Sequence[Rotary | None],
    generator: torch.Generator,
) -> list[Doubles]:
    """Return the mean squared gradient of sampled tokens' log-likelihood by cached values, of each group of rows.

    Each is (layers, 2, channels), keys before RoPE, without the first tokens, which tide keeps whole, and what has left
    a window. continuation: the tokens after the context. The model's weights are told to ask for no gradients.
    """
    past = contexts.restored(context)
    by_group = contexts.ask_gradients(past)
    logits = contexts.model(torch.tensor([continuation]), past_key_values=past, use_cache=True).logits[0].float()
    likelihood = logits.log_softmax(-1)
    leaves = [leaf for mine in by_group for leaf in mine]
    total: list[Doubles] = [np.zeros(1)] * len(by_group)
    for sample in range(_SAMPLES):
        drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=generator)
        loss = likelihood.gather(-1, drawn).sum()
        gradients = iter(torch.autograd.grad(loss, leaves, retain_graph=sample + 1 < _SAMPLES))
        for group, mine in enumerate(by_group):
            halves = [contexts.halves(group, next(gradients), next(gradients)) for _ in range(len(mine) // 2)]
            found = [
                (_rest(before, context.tokens).astype(np.float64) ** 2).mean(axis=1).reshape(2, -1)
                for before in turned_back(halves, rotaries[group], context.tokens)
            ]
            total[group] = total[group] + np.stack(found)
    return [each / _SAMPLES for each in total]


def _rest(halves: Floats, stop: int) -> Floats:
    """Return the tokens of a layer, (2, tokens, kv_heads, head_dim), without those that tide keeps whole."""
    return halves[:, max(0, APART_TOKENS - (stop - halves.shape[1])) :]


class LossShares(NamedTuple):
    """Shares of a group's K and V heads: of the KL, and of the weighted squared error, (layers, 2, kv_heads) both."""

    kl: Doubles
    error: Doubles


def loss_shares(
    contexts: ModelContexts,
    context: Context,
    decoded: Sequence[Sequence[BlockBits]],
    continuation: Sequence[int],
    rotaries: Sequence[Rotary | None],
    weights: Sequence[Floats],
) -> list[LossShares]:
    """Return sums for each group of rows, of a context whose blocks were decoded from some step.

    The KL of the continuation is half the sum of errors times gradients, as far as it is quadratic in the errors; on
    SmolLM2 within 8 %. weights: (layers, 2, channels) of each group. The model's own are told to ask for no gradients.
    """
    ids = torch.tensor([continuation[:-1]])
    right = contexts.restored(context)
    exact = [leaf.detach() for mine in contexts.ask_gradients(right) for leaf in mine]
    past = contexts.restored(context, decoded)
    by_group = contexts.ask_gradients(past)
    leaves = [leaf for mine in by_group for leaf in mine]
    with torch.no_grad():
        wanted = contexts.model(ids, past_key_values=right, use_cache=True).logits[0].float().log_softmax(-1)
    said = contexts.model(ids, past_key_values=past, use_cache=True).logits[0].float().log_softmax(-1)
    kl = (wanted.exp() * (wanted - said)).sum(-1).mean()
    gradients = torch.autograd.grad(kl, leaves)
    triples = iter(zip(leaves, exact, gradients, strict=True))
    found = []
    for group, mine in enumerate(by_group):
        layers = [_layer(contexts, group, next(triples), next(triples)) for _ in range(len(mine) // 2)]
        before = turned_back([errors for _, errors in layers], rotaries[group], context.tokens)
        felt = [_rest(halves, context.tokens).sum(axis=(1, 3), dtype=np.float64) / 2 for halves, _ in layers]
        weighted = [
            _rest(halves, context.tokens) * weight.reshape(2, 1, *halves.shape[2:])
            for halves, weight in zip(before, weights[group], strict=True)
        ]
        squares = [np.square(halves).sum(axis=(1, 3), dtype=np.float64) for halves in weighted]
        found.append(LossShares(np.stack(felt), np.stack(squares)))
    return found


def finer_weights(shares: Sequence[LossShares]) -> list[Doubles]:
    """Return what to multiply weights by, of each group: (layers, 2, kv_heads). Bits stay about what they are."""
    kl, error = sum(float(each.kl.sum()) for each in shares), sum(float(each.error.sum()) for each in shares)
    if kl <= 0 or error <= 0:
        return [np.ones(each.kl.shape) for each in shares]
    by_group, mean = [], 0.0
    for each in shares:
        ratio = np.where(each.error > 0, (each.kl / kl) / np.maximum(each.error / error, 1e-12), 1.0)
        by_group.append(FOLLOWED / 2 * np.log(np.clip(ratio, RATIO_MIN, 1 / RATIO_MIN)))
        mean += float((by_group[-1] * each.error).sum()) / error
    return [np.exp(each - mean) for each in by_group]


def turned_back(halves: Sequence[Floats], rotary: Rotary | None, stop: int) -> list[Floats]:
    """Return halves of layers, (2, tokens, kv_heads, head_dim) before token `stop`, with K before its rotation."""
    if rotary is None:
        return list(halves)
    found = []
    for layer, (keys, values) in enumerate(halves):
        turns = rotary.inverse_tables(stop - len(keys), len(keys), layer)
        before = rotary.load(np.ascontiguousarray(keys).view(np.uint32), KVDtype.FLOAT32, turns)
        found.append(np.stack([before.reshape(keys.shape), values]))
    return found


def _layer(contexts: ModelContexts, group: int, *pair: Any) -> tuple[Floats, Floats]:
    """Return errors times gradients, and errors, of a layer as a block has them."""
    (keys, right_keys, felt_keys), (values, right_values, felt_values) = pair
    errors = [a.detach().float() - b.float() for a, b in ((keys, right_keys), (values, right_values))]
    felt = contexts.halves(group, errors[0] * felt_keys.float(), errors[1] * felt_values.float())
    return felt, contexts.halves(group, *errors)
