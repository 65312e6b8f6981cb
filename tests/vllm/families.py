"""Checkpoints of model families with a few small layers of random weights, which real vLLM runs on a processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 1024
WINDOW = 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Class of the configuration, and what differs from the common shape.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Five windows for each layer of full attention.
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    # No full attention anywhere.
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    # Windows of one page, and sinks.
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # States of Mamba 2, and attention.
    "nemotron_h": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M-M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
    ),
}


def checkpoint(family: str, folder: Path) -> Path:
    """Return a folder with configuration and weights, which are the same each time."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**_SHAPE, **changes}))
    model.save_pretrained(folder)
    return folder
