"""`kvtide explain`: why a prompt hits only so many tokens of a store, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape

from kvtide.cli.report import JsonOption, read_json, say
from kvtide.cli.store import DEFAULT_STORE, StoreOption, looking_at, read_header, read_object
from kvtide.codec import CodecRegistry
from kvtide.engines import installed_profiles, read_profile
from kvtide.errors import CorruptPayload
from kvtide.group import LayerGroup, hit_of, part_keys
from kvtide.keys import TokenIds, block_keys, tokens_array
from kvtide.store.load import QUALITY_SLACK
from kvtide.store.profiles import ProfileStore
from kvtide.tier import Tier
from kvtide.tier.seal import SEALED_CODEC
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide.wire import StoredObject


class MatchVerdict(Enum):
    """The reason why matching ended."""

    ALL_FULL_BLOCKS = "every full block is stored"
    SHORTER_THAN_BLOCK = "the prompt is shorter than one block"
    NEVER_STORED = "the first missing block was never stored, or so long ago that nobody remembers"
    EVICTED = "the first missing block was evicted"
    CORRUPT = "the first missing block was corrupt and has been removed"
    REMOVED = "the first missing block was removed by hand (kvtide rm)"
    CORRUPT_NOW = "the first missing block's object is corrupt; the next load removes it"
    CODEC_ABSENT = "the first missing block is stored, but its codec or profile is not here"
    COARSE = "the first missing block is stored, but coarser than asked for; it is replaced once it is computed"
    OTHER_NAMESPACE = "the same tokens are stored under another namespace (model, dtype, block size or tenant)"


_REMOVED = {"evicted": MatchVerdict.EVICTED, "corrupt": MatchVerdict.CORRUPT, "removed": MatchVerdict.REMOVED}


class Explanation(NamedTuple):
    """The blocks that a look-up of this prompt finds, and why it ends there.

    first_missing: the block, or of a model of several groups of layers the part; ended_by: then its group. needs: names
    a codec or profile that is not here, or the quality that the block has.
    """

    prompt_tokens: int
    full_blocks: int
    hit_blocks: int
    hit_tokens: int
    verdict: MatchVerdict
    first_missing: BlockKey | None
    elsewhere: tuple[Namespace, ...] = ()
    needs: str = ""
    ended_by: str = ""
    hit_bytes: int = 0

    @property
    def reason(self) -> str:
        """The verdict in words."""
        left_over = self.prompt_tokens - self.hit_tokens
        is_partial = self.verdict is MatchVerdict.ALL_FULL_BLOCKS and left_over
        return self.verdict.value + (f"; the last {left_over} tokens don't fill a block" if is_partial else "")


def explain(
    text: Annotated[Path | None, typer.Option(help="A file with the prompt; needs a model.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="A file with a JSON list of token ids.")] = None,
    model: Annotated[str | None, typer.Option(help="A model folder; with --text: SmolLM2-135M.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Leading hex digits; with --tokens and no model.")] = None,
    block_tokens: Annotated[int, typer.Option(min=1)] = 256,
    profile: Annotated[list[Path] | None, typer.Option(help="Profiles beside those that ship.")] = None,
    quality: Annotated[
        float | None, typer.Option(min=0, help="KL divergence that the engine asks for: 5e-3 for tide:5e-3.")
    ] = None,
    prefill: Annotated[
        float, typer.Option("--prefill-tokens-s", min=0, help="Speed of your engine: says what the hit gains.")
    ] = 0.0,
    link: Annotated[float, typer.Option("--link-mbit-s", min=0, help="Rate of the link to the store, for that.")] = 0.0,
    url: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Say why a prompt hits only so many tokens: first missing block, evicted, corrupt, profile, other namespace."""
    if (text is None) == (tokens is None):
        raise ValueError("give the prompt, as in: kvtide explain --text FILE --model FOLDER, or --tokens FILE")
    registry = CodecRegistry([*installed_profiles(), *(read_profile(path) for path in profile or ())])
    with looking_at(url) as tier:
        mistake = f"no JSON list of token ids in {tokens}: kvtide explain --text FILE?"
        ids = read_json(tokens, list[int], mistake) if tokens is not None else _tokenized(text, model)
        groups = _groups_of(model, block_tokens) if model is not None or text is not None else ()
        digest = groups[0][1] if groups else _namespace_in(tier, namespace)
        # One group's parts are the blocks themselves.
        groups = groups if len(groups) > 1 else ()

        look = partial(explain_prompt, tier, digest, ids, block_tokens, registry, quality, groups)
        found = look()
        # As an engine does, that finds what blocks name.
        stored = ProfileStore(tier, may_remove=False)
        while registry.unknown and (profile_found := stored.read(registry.unknown.pop())) is not None:
            registry.add(profile_found)
            found = look()
    loading_s = 8e-6 * found.hit_bytes / link if link else 0.0
    saved_s = found.hit_tokens / prefill - loading_s if prefill else None
    gain = [] if saved_s is None else [f"{'saves' if saved_s >= 0 else 'loses'} {abs(saved_s):.3g} s against computing"]
    say({**_result(url, digest, found), "saved_s": saved_s}, as_json, *_lines(found), *gain)


def _result(url: str, digest: Namespace, found: Explanation) -> dict[str, object]:
    kept = ("prompt_tokens", "full_blocks", "hit_blocks", "hit_tokens", "hit_bytes", "reason", "ended_by", "needs")
    return {
        "store": url,
        "namespace": digest.hex(),
        **{name: getattr(found, name) for name in kept},
        "first_missing_key": found.first_missing.hex() if found.first_missing else None,
        "elsewhere": [other.hex() for other in found.elsewhere],
    }


def _lines(found: Explanation) -> list[str]:
    blocks = f"{found.hit_blocks} of {found.full_blocks} blocks"
    lines = [f"{found.hit_tokens} of {found.prompt_tokens} tokens hit ({blocks})", f"reason: {found.reason}"]
    if found.first_missing:
        whose = f", of the layers named {escape(found.ended_by)}" if found.ended_by else ""
        lines.append(f"first missing block: {found.first_missing.hex()[:16]} at token {found.hit_tokens}{whose}")
    if found.needs:
        lines.append(f"it needs {escape(found.needs)}")
    return lines + [
        f"stored under namespace {other.hex()[:12]}; `kvtide stats` names its model" for other in found.elsewhere
    ]


def _namespace_in(tier: Tier, prefix: str | None) -> Namespace:
    namespaces = sorted({info.id.namespace for info in tier.objects()})
    matching = [namespace for namespace in namespaces if namespace.hex().startswith((prefix or "").lower())]
    if len(matching) != 1:
        names = ", ".join(namespace.hex()[:12] for namespace in namespaces) or "none"
        raise ValueError(f"--namespace names one of the store's ({names}), got {prefix!r}: kvtide stats")
    return matching[0]


def _tokenized(path: Path | None, model: str | None) -> list[int]:
    from kvtide.engines.transformers import converted_folder, load_tokenizer

    assert path is not None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read {path}: {error}") from error
    return list(load_tokenizer(model or converted_folder())(text).input_ids)


def _groups_of(model: str | None, block_tokens: int) -> Sequence[tuple[LayerGroup, Namespace]]:
    from kvtide.engines.transformers import attach, converted_folder, load_model

    identity = attach(load_model(model or converted_folder()), "memory://", block_tokens=block_tokens).identity
    return [(each.group, space) for each, space in zip(identity.groups, identity.namespaces, strict=True)]


class _Look(NamedTuple):
    """The reason why an object can't be loaded (ALL_FULL_BLOCKS: it can), and what it needs."""

    verdict: MatchVerdict = MatchVerdict.ALL_FULL_BLOCKS
    needs: str = ""
    stored_bytes: int = 0


def explain_prompt(
    tier: Tier,
    namespace: Namespace,
    tokens: TokenIds,
    block_tokens: int,
    registry: CodecRegistry | None = None,
    quality: float | None = None,
    groups: Sequence[tuple[LayerGroup, Namespace]] = (),
) -> Explanation:
    """Match a prompt against a store and name the reason where the run of blocks ends. Reads, changes nothing.

    namespace: of the blocks. groups: those of a model that has several, each with its own. quality: the KL divergence
    that the engine asks for, None for any. Without a registry every codec and profile counts as being here.
    """
    prompt = tokens_array(tokens)
    keys = block_keys(namespace, prompt, block_tokens)
    parts = [(space, part_keys(space, keys)) for _, space in groups] or [(namespace, keys)]
    reaches = [group.reach_blocks(block_tokens) for group, _ in groups] or [0]
    looks, good = list[list[_Look]](), MatchVerdict.ALL_FULL_BLOCKS
    for (space, mine), reach in zip(parts, reaches, strict=True):
        looks.append([])
        for key in mine:
            # What is behind a gap of layers that see everything is no part of any hit.
            is_over = not reach and looks[-1] and looks[-1][-1].verdict is not good
            looks[-1].append(looks[-1][-1] if is_over else _look(tier, ObjectId(space, key), registry, quality))
    present = [[look.verdict is good for look in seen] for seen in looks]
    hits, ended_by, _ = hit_of(present, reaches)
    counts = (len(prompt), len(keys), hits, hits * block_tokens)
    loaded = [seen[max(0, hits - reach) if reach else 0 : hits] for seen, reach in zip(looks, reaches, strict=True)]
    hit_bytes = sum(look.stored_bytes for seen in loaded for look in seen)
    if ended_by is None:
        return Explanation(*counts, good if keys else MatchVerdict.SHORTER_THAN_BLOCK, None, hit_bytes=hit_bytes)
    # A hit of one block more needs it.
    missing = max(position for position in range(hits + 1) if not present[ended_by][position])
    verdict, needs, _ = looks[ended_by][missing]
    elsewhere: tuple[Namespace, ...] = ()
    if verdict is MatchVerdict.NEVER_STORED and not groups:
        elsewhere = _namespaces_with(tier, namespace, prompt, block_tokens, hits)
        verdict = MatchVerdict.OTHER_NAMESPACE if elsewhere else verdict
    name = groups[ended_by][0].name if groups else ""
    return Explanation(*counts, verdict, parts[ended_by][1][missing], elsewhere, needs, name, hit_bytes)


def _look(tier: Tier, object_id: ObjectId, registry: CodecRegistry | None, quality: float | None) -> _Look:
    try:
        stored = read_object(tier, object_id)
    except CorruptPayload:
        return _Look(MatchVerdict.CORRUPT_NOW)
    if stored is None:
        return _Look(_REMOVED.get(tier.removed_reason(object_id) or "", MatchVerdict.NEVER_STORED))
    if stored.meta.id != object_id:
        return _Look(MatchVerdict.CORRUPT_NOW)
    if registry is not None and registry.get(stored.codec_id, stored.profile) is None:
        return _Look(MatchVerdict.CODEC_ABSENT, _needs(stored))
    if quality is not None and stored.quality > quality * (1 + QUALITY_SLACK):
        return _Look(MatchVerdict.COARSE, f"a quality of {quality:.2g}; {stored.codec_id} has {stored.quality:.2g}")
    return _Look(stored_bytes=stored.object_bytes)


def _needs(stored: StoredObject) -> str:
    if stored.codec_id == SEALED_CODEC:
        return "the key that sealed it: add ?seal= to the store's URL"
    profile = f" with profile {stored.profile.hex()[:16]}" if stored.profile else ""
    return f"codec {stored.codec_id}{profile}, of model {stored.meta.model or 'unknown'}"


def _namespaces_with(
    tier: Tier, namespace: Namespace, tokens: TokenIds, block_tokens: int, hits: int
) -> tuple[Namespace, ...]:
    """The other namespaces that hold more of this prompt than we found."""
    samples = {info.id.namespace: info.id for info in tier.objects() if info.id.namespace != namespace}
    found = []
    for other, sample in sorted(samples.items()):
        stored = None
        with suppress(CorruptPayload):
            stored = read_header(tier, sample)
        keys = block_keys(other, tokens, stored.meta.layout.tokens if stored else block_tokens)[: hits + 1]
        if keys and all(tier.contains(ObjectId(other, key)) for key in keys):
            found.append(other)
    return tuple(found)
