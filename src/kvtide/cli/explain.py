"""`kvtide explain`: why a prompt hits only so many tokens of a store, and whether loading them pays."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtide.cli.report import CONSOLE, JsonOption, emit_json
from kvtide.cli.store import DEFAULT_STORE, StoreOption, below_seal, looking_at
from kvtide.codec import CodecRegistry
from kvtide.engines import installed_profiles, read_profile
from kvtide.explain import Explanation, MatchVerdict, explain_groups, weigh
from kvtide.explain import explain as explain_prompt
from kvtide.group import LayerGroup
from kvtide.plan import PrefillSpeed
from kvtide.store import ProfileStore
from kvtide.tier import Tier
from kvtide.tier.disk import DiskTier
from kvtide.types import Namespace


class DecisionRow(msgspec.Struct, frozen=True):
    """Load or recompute, and the seconds that each way takes; None where a way never ends."""

    way: str
    reason: str
    load_s: float | None
    recompute_s: float
    both_s: float | None


class DecidedRow(msgspec.Struct, frozen=True):
    """Tokens of prompts by what engines did with them beside this store, as far back as its journal goes."""

    decision: str
    reason: str
    meaning: str
    tokens: int


class ExplainRow(msgspec.Struct, frozen=True):
    """An explanation as the command prints it; `decision` only where link and engine were given.

    ended_by: the group of layers whose part is missing, of a model that has several.
    """

    store: str
    namespace: str
    prompt_tokens: int
    full_blocks: int
    hit_blocks: int
    hit_tokens: int
    reason: str
    first_missing_key: str | None
    ended_by: str
    elsewhere: list[str]
    needs: str
    decision: DecisionRow | None
    decided: list[DecidedRow]


def explain(
    text: Annotated[Path | None, typer.Option("--text", help="A file with the prompt; needs a model.")] = None,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="A file with a JSON list of token ids.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A model folder; with --text: SmolLM2-135M.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Leading hex digits; with --tokens and no model.")
    ] = None,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=1)] = 256,
    profile: Annotated[list[Path] | None, typer.Option("--profile", help="Profiles beside those that ship.")] = None,
    quality: Annotated[
        float | None, typer.Option("--quality", help="KL divergence that the engine asks for: 5e-3 for tide:5e-3.")
    ] = None,
    link: Annotated[
        float | None, typer.Option("--link-mbit-s", help="Rate of a link, with --prefill-tokens-s: load or recompute?")
    ] = None,
    prefill: Annotated[float | None, typer.Option("--prefill-tokens-s", help="Speed of the engine.")] = None,
    url: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Say why a prompt hits only so many tokens: first missing block, evicted, corrupt, profile, other namespace."""
    if (link is None) != (prefill is None):
        raise ValueError("load or recompute is decided by both: give --link-mbit-s and --prefill-tokens-s")
    known = [*installed_profiles(), *(read_profile(path) for path in profile or ())]
    if (text is None) == (tokens is None):
        raise ValueError("give the prompt as --text FILE or as --tokens FILE")
    with looking_at(url) as tier:
        groups: Sequence[tuple[LayerGroup, Namespace]] = ()
        if tokens is not None:
            ids = _token_ids(_read(tokens))
        else:
            assert text is not None
            ids = _tokenized(_read(text), model)
        if text is not None or model is not None:
            groups = _groups_of(model, block_tokens)
        digest = groups[0][1] if groups else _namespace_in(tier, namespace)
        registry = CodecRegistry(known)

        def look() -> Explanation:
            if len(groups) > 1:
                return explain_groups(tier, groups, ids, block_tokens, registry, quality)
            return explain_prompt(tier, digest, ids, block_tokens, registry, quality)

        found = look()
        # As an engine does, that finds what blocks name.
        stored = ProfileStore(tier, may_remove=False)
        while registry.unknown and (profile_found := stored.read(registry.unknown.pop())) is not None:
            registry.add(profile_found)
            found = look()
        decided = _decided_rows(tier)
    row = _explain_row(url, digest, found, _decision_row(found, link, prefill), decided)
    if as_json:
        emit_json(row)
    else:
        _show(row)


def _show(row: ExplainRow) -> None:
    CONSOLE.print(f"{row.hit_tokens} of {row.prompt_tokens} tokens hit ({row.hit_blocks} of {row.full_blocks} blocks)")
    CONSOLE.print(f"reason: {row.reason}")
    if row.first_missing_key:
        whose = f", of the layers named {row.ended_by}" if row.ended_by else ""
        CONSOLE.print(f"first missing block: {row.first_missing_key[:16]} at token {row.hit_tokens}{whose}")
    if row.needs:
        CONSOLE.print(f"it needs {row.needs}")
    for other in row.elsewhere:
        CONSOLE.print(f"stored under namespace {other[:12]}; `kvtide stats` names its model")
    if row.decision:
        seconds = f"loading {_seconds(row.decision.load_s)}, computing {_seconds(row.decision.recompute_s)}"
        CONSOLE.print(f"{row.decision.way}: {row.decision.reason} ({seconds}, both {_seconds(row.decision.both_s)})")
    for past in row.decided:
        CONSOLE.print(f"decided before: {past.decision} {past.tokens} tokens, {past.meaning}")


def _decided_rows(tier: Tier) -> list[DecidedRow]:
    """Return what a disk's journal says; servers have it in their metrics."""
    disk = below_seal(tier)
    counts = sorted(disk.decisions().items()) if isinstance(disk, DiskTier) else []
    return [DecidedRow(kind.choice, kind.why, kind.why.meaning, tokens) for kind, tokens in counts]


def _seconds(value: float | None) -> str:
    return "forever" if value is None else f"{value:.3g} s"


def _decision_row(found: Explanation, link_mbit_s: float | None, prefill_tokens_s: float | None) -> DecisionRow | None:
    if link_mbit_s is None or prefill_tokens_s is None:
        return None
    decision = weigh(found, PrefillSpeed(prefill_tokens_s), link_mbit_s * 1e6 / 8)
    if decision is None:
        return None
    load_s, both_s = (value if math.isfinite(value) else None for value in (decision.load_s, decision.both_s))
    way = decision.way
    return DecisionRow(way.name.lower(), way.value, load_s, decision.recompute_s, both_s)


def _explain_row(
    url: str, digest: Namespace, found: Explanation, decision: DecisionRow | None, decided: list[DecidedRow]
) -> ExplainRow:
    left_over = found.prompt_tokens - found.hit_tokens
    reason = found.verdict.value
    if found.verdict is MatchVerdict.ALL_FULL_BLOCKS and left_over:
        reason = f"{reason}; the last {left_over} tokens don't fill a block"
    return ExplainRow(
        store=url,
        namespace=digest.hex(),
        prompt_tokens=found.prompt_tokens,
        full_blocks=found.full_blocks,
        hit_blocks=found.hit_blocks,
        hit_tokens=found.hit_tokens,
        reason=reason,
        first_missing_key=found.first_missing.hex() if found.first_missing else None,
        ended_by=found.ended_by,
        elsewhere=[other.hex() for other in found.elsewhere],
        needs=found.needs,
        decision=decision,
        decided=decided,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read {path}: {error}") from error


def _token_ids(text: str) -> list[int]:
    try:
        ids = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON list of token ids: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ValueError("expected a JSON list of token ids")
    return ids


def _namespace_in(tier: Tier, prefix: str | None) -> Namespace:
    namespaces = sorted({info.id.namespace for info in tier.objects()})
    matching = [namespace for namespace in namespaces if namespace.hex().startswith((prefix or "").lower())]
    if len(matching) != 1:
        names = ", ".join(namespace.hex()[:12] for namespace in namespaces) or "none"
        raise ValueError(f"--namespace must name one of the store's namespaces ({names}), got {prefix!r}")
    return matching[0]


def _tokenized(text: str, model: str | None) -> list[int]:
    from kvtide.engines.transformers import converted_folder, load_tokenizer

    ids: list[int] = load_tokenizer(model or converted_folder())(text).input_ids
    return ids


def _groups_of(model: str | None, block_tokens: int) -> Sequence[tuple[LayerGroup, Namespace]]:
    """Return a model's groups of layers, each with its namespace."""
    from kvtide.engines.transformers import attach, converted_folder, load_model

    return attach(load_model(model or converted_folder()), "memory://", block_tokens=block_tokens).groups
