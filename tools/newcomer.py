"""Does what a newcomer does with README and the documents: runs their commands in a scratch home, follows their links.

Usage: newcomer.py [PAGE…]   (exit status 1 when something does not work as it is shown)

`sh` blocks run, one after the other in one folder a page, servers in the background; `python` blocks run with a small
random model; `toml`, `json` and `yaml` are parsed. Commands in `text` blocks and in prose have to exist, with the
options that they are shown with. A block for which another machine is needed stands behind
`<!-- newcomer: skip REASON -->`; these are counted and printed. What needs llama.cpp runs in its own environment:
tests/llama/test_guide.py.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

import kvtide.cli.app
import kvtide_lab.cli.app
from kvtide_lab.bench.services import free_ports
from links import dead_links
from wheel import PRELUDE, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = 80
BLOCK_S_MAX = 300.0
# Commands that serve: what says where, unless the line does; what they say once they listen.
SERVERS = {
    "kvtide serve": (("--listen", "--config"), "--listen 127.0.0.1:", "7421", "kvtide serves"),
    "kvtide llama": (("--port",), "--port ", "8000", "serving "),
}
APPS = {"kvtide": kvtide.cli.app.app, "kvtide-lab": kvtide_lab.cli.app.app}
FENCE = re.compile(r"^(?:<!-- newcomer: skip (.*?) -->\n)?```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(kvtide(?:-lab)?) +([a-z].*(?:\n +.*)*)", re.MULTILINE)
# Rich draws tables with these.
TABLE = re.compile(r"[│┃┆|].*[│┃┆|]")
# `make` says what it would do, `pip` nothing: what installs has tests of its own.
PREAMBLE = f"""set -eo pipefail
make() {{ command make --dry-run --directory='{ROOT}' "$@" >/dev/null; }}
pip() {{ :; }}
"""


class Block(NamedTuple):
    """A fenced block. `skip` says what it would need, empty if it is to be run."""

    line: int
    language: str
    text: str
    skip: str


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for found in FENCE.finditer(text):
        yield Block(text.count("\n", 0, found.start()) + 1, found[2], found[3], found[1] or "")


def command_of(program: str, words: list[str]) -> tuple[Any, str | None]:
    """Return the command that words begin with, and the word that none has."""
    command: Any = typer.main.get_command(APPS[program])
    for word in words:
        if not hasattr(command, "commands"):
            break
        if word not in command.commands:
            return command, word
        command = command.commands[word]
    return command, None


def unknown(text: str) -> Iterator[str]:
    """Yield commands, and options of them, that are shown and that no program has. `bench a | b` are two commands."""
    for program, rest in COMMAND.findall(text):
        first, *others = re.split(r" {2}|\(|#|--", rest)[0].split(" | ")
        words = first.split()
        known = {"--help"}
        for each in [words, *([*words[:-1], *other.split()[:1]] for other in others)]:
            command, missing = command_of(program, each)
            known |= {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
            if missing:
                yield f"{program} {' '.join(each)}: no command {missing}"
        options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)
        yield from (f"{program} {first.strip()}: no option {each}" for each in options if each not in known)


def complaints(output: str) -> Iterator[str]:
    """Yield what nobody should see in the output of a command."""
    if "Traceback (most recent call last)" in output:
        yield "a traceback: " + output.strip().splitlines()[-1]
    wide = [line for line in output.splitlines() if len(line) > COLUMNS and TABLE.search(line)]
    yield from (f"a table of {len(line)} columns: {line[:COLUMNS]}" for line in wide[:1])


class Page:
    """One page in a scratch home, with servers that it has started. Use with `with`.

    prelude: before Python blocks. Commands run in the folder's `work`.
    """

    def __init__(self, folder: Path, prelude: str = PRELUDE) -> None:
        self._folder, self._prelude = folder, prelude
        self._servers: list[subprocess.Popen[str]] = []
        self._places = {f"/{each}/kvtide": f"{folder}/{each}/kvtide" for each in ("etc", "var/lib", "var/cache")}
        self._ports = dict(zip(("7421", "7422", "7423", "8000"), map(str, free_ports(4)), strict=True))
        self._places |= self._ports
        programs = Path(sys.executable).parent
        # No shell of this machine's user, and a terminal of 80 columns.
        self._environment = {
            **{key: value for key, value in os.environ.items() if key.startswith(("LANG", "LC_", "HF_", "OMP_"))},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": str(COLUMNS),
            "TERM": "dumb",
        }
        for place in ("work", "var/lib", "var/cache"):
            (folder / place).mkdir(parents=True)

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.kill()
            server.communicate()

    def run(self, block: Block) -> Iterator[str]:
        """Run a block and yield what was wrong."""
        text = block.text
        for place, here in self._places.items():
            text = text.replace(place, here)
        if block.language == "python":
            yield from self._done([sys.executable, "-c", self._prelude + text])
            return
        lines = text.splitlines(keepends=True)
        for line in (line for line in lines if line.startswith(tuple(SERVERS))):
            yield from self._serve(line)
        script = "".join(line for line in lines if not line.startswith(tuple(SERVERS)))
        yield from self._done(["bash", "-c", PREAMBLE + script])

    def _done(self, command: list[str]) -> Iterator[str]:
        """Run a command to its end. `work` is where a page's commands run."""
        work = self._folder / "work"
        done = subprocess.run(
            command,
            check=False,
            cwd=work,
            env=self._environment,
            timeout=BLOCK_S_MAX,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        found = list(complaints(done.stdout))
        yield from found
        if done.returncode and not found:
            yield f"exit status {done.returncode}: {done.stdout.strip()[-400:]}"

    def _serve(self, line: str) -> Iterator[str]:
        """Start a server and wait until it listens. It ends with the page."""
        options, where, port, first = next(each for name, each in SERVERS.items() if line.startswith(name))
        where = "" if any(option in line for option in options) else f" {where}{self._ports[port]}"
        command, work = ["bash", "-c", f"exec {line.partition(' #')[0].rstrip()}{where}"], self._folder / "work"
        server = subprocess.Popen(
            command, cwd=work, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._servers.append(server)
        assert server.stdout is not None
        for said in server.stdout:
            if said.startswith(first):
                return
        yield f"{line.strip()}: ended with status {server.wait()}"


def parsed(block: Block) -> Iterator[str]:
    """Yield why a block of settings can't be read."""
    read = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}[block.language]
    try:
        read(block.text)
    except (ValueError, yaml.YAMLError) as error:
        yield f"is no {block.language}: {error}"


def still_problems(document: Path) -> Iterator[str]:
    """Yield what can be seen to be wrong on a page without running anything: links, commands, settings, languages."""
    text = document.read_text(encoding="utf-8")
    yield from dead_links(document)
    # What has no door yet is said to be missing.
    prose = FENCE.sub("", text).partition("\n## No door yet\n")[0]
    for shown in re.findall(r"`(kvtide(?:-lab)? [^`]+)`", prose):
        yield from unknown(" ".join(shown.split()))
    for block in blocks_of(text):
        found = ["a block without a language"] if not block.language else []
        if block.language in {"text", "sh"}:
            found += unknown(block.text)
        elif block.language in {"toml", "json", "yaml"}:
            found += parsed(block)
        yield from (f"line {block.line}: {each}" for each in found)


def is_run(block: Block) -> bool:
    """Tell whether a block is run."""
    return block.language in {"sh", "python"} and not block.skip


def run_problems(document: Path) -> Iterator[str]:
    """Run the blocks of a page and yield what did not work."""
    with tempfile.TemporaryDirectory() as name, Page(Path(name)) as page:
        for block in filter(is_run, blocks_of(document.read_text(encoding="utf-8"))):
            yield from (f"line {block.line}: {each}" for each in page.run(block))


def main(arguments: list[str]) -> int:
    """Try pages, print what is wrong and what was skipped; return the exit status."""
    status = 0
    for document in [Path(each).absolute() for each in arguments] or PAGES:
        blocks = list(blocks_of(document.read_text(encoding="utf-8")))
        found = [*still_problems(document), *run_problems(document)]
        skipped = "; ".join(f"{block.line} {block.skip}" for block in blocks if block.skip)
        print(
            f"{document.name}: {sum(map(is_run, blocks))} blocks run" + (skipped and f", skipped: {skipped}"),
            flush=True,
        )
        for each in found:
            print(f"  {each}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
