"""Putting a cache beside a Hugging Face model: what a user says, checked, made into a `CachedModel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry, Profile
from kvtide.config import Limits
from kvtide.engines.transformers.cached import BLOCK_TOKENS, CachedModel
from kvtide.engines.transformers.fingerprint import NamespaceSettings, model_layout
from kvtide.engines.transformers.learning import Learner
from kvtide.engines.transformers.selective import SELECTED_QUALITY, SparseSettings, check_ratio
from kvtide.engines.transformers.streaming import StreamSettings
from kvtide.evict import ScoreRanking
from kvtide.plan import CHUNK_TOKENS
from kvtide.store import cache_for


def attach(
    model: Any,
    store: str | Path,
    *,
    codec: str | None = None,
    profiles: Sequence[Profile] = (),
    block_tokens: int = BLOCK_TOKENS,
    tenant_salt: bytes = b"",
    limits: Limits | None = None,
    fingerprint: bytes | None = None,
    importance: float | SparseSettings | None = None,
    start_within_s: float | None = None,
    quality: float | str | None = None,
    policy: str | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> CachedModel:
    """Put a cache beside a Hugging Face causal language model.

    store: `disk:///path`, a folder (a Path, or text such as `./folder`), `memory://`, … codec: `lossless` (the
    default), `tide[:quality[:refinements]]`, `tide-light`, `tide-deep`, `cachegen[:level[:coder]]`, …; lossy ones take
    the first of the `profiles` that fits the model. Tide needs one (`engines.installed_profiles()` lists
    them), others keep tables in payloads without.
    importance: the share of a restored prefix's tokens, from 0 to 1, to load exactly, those that the rest of the prompt
    attends to; the others stay rough (decision 0013). The codec is then `packed` unless it is given, and needs a
    profile as tide does. None, the default: all of it exactly.
    start_within_s: stream a stored prefix, its roughest form first, computing meanwhile, and start the model after so
    many seconds with what has come. quality: the KL divergence, in nats, at which it starts earlier; the codec's unless
    given. policy: what to ask for first, one of `kvtide.plan.POLICIES`; `cachegen` picks one of the levels that
    `codec="cachegen:1-4"` stores for each `chunk_tokens`. Any of the three switches streaming on, and `last.streamed`
    says what came (docs/streaming.md).
    The salt keeps tenants apart. The fingerprint is taken from the weights unless given; one that is given must change
    whenever the weights do.
    UnsupportedModel (a ValueError) for a model that kvtide can't serve exactly; ValueError for a bad store or codec.

        with attach(model, "disk:///var/cache/kvtide") as cached:
            output = cached.generate(input_ids, max_new_tokens=64)
    """
    clock = SystemClock()
    registry, layout = CodecRegistry(profiles), model_layout(model, block_tokens)
    settings = SparseSettings(importance) if isinstance(importance, float | int) else importance
    made = registry.make(codec or ("lossless" if settings is None else "packed"), layout)
    learner = Learner(registry, clock)
    ranking = None if settings is None else ScoreRanking(learner.important_tokens)
    is_part = settings is not None and settings.ratio < 1
    stored_quality = max(made.quality, SELECTED_QUALITY) if is_part else None
    cache = cache_for(store, made, profiles, limits, clock, ranking, quality=stored_quality)
    is_exact = made.is_lossless and not is_part
    cached = CachedModel(model, cache, clock, NamespaceSettings(block_tokens, tenant_salt, fingerprint, is_exact))
    if settings is not None:
        check_ratio(settings.ratio)
        cached.select(settings, learner)
    if (start_within_s, quality, policy) != (None, None, None):
        if settings is not None:
            raise ValueError("importance loads a prefix in its own way: it takes no start_within_s, quality or policy")
        wanted = None if quality is None else float(quality)
        cached.stream(StreamSettings(start_within_s, wanted, policy, chunk_tokens), learner)
    return cached
