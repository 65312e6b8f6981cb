"""What a user does: attach a model, start `kvtide serve` with a file of settings, run `kvtide`, read metrics."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.server.worlds import ask, token_of
from tests.servers import RunningServer, ServerProcess, server_process
from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.engines.transformers import attach
from kvtide.server.auth import token_digest

BLOCK = 16
PROMPT = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(1))
# Its full blocks, and their tokens.
BLOCKS = 6
RESTORED = BLOCKS * BLOCK


class Answer(NamedTuple):
    """What the model said, how much of the prompt came from the store, and the store's counters."""

    output: Any
    hit_tokens: int
    read_bytes: int
    stats: Any


def answer(model: Any, store: Path | str, prompt: Any, **options: Any) -> Answer:
    """Answer with a cache of its own, as a new process would, and wait until all is stored."""
    with attach(model, str(store), block_tokens=BLOCK, **options) as cached:
        output = cached.generate(prompt, max_new_tokens=4, do_sample=False)
        assert cached.flush(60)
        return Answer(output, cached.last.hit_tokens, cached.last.stored_bytes_read, cached.cache.stats())


@contextmanager
def serving(folder: Path, settings: str = "", *flags: str, port: int = 0) -> Iterator[ServerProcess]:
    """Run `kvtide serve --config` with these settings (TOML)."""
    (folder / "kvtide.toml").write_text(settings)
    with server_process("--config", str(folder / "kvtide.toml"), *flags, port=port) as server:
        yield server


def grant(tenant: str, scopes: str = '"read", "write", "admin"') -> str:
    digest = token_digest(token_of(tenant))
    return f'[[grants]]\ntenant = "{tenant}"\nscopes = [{scopes}]\ntoken_sha256 = "{digest}"\n'


def status(
    server: ServerProcess | RunningServer, method: str, what: int | str, body: bytes | None = None, **h: str
) -> int:
    return ask(server, method, what, body, **h)[0].status


def kvtide(*words: Any) -> Any:
    """Run a `kvtide` command with `--json` and return what it printed."""
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)
