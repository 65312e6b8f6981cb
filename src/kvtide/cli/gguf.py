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

SUFFIX = ".gguf"
# The point of a profile's curve at which noise is measured: finer ones are so fine that blocks are stored losslessly.
_FINE_POINT = 1
# A batch, and the tokens that are judged behind a restored context. A busy machine may be too late with a block.
_BATCH_TOKENS, _FLUSH_S_MAX, _TRIES = 128, 300.0, 3
# Where a step's own loss is less than this part of the noise, the curve of both falls as that of the loss alone.
_HEARD = 8
_Progress = Callable[[str, int, int], None]


def check_lossy(model: Path) -> None:
    """Do nothing if llama.cpp can keep a model's rows by tide; UnsupportedModel, with the reason, if it can't.

    Without llama-cpp-python nothing is checked.
    """
    try:
        import llama_cpp
    except ImportError:
        return
    from kvtide.engines.llamacpp import attach

    with closing(llama_cpp.Llama(str(model), n_ctx=_BATCH_TOKENS, verbose=False)) as llm:
        attach(llm, "memory://", codec="tide")


def llama_losses(
    model: Path,
    profiles: Sequence[Profile],
    texts: Sequence[Sequence[int]],
    show: _Progress,
    quality: float | None = None,
) -> list[float]:
    """Return the KL of the next token, in nats, behind each text once its blocks went through tide, by llama.cpp.

    profiles: of one calibration. quality: None for one that leaves them nearly whole, and little but llama.cpp's noise.
    texts: token ids. Those of which nothing is restored, or that are stored losslessly, are left out. ImportError
    without llama-cpp-python; ValueError if that is all of them, and for models whose rows can't be lossy in llama.cpp.
    """
    import llama_cpp

    from kvtide.engines.llamacpp import attach

    if quality is None:
        arrays = profiles[0].arrays
        quality = float(arrays.get("trellis_curve", arrays["curve"])[_FINE_POINT, 2])
    codec = f"{profiles[0].kind.removesuffix('-layer')}:{quality}"
    room, found = max(map(len, texts)) + _BATCH_TOKENS, list[float]()
    llm = llama_cpp.Llama(str(model), n_ctx=room, n_batch=_BATCH_TOKENS, verbose=False)
    with closing(llm), attach(llm, "memory://", codec=codec, profiles=profiles) as cached:
        for number, ids in enumerate(texts):
            show("llama.cpp", number, len(texts))
            tokens = max(0, len(ids) - _BATCH_TOKENS - 1) // cached.served.step * cached.served.step
            exact = _said(llm, ids, tokens)
            cached.flush(_FLUSH_S_MAX)
            for _ in range(_TRIES if tokens else 0):
                said = _said(llm, ids, tokens)
                if cached.last is not None and cached.last.hit_tokens == tokens:
                    kl = float((np.exp(exact) * (exact - said)).sum(-1).mean())
                    found += [kl] if kl > 0 else []
                    break
    if not found:
        raise ValueError(f"none of {len(texts)} texts is long enough, fits the profile and was restored in time")
    return found


def _said(llm: Any, ids: Sequence[int], tokens: int) -> NDArray[np.float64]:
    """Return log probabilities of what follows the tokens behind so many, which are computed or restored."""
    llm.reset()
    with closing(llm.generate(ids[: tokens + 1], temp=0.0)) as answer:
        next(answer)
    behind = ids[tokens + 1 :][:_BATCH_TOKENS]
    llm._batch.set_batch(behind, llm.n_tokens, True)
    llm._ctx.decode(llm._batch)
    logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(len(behind), llm.n_vocab())).astype(np.float64)
    found: NDArray[np.float64] = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return found


def with_noise(profile: Profile, noise: float) -> Profile:
    """Return a profile whose curves have llama.cpp's noise in them, and fall where that is all there is."""
    curves = {name: profile.arrays[name].copy() for name in ("curve", "trellis_curve") if name in profile.arrays}
    for curve in curves.values():
        curve[:, 2] += np.minimum(noise, _HEARD * curve[:, 2])
    return profile.with_arrays(curves)
