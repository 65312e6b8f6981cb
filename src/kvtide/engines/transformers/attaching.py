"""Putting a cache beside a Hugging Face model: what a user says, checked, made into a `CachedModel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from kvtide.clock import SystemClock
from kvtide.codec import AwaitingCodec, Codec, CodecRegistry, Profile
from kvtide.config import Limits
from kvtide.engines.transformers.attention import Learner
from kvtide.engines.transformers.cached import BLOCK_TOKENS, CachedModel
from kvtide.engines.transformers.fingerprint import NamespaceSettings, groups_of, plain_layout
from kvtide.engines.transformers.groups import ModelGroup, is_plain, profile_shapes
from kvtide.engines.transformers.profiles import ProfileSeeker
from kvtide.engines.transformers.selective import Impress, SparseSettings, check_ratio
from kvtide.engines.transformers.streaming import StreamSettings
from kvtide.evict import ScoreRanking
from kvtide.plan.base import CHUNK_TOKENS
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
    importance: float | Impress | SparseSettings | None = None,
    start_within_s: float | None = None,
    quality: float | str | None = None,
    policy: str | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    state_every_tokens: int | None = None,
    calibrate: Literal["background"] | None = None,
) -> CachedModel:
    """Put a cache beside a Hugging Face causal language model.

    store: `disk:///path`, a folder (a Path, or text such as `./folder`), `memory://`, … codec: `lossless` (the
    default), `tide[:quality[:refinements]]`, `tide-light`, `tide-deep`, `cachegen[:level[:coder]]`, …; lossy ones take
    the first of the `profiles` that fits, or one a group of layers. Without `profiles` tide takes what `kvtide
    calibrate` left in the store for this model, and stores losslessly until then; others keep tables in payloads.
    importance: the share of a restored prefix's tokens, from 0 to 1, to load exactly, those that the rest of the prompt
    attends to; the others stay rough (decision 0013). The codec is then `packed`, which needs a profile as tide does.
    `Impress(ratio)`: the paper's way, without a profile, leaves the others out.
    start_within_s: stream a stored prefix, its roughest form first, computing meanwhile, and start the model after so
    many seconds with what has come. quality: the KL divergence, in nats, at which it starts earlier; the codec's unless
    given. policy: what to ask for first, one of `kvtide.plan.policies.POLICIES`; `cachegen` picks one of the levels
    that `codec="cachegen:1-4"` stores for each `chunk_tokens`. Any of the three streams (docs/streaming.md).
    state_every_tokens: of models with states, how often one is kept (docs/transformers.md).
    calibrate: `background` has a child process make the profile that the store lacks; see `cached.calibration`.
    The salt keeps tenants apart. A fingerprint is taken from the weights; one that is given must change when they do.
    UnsupportedModel (a ValueError) for a model that can't be served exactly; ValueError for a bad store or codec.

        with attach(model, "disk:///var/cache/kvtide") as cached:
            output = cached.generate(input_ids, max_new_tokens=64)
    """
    clock = SystemClock()
    registry, groups = CodecRegistry(profiles), groups_of(model, block_tokens)
    settings, steps = _settings(importance), importance if isinstance(importance, Impress) else Impress(1.0)
    is_streamed = (start_within_s, quality, policy) != (None, None, None)
    _check_loads(groups, settings, is_streamed)
    layout, learner = groups[0].group.layout, Learner(registry, clock)
    made = _made(registry, codec or _usual_codec(model, layout.kv_heads, importance), groups, bool(profiles))
    part_quality = max(made.quality, settings.quality) if settings and settings.ratio < 1 else None
    ranking = ScoreRanking(learner.important_tokens) if settings and steps.is_scored else None
    cache = cache_for(store, made, registry, limits, clock, ranking, quality=part_quality)
    named = NamespaceSettings(block_tokens, tenant_salt, fingerprint, made.is_lossless and part_quality is None)
    seeker = ProfileSeeker(cache, model, str(store), None if profiles else made, calibrate)
    cached = CachedModel(model, cache, clock, named, seeker)
    if state_every_tokens is not None:
        cached.keep_states(state_every_tokens)
    if is_streamed:
        wanted = None if quality is None else float(quality)
        cached.stream(StreamSettings(start_within_s, wanted, policy, chunk_tokens), learner)
    if settings is not None:
        cached.select(settings, learner, steps.is_reordered)
    return cached


def _settings(importance: float | Impress | SparseSettings | None) -> SparseSettings | None:
    asked = importance.settings() if isinstance(importance, Impress) else importance
    return SparseSettings(asked) if isinstance(asked, float | int) else asked


def _usual_codec(model: Any, kv_heads: int, importance: object) -> str:
    if isinstance(importance, Impress):
        return importance.codec(model.config.num_attention_heads, kv_heads)
    return "lossless" if importance is None else "packed"


def _made(
    registry: CodecRegistry, spec: str, groups: Sequence[ModelGroup], has_profiles: bool
) -> Codec | AwaitingCodec:
    """Return the codec of a model; of profiles that are given each group must have its own. ValueError otherwise."""
    if has_profiles and is_plain(groups):
        return registry.make(spec, groups[0].group.layout)
    shapes = profile_shapes(groups)
    if not shapes:
        # States are kept losslessly by any codec.
        return registry.make(spec)
    made = registry.make_by_group(spec, shapes)
    if has_profiles and isinstance(made, AwaitingCodec) and not made.first:
        names = ", ".join(each.group.name for each in groups if each.rows)
        raise ValueError(f"codec {spec!r} needs profiles of one calibration of this model, one each of {names}")
    return made


def _check_loads(groups: Sequence[ModelGroup], settings: SparseSettings | None, is_streamed: bool) -> None:
    """Refuse ways to load that the model does not take, or that do not go together."""
    if settings is not None:
        check_ratio(settings.ratio)
        if is_streamed:
            raise ValueError("importance loads a prefix in its own way: it takes no start_within_s, quality or policy")
    if settings is not None or is_streamed:
        plain_layout(groups)
