"""The alternatives of a user, where their wheel is installed: nvCOMP's ANS, LMCache's CacheGen kernels.

Written after the public documentation of nvCOMP 5 and the public source of LMCache 0.3 to 0.5, and never run.
"""

from typing import Any

import numpy as np
import torch

from gpu_cases import STREAM_SYMBOLS, Size, host_seconds, is_real, rans_data, rate, seconds
from kvtide_gpu.kernels import Kernels


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
        stream = torch.cuda.current_stream().cuda_stream
        codec = nvcomp.Codec(algorithm="ANS", data_type="|u1", cuda_stream=stream)
        source = nvcomp.as_array(data, cuda_stream=stream)
        coded = codec.encode(source)
        assert torch.equal(torch.from_dlpack(codec.decode(coded).to_dlpack(cuda_stream=stream)).view(torch.uint8), data)
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
        from lmcache.storage_backend.serde.cachegen_decoder import decode_function_gpu, do_dequantize
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
    coded = encode_function(kv, config, bins["k"], bins["v"], tokens)

    def encode() -> None:
        encode_function(kv, config, bins["k"], bins["v"], tokens)
        torch.cuda.synchronize()

    def decode() -> torch.Tensor:
        keys, _ = decode_function_gpu(coded.cdf, coded.data_chunks, layers, tokens, room)
        torch.cuda.synchronize()
        return keys

    # What it was given, to half a bin and what rounding to bfloat16 adds.
    keys, scale = kv[:, 0].reshape(layers, tokens, -1).float(), coded.max_tensors_key.float()
    off = (do_dequantize(decode(), bins["k"], scale) - keys).abs() / scale * (bins["k"] // 2 - 1)[:, None, None]
    assert float(off.max()) < 0.75, "LMCache's own blocks do not come back"
    # By the host's clock: which streams its kernels run on is its own affair.
    encode_s, decode_s = host_seconds(kernels, encode), host_seconds(kernels, decode)
    return {
        "symbols": kv.numel(),
        "decode_tsym_s": rate(kv.numel(), decode_s, 1e12),
        "encode_tsym_s": rate(kv.numel(), encode_s, 1e12),
    }
