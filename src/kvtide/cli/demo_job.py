"""Messages between the demo and its processes."""

from __future__ import annotations

import msgspec


class DemoJob(msgspec.Struct, frozen=True):
    """The work of one run. `is_cold`: prefill, and store.

    `exact`: the codec that another run has stored the same prompt with, to say how far the model is from that.
    """

    store: str
    codec: str
    prefix_tokens: int
    answer_tokens: int
    is_cold: bool
    exact: str | None = None


class DemoRun(msgspec.Struct, frozen=True):
    """Measurements of one run. `was_warm`: the store had blocks of this prompt, and a cold run left the cache out."""

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


class DemoWord(msgspec.Struct, frozen=True):
    """A line that a run says: how far a step is, or one of the others, at its end."""

    step: str = ""
    done: int = 0
    total: int = 1
    result: DemoRun | None = None
    mistake: str = ""
    status: int | None = None
