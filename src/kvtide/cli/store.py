"""Commands that look into a store: stats, ls, rm, explain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvtide.cli.report import CONSOLE, emit_json, format_bytes
from kvtide.clock import SystemClock
from kvtide.codec import CodecRegistry
from kvtide.config import Limits, cache_home
from kvtide.engines import installed_profiles, read_profile
from kvtide.errors import CorruptPayload, TierUnavailable
from kvtide.explain import Explanation, MatchVerdict, read_header, read_object, read_record, weigh
from kvtide.explain import explain as explain_prompt
from kvtide.importance import UseRecord
from kvtide.plan import PrefillSpeed
from kvtide.tier import ObjectInfo, Tier, disk_path
from kvtide.tier.disk import DiskTier
from kvtide.types import Namespace

DEFAULT_STORE = str(cache_home() / "demo-store")
# What `ls` calls a record of past uses, which lies beside its block and is none.
RECORD = "use record"
StoreOption = Annotated[str, typer.Option("--store", help="disk:///path or a path.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def store_folder(url: str) -> Path:
    """Return the folder of a store that a command is to look into. ValueError for a store of another kind."""
    path = disk_path(url)
    if path is None:
        kind = url.partition("://")[0]
        raise ValueError(f"this command looks into a folder: give disk:///path or a path, not a {kind}:// store")
    return path


def _tier_at(url: str) -> DiskTier:
    """Return the tier of an existing store, not yet opened. ValueError if there is none; nothing is made."""
    path = store_folder(url)
    if not path.is_dir():
        raise ValueError(f"no store at {path}: it is not a directory")
    if not (path / "segments").is_dir():
        raise ValueError(f"no store at {path}: it has no folder named segments, nothing was ever stored there")
    return DiskTier(path, Limits().disk_bytes_max, SystemClock(), lambda key: False)


@contextmanager
def _opened(tier: DiskTier, action: Callable[[], None]) -> Iterator[DiskTier]:
    try:
        action()
        yield tier
    except TierUnavailable as error:
        raise ValueError(str(error)) from error
    finally:
        tier.close()


def _looking_at(url: str) -> AbstractContextManager[DiskTier]:
    """Open an existing store to look at it: nothing in it changes. ValueError if it is not there."""
    tier = _tier_at(url)
    return _opened(tier, tier.open_read_only)


class ObjectRow(msgspec.Struct, frozen=True):
    """One object in a listing; `problem` is empty for a good one."""

    namespace: str
    key: str
    model: str
    codec: str
    start: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    age_s: float
    problem: str


def _rows(tier: Tier, is_verified: bool) -> Iterator[ObjectRow]:
    now_s = SystemClock().wall_s()
    read = read_object if is_verified else read_header
    for info in sorted(tier.objects(), key=lambda info: (info.id.namespace, -info.last_use_s, info.id.key)):
        try:
            stored = read(tier, info.id)
        except CorruptPayload as error:
            record = read_record(tier, info.id, info.size)
            yield _broken_row(info, now_s, str(error)) if record is None else _record_row(info, now_s, record)
            continue
        if stored is not None:
            meta = stored.meta
            yield ObjectRow(
                namespace=info.id.namespace.hex(),
                key=info.id.key.hex(),
                model=meta.model,
                codec=stored.codec_id,
                start=meta.start,
                tokens=meta.layout.tokens,
                raw_bytes=meta.layout.raw_bytes,
                stored_bytes=info.size,
                age_s=now_s - info.last_use_s,
                problem="",
            )


def _record_row(info: ObjectInfo, now_s: float, record: UseRecord) -> ObjectRow:
    """Return what past uses say of a block, as a row: it holds no tokens of its own."""
    what, age_s = f"uses of {record.block.hex()[:16]}", now_s - info.last_use_s
    return ObjectRow(info.id.namespace.hex(), info.id.key.hex(), what, RECORD, 0, 0, 0, info.size, age_s, "")


def _broken_row(info: ObjectInfo, now_s: float, problem: str) -> ObjectRow:
    age_s = now_s - info.last_use_s
    return ObjectRow(info.id.namespace.hex(), info.id.key.hex(), "", "", 0, 0, 0, info.size, age_s, problem)


class NamespaceRow(msgspec.Struct, frozen=True):
    """What a store holds of one namespace and codec."""

    namespace: str
    model: str
    codec: str
    objects: int
    tokens: int
    raw_bytes: int
    stored_bytes: int
    ratio: float


def stats(url: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Show how much a store holds, by namespace and codec."""
    with _looking_at(url) as tier:
        rows = list(_rows(tier, is_verified=False))
    groups: dict[tuple[str, str, str], list[ObjectRow]] = {}
    for row in rows:
        if not row.problem:
            model = "" if row.codec == RECORD else row.model
            groups.setdefault((row.namespace, model, row.codec), []).append(row)
    summary = [_namespace_row(name, members) for name, members in groups.items()]
    problems = sum(1 for row in rows if row.problem)
    if as_json:
        total = sum(row.stored_bytes for row in rows)
        emit_json({"store": url, "objects": len(rows), "stored_bytes": total, "problems": problems, "rows": summary})
        return
    table = Table("namespace", "model", "codec", "blocks", "tokens", "raw", "stored", "ratio", title=escape(url))
    for item in summary:
        sizes = (format_bytes(item.raw_bytes), format_bytes(item.stored_bytes), f"{item.ratio:.2f}")
        table.add_row(
            item.namespace[:12], escape(item.model), escape(item.codec), str(item.objects), str(item.tokens), *sizes
        )
    CONSOLE.print(table)
    if problems:
        CONSOLE.print(f"{problems} objects can't be read; `kvtide ls` names them")


def _namespace_row(name: tuple[str, str, str], members: list[ObjectRow]) -> NamespaceRow:
    raw_bytes, stored_bytes = sum(row.raw_bytes for row in members), sum(row.stored_bytes for row in members)
    tokens = sum(row.tokens for row in members)
    return NamespaceRow(*name, len(members), tokens, raw_bytes, stored_bytes, raw_bytes / stored_bytes)


def ls(
    url: StoreOption = DEFAULT_STORE,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the objects of a store, newest use first within a namespace."""
    with _looking_at(url) as tier:
        rows = list(_rows(tier, verify))
    if as_json:
        emit_json({"store": url, "rows": rows})
        return
    table = Table(
        "namespace", "key", "model", "codec", "tokens", "raw", "stored", "last use", "problem", title=escape(url)
    )
    for row in rows:
        span = "" if row.problem else f"[{row.start}, {row.start + row.tokens})"
        sizes = (format_bytes(row.raw_bytes), format_bytes(row.stored_bytes), f"{row.age_s:.0f} s ago", row.problem)
        cells = (row.namespace[:12], row.key[:16], row.model, row.codec, span, *sizes)
        table.add_row(*map(escape, cells))
    CONSOLE.print(table)


def rm(
    prefixes: Annotated[list[str] | None, typer.Argument(help="Leading hex digits of keys or namespaces.")] = None,
    url: StoreOption = DEFAULT_STORE,
    everything: Annotated[bool, typer.Option("--all", help="Remove every object.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove objects by leading hex digits (at least 4) of their key or namespace."""
    chosen = [prefix.lower() for prefix in prefixes or []]
    if bool(chosen) == everything:
        raise ValueError("name what to remove by hex digits of key or namespace, or give --all")
    for prefix in chosen:
        if len(prefix) < 4 or set(prefix) - set("0123456789abcdef"):
            raise ValueError(f"expected at least 4 hex digits, got {prefix!r}")
    removed_bytes = removed = 0
    tier = _tier_at(url)
    with _opened(tier, tier.open):
        for info in list(tier.objects()):
            names = (info.id.key.hex(), info.id.namespace.hex())
            matches = everything or any(name.startswith(prefix) for name in names for prefix in chosen)
            if matches and tier.delete(info.id, "removed"):
                removed += 1
                removed_bytes += info.size
    if as_json:
        emit_json({"store": url, "removed": removed, "removed_bytes": removed_bytes})
    else:
        CONSOLE.print(f"removed {removed} objects, {format_bytes(removed_bytes)}")


class DecisionRow(msgspec.Struct, frozen=True):
    """Load or recompute, and the seconds that each way takes; None where a way never ends."""

    way: str
    reason: str
    load_s: float | None
    recompute_s: float
    both_s: float | None


class DecidedRow(msgspec.Struct, frozen=True):
    """What engines did with tokens of prompts beside this store, as far back as its journal goes."""

    decision: str
    reason: str
    meaning: str
    tokens: int


class ExplainRow(msgspec.Struct, frozen=True):
    """An explanation as the command prints it; `decision` only where link and engine were given."""

    store: str
    namespace: str
    prompt_tokens: int
    full_blocks: int
    hit_blocks: int
    hit_tokens: int
    reason: str
    first_missing_key: str | None
    elsewhere: list[str]
    needs: str
    decision: DecisionRow | None
    decided: list[DecidedRow]


def explain(
    text: Annotated[Path | None, typer.Option("--text", help="A file with the prompt; needs a model.")] = None,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="A file with a JSON list of token ids.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A model folder; default: SmolLM2-135M.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Leading hex digits; with --tokens.")] = None,
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
    with _looking_at(url) as tier:
        if text is not None:
            digest, ids = _from_text(_read(text), model, block_tokens)
        else:
            assert tokens is not None
            digest, ids = _namespace_in(tier, namespace), _token_ids(_read(tokens))
        found = explain_prompt(tier, digest, ids, block_tokens, CodecRegistry(known), quality)
        decided = _decided_rows(tier)
    row = _explain_row(url, digest, found, _decision_row(found, link, prefill), decided)
    if as_json:
        emit_json(row)
        return
    CONSOLE.print(f"{row.hit_tokens} of {row.prompt_tokens} tokens hit ({row.hit_blocks} of {row.full_blocks} blocks)")
    CONSOLE.print(f"reason: {row.reason}")
    if row.first_missing_key:
        CONSOLE.print(f"first missing block: {row.first_missing_key[:16]} at token {row.hit_tokens}")
    if row.needs:
        CONSOLE.print(f"it needs {row.needs}")
    for other in row.elsewhere:
        CONSOLE.print(f"stored under namespace {other[:12]}; `kvtide stats` names its model")
    if row.decision:
        seconds = f"loading {_seconds(row.decision.load_s)}, computing {_seconds(row.decision.recompute_s)}"
        CONSOLE.print(f"{row.decision.way}: {row.decision.reason} ({seconds}, both {_seconds(row.decision.both_s)})")
    for past in row.decided:
        CONSOLE.print(f"decided before: {past.decision} {past.tokens} tokens, {past.meaning}")


def _decided_rows(tier: DiskTier) -> list[DecidedRow]:
    counts = sorted(tier.decisions().items())
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


def _from_text(text: str, model: str | None, block_tokens: int) -> tuple[Namespace, list[int]]:
    from kvtide.engines.transformers import attach, converted_folder, load_model, load_tokenizer

    folder = model or converted_folder()
    ids = load_tokenizer(folder)(text).input_ids
    attached = attach(load_model(folder), "memory://", block_tokens=block_tokens)
    return attached.namespace, ids
