"""Tiny models as GGUF files: of random weights, which answer otherwise at the smallest change."""

from pathlib import Path

import gguf
import numpy as np

_SPECIAL = ("<unk>", "<s>", "</s>")
VOCABULARY, WIDTH = len(_SPECIAL) + 256, 64


class _Writer:
    """A GGUF file with a vocabulary of bytes, whose weights are random."""

    def __init__(self, path: Path, arch: str, layers: int, seed: int) -> None:
        self.file = gguf.GGUFWriter(path, arch)
        self._rng = np.random.default_rng(seed)
        self.file.add_name(f"tiny {arch}")
        self.file.add_block_count(layers)
        self.file.add_context_length(4096)
        self.file.add_embedding_length(WIDTH)
        self.file.add_layer_norm_rms_eps(1e-5)
        self.file.add_tokenizer_model("llama")
        self.file.add_token_list([*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])
        self.file.add_token_scores([0.0] * VOCABULARY)
        kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        self.file.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256])
        self.file.add_bos_token_id(1)
        self.file.add_eos_token_id(2)
        self.matrix("token_embd", VOCABULARY, WIDTH)
        self.norm("output_norm", WIDTH)

    def matrix(self, name: str, *shape: int) -> None:
        values = self._rng.standard_normal(shape) / np.sqrt(shape[-1]) * 1.5
        self.file.add_tensor(f"{name}.weight", values.astype(np.float16))

    def norm(self, name: str, *shape: int, kind: str = "weight") -> None:
        dot = f".{kind}" if kind else ""
        self.file.add_tensor(f"{name}{dot}", (1 + 0.1 * self._rng.standard_normal(shape)).astype(np.float32))

    def finish(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write_model(path: Path, arch: str = "llama", layers: int = 3, seed: int = 0, window: int = 0) -> Path:
    """Write a transformer of 4 heads, 2 of keys and values. window: of all layers but each sixth, as Gemma's."""
    writer, inner, dims = _Writer(path, arch, layers, seed), 128, 32
    writer.file.add_feed_forward_length(inner)
    writer.file.add_head_count(4)
    writer.file.add_head_count_kv(2)
    writer.file.add_key_length(dims)
    writer.file.add_value_length(dims)
    writer.file.add_rope_dimension_count(dims)
    writer.file.add_rope_freq_base(10000.0)
    if window:
        writer.file.add_sliding_window(window)
    writer.matrix("output", VOCABULARY, WIDTH)
    for layer in range(layers):
        at = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") if window else ())):
            writer.norm(f"{at}.{name}", WIDTH)
        for name in ("attn_q_norm", "attn_k_norm") if window else ():
            writer.norm(f"{at}.{name}", dims)
        writer.matrix(f"{at}.attn_q", 4 * dims, WIDTH)
        writer.matrix(f"{at}.attn_k", 2 * dims, WIDTH)
        writer.matrix(f"{at}.attn_v", 2 * dims, WIDTH)
        writer.matrix(f"{at}.attn_output", WIDTH, 4 * dims)
        writer.matrix(f"{at}.ffn_gate", inner, WIDTH)
        writer.matrix(f"{at}.ffn_up", inner, WIDTH)
        writer.matrix(f"{at}.ffn_down", WIDTH, inner)
    writer.finish()
    return path


def write_mamba(path: Path) -> Path:
    """Write a model of one layer that keeps a state."""
    writer, inner, state, rank = _Writer(path, "mamba", 1, 0), 128, 16, 4
    writer.file.add_feed_forward_length(0)
    writer.file.add_head_count(0)
    writer.file.add_ssm_conv_kernel(4)
    writer.file.add_ssm_inner_size(inner)
    writer.file.add_ssm_state_size(state)
    writer.file.add_ssm_time_step_rank(rank)
    writer.norm("blk.0.attn_norm", WIDTH)
    writer.matrix("blk.0.ssm_in", 2 * inner, WIDTH)
    writer.norm("blk.0.ssm_conv1d", inner, 4)
    writer.norm("blk.0.ssm_conv1d", inner, kind="bias")
    writer.matrix("blk.0.ssm_x", rank + 2 * state, inner)
    writer.matrix("blk.0.ssm_dt", inner, rank)
    writer.norm("blk.0.ssm_dt", inner, kind="bias")
    writer.norm("blk.0.ssm_a", inner, state, kind="")
    writer.norm("blk.0.ssm_d", inner, kind="")
    writer.matrix("blk.0.ssm_out", WIDTH, inner)
    writer.finish()
    return path
