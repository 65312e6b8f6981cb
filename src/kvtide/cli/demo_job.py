"""What the demo and its processes tell each other."""

from __future__ import annotations

import msgspec


class DemoJob(msgspec.Struct, frozen=True):
    """What one run is to do. `is_judged`: say how far what the model says is from exact."""

    folder: str
    store: str
    codec: str
    prefix_tokens: int
    answer_tokens: int
    is_judged: bool


class DemoRun(msgspec.Struct, frozen=True):
    """What one run measured. `was_warm`: the store had blocks of this prompt, and a cold run left the cache out."""

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
