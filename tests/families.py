"""Model families with a few small layers of random weights: exactness does not depend on what weights are."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from truth import TRUTH

VOCABULARY = 1024
WINDOW = 256
_SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
_LATENT: dict[str, Any] = {
    # With more, attention over the latent dimensions is so sharp that rounding to bfloat16 decides tokens.
    "initializer_range": 0.07,
    **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
}
_MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 64},
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TIED = {"tie_word_embeddings": True}


def _layers(kind: str, count: int, times: int = 1, full: str = "full_attention") -> dict[str, list[str]]:
    """Return the types of layers: `count` of a kind and one of full attention, so many times."""
    return {"layer_types": [*[kind] * count, full] * times}


def _windows(count: int, times: int = 1) -> dict[str, Any]:
    return {"sliding_window": WINDOW, **_layers("sliding_attention", count, times)}


# Class of the configuration, and what differs from the common shape.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "mixtral": ("MixtralConfig", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "gpt2": ("GPT2Config", {}),
    # Five windows for each layer of full attention.
    "gemma3": ("Gemma3TextConfig", {**_windows(5), "num_hidden_layers": 6, "query_pre_attn_scalar": 64}),
    # A window in every second layer.
    "gemma2": ("Gemma2Config", {**_windows(1, 2), **_TIED, "query_pre_attn_scalar": 64}),
    "olmo3": ("Olmo3Config", _windows(3)),
    # No full attention anywhere.
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    # Windows of one page, and sinks.
    "gpt_oss": ("GptOssConfig", {**_windows(1, 2), **_LOCAL_EXPERTS, "sliding_window": 128}),
    # States of Mamba 2, and attention.
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{"hybrid_override_pattern": "M-M*", "mamba_num_heads": 4, "mamba_head_dim": 64, "n_groups": 1},
            **{"ssm_state_size": 64, "conv_kernel": 4, "chunk_size": 64},
        },
    ),
    # Two shapes of keys, one of them in windows.
    "gemma4": (
        "Gemma4TextConfig",
        {
            **{"global_head_dim": 128, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY},
            **{**_windows(3), **_TIED, "num_kv_shared_layers": 0},
        },
    ),
    # Attention within chunks of 256 tokens, and in one layer of four to all of them.
    "llama4": (
        "Llama4TextConfig",
        {
            **{"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            **{"intermediate_size_mlp": 256, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 1, 1, 0]},
            **{"use_qk_norm": True, "attn_temperature_tuning": True},
        },
    ),
    # One latent row a token.
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    # States of linear attention.
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64},
            **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 64},
            **{**_layers("linear_attention", 3), **_EXPERTS},
        },
    ),
    # States and latents.
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "linear_attn_config": {
                **{"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 128},
                "short_conv_kernel_size": 4,
            },
            "num_experts": 4,
        },
    ),
    # States of short convolutions alone.
    "lfm2": (
        "Lfm2Config",
        {
            **{"head_dim": 32, "block_multiple_of": 32, "conv_L_cache": 3, **_TIED},
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            **{**_MAMBA2, **_LOCAL_EXPERTS, **_layers("mamba", 3, full="attention"), "head_dim": 32},
            **{"shared_intermediate_size": 128, "position_embedding_type": "nope"},
        },
    ),
    # Keys, values and states in each layer.
    "falcon_h1": ("FalconH1Config", {**_MAMBA2, "mamba_d_ssm": 256, "mamba_rms_norm": False, "num_hidden_layers": 2}),
    # States alone.
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 64, "state_size": 64, "n_groups": 1, "expand": 2, "chunk_size": 64},
    ),
    # Two passes over these are not one: their states do not go on.
    "bamba": ("BambaConfig", {**_MAMBA2, "head_dim": 32, "attn_layer_indices": [3], "attn_rotary_emb": 32}),
    "jamba": (
        "JambaConfig",
        {
            **{"head_dim": 32, "attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 2},
            **{"expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 16},
            "mamba_dt_rank": 8,
        },
    ),
    "mamba": ("MambaConfig", {"state_size": 16, "initializer_range": 0.3}),
    "minimax": (
        "MiniMaxConfig",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 64, **_layers("linear_attention", 3)},
    ),
}


class Support(NamedTuple):
    """What tests prove of a family: how it is shown, what its layers keep, and where it is served.

    transformers: its tests in tests/engines. connector: those of KVTideConnector in tests/vllm. tier: of KVTideTier.
    """

    name: str
    keeps: str
    transformers: str
    connector: str = ""
    tier: str = ""


EXACT, TIDE, LOSSY, REFUSED = "exact", "exact, `tide`", "exact, lossy", "refused"
# docs/support.md shows these; tests take their families from here.
SUPPORT = {family: Support(**said) for family, said in TRUTH["models"].items()}


def families(engine: str, *how: str) -> list[str]:
    """Return the families that an engine (a field of `Support`) serves in one of these ways."""
    return [family for family, support in SUPPORT.items() if getattr(support, engine) in how]


def model_of_family(family: str) -> Any:
    """Return a model in float32, the same each time."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**_SHAPE, **changes})).eval()


def tiny_llama(seed: int = 7, **changes: Any) -> Any:
    """Return a Llama with random weights: three layers, two KV heads of size 16, or what `changes` say."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # Threads cost a model of this size more than they bring.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **changes})).eval()


def draft_checkpoint(folder: Path) -> Path:
    """Return a folder with a draft (EAGLE) for the `llama` checkpoint, which shares embedding and head with it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{**_SHAPE, "num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(1)
    layer = AutoModelForCausalLM.from_config(config).model.layers[0].state_dict()
    weights = {f"layers.0.{name}": tensor for name, tensor in layer.items() if not name.startswith("input_layernorm")}
    weights["fc.weight"] = torch.randn(_SHAPE["hidden_size"], 2 * _SHAPE["hidden_size"]) * 0.1
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


def checkpoint(family: str, folder: Path) -> Path:
    model_of_family(family).save_pretrained(folder)
    if family == "deepseek_v3":
        # vLLM wants what transformers does not write.
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "topk_method": "noaux_tc"}))
    return folder
