"""The cost of a layer's width to tide: profile, bits at equal distortion, decoding beside `tide-light` in one run.

The first two widths are SmolLM2's own caches, one head of three and all. The others are of Llamas of random weights,
two layers of a real model's sizes: their caches say what a width costs, not what a transform gains on real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Profile
from kvtide.codec.rotary import Rotary
from kvtide.codec.tide import COSTS, Moments, Steps, TideCodec, TideCounts, draft_profile, finished_profile
from kvtide.codec.tide.model import TideModel
from kvtide.engines.calibrate import snippets
from kvtide.engines.calibrate.judge import block_metas, capture_blocks
from kvtide.engines.transformers import converted_folder, load_model, load_tokenizer
from kvtide_lab.bench.codec_speed import measure, pinned

BLOCK_TOKENS, TEXT_BLOCKS, TEXTS = 256, 2, 12
# The last text is coded and not fitted on. Steps about those of a KL of 5e-3, in units.
UNITS = (-26, -17, -7)
LAYERS, STATED_LAYERS = 2, 32
SECONDS = 1.0
_CURVE = np.array([[-40, 5, 1e-4], [0, 1, 1e-2]], dtype=np.float32)


class Width(NamedTuple):
    """KV heads, dims of a head, and the hidden size of the random Llama; 0: SmolLM2's own caches."""

    name: str
    heads: int
    dims: int
    hidden: int


WIDTHS = (
    Width("1 x 64, SmolLM2", 1, 64, 0),
    Width("3 x 64, SmolLM2", 3, 64, 0),
    Width("4 x 128, random", 4, 128, 2048),
    Width("8 x 128, random", 8, 128, 4096),
    Width("16 x 256, random", 16, 256, 3072),
    Width("2 x 288 (MLA's 512 + 64), random", 1, 288, 2048),
)


class WidthRow(msgspec.Struct, frozen=True):
    """One width. bits: of `tide-layer`; light_bits: of `tide-light` at the same error. profile_bytes: of 32 layers."""

    name: str
    transform: str
    profile_bytes: int
    bits: float
    light_bits: float
    light_gelem_s: float
    gelem_s: float
    over_light: float


class WidthResult(msgspec.Struct, frozen=True):
    """All widths."""

    rows: list[WidthRow]


class _Caches(NamedTuple):
    layout: BlockLayout
    rotary: Rotary | None
    fitted: list[tuple[BlockMeta, BlockBits]]
    coded: tuple[BlockMeta, BlockBits]


def run(show: Callable[[str, int, int], None], names: Sequence[str] = ()) -> WidthResult:
    """Measure widths whose name begins with one of `names`, all without any. ValueError if there is none."""
    chosen = [each for each in WIDTHS if not names or each.name.startswith(tuple(names))]
    if not chosen:
        raise ValueError(f"unknown widths {', '.join(names)}, expected {'; '.join(each.name for each in WIDTHS)}")
    rows = []
    for number, width in enumerate(chosen):
        show(width.name, number, len(chosen))
        rows.append(measure_width(width, TEXTS))
    return WidthResult(rows)


def measure_width(width: Width, texts: int, seconds: float = SECONDS) -> WidthRow:
    """Fit `tide-light` and `tide-layer` on all texts but one, and code a block of that."""
    caches = _caches(width, texts)
    light, layer = (_fitted(caches, cost) for cost in ("light", "layer"))
    weight = TideModel(layer).weight
    found = {profile.kind: [_coded(profile, units, caches, weight) for units in UNITS] for profile in (light, layer)}
    bits, error = found[layer.kind][1]
    errors, sizes = np.log([each[1] for each in found[light.kind]]), [each[0] for each in found[light.kind]]
    # Twice the error is half a bit less.
    light_bits = float(
        np.interp(np.log(error), errors, sizes, left=sizes[0] + 0.5 * (errors[0] - np.log(error)) / np.log(2))
    )
    with pinned():
        light_rate, rate = (_decoding(profile, caches, seconds) for profile in (light, layer))
    stated = len(layer.to_bytes()) * STATED_LAYERS // caches.layout.layers
    return WidthRow(width.name, _transform_of(layer), stated, bits, light_bits, light_rate, rate, rate / light_rate)


def _transform_of(profile: Profile) -> str:
    arrays = profile.arrays
    if "mixed" not in arrays:
        return f"one matrix of {arrays['fine'].shape[-1]}"
    return f"blocks of {arrays['block_unit'].shape[-1]}, {arrays['mixed'].shape[-1]} mixed"


def _caches(width: Width, texts: int) -> _Caches:
    contents = [text.content for text in snippets(2 * texts)]
    tokens = TEXT_BLOCKS * BLOCK_TOKENS
    if width.hidden:
        model: Any = _random_model(width)
        ids = [list((content * 4).encode())[:tokens] for content in contents]
        layers = LAYERS
    else:
        model, tokenizer = load_model(converted_folder()), load_tokenizer(converted_folder())
        ids = [tokenizer(content).input_ids[:tokens] for content in contents]
        layers = model.config.num_hidden_layers
    ids = [each for each in ids if len(each) == tokens][:texts]
    heads = width.heads if width.hidden else model.config.num_key_value_heads
    whole = BlockLayout(layers, BLOCK_TOKENS, heads, width.dims, KVDtype.FLOAT32)
    layout = BlockLayout(layers, BLOCK_TOKENS, width.heads, width.dims, KVDtype.FLOAT32)
    pairs: list[tuple[BlockMeta, BlockBits]] = []
    for each in ids:
        blocks = capture_blocks(model, each, whole)
        for meta, bits in zip(block_metas(each, layout), blocks, strict=True):
            own: BlockBits = np.ascontiguousarray(bits[..., : width.heads, :], dtype=np.uint32)
            pairs.append((meta, own))
    return _Caches(layout, Rotary.from_config(model.config.to_dict()), pairs[:-TEXT_BLOCKS], pairs[-1])


def _random_model(width: Width) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width.hidden,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=width.heads,
        num_key_value_heads=width.heads,
        head_dim=width.dims,
    )
    return LlamaForCausalLM(config).eval()


def _fitted(caches: _Caches, cost: str) -> Profile:
    layout = caches.layout
    moments = Moments(layout, COSTS[cost])
    for meta, bits in caches.fitted:
        moments.add(meta, bits, caches.rotary)
    moments.add_sensitivity(np.ones((layout.layers, 2, layout.kv_heads * layout.head_dim)))
    draft = draft_profile("width", layout, cost, caches.rotary, moments.state)
    counts = TideCounts(draft)
    for number, (meta, bits) in enumerate(caches.fitted[::TEXT_BLOCKS]):
        counts.add(meta, bits, number)
    return finished_profile(draft, layout, counts.state, _CURVE)


def _coded(profile: Profile, units: int, caches: _Caches, weight: NDArray[Any]) -> tuple[float, float]:
    """Return bits an element, and the mean squared error of weighted values."""
    codec, (meta, bits) = TideCodec(profile).with_steps(Steps(units, 0)), caches.coded
    sections, out = codec.encode(meta, bits), np.empty_like(bits)
    codec.decode(meta, sections, out)
    lost = out.view(np.float32) - bits.view(np.float32)
    by_value = weight.reshape(meta.layout.layers, 2, 1, meta.layout.kv_heads, meta.layout.head_dim)
    return 8 * sum(len(each.data) for each in sections) / bits.size, float(np.square(lost * by_value).mean())


def _decoding(profile: Profile, caches: _Caches, seconds: float) -> float:
    """Return 10^9 elements decoded in a second of the thread's CPU time, as bfloat16, at the middle step."""
    layout, (meta, bits) = caches.layout, caches.coded
    narrow = BlockLayout(layout.layers, layout.tokens, layout.kv_heads, layout.head_dim, KVDtype.BFLOAT16)
    meta, bits = BlockMeta(meta.id, meta.parent, meta.start, narrow), (bits >> np.uint32(16)).astype(np.uint16)
    codec, out = TideCodec(profile).with_steps(Steps(UNITS[1], 0)), np.empty_like(bits)
    sections = codec.encode(meta, bits)
    return measure(lambda: codec.decode(meta, sections, out), bits.size, seconds, time.thread_time).median


def render(result: WidthResult) -> str:
    """Return a line for each width."""
    lines = [f"{'width':34} {'transform':28} {'MB of 32 layers':>15} {'bits':>6} {'light':>6} {'over light':>11}"]
    for row in result.rows:
        size = f"{row.profile_bytes / 1e6:>15.1f} {row.bits:>6.3f} {row.light_bits:>6.3f}"
        lines.append(f"{row.name:34} {row.transform:28} {size} {row.over_light:>11.2f}")
    return "\n".join(lines)
