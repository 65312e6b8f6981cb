"""A digest of everything that a live model's KV cache depends on, and a cheap look at each call for changes.

Invariant: two models share a digest only if config, every weight, every buffer and every module's numbers are the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, ValuesView
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
import xxhash
from numpy.typing import NDArray
from torch.nn.modules import module as torch_module

from kvtide.engines.transformers.groups import groups_of, is_plain
from kvtide.errors import UnsupportedModel
from kvtide.keys import namespace_digest
from kvtide.types import Namespace


class ModelIdentity:
    """A live model's groups and namespaces, kept up with its changes. `refusal`: why it can't be served, or None."""

    def __init__(
        self, model: Any, block_tokens: int, tenant_salt: bytes, fingerprint: bytes | None, is_exact: bool
    ) -> None:
        """fingerprint: the user's, until the model changes. is_exact: what lossy codecs store is apart (0005)."""
        self._model = model
        self._is_exact = is_exact
        self._watch = ModelWatch(model)
        self.block_tokens = block_tokens
        self.tenant_salt = tenant_salt
        self.given_fingerprint = fingerprint
        self.fingerprint = b""
        self._take_groups()
        # Of each group's parts; none, and an empty one, before the model has a name. Prompts are named in the first.
        self.namespaces: tuple[Namespace, ...] = ()
        self.namespace = Namespace(b"")
        self.refusal = self._identify()

    def _take_groups(self) -> None:
        self.groups = groups = groups_of(self._model, self.block_tokens)
        # How many blocks before a hit's end each group's parts must be there, 0 for all.
        self.reaches = tuple(each.group.reach_blocks(self.block_tokens) for each in groups)
        # Whether the model has blocks and not several parts of each, or keeps no rows of tokens at all.
        self.is_plain = is_plain(groups)
        self.is_of_states = all(each.states for each in groups)
        # Of blocks, where the first group is the only one.
        self.layout = groups[0].group.layout

    def follow(self) -> str | None:
        """Look whether the model has changed and return the `refusal`; see `ModelWatch` for what is seen."""
        if self._watch.follow():
            self.given_fingerprint = None
            self.refusal = self._identify()
        return self.refusal

    def renew(self, fingerprint: bytes | None) -> None:
        """Take the model as it is now, also what can't be seen of it; `fingerprint` is the user's new one."""
        self._watch.renew()
        self.given_fingerprint = fingerprint
        self.refusal = self._identify()

    def _identify(self) -> str | None:
        if self.given_fingerprint is None and (code := foreign_code(self._model)) is not None:
            return f"{code}, may change the cache and can't be named; give a fingerprint= that covers it"
        try:
            self._take_groups()
            self.fingerprint = self.given_fingerprint or self._watch.fingerprint()
        except UnsupportedModel as error:
            return str(error)
        # What a state's tensors mean is the library's own affair.
        library = f" by transformers {'.'.join(transformers.__version__.split('.')[:2])}"
        texts = [f"{each.group.text}{library if each.states else ''}" for each in self.groups]
        if self.is_plain:
            texts = [f"layers={self.layout.layers} kv_heads={self.layout.kv_heads} head_dim={self.layout.head_dim}"]
        quality, settings = "exact" if self._is_exact else "approximate", (self.block_tokens, self.tenant_salt)
        self.namespaces = tuple(
            namespace_digest(self.fingerprint, each.group.layout.dtype, f"{text} {quality}", *settings)
            for text, each in zip(texts, self.groups, strict=True)
        )
        self.namespace = self.namespaces[0]
        return None


# Config entries that say where a model came from or how it is written down, not what it computes.
_VOLATILE_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
# These are computed in float32 whatever a model is loaded in.
_ROPE_BUFFERS = {"inv_freq", "original_inv_freq"}
_SCALARS = (bool, int, float, str, type(None))
# Packages whose hooks and replaced `forward`s are taken to leave keys and values as they are.
_TRUSTED_PACKAGES = {"accelerate", "torch", "transformers"}
# Of each weight and buffer so many elements are looked at in a call, and others in the next, before they come again.
SAMPLE_ELEMENTS = 16
SAMPLE_ROUNDS = 16
_GOLDEN_RATIO = 0.6180339887
# After the last value, so that one more or less shows.
_END = object()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_fingerprint(model: Any) -> bytes:
    """Return a digest of config, all weights, buffers and modules' numbers. UnsupportedModel if not in memory."""
    return ModelWatch(model).fingerprint()


def fingerprint_in(model: Any, dtype: str) -> bytes | None:
    """Return the digest of a float32 model loaded in `dtype`, None if that can't be told: modules differ in dtype."""
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    kept = model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict
    if any(kept) or not buffers <= _ROPE_BUFFERS or model.config.sub_configs:
        return None
    return hashlib.sha256(_structure_digest(model) + _tensors_digest(model, getattr(torch, dtype))).digest()


def _structure_digest(model: Any) -> bytes:
    config = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE_CONFIG}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, module in model.named_modules():
        # Attention scaling, epsilons and the like are plain attributes.
        values = {key: value for key, value in vars(module).items() if isinstance(value, _SCALARS)}
        numbers = {key: value for key, value in values.items() if not key.startswith("_") and key != "name_or_path"}
        digest.update(f"{name} {type(module).__qualname__} {sorted(numbers.items())}\n".encode())
    return digest.digest()


def _tensors_digest(model: Any, dtype: torch.dtype | None = None) -> bytes:
    """Return a digest of all tensors; dtype: of the parameters, None for their own."""
    digest = hashlib.sha256()
    for name, own in sorted(_named_tensors(model), key=lambda item: item[0]):
        tensor = own if dtype is None or not isinstance(own, torch.nn.Parameter) else own.detach().to(dtype)
        if tensor.device.type == "meta":
            raise UnsupportedModel(f"the weight {name} is not in memory (offloaded)")
        data = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(data)}\n".encode())
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name} {value!r}\n".encode())
    return digest.digest()


def _named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers (also those that are not saved) and tensors that are plain attributes."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value


def foreign_code(model: Any) -> str | None:
    """Name a hook or a replaced `forward` that may change keys and values, None if there is none."""
    hooks = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    found = [("a hook on all modules", code, _TRUSTED_PACKAGES) for code in hooks]
    for name, module in model.named_modules():
        replaced = [vars(module)["forward"]] if "forward" in vars(module) else []
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *replaced]
        found += [(f"a hook on {name or 'the model'}", code, _TRUSTED_PACKAGES) for code in hooks]
        own = {*_TRUSTED_PACKAGES, type(module).__module__.partition(".")[0]}
        found.append((f"another forward of {type(module).__qualname__}", type(module).forward, own))
    for what, code, packages in found:
        if not _is_trusted(code, packages):
            return f"{what}, {getattr(code, '__qualname__', None) or type(code).__qualname__}"
    return None


def _is_trusted(code: Any, packages: Collection[str]) -> bool:
    """Tell whether a function and all that it wraps are of these packages."""
    while code is not None:
        function = getattr(code, "__func__", code)
        # Not `__module__`, which `functools.wraps` copies from what is wrapped.
        home = function.__globals__["__name__"] if hasattr(function, "__globals__") else type(function).__module__
        if not isinstance(code, functools.partial) and home.partition(".")[0] not in packages:
            return False
        code = code.func if isinstance(code, functools.partial) else getattr(function, "__wrapped__", None)
    return True


class _Sample(NamedTuple):
    """Elements of a tensor in memory, by round. reads(positions): their bits, which were `known` as bytes."""

    reads: Callable[[NDArray[np.int64]], NDArray[Any]]
    positions: list[NDArray[np.int64]]
    known: list[bytes]


class ModelWatch:
    """Notices changes of a live model between two calls.

    It sees: another value of an attribute, a buffer, a module, a weight or a config entry; hooks; writes in place that
    torch counts. Others (`.data`, numpy views, weights made in inference mode) show in samples: SAMPLE_ELEMENTS of each
    weight and buffer at each call. What changes a few elements only may be missed: then say so with `renew`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._round = 0
        self._digest: bytes | None = None
        self._take()

    def fingerprint(self) -> bytes:
        """Return the model's digest as of the last look; see `model_fingerprint`."""
        self._digest = self._digest or _tensors_digest(self._model)
        return hashlib.sha256(_structure_digest(self._model) + self._digest).digest()

    def renew(self) -> None:
        """Take the model as it is now, whatever could be seen of it."""
        self._digest = None
        self._take()

    def follow(self) -> bool:
        """Look whether the model is another than at the last look, and take it as it is now."""
        for module in self._model.modules():
            if "rope_deltas" in vars(module):
                # How far its last images moved positions: transformers adds it in any call that begins with a cache.
                module.rope_deltas = None
        self._round = (self._round + 1) % SAMPLE_ROUNDS
        is_written = self._is_written()
        if not is_written and not self._is_rebuilt():
            return False
        before = self._tensors
        self._take()
        if is_written or [each[1:] for each in before] != [each[1:] for each in self._tensors]:
            self._digest = None
        return True

    def _take(self) -> None:
        # Views of the modules' own dicts, which show what is in them at any time.
        self._views = list[ValuesView[Any]]()
        for each in self._model.modules():
            held = (each._parameters, each._buffers, each._modules, each._forward_hooks, each._forward_pre_hooks)
            self._views += [own.values() for own in (vars(each), *held)]
        config = self._model.config
        self._views += [vars(config).values(), vars(config.get_text_config(decoder=True)).values()]
        self._views += [torch_module._global_forward_hooks.values(), torch_module._global_forward_pre_hooks.values()]
        self._forwards = {type(module): type(module).forward for module in self._model.modules()}
        # Kept alive, so that no other object takes the place of one of them.
        self._values = (*chain.from_iterable(self._views), _END)
        tensors = {id(tensor): tensor for _, tensor in _named_tensors(self._model)}.values()
        self._tensors = [(tensor, tensor.data_ptr(), _write_count(tensor)) for tensor in tensors]
        self._samples = [_sample_of(tensor) for tensor in tensors if tensor.numel() and tensor.device.type != "meta"]

    def _is_rebuilt(self) -> bool:
        if any(each.forward is not forward for each, forward in self._forwards.items()):
            return True
        # A tenth of a microsecond a value: SmolLM2's modules have 12,000.
        if all(map(is_, chain(chain.from_iterable(self._views), (_END,)), self._values)):
            return False
        try:
            # Numbers may be other objects of the same value.
            return (*chain.from_iterable(self._views), _END) != self._values
        except (RuntimeError, ValueError):  # tensors and arrays can't be compared so
            return True

    def _is_written(self) -> bool:
        if any(each.data_ptr() != pointer or _write_count(each) != count for each, pointer, count in self._tensors):
            return True
        at = self._round
        return any(each.reads(each.positions[at]).tobytes() != each.known[at] for each in self._samples)


def _write_count(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sample_of(tensor: torch.Tensor) -> _Sample:
    size = tensor.numel()
    count = min(size, SAMPLE_ELEMENTS)
    shifts = [(number * _GOLDEN_RATIO) % 1 for number in range(SAMPLE_ROUNDS)]
    positions = [((np.arange(count) + shift) * size / count).astype(np.int64) for shift in shifts]
    reads = _reader_of(tensor.detach())
    return _Sample(reads, positions, [reads(each).tobytes() for each in positions])


def _reader_of(tensor: torch.Tensor) -> Callable[[NDArray[np.int64]], NDArray[Any]]:
    width = tensor.element_size()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and width in _INTEGERS:
        # A view of the weight's memory: ten times as fast as torch for so few elements.
        bits: NDArray[Any] = tensor.reshape(-1).view(_INTEGERS[width]).numpy()
        return bits.take
    return lambda positions: (
        torch.take(tensor, torch.from_numpy(positions).to(tensor.device)).cpu().view(torch.uint8).numpy()
    )
