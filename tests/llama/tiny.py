"""Tiny models as GGUF files: of random weights, which answer otherwise at the smallest change."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

_SPECIAL = ("<unk>", "<s>", "</s>")
_KINDS = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256)
VOCABULARY, WIDTH, INNER, DIMS = len(_SPECIAL) + 256, 64, 128, 32


class _Writer(gguf.GGUFWriter):  # type: ignore[misc]  # gguf is not typed
    """A GGUF file with a vocabulary of bytes."""

    def __init__(self, path: Path, arch: str, layers: int, seed: int) -> None:
        super().__init__(path, arch)
        self._rng = np.random.default_rng(seed)
        self.add_name(f"tiny {arch}")
        self.add_block_count(layers)
        self.add_context_length(4096)
        self.add_embedding_length(WIDTH)
        self.add_layer_norm_rms_eps(1e-5)
        self.add_tokenizer_model("llama")
        self.add_token_list([*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])
        self.add_token_scores([0.0] * VOCABULARY)
        self.add_token_types(_KINDS)
        self.add_bos_token_id(1)
        self.add_eos_token_id(2)

    def write(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Write everything with tensors of random numbers: weights of matrices, and others around 1."""
        for name, shape in {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,), **shapes}.items():
            values = self._rng.standard_normal(shape)
            if len(shape) > 1 and name.endswith("weight") and "conv" not in name:
                self.add_tensor(name, (values / np.sqrt(shape[-1]) * 1.5).astype(np.float16))
            else:
                self.add_tensor(name, (1 + 0.1 * values).astype(np.float32))
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def write_model(
    path: Path, arch: str = "llama", layers: int = 3, seed: int = 0, window: int = 0, stretch: float = 0
) -> Path:
    """Write a transformer of 4 heads, 2 of keys and values. window: of all layers but each sixth or second, as Gemma's.

    stretch: of positions, as the file says it.
    """
    writer = _Writer(path, arch, layers, seed)
    if stretch:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(stretch)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(DIMS)
    writer.add_value_length(DIMS)
    writer.add_rope_dimension_count(DIMS)
    shapes = {"attn_q": (4 * DIMS, WIDTH), "attn_k": (2 * DIMS, WIDTH), "attn_v": (2 * DIMS, WIDTH)}
    shapes |= {"attn_output": (WIDTH, 4 * DIMS), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
    norms = {"ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    if window:
        writer.add_sliding_window(window)
        # Of layers that attend to all tokens; windows have 10,000.
        writer.add_rope_freq_base(1e6)
        norms |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
        norms |= {"attn_q_norm": (DIMS,), "attn_k_norm": (DIMS,)} if arch == "gemma3" else {}
    every = {f"blk.{n}.{name}.weight": shape for n in range(layers) for name, shape in {**shapes, **norms}.items()}
    output = {} if arch == "gemma2" else {"output.weight": (VOCABULARY, WIDTH)}
    writer.write({**output, **every})
    return path


def write_adapter(path: Path, seed: int) -> Path:
    """Write a LoRA adapter of the first layer's keys."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(seed)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for half, shape in (("lora_a", (4, WIDTH)), ("lora_b", (2 * DIMS, 4))):
        writer.add_tensor(f"blk.0.attn_k.weight.{half}", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_mamba(path: Path) -> Path:
    """Write a model of one layer that keeps a state."""
    writer = _Writer(path, "mamba", 1, 0)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(16)
    writer.add_ssm_time_step_rank(4)
    shapes = {"attn_norm.weight": (WIDTH,), "ssm_in.weight": (2 * INNER, WIDTH), "ssm_conv1d.weight": (INNER, 4)}
    shapes |= {"ssm_conv1d.bias": (INNER,), "ssm_x.weight": (36, INNER), "ssm_dt.weight": (INNER, 4)}
    shapes |= {"ssm_dt.bias": (INNER,), "ssm_a": (INNER, 16), "ssm_d": (INNER,), "ssm_out.weight": (WIDTH, INNER)}
    writer.write({f"blk.0.{name}": shape for name, shape in shapes.items()})
    return path
