"""The prompts of a user's trace or logs, and what a cache of so many blocks hits. No more is read than bounds say."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtide.clock import ManualClock
from kvtide.evict.policies import policy_named
from kvtide.index import RadixIndex
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace

LINE_BYTES_MAX, BLOCKS_MAX = 4 << 20, 1 << 22
# Of a block of a text: four bytes are a token, as in English.
TEXT_TOKENS, TEXT_BYTES = 128, 512


class AskedPrompts(NamedTuple):
    """Prompts in the order in which they came, as keys of blocks; equal keys are equal prefixes."""

    block_tokens: int
    prompts: list[list[BlockKey]]
    blocks: int
    different_blocks: int


class _Line(msgspec.Struct, frozen=True):
    timestamp: float = 0.0
    hash_ids: list[int] | None = None
    input: str | None = None


def read_prompts(path: Path, block_tokens: int) -> AskedPrompts:
    """Read a trace, or all `*.jsonl` and `*.jsonl.gz` below a folder: a request a line, with `hash_ids` or `input`.

    block_tokens: of what has an id. ValueError, with file and line, for anything else.
    """
    found, units, blocks = list[tuple[float, list[BlockKey]]](), set[int](), 0
    for file in sorted(path.rglob("*.jsonl*")) if path.is_dir() else [path]:
        for where, row in _rows(file):
            if (row.hash_ids is None) == (row.input is None):
                raise ValueError(f"{where} must have hash_ids, or a text as input")
            if keys := _keys(row):
                units.add(TEXT_TOKENS if row.hash_ids is None else block_tokens)
                found.append((row.timestamp, keys))
                blocks += len(keys)
                if blocks > BLOCKS_MAX:
                    raise ValueError(f"{where} is beyond {BLOCKS_MAX:,} blocks: give a part of it")
    if len(units) != 1:
        sizes = sorted(units) or "no full block"
        raise ValueError(f"expected a request a line of *.jsonl or *.jsonl.gz, one size of blocks: {path} has {sizes}")
    prompts = [keys for _, keys in sorted(found, key=lambda each: each[0])]
    return AskedPrompts(units.pop(), prompts, blocks, len({key for keys in prompts for key in keys}))


def _keys(row: _Line) -> list[BlockKey]:
    size, content = TEXT_BYTES, (row.input or "").encode()
    texts = [content[start : start + size] for start in range(0, len(content) - size + 1, size)]
    keys = [BlockKey(bytes(DIGEST_BYTES))]
    for piece in texts if row.hash_ids is None else [b"%d" % each for each in row.hash_ids]:
        keys.append(BlockKey(hashlib.sha256(keys[-1] + piece).digest()))
    return keys[1:]


def _rows(path: Path) -> Iterator[tuple[str, _Line]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if line.strip():
                    yield f"{path}: line {number}", msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: line {number} is no request (cut off, or too long?): {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"can't read {path}, which should be a request a line: {error}") from error


def hit_rate(asked: AskedPrompts, policy: str, blocks_max: int) -> float:
    """Return the share of all blocks that are hit by prompts that come one a second, each stored once it is asked."""
    clock, hits = ManualClock(), 0
    index = RadixIndex(clock, policy_named(policy), blocks_max)
    for keys in asked.prompts:
        clock.advance(1.0)
        hits += index.match(keys)
        index.insert(Namespace(bytes(DIGEST_BYTES)), keys)
    return hits / asked.blocks
