"""GGUF models as `kvtide calibrate` takes them: fitted in transformers, judged by llama.cpp's own answers too.

llama.cpp rounds what it multiplies to a few bits, so that the smallest change of a cache moves its answers: its noise,
which no step of a codec takes away. A profile's curves have it in them, for a quality to be what llama.cpp says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.codec import Profile
from kvtide.errors import UnsupportedModel

SUFFIX = ".gguf"
# Blocks are nearly whole at this quality: on SmolLM2 they lose a fifth of what llama.cpp's noise is.
NEARLY_EXACT = "tide:5e-4"
# A batch, and the tokens that are judged behind a restored context.
_BATCH_TOKENS = 128
_FLUSH_S_MAX, _TRIES = 300.0, 3
# Where a step's own loss is less than this part of the noise nobody hears it: a curve has to fall there, too.
_HEARD = 8


def llama_losses(
    model: Path,
    profile: Profile,
    texts: Sequence[Sequence[int]],
    show: Callable[[str, int, int], None],
    codec: str = NEARLY_EXACT,
) -> list[float]:
    """Return the KL of the next token, in nats, behind each text once its blocks went through a codec, by llama.cpp.

    texts: token ids. Those of which nothing can be restored are left out; ValueError if that is all of them.
    UnsupportedModel without llama-cpp-python, and for a model whose rows can't be lossy in llama.cpp.
    """
    try:
        import llama_cpp

        from kvtide.engines.llamacpp import attach
    except ImportError as error:
        raise UnsupportedModel(f"llama-cpp-python is not installed: {error}") from error
    room = max(map(len, texts)) + _BATCH_TOKENS
    llm, found = llama_cpp.Llama(str(model), n_ctx=room, n_batch=_BATCH_TOKENS, verbose=False), list[float]()
    with closing(llm), attach(llm, "memory://", codec=codec, profiles=[profile]) as cached:
        step = max(cached.served.block_tokens, cached.served.step)
        for number, ids in enumerate(texts):
            show("llama.cpp", number, len(texts))
            tokens = (len(ids) - _BATCH_TOKENS - 1) // step * step
            if tokens <= 0:
                continue
            exact = _said(llm, ids, tokens)
            cached.flush(_FLUSH_S_MAX)
            # A busy machine may be too late with a block.
            for _ in range(_TRIES):
                said = _said(llm, ids, tokens)
                if cached.last is not None and cached.last.hit_tokens == tokens:
                    found.append(float((np.exp(exact) * (exact - said)).sum(-1).mean()))
                    break
        show("llama.cpp", len(texts), len(texts))
    if not found:
        raise ValueError(f"none of {len(texts)} texts is long enough, or could be restored in time")
    return found


def _said(llm: Any, ids: Sequence[int], tokens: int) -> NDArray[np.float64]:
    """Return log probabilities of what follows the tokens behind so many, which are computed or restored."""
    llm.reset()
    with closing(llm.generate(ids[: tokens + 1], temp=0.0)) as answer:
        next(answer)
    behind, words = ids[tokens + 1 :][:_BATCH_TOKENS], llm.n_vocab()
    llm._batch.set_batch(behind, llm.n_tokens, True)
    llm._ctx.decode(llm._batch)
    logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(len(behind) * words,)).reshape(-1, words)
    found: NDArray[np.float64] = logits - logits.max().astype(np.float64)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return found


def heard(kl: float, noise: float) -> float:
    """Return the KL of a step as llama.cpp says it: with its noise, and falling where that is all there is."""
    return kl + min(noise, _HEARD * kl)


def with_noise(profile: Profile, noise: float) -> Profile:
    """Return a profile whose curves have llama.cpp's noise in them."""
    curves = {name: profile.arrays[name].copy() for name in ("curve", "trellis_curve") if name in profile.arrays}
    for curve in curves.values():
        curve[:, 2] = [heard(float(kl), noise) for kl in curve[:, 2]]
    return profile.with_arrays(curves)
