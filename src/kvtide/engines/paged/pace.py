"""Decides whether loading beats computing, from what was measured on this engine. Pure: the time is passed in."""

from __future__ import annotations

# Shorter steps and loads say more about overheads than about speed.
SAMPLE_TOKENS_MIN = 64
# Share of the newest sample in the estimate.
NEWEST_SHARE = 0.5
# A speed that nobody has measured for so long is unknown again, so that a slow store gets another chance.
MEMORY_S = 60.0
# No load is given less: below this, scheduling decides and not the store.
DEADLINE_S_MIN = 0.1


class Speed:
    """Tokens a second, as the newest samples say."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0
        self._seen_s = float("-inf")

    def note(self, tokens: int, seconds: float, now_s: float) -> None:
        """Take a sample; short ones are ignored."""
        if tokens < SAMPLE_TOKENS_MIN or seconds <= 0:
            return
        known = self.known(now_s)
        sample = tokens / seconds
        self._tokens_per_s = sample if known is None else known + NEWEST_SHARE * (sample - known)
        self._seen_s = now_s

    def known(self, now_s: float, memory_s: float = float("inf")) -> float | None:
        """Return the estimate, None if there is none as young as `memory_s`."""
        return self._tokens_per_s if self._tokens_per_s and now_s - self._seen_s <= memory_s else None


class Throughput:
    """Speeds of prefill and of loading, in tokens a second, as newest samples say."""

    def __init__(self, load_s_max: float) -> None:
        self._load_s_max = load_s_max
        self._prefill = Speed()
        self._load = Speed()

    def note_prefill(self, tokens: int, seconds: float, now_s: float) -> None:
        """Take the duration of a step that computed `tokens`; short steps are ignored."""
        self._prefill.note(tokens, seconds, now_s)

    def note_load(self, tokens: int, seconds: float, now_s: float) -> None:
        """Take the duration of a load, from the decision to the last page."""
        self._load.note(tokens, seconds, now_s)

    def is_load_faster(self, tokens: int, now_s: float) -> bool:
        """Tell whether loading is expected to end before computing would. True while either speed is unknown."""
        prefill, load = self._prefill.known(now_s), self._load.known(now_s, MEMORY_S)
        return prefill is None or load is None or tokens / load < tokens / prefill

    def deadline_s(self, tokens: int, now_s: float) -> float:
        """Return the longest that a load may take: as long as computing would, and never over `load_s_max`."""
        prefill = self._prefill.known(now_s)
        computing_s = self._load_s_max if prefill is None else max(DEADLINE_S_MIN, tokens / prefill)
        return min(self._load_s_max, computing_s)
