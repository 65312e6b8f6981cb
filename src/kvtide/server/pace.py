"""How long the peer of a body may still keep us waiting."""

from __future__ import annotations


class ProgressBudget:
    """A bucket of time: waiting empties it, bytes that move fill it, up to `slow_s_max` seconds.

    So a peer is never slower than `bytes_s_min` for longer than that, however fast it was before. `due_s` is when the
    bucket is empty if nothing moves.
    """

    def __init__(self, slow_s_max: float, bytes_s_min: float, now_s: float) -> None:
        self._slow_s_max = slow_s_max
        self._bytes_s_min = bytes_s_min
        self.due_s = now_s + slow_s_max

    def moved(self, count: int, now_s: float) -> None:
        """Note bytes that moved."""
        self.due_s = min(now_s + self._slow_s_max, self.due_s + count / self._bytes_s_min)

    def paused(self, seconds: float) -> None:
        """Note time that the peer did not keep us waiting."""
        self.due_s += seconds
