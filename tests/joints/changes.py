"""Ways to change a live model so that its cache is another, each with the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

Undo = Callable[[], None]
# A power of two: the way back is exact.
TIMES = 2.0
MODELS = ("plain", "cast", "inferred")


def make_model(seed: int = 7) -> Any:
    """A Llama with random weights, large enough to matter: two layers, two KV heads of size 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
        # Without padding `generate` hides no token that looks like it.
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def make_models() -> dict[str, Any]:
    """One checkpoint loaded in three ways: as it is; by a cast that rounds its buffers too; in inference mode.

    Their weights are bfloat16's and the same; rotary frequencies of the second are not.
    """
    cast = make_model().to(torch.bfloat16).to(torch.float32)
    plain = make_model()
    plain.load_state_dict(cast.state_dict())
    with torch.inference_mode():
        inferred = make_model()
        inferred.load_state_dict(cast.state_dict())
    return dict(zip(MODELS, (plain, cast, inferred), strict=True))


def _weight(model: Any) -> Any:
    return model.model.layers[0].self_attn.k_proj.weight


def _in_place(model: Any) -> Undo:
    def times(factor: float) -> None:
        with torch.inference_mode() if _weight(model).is_inference() else torch.no_grad():
            _weight(model).mul_(factor)

    times(TIMES)
    return lambda: times(1 / TIMES)


def _by_data(model: Any) -> Undo:
    weight = _weight(model)
    before = weight.data.clone()
    with torch.inference_mode(weight.is_inference()):
        weight.data.copy_(before.roll(1, 0))

    def undo() -> None:
        with torch.inference_mode(weight.is_inference()):
            weight.data.copy_(before)

    return undo


def _by_numpy(model: Any) -> Undo:
    view = _weight(model).detach().numpy()
    view *= TIMES

    def undo() -> None:
        view[...] /= TIMES

    return undo


def _buffer(model: Any) -> Undo:
    buffer = model.model.rotary_emb.inv_freq
    with torch.inference_mode(buffer.is_inference()):
        buffer.mul_(1 / TIMES)

    def undo() -> None:
        with torch.inference_mode(buffer.is_inference()):
            buffer.mul_(TIMES)

    return undo


def _scaling(model: Any) -> Undo:
    attention = model.model.layers[0].self_attn
    attention.scaling *= TIMES

    def undo() -> None:
        attention.scaling /= TIMES

    return undo


def _hook(model: Any) -> Undo:
    def steer(module: Any, inputs: Any, output: Any) -> Any:
        return output + 0.5

    undo: Callable[[], None] = model.model.layers[0].mlp.register_forward_hook(steer).remove
    return undo


def _before_hook(model: Any) -> Undo:
    def steer(module: Any, inputs: Any) -> Any:
        return (inputs[0] + 0.5, *inputs[1:])

    undo: Callable[[], None] = model.model.layers[1].input_layernorm.register_forward_pre_hook(steer).remove
    return undo


def _load(model: Any) -> Undo:
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode(_weight(model).is_inference()):
        model.load_state_dict({name: tensor.roll(1, -1) for name, tensor in before.items()})

    def undo() -> None:
        with torch.inference_mode(_weight(model).is_inference()):
            model.load_state_dict(before)

    return undo


def _module(model: Any) -> Undo:
    layer = model.model.layers[0]
    before = layer.mlp
    layer.mlp = make_model(8).model.layers[0].mlp

    def undo() -> None:
        layer.mlp = before

    return undo


CHANGES: dict[str, Callable[[Any], Undo]] = {
    "in place": _in_place,
    "by .data": _by_data,
    "by a numpy view": _by_numpy,
    "of a buffer": _buffer,
    "of the attention's scaling": _scaling,
    "by a hook": _hook,
    "by a hook before": _before_hook,
    "by load_state_dict": _load,
    "of a module": _module,
}
