"""What a user would pick instead, where its wheel is installed: nvCOMP's ANS, LMCache's CacheGen kernels."""

from typing import Any

import numpy as np
import torch

from gpu_cases import STREAM_SYMBOLS, Size, is_real, rans_data, rate, seconds
from kvtide.engines.gpu.kernels import Kernels


def nvcomp_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """nvCOMP's ANS on the symbols that our rANS is timed on, as bytes."""
    try:
        from nvidia import nvcomp
    except ImportError as error:
        return {"reason": f"not installed: {error}"}
    if not is_real(kernels):
        return {"reason": "needs a CUDA device"}
    _, _, symbols = rans_data(32)
    data = torch.from_numpy(np.tile(symbols, (size.streams // 32, 1))).to(kernels.device).reshape(-1)
    kernels.finish()
    total = size.streams * STREAM_SYMBOLS
    with kernels.queue():
        codec = nvcomp.Codec(algorithm="ANS", cuda_stream=torch.cuda.current_stream().cuda_stream)
        source = nvcomp.as_array(data)
        coded = codec.encode(source)
        encode_s = seconds(kernels, lambda: codec.encode(source))
        decode_s = seconds(kernels, lambda: codec.decode(coded))
    return {
        "bits": 8 * coded.buffer_size / total,
        "decode_tsym_s": rate(total, decode_s, 1e12),
        "encode_tsym_s": rate(total, encode_s, 1e12),
    }


def lmcache_case(kernels: Kernels, size: Size) -> dict[str, Any]:
    """LMCache's CacheGen on blocks of 256 tokens of an 8B model's shape, of normal values."""
    try:
        from lmcache.storage_backend.serde.cachegen_basics import CacheGenConfig
        from lmcache.storage_backend.serde.cachegen_decoder import decode_function_gpu
        from lmcache.storage_backend.serde.cachegen_encoder import encode_function
    except (ImportError, OSError) as error:
        return {"reason": f"not installed: {error}"}
    if not is_real(kernels):
        return {"reason": "needs a CUDA device"}
    config = CacheGenConfig.from_model_name("meta-llama/Llama-3.1-8B-Instruct")
    layers, tokens, heads, head_dim = 32, 256, 8, 128
    bins = {name: torch.zeros(layers, device=kernels.device) for name in ("k", "v")}
    for name, specs in (("k", config.kspecs), ("v", config.vspecs)):
        for spec in specs:
            bins[name][spec.start_layer : spec.end_layer] = spec.bins
    kv = torch.randn(layers, 2, tokens, heads, head_dim, device=kernels.device, dtype=torch.bfloat16)
    room = torch.zeros((tokens, 2 * layers * heads * head_dim), dtype=torch.uint8, device=kernels.device)
    torch.cuda.synchronize()
    with kernels.queue():
        coded = encode_function(kv, config, bins["k"], bins["v"], tokens)
        encode_s = seconds(kernels, lambda: encode_function(kv, config, bins["k"], bins["v"], tokens))
        decode_s = seconds(kernels, lambda: decode_function_gpu(coded.cdf, coded.data_chunks, layers, tokens, room))
    return {
        "symbols": kv.numel(),
        "decode_tsym_s": rate(kv.numel(), decode_s, 1e12),
        "encode_tsym_s": rate(kv.numel(), encode_s, 1e12),
    }
