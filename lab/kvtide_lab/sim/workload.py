"""Request traces in the public formats, as runs of block keys that an index takes.

Two blocks have equal keys exactly if they and all blocks before them are equal and of one tenant: what the trace calls
a block is chained here, whether or not its ids were.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kvtide.cli.size import read_lines
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace

_Row = TypeVar("_Row")

REQUEST_BLOCKS_MAX = 1 << 20
_DEFAULT_TENANT = "default"


class TraceRequest(NamedTuple):
    """One request: when it comes, whose it is, the keys of its prompt's blocks."""

    at_s: float
    tenant: str
    keys: list[BlockKey]


class Trace(NamedTuple):
    """Requests in order of time. `unique_blocks` is what an infinite cache would hold in the end."""

    name: str
    block_tokens: int
    requests: list[TraceRequest]
    unique_blocks: int


class TraceSource(NamedTuple):
    """One request before its blocks are keyed: equal `blocks` in equal places are equal content."""

    at_s: float
    tenant: str
    blocks: Sequence[Hashable]


class WekaReplay(NamedTuple):
    """The times of sessions whose start is not in the trace.

    The first `sessions_max` by id (None: all), one starting every `start_gap_s`; blocks of 64 tokens are joined to
    blocks of `64 * join` tokens, what remains at the end of a prompt is not a block.
    """

    sessions_max: int | None = 50
    start_gap_s: float = 120.0
    join: int = 8


# Sessions of texts: a block is this much of one, as many tokens as English has in it.
TEXT_BLOCK_BYTES, TEXT_BLOCK_TOKENS = 256, 64
_TEXT_GAP_S = 30.0


class _Text(msgspec.Struct):
    timestamp: int
    input: str


class _HashIds(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]
    chat_id: int | None = None
    type: str = _DEFAULT_TENANT


class _Weka(msgspec.Struct):
    sid: str
    t: float
    model: str
    h: list[tuple[int, int]]


def tenant_namespace(tenant: str) -> Namespace:
    """Return the namespace that stands for a tenant in simulations."""
    return Namespace(hashlib.sha256(tenant.encode()).digest())


def read_trace(path: Path, weka: WekaReplay | None = None) -> Trace:
    """Read a trace, gzipped or not, in the format that its first line shows; of a folder the texts in it.

    Mooncake: `timestamp` (ms) and `hash_ids` of 512-token blocks. Qwen-Bailian: the same with `chat_id`, in seconds and
    blocks of 16 tokens, its `type` taken as the tenant. WEKA compact: `sid`, `t` (s), run-length blocks `h`, its
    `model` taken as the tenant. ValueError, with the line, for anything else.
    """
    if path.is_dir():
        return build_trace(path.name, TEXT_BLOCK_TOKENS, _text_sources(path))
    lines = read_lines(path, msgspec.Raw)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path.name} has no requests")
    head = _decode(first, dict[str, msgspec.Raw])
    everything = chain([first], lines)
    if "hash_ids" in head:
        is_bailian = "chat_id" in head
        rows = (_decode(line, _HashIds) for line in everything)
        unit_s, block_tokens = (1.0, 16) if is_bailian else (1e-3, 512)
        sources = [TraceSource(row.timestamp * unit_s, row.type, row.hash_ids) for row in rows]
        return build_trace(path.name, block_tokens, sources)
    if "sid" in head and "h" in head:
        replay = weka or WekaReplay()
        sources = _weka_sources((_decode(line, _Weka) for line in everything), replay)
        return build_trace(path.name, 64 * replay.join, sources)
    raise ValueError(f"{path.name}: line 1 is of no known trace format; it has the fields {', '.join(sorted(head))}")


def _text_sources(folder: Path) -> Iterator[TraceSource]:
    """Yield the requests of sessions of texts (`timestamp` in microseconds, `input`), a file each, started in turn."""
    for number, path in enumerate(sorted(folder.glob("*.jsonl*"))):
        rows = sorted((_decode(line, _Text) for line in read_lines(path, msgspec.Raw)), key=lambda row: row.timestamp)
        for row in rows:
            text, at_s = row.input.encode(), number * _TEXT_GAP_S + (row.timestamp - rows[0].timestamp) / 1e6
            stop = len(text) - len(text) % TEXT_BLOCK_BYTES
            blocks = [text[i : i + TEXT_BLOCK_BYTES] for i in range(0, stop, TEXT_BLOCK_BYTES)]
            yield TraceSource(at_s, _DEFAULT_TENANT, blocks)


def joined(traces: Sequence[Trace]) -> Trace:
    """Return several traces as tenants of one cache, all as long as the first one. ValueError for unlike blocks."""
    sizes = {trace.block_tokens for trace in traces}
    if len(sizes) != 1:
        raise ValueError(f"traces must have blocks of one size to share a cache, got {sorted(sizes)} tokens")
    spans_s = [max(1e-9, trace.requests[-1].at_s - trace.requests[0].at_s) for trace in traces]
    sources = (
        TraceSource((at_s - trace.requests[0].at_s) * spans_s[0] / span_s, f"{number} {tenant}", keys)
        for number, (trace, span_s) in enumerate(zip(traces, spans_s, strict=True))
        for at_s, tenant, keys in trace.requests
    )
    return build_trace("+".join(trace.name for trace in traces), sizes.pop(), sources)


def _decode(line: tuple[str, msgspec.Raw], row: type[_Row]) -> _Row:
    where, text = line
    try:
        return msgspec.json.decode(text, type=row)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is no such request: {error}") from error


def _weka_sources(rows: Iterable[_Weka], replay: WekaReplay) -> list[TraceSource]:
    sessions: defaultdict[str, list[_Weka]] = defaultdict(list)
    for row in rows:
        sessions[row.sid].append(row)
    sources = []
    for position, sid in enumerate(sorted(sessions)[: replay.sessions_max]):
        start_s = position * replay.start_gap_s
        for row in sessions[sid]:
            ids: list[int] = []
            for start, count in row.h:
                if not 0 <= count <= REQUEST_BLOCKS_MAX:
                    raise ValueError(f"session {sid}: a run of blocks has length {count}")
                ids.extend(range(start, start + count))
            stop = len(ids) - len(ids) % replay.join
            blocks = [(sid, *ids[i : i + replay.join]) for i in range(0, stop, replay.join)]
            sources.append(TraceSource(start_s + row.t, row.model, blocks))
    return sources


def build_trace(name: str, block_tokens: int, sources: Iterable[TraceSource]) -> Trace:
    """Key the blocks and put the requests in order of time; those without a block are left out.

    ValueError for a request of more than `REQUEST_BLOCKS_MAX` blocks, and where there is none.
    """
    keys: dict[tuple[Hashable, Hashable], BlockKey] = {}
    requests = []
    for at_s, tenant, blocks in sources:
        if len(blocks) > REQUEST_BLOCKS_MAX:
            raise ValueError(f"a request has {len(blocks)} blocks, at most {REQUEST_BLOCKS_MAX} are replayed")
        parent: Hashable = tenant
        found = []
        for block in blocks:
            key = keys.get((parent, block))
            if key is None:
                key = keys[parent, block] = BlockKey(len(keys).to_bytes(DIGEST_BYTES, "little"))
            found.append(key)
            parent = key
        if found:
            requests.append(TraceRequest(at_s, tenant, found))
    if not requests:
        raise ValueError(f"{name} has no request of a full block")
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, block_tokens, requests, len(keys))
