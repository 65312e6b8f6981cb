"""Ways to change a live model so that its cache is another, each taken back at the end of its `with`."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

# A power of two: the way back is exact.
TIMES = 2.0
MODELS = ("plain", "cast", "inferred")


def make_model(seed: int = 7) -> Any:
    """A Llama with random weights, large enough to matter: two layers, two KV heads of size 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    # Without padding `generate` hides no token that looks like it.
    config = LlamaConfig(**shape, **heads, initializer_range=0.2, eos_token_id=None, pad_token_id=None)
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


def _writing(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


@contextmanager
def _scaled(tensor: torch.Tensor, writing: Callable[..., AbstractContextManager[Any]] = _writing) -> Iterator[None]:
    with writing(tensor):
        tensor.mul_(TIMES)
    yield
    with writing(tensor):
        tensor.mul_(1 / TIMES)


def _by_data(model: Any) -> Iterator[None]:
    weight = _weight(model)
    before = weight.data.clone()
    with _writing(weight):
        weight.data.copy_(before.roll(1, 0))
    yield
    with _writing(weight):
        weight.data.copy_(before)


def _by_numpy(model: Any) -> Iterator[None]:
    view = _weight(model).detach().numpy()
    view *= TIMES
    yield
    view /= TIMES


def _scaling(model: Any) -> Iterator[None]:
    attention = model.model.layers[0].self_attn
    attention.scaling *= TIMES
    yield
    attention.scaling /= TIMES


def _before_hook(model: Any) -> AbstractContextManager[Any]:
    norm = model.model.layers[1].input_layernorm
    return norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.5, *inputs[1:]))


def _hook_on_all(model: Any) -> AbstractContextManager[Any]:
    layer = model.model.layers[0]
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 1.5 if module is layer else None
    )


def _forward(model: Any) -> Iterator[None]:
    layer = model.model.layers[0]
    usual = layer.forward
    layer.forward = lambda *args, **named: usual(*args, **named) * 1.5
    yield
    del layer.forward


def _load(model: Any) -> Iterator[None]:
    before = copy.deepcopy(model.state_dict())
    with _writing(_weight(model)):
        model.load_state_dict({name: tensor.roll(1, -1) for name, tensor in before.items()})
    yield
    with _writing(_weight(model)):
        model.load_state_dict(before)


def _module(model: Any) -> Iterator[None]:
    layer = model.model.layers[0]
    before, layer.mlp = layer.mlp, make_model(8).model.layers[0].mlp
    yield
    layer.mlp = before


CHANGES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "in place": lambda model: _scaled(_weight(model)),
    "in inference mode": lambda model: _scaled(_weight(model), lambda tensor: torch.inference_mode()),
    "by .data": contextmanager(_by_data),
    "by a numpy view": contextmanager(_by_numpy),
    "of a buffer": lambda model: _scaled(model.model.rotary_emb.inv_freq),
    "of the attention's scaling": contextmanager(_scaling),
    "by a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *given: given[2] + 0.5),
    "by a hook before": _before_hook,
    "by a hook on all modules": _hook_on_all,
    "of a forward method": contextmanager(_forward),
    "by load_state_dict": contextmanager(_load),
    "of a module": contextmanager(_module),
}


USES = ("continue", "crop", "reset", "write")


def use_cache(kind: str, model: Any, past: Any, ids: torch.Tensor, back: int) -> None:
    """Use a cache that a call returned for `ids`, as callers may; `back` tokens are taken off it by a crop."""
    following = (ids.flip(1)[:, :30] + 7) % model.config.vocab_size
    if kind == "crop":
        past.crop(-back)
        ids = torch.cat([ids[:, : past.get_seq_length()], following.repeat(1, 1 + back // 30)], 1)
    if kind in {"continue", "crop"}:
        ids = torch.cat([ids, following], 1)
        model.generate(ids, past_key_values=past, do_sample=False, max_new_tokens=4)
    elif kind == "reset":
        past.reset()
    else:
        with torch.inference_mode():
            for layer in past.layers:
                layer.keys.mul_(3)
                layer.values.add_(1)
