"""Small models with random weights, and what they cache before and after their rotary embedding."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

Keys = NDArray[np.float32]
TOKENS = 40

_PLAIN = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPTJ = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 32, "n_positions": 256, "rotary_dim": 8}
_LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_LAYER_TYPES = ["sliding_attention", "full_attention"]
_WINDOWS: dict[str, Any] = {"sliding_window": 128, "layer_types": _LAYER_TYPES}
_ATTENTION: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
_MAMBA = {"d_ssm": 64, "n_heads": 4, "d_head": 16, "n_groups": 1, "d_state": 16, "chunk_size": 16}
_WIDE: dict[str, Any] = {"head_dim": 32}
_SPECIAL: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "num_key_value_heads": 1},
    "gemma3_text": _WIDE | _WINDOWS,
    **dict.fromkeys(("gemma2", "qwen3", "glm", "glm4", "ernie4_5"), _WIDE),
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    **dict.fromkeys(("qwen3_moe", "gpt_oss"), _EXPERTS | _WIDE),
    "mixtral": _EXPERTS,
    "olmo": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 1},
    "helium": {"head_dim": 16},
    **dict.fromkeys(("cohere2", "olmo3"), _WINDOWS),
    "smollm3": {"num_hidden_layers": 4},
    "gemma4_text": {
        **(_WIDE | _WINDOWS),
        **{"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    },
    "llama4_text": {
        **_EXPERTS,
        **{"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32},
        **{"attention_chunk_size": 128, "no_rope_layers": [1, 0]},
    },
    "qwen3_next": _EXPERTS | _WIDE | _ATTENTION | {"shared_expert_intermediate_size": 16},
    "lfm2": {"block_multiple_of": 32, **_ATTENTION},
    "falcon_h1": {f"mamba_{name}": value for name, value in _MAMBA.items()},
    "granitemoehybrid": {
        **_EXPERTS,
        **{"shared_intermediate_size": 32, "layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
}


def config_of(family: str, **changes: Any) -> Any:
    sizes = _GPTJ if family in {"gptj", "codegen"} else {**_PLAIN, **_SPECIAL.get(family, {})}
    return AutoConfig.for_model(family, **{**sizes, **changes})


def random_model(config: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def cached_keys(config: Any, tokens: int = TOKENS) -> list[tuple[Keys, Keys]]:
    """Return each layer's keys of tokens at positions 0, 1, …, and of the same tokens all at position 0.

    Of a model whose attention says nothing, so that every layer's keys depend on their own token alone.

    A key at position 0 is not rotated: a batch of single tokens gives all keys before RoPE, for any architecture.
    """
    model = random_model(config)
    for name, module in model.named_modules():
        if name.split(".")[-1] in {"o_proj", "out_proj", "dense", "wo"} and "mlp" not in name:
            for parameter in module.parameters():
                parameter.data.zero_()
    ids = torch.arange(tokens) % 64
    row, column = run(model, ids[None]), run(model, ids[:, None])
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    found = []
    for at, zero in zip(row.layers, column.layers, strict=True):
        # transformers keeps the latent as keys and the rotated part as values.
        both = [torch.cat([pages.keys, pages.values], -1) if is_latent else pages.keys for pages in (at, zero)]
        found.append((both[0][0].transpose(0, 1).numpy(), both[1][:, :, 0].numpy()))
    return found


def run(model: Any, ids: torch.Tensor) -> DynamicCache:
    past = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, past_key_values=past, use_cache=True)
    return past
