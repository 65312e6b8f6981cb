"""Whole codecs that tools/gpu.py times: objects to pages and back, checked against the processor's."""

from typing import Any

import numpy as np
import torch

from gpu_cases import Size, is_real, rate, seconds
from kvtide.block import BlockBits, BlockLayout, BlockMeta, KVDtype
from kvtide.codec import Codec
from kvtide.codec.published import CachegenCodec, ChunkwiseCodec, ProfileFitter
from kvtide.codec.tide import TideCodec
from kvtide.codec.tide.model import TideModel
from kvtide.engines import installed_profiles
from kvtide.keys import block_keys
from kvtide.types import BlockKey, Namespace, ObjectId
from kvtide_gpu.groups import DeviceGroups
from kvtide_gpu.kernels import Kernels
from kvtide_gpu.targets import StoredBlock, page_target
from kvtide_gpu.tide import DeviceTide
from kvtide_gpu.tide_encode import DeviceTideEncoder, PagedBlock
from kvtide_gpu.tide_model import DeviceModel


def block_meta(layout: BlockLayout, position: int) -> BlockMeta:
    """Return the identity of block `position` of a made-up prompt."""
    space = Namespace(bytes(32))
    tokens = np.arange(layout.tokens * (position + 1), dtype=np.uint32)
    keys = [BlockKey(space), *block_keys(space, tokens, layout.tokens)]
    return BlockMeta(ObjectId(space, keys[-1]), keys[-2], position * layout.tokens, layout, "made-up float")


def smooth_bits(layout: BlockLayout, seed: int) -> BlockBits:
    """Return bit patterns of normally distributed values in bfloat16 or float16."""
    values: Any = torch.from_numpy(np.random.default_rng(seed).normal(size=layout.shape))
    dtype = torch.bfloat16 if layout.dtype is KVDtype.BFLOAT16 else torch.float16
    found: BlockBits = values.to(dtype).view(torch.int16).numpy().view(np.uint16)
    return found


def model_block(model: TideModel, layout: BlockLayout, start: int, seed: int) -> np.ndarray:
    """A block as the profile says that the model's are: each component normal with its scale, keys turned."""
    rng = np.random.default_rng(seed)
    values = np.empty(layout.shape, dtype=np.float32)
    for group in model.groups:
        mean, weight = model.mean_and_weight(group)
        noise = rng.normal(size=(layout.tokens, len(group.scales))) * np.exp2(group.scales / 12)
        flat = np.zeros((layout.tokens, group.shape[1]))
        if group.order.size:
            flat[:, group.order] = noise
        else:
            flat = noise @ (group.matrix.astype(np.float64) / 8192)
        layers = slice(group.layer_start, group.layer_stop)
        shaped = (flat / weight + mean).reshape(layout.tokens, -1, 2, layout.kv_heads, layout.head_dim)
        values[layers] = shaped.transpose(1, 2, 0, 3, 4)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    if model.rotary is not None:
        for layer, keys in enumerate(values[:, 0]):
            tables = model.rotary.tables(start, layout.tokens, layer)
            turned = model.rotary.load(keys.view(np.uint32), KVDtype.FLOAT32, tables)
            bits[layer, 0] = turned.view(np.uint32) >> 16
    return bits


def tide_case(kernels: Kernels, size: Size, kind: str) -> dict[str, Any]:
    """Whole objects to pages, with what the host does; and the same checked against the processor's codec."""
    profile = next((found for found in installed_profiles() if found.kind == kind), None)
    if profile is None:
        raise ValueError(f"no {kind} profile is installed: pip install ./lab, which has those that are measured")
    tokens = 256 if is_real(kernels) else 32
    layout = BlockLayout(profile.layers, tokens, profile.kv_heads, profile.head_dim, KVDtype.BFLOAT16)
    codec, model = TideCodec(profile, 5e-3, 2).rounded(), TideModel(profile)
    distinct = [(block_meta(layout, i), i) for i in range(min(2, size.blocks))]
    coded = [(meta, codec.encode(meta, model_block(model, layout, meta.start, seed))) for meta, seed in distinct]
    page_tokens = 16
    per_block = tokens // page_tokens
    shape = (size.blocks * per_block, layout.kv_heads, page_tokens, 2 * layout.head_dim)
    with kernels.queue():
        layers = [torch.zeros(shape, dtype=torch.int16, device=kernels.device) for _ in range(layout.layers)]
    target = page_target(layers, layout)
    tide = DeviceTide(device := DeviceModel(kernels, model), target)
    starts = [target.token_starts(range(i * per_block, (i + 1) * per_block)) for i in range(size.blocks)]

    def decode() -> None:
        blocks = [
            (tide.block(coded[i % len(coded)][0], start), coded[i % len(coded)][1]) for i, start in enumerate(starts)
        ]
        tide.feed(blocks)
        kernels.follow()
        tide.write([block for block, _ in blocks])
        assert tide.check([block for block, _ in blocks]) == [None] * len(blocks)

    took = seconds(kernels, decode)
    _check_pages(layers, layout, codec, coded, per_block)
    encoder = DeviceTideEncoder(device, target, codec.steps)
    encode_s = seconds(
        kernels, lambda: encoder.encode([PagedBlock(coded[i % len(coded)][0], start) for i, start in enumerate(starts)])
    )
    elements = size.blocks * layout.raw_bytes // 2
    stored = sum(len(section.data) for section in coded[0][1])
    return {
        "profile": kind,
        "blocks": size.blocks,
        "bits": 8 * stored / (layout.raw_bytes // 2),
        "decode_gelem_s": rate(elements, took, 1e9),
        "encode_gelem_s": rate(elements, encode_s, 1e9),
        "raw_gb_s": rate(2 * elements, took, 1e9),
    }


def _check_pages(
    layers: list[torch.Tensor], layout: BlockLayout, codec: Codec, coded: list[Any], per_block: int
) -> None:
    for i, (meta, sections) in enumerate(coded):
        expected = np.empty(layout.shape, np.uint16)
        meta_checked: BlockMeta = meta
        codec.decode(meta_checked, sections, expected)
        pages = torch.stack([layer[i * per_block : (i + 1) * per_block] for layer in layers]).cpu().numpy()
        found = (
            pages.view(np.uint16).transpose(0, 1, 3, 2, 4).reshape(layout.layers, layout.tokens, layout.kv_heads, -1)
        )
        assert np.array_equal(found[..., : layout.head_dim], expected[:, 0]), "keys"
        assert np.array_equal(found[..., layout.head_dim :], expected[:, 1]), "values"


def groups_case(kernels: Kernels, size: Size, kind: str) -> dict[str, Any]:
    """Blocks of an 8B model's shape by a published codec: objects to pages, and blocks of this machine to objects."""
    layers, tokens, heads, head_dim = (32, 256, 8, 128) if is_real(kernels) else (2, 32, 2, 8)
    layout = BlockLayout(layers, tokens, heads, head_dim, KVDtype.BFLOAT16)
    fitter, bits = ProfileFitter(kind, "made up", layout), smooth_bits(layout, 1)
    fitter.scale([bits])
    fitter.add(bits)
    maker = {"cachegen": CachegenCodec, "chunkwise": ChunkwiseCodec}[kind]
    codec, meta = maker(3, 0, fitter.profile(texts=1)), block_meta(layout, 0)
    sections, groups = codec.encode(meta, bits), DeviceGroups(kernels)
    assert groups.encode(codec, meta, bits) == sections
    encode_s = seconds(kernels, lambda: groups.encode(codec, meta, bits))
    count, per_block = min(16, size.blocks), tokens // 16
    with kernels.queue():
        shape = (count * per_block, heads, 16, 2 * head_dim)
        pages = [torch.zeros(shape, dtype=torch.int16, device=kernels.device) for _ in range(layers)]
    target = page_target(pages, layout)
    starts = [target.token_starts(range(i * per_block, (i + 1) * per_block)) for i in range(count)]
    blocks = [StoredBlock(meta, sections, each) for each in starts]

    def decode() -> None:
        assert all(groups.write(codec, blocks, target, kernels.follow))

    decode_s = seconds(kernels, decode)
    _check_pages(pages, layout, codec, [(meta, sections)], per_block)
    elements = layout.raw_bytes // 2
    return {
        "blocks": count,
        "bits": 8 * sum(len(section.data) for section in sections) / elements,
        "decode_gelem_s": rate(count * elements, decode_s, 1e9),
        "encode_gelem_s": rate(elements, encode_s, 1e9),
    }
