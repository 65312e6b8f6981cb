"""Options that several commands share, and the demo's model and texts as they take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from kvtide.block import BlockLayout
    from kvtide.codec import Profile
    from kvtide.engines.calibrate.texts import Text

QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repeats and cases.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write a figure to this PNG file.")]
PartialOption = Annotated[
    Path | None, typer.Option("--partial", help="Keep each result in this file, and go on from it.")
]
PythonOption = Annotated[
    Path | None, typer.Option("--python", help="Interpreter with vLLM and kvtide; default: this one.")
]
LmcacheOption = Annotated[
    Path | None, typer.Option("--lmcache-python", help="Interpreter with vLLM and LMCache, for that peer.")
]


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


def texts_of(paths: list[Path] | None) -> list[Text]:
    """Return the user's texts, or those that are judged on."""
    from kvtide.engines.calibrate.texts import evaluation_texts, read_texts

    return list(read_texts(paths) if paths else evaluation_texts())


def profiles_of(paths: Sequence[Path] | None) -> Sequence[Profile]:
    """Return the user's profiles, or those that are installed."""
    from kvtide.engines import installed_profiles, read_profile

    return [read_profile(path) for path in paths] if paths else installed_profiles()
