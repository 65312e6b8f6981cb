"""Messages between the demo and its processes."""

from __future__ import annotations

import msgspec


class DemoJob(msgspec.Struct, frozen=True):
    """The work of one run. `is_cold`: prefill, and store.

    `exact`: the codec that another run has stored the same prompt with, to say how far the model is from that.
    `link`: the run's part in the demo of a link.
    """

    store: str
    codec: str
    prefix_tokens: int
    answer_tokens: int
    is_cold: bool
    exact: str | None = None
    link: DemoLink | None = None


class DemoLink(msgspec.Struct, frozen=True):
    """A run over a link. `said_path`: log probabilities of the exact answer's tokens, written by the cold run.

    A streamed run says `answer_ids`, the exact answer, after the prefix that came within `start_within_s`.
    """

    said_path: str
    start_within_s: float | None = None
    answer_ids: list[int] = []


class DemoRun(msgspec.Struct, frozen=True):
    """Measurements of one run. `was_warm`: the store had blocks of this prompt, and a cold run left the cache out.

    `loaded_tokens`, `kl_law`: of a streamed prefix, what was not computed and what the codec's law says that costs.
    """

    prompt_tokens: int
    prefix_blocks: int
    hit_tokens: int
    was_warm: bool
    ttft_s: float
    raw_bytes: int
    stored_bytes: int
    answer_ids: list[int]
    answer: str
    kl: float | None
    loaded_tokens: int = 0
    kl_law: float = 0.0


class DemoWord(msgspec.Struct, frozen=True):
    """A line that a run says: how far a step is, or one of the others, at its end."""

    step: str = ""
    done: int = 0
    total: int = 1
    result: DemoRun | None = None
    mistake: str = ""
    status: int | None = None
