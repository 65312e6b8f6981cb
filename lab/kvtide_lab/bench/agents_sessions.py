"""Agent sessions for the bench: recorded requests with texts, or made-up ones of the same form, cut to a context.

A file `*.jsonl` or `*.jsonl.gz` is one session: a line a request with `timestamp`, `input` and `output`, as
LMCache/lmcache-agent-trace has them.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec

PROMPT_TOKENS_MIN = 256
TURNS_MIN = 2
# Made-up sessions: what the user says first, what each tool says.
_TASK_CHARACTERS, _TOOL_CHARACTERS = 3000, 700
_MADE_UP_TURNS = 8

Tokenize = Callable[[str], Sequence[int]]


class AgentTurn(NamedTuple):
    """One request: the prompt's ids, and how many tokens were answered when it was recorded."""

    ids: list[int]
    answer_tokens: int


class AgentSession(NamedTuple):
    """Requests in the order in which they were made. `kind` is the folder's name, that of the agent."""

    name: str
    kind: str
    turns: list[AgentTurn]


class _Request(msgspec.Struct, frozen=True):
    input: str
    output: str
    timestamp: int = 0


def read_sessions(folder: Path, tokenize: Tokenize, context_tokens: int, turns_max: int) -> list[AgentSession]:
    """Read all sessions below `folder`, one of each kind in turn. ValueError if there are none, and for other files.

    Requests that are shorter than PROMPT_TOKENS_MIN or longer than the context are left out, sessions with fewer than
    TURNS_MIN others too; of each session the first `turns_max` are taken.
    """
    paths = sorted(path for path in folder.rglob("*.jsonl*") if path.is_file())
    by_kind: dict[str, list[AgentSession]] = {}
    for path in paths:
        turns = _turns(_requests(path), tokenize, context_tokens, turns_max)
        if len(turns) >= TURNS_MIN:
            by_kind.setdefault(path.parent.name, []).append(AgentSession(path.name, path.parent.name, turns))
    if not by_kind:
        raise ValueError(f"no session in {folder} has {TURNS_MIN} requests of up to {context_tokens} tokens")
    return [session for each in zip_longest(*by_kind.values()) for session in each if session is not None]


def made_up_sessions(
    texts: Iterable[str], tokenize: Tokenize, context_tokens: int, turns_max: int
) -> list[AgentSession]:
    """Make a session of each text: a task, and in each turn a little more of the text, as tools would say it."""
    found = []
    for number, text in enumerate(texts):
        ends = [_TASK_CHARACTERS + _TOOL_CHARACTERS * turn for turn in range(_MADE_UP_TURNS)]
        requests = [_Request(text[:end], text[end : end + 200]) for end in ends if end < len(text)]
        turns = _turns(requests, tokenize, context_tokens, turns_max)
        if len(turns) >= TURNS_MIN:
            found.append(AgentSession(f"made-up {number}", "made-up", turns))
    return found


def _requests(path: Path) -> list[_Request]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        requests = [msgspec.json.decode(line, type=_Request) for line in content.splitlines() if line]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a session, a request a line: {error}") from error
    return sorted(requests, key=lambda request: request.timestamp)


def _turns(requests: Iterable[_Request], tokenize: Tokenize, context_tokens: int, turns_max: int) -> list[AgentTurn]:
    turns: list[AgentTurn] = []
    for request in requests:
        if len(turns) == turns_max:
            break
        # More characters are more tokens than fit in any case.
        ids = list(tokenize(request.input)) if len(request.input) < 20 * context_tokens else []
        if PROMPT_TOKENS_MIN <= len(ids) <= context_tokens:
            turns.append(AgentTurn(ids, max(1, len(tokenize(request.output)))))
    return turns


def working_set_pages(sessions: Sequence[AgentSession], page_tokens: int) -> int:
    """Return how many pages hold every prompt at once; what prompts share is there once."""
    pages: dict[tuple[int, tuple[int, ...]], int] = {}
    for turn in (turn for session in sessions for turn in session.turns):
        parent = -1
        for start in range(0, len(turn.ids), page_tokens):
            parent = pages.setdefault((parent, tuple(turn.ids[start : start + page_tokens])), len(pages))
    return len(pages)
