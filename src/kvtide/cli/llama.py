"""`kvtide llama`: a GGUF model served on this machine, whose prompts outlive the process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.store import DEFAULT_STORE
from kvtide.config import TENANT_SALT_VARIABLE
from kvtide.engines import option_bytes


def llama(
    model: Annotated[Path, typer.Argument(help="A model's GGUF file, the first of a split one.")],
    url: Annotated[str, typer.Option("--store", help="Where prompts are kept.")] = DEFAULT_STORE,
    host: Annotated[str, typer.Option(help="Who may ask: 127.0.0.1 is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    context: Annotated[int, typer.Option(min=256, help="Tokens of prompt and answer together.")] = 8192,
    batch: Annotated[
        int, typer.Option(min=1, help="Tokens computed at a time; prompts are restored in whole ones.")
    ] = 128,
    threads: Annotated[int, typer.Option(min=0, help="0: one for each processor.")] = 0,
    gpu_layers: Annotated[int, typer.Option(min=-1, help="On a GPU, where it was built for one.")] = 0,
    flash_attention: Annotated[bool, typer.Option("--flash-attention", help="As llama.cpp's own option.")] = False,
    codec: Annotated[str, typer.Option(help="raw [on this machine], lossless [elsewhere], tide …")] = "",
    tenant_salt: Annotated[str, typer.Option(envvar=TENANT_SALT_VARIABLE, help="Keeps what is stored apart.")] = "",
) -> None:
    """Serve a model by OpenAI's API on this machine until Ctrl-C or SIGTERM, with its prompts kept in a store."""
    from kvtide.engines.llamacpp import serve_model

    threads = threads or os.cpu_count() or 1
    options = {"n_ctx": context, "n_batch": batch, "n_ubatch": batch, "n_gpu_layers": gpu_layers}
    options |= {"flash_attn": flash_attention, "n_threads": threads, "n_threads_batch": threads}
    say = partial(print, flush=True)
    serve_model(model, url, host, port, options, say, codec=codec, tenant_salt=option_bytes(tenant_salt))
