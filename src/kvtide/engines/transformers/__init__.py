"""Hugging Face transformers: `attach` gives a model a cache."""

from kvtide.engines.transformers.cached import BLOCK_TOKENS, CachedModel, attach
from kvtide.engines.transformers.contexts import Context, ModelContexts
from kvtide.engines.transformers.fingerprint import fingerprint_in, model_fingerprint
from kvtide.engines.transformers.groups import model_layout
from kvtide.engines.transformers.selective import Impress
from kvtide.engines.transformers.smollm2 import converted, converted_folder, load_model, load_to_fork, load_tokenizer

__all__ = [
    "BLOCK_TOKENS",
    "CachedModel",
    "Context",
    "Impress",
    "ModelContexts",
    "attach",
    "converted",
    "converted_folder",
    "fingerprint_in",
    "load_model",
    "load_to_fork",
    "load_tokenizer",
    "model_fingerprint",
    "model_layout",
]
