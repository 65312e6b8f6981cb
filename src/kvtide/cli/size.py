"""`kvtide size`: how large a model's cache is, by codec, what a disk holds of it, what a trace would hit there."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
import typer
from rich.table import Table

from kvtide.cli.report import JsonOption, format_bytes, narrow_table, read_json, say
from kvtide.clock import ManualClock
from kvtide.evict.policies import policy_named
from kvtide.index import RadixIndex
from kvtide.types import DIGEST_BYTES, BlockKey, Namespace

_Row = TypeVar("_Row")
_DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
# What `lossless` leaves of a block, measured on SmolLM2-135M (docs/codec.md, "Measured"): 1 / 1.197, 1.165, 1.490.
_LOSSLESS_SHARE = {"float32": 0.835, "float16": 0.858, "bfloat16": 0.671}
# Bits an element of who asks for a KL of 5e-3 or, of cachegen, for a level: docs/benchmarks/codecs.md, the same model.
_LOSSY_BITS = {"cachegen:2": 4.33, "tide (profile light)": 3.14, "tide-layer": 1.73, "tide-deep": 0.96}


class Config(msgspec.Struct, frozen=True):
    """The entries of a Hugging Face config that say how large a cache is. Older models have names of their own."""

    num_hidden_layers: int = 0
    n_layer: int = 0
    num_attention_heads: int = 0
    n_head: int = 0
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    n_embd: int = 0
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    text_config: Config | None = None


class CacheShape(msgspec.Struct, frozen=True):
    """A model's cache. Layers that see everything grow with the prompt; those of a window or a state don't."""

    full_layers: int
    other_layers: int
    elements_a_token: int
    dtype: str


# Of those that a trace is counted for, as users write them; rooms, from what holds everything raw to a 32nd of it.
_COUNTED, _HALVES = {"raw": "raw", "lossless": "lossless", "tide:5e-3": "tide (profile light)"}, 6


class HitRow(msgspec.Struct, frozen=True):
    """A room and, by codec, the share of a trace's blocks that come from a store of that size."""

    gb: float
    hit_rates: dict[str, float]


class SizeRow(msgspec.Struct, frozen=True):
    """One codec: GB are 10^9 bytes, `disk_tokens` what the disk holds."""

    codec: str
    gb_per_1000_tokens: float
    disk_tokens: int


def size(
    model: Annotated[Path, typer.Option(help="A model's folder, or its config.json.")],
    disk_gb: Annotated[float, typer.Option(min=0.001, max=1e9, help="Room there, in 10^9 bytes.")] = 100.0,
    dtype: Annotated[str, typer.Option(help="Of the cache, if not the config's.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Your trace, or a folder of logs: *.jsonl, *.jsonl.gz.")] = None,
    policy: Annotated[Literal["lru", "s3fifo", "mix"], typer.Option(help="What leaves first; mix is slower.")] = "lru",
    block_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Of what has a hash_id in your trace.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Say how large a model's cache is by codec, what a disk holds of it, what your trace would hit, what to choose."""
    shape = cache_shape(read_config(model), dtype)
    rows = size_rows(shape, disk_gb)
    asked = read_prompts(trace, block_tokens) if trace is not None and shape.full_layers else None
    hits = hit_rows(asked, rows, policy, disk_gb) if asked is not None else []
    asked_for = None if asked is None else {**asked._asdict(), "prompts": len(asked.prompts)}
    others = f"{shape.other_layers} more keep a window or a state, which does not grow with the prompt."
    block = format_bytes(rows[0].gb_per_1000_tokens * 1e6 * 256)
    columns = ("codec", ">KB a token", ">GB per 1,000 tokens", f">tokens in {disk_gb:g} GB")
    figures = [
        (row.codec, f"{row.gb_per_1000_tokens * 1e3:.1f}", f"{row.gb_per_1000_tokens:.3f}", f"{row.disk_tokens:,}")
        for row in rows
    ]
    say(
        {"model": str(model), "disk_gb": disk_gb, "shape": shape, "rows": rows, "trace": asked_for, "hits": hits},
        as_json,
        f"{shape.full_layers} layers, {shape.elements_a_token:,} elements a token, {shape.dtype}",
        *([others] if shape.other_layers else []),
        narrow_table(columns, figures),
        "raw and lossless are exact. All but raw are as measured on SmolLM2-135M.",
        *(_chart(asked, hits, policy) if asked is not None else []),
        f"A block of 256 tokens takes {block} of memory: have room for your longest prompt.",
        "Take lossless, the default, unless disk or link is too small.",
        "For tide fit a profile: kvtide calibrate MODEL --store URL",
    )


def read_config(model: Path) -> Config:
    """Read a model's config. ValueError if there is none to be read."""
    path = model / "config.json" if model.is_dir() else model
    config = read_json(path, Config, f"no model's config at {path}, as in kvtide size --model FOLDER:")
    return config.text_config or config


def cache_shape(config: Config, dtype: str = "") -> CacheShape:
    """The cache that a config describes. ValueError if it does not say enough."""
    layers, heads = config.num_hidden_layers or config.n_layer, config.num_attention_heads or config.n_head
    hidden = config.hidden_size or config.n_embd
    chosen = dtype or (config.dtype or config.torch_dtype or "bfloat16").removeprefix("torch.")
    if chosen not in _DTYPE_BITS:
        raise ValueError(f"the cache's dtype is one of {', '.join(_DTYPE_BITS)}, got {chosen!r}: give --dtype")
    head_dim = config.head_dim or (hidden // heads if heads else 0)
    elements = 2 * (config.num_key_value_heads or heads) * head_dim
    if config.kv_lora_rank:
        # Latent attention keeps one vector a token for keys and values of all heads, and the part with positions.
        elements = config.kv_lora_rank + config.qk_rope_head_dim
    if min(layers, elements) <= 0:
        raise ValueError("the config does not say how many layers, heads and dimensions the cache has")
    kinds = config.layer_types or ["full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    return CacheShape(full, len(kinds) - full, full * elements, chosen)


def size_rows(shape: CacheShape, disk_gb: float) -> list[SizeRow]:
    """A row for each codec, the exact ones first."""
    raw_bits = float(_DTYPE_BITS[shape.dtype])
    bits = {"raw": raw_bits, "lossless": raw_bits * _LOSSLESS_SHARE[shape.dtype], **_LOSSY_BITS}
    token_bytes = {codec: shape.elements_a_token * each / 8 for codec, each in bits.items()}
    return [SizeRow(codec, each / 1e6, int(disk_gb * 1e9 / each) if each else 0) for codec, each in token_bytes.items()]


def hit_rows(asked: AskedPrompts, rows: list[SizeRow], policy: str, disk_gb: float) -> list[HitRow]:
    """A row for each room, the smallest first: halves of what holds all blocks raw, and the disk's."""
    block_gb = {row.codec: row.gb_per_1000_tokens * asked.block_tokens / 1000 for row in rows}
    count, rate = asked.different_blocks, cache(partial(hit_rate, asked, policy))
    halves = [count * block_gb["raw"] / 2**half for half in range(_HALVES)]
    return [
        HitRow(gb, {codec: rate(min(count, round(gb / block_gb[name]))) for codec, name in _COUNTED.items()})
        for gb in sorted({*halves, min(disk_gb, halves[0])})
    ]


def _chart(asked: AskedPrompts, hits: list[HitRow], policy: str) -> list[str | Table]:
    """Draw hits as bars: a line a room, a column a codec."""
    most = max(max(hit.hit_rates.values()) for hit in hits) or 1.0
    lines = [
        [f"{hit.gb:.3g}", *(f"{'█' * round(12 * x / most):12} {x:.3f}" for x in hit.hit_rates.values())] for hit in hits
    ]
    blocks = f"{asked.blocks:,} blocks of {asked.block_tokens} tokens, {asked.different_blocks:,} different ones"
    said = f"Of your {len(asked.prompts):,} prompts ({blocks}) this share comes from a store of so many GB ({policy}):"
    return [said, narrow_table((">GB", *_COUNTED), lines)]


# The prompts of a user's trace or logs. No more is read than these bounds say.
LINE_BYTES_MAX, BLOCKS_MAX = 16 << 20, 1 << 22
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
    for file in sorted([*path.rglob("*.jsonl"), *path.rglob("*.jsonl.gz")]) if path.is_dir() else [path]:
        for where, row in read_lines(file, _Line):
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


def read_lines(path: Path, kind: type[_Row]) -> Iterator[tuple[str, _Row]]:
    """Yield the values in a file, each a line of JSON, and where it is; unpacks `.gz`. ValueError for another file."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LINE_BYTES_MAX), b""), 1):
                if line.strip():
                    yield f"{path}: line {number}", msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
