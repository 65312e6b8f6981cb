"""llama-cpp-python's server of OpenAI's API with kvtide in it.

Invariant: what a client was answered is stored, or tried to be, before the process ends by a signal.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kvtide.engines.llamacpp.cached import attach


def serve_model(
    model: Path, store: str, host: str, port: int, options: Mapping[str, Any], say: Callable[[str], None], **cached: Any
) -> None:
    """Serve until a signal. options: of `llama_cpp.Llama`; say: takes lines for the user; cached: of `attach`.

    ValueError for what can't be served. Takes what the extra `llamacpp` brings.
    """
    import uvicorn
    from llama_cpp.server import app as llama_server
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    if not model.is_file():
        raise ValueError(f"no file {model}: give the path of a model in GGUF")
    logging.getLogger("kvtide.engines.llamacpp").setLevel(logging.INFO)
    say(f"loading {model.name}")
    settings = ModelSettings(model=str(model), model_alias=model.stem, verbose=False, logits_all=False, **options)
    app = llama_server.create_app(server_settings=ServerSettings(host=host, port=port), model_settings=[settings])
    # Streams that are under way at a signal have ten seconds to end.
    config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=10)
    # The server raises the signal that ended it once more, when it is done.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        closing(llama_server._llama_proxy()) as llm,
        attach(llm, store, **cached),
        closing(config.bind_socket()) as own,
    ):
        own.listen()
        with suppress(KeyboardInterrupt):
            say(f"serving {model.stem} on http://{host}:{own.getsockname()[1]}/v1")
            uvicorn.Server(config).run([own])
