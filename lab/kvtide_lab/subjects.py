"""The model that is measured, with its tokenizer, and texts that are long enough for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


def subject(folder: str | None = None, dtype: str = "float32") -> LoadedModel:
    """Load a model; without a folder SmolLM2-135M."""
    from kvtide.engines.transformers import converted_folder, load_model

    chosen = Path(folder) if folder else converted_folder()
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
