"""Prefill that the engine begins before it is known what can be loaded, handed over without losing any of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.clock import Clock
from kvtide.plan import Decision
from kvtide.plan.base import PASS_TOKENS, pass_reach
from kvtide.store.load.job import LoadRequest
from kvtide.store.load.run import Engine

if TYPE_CHECKING:
    from kvtide.store.load.streamed import StreamedLoad

# Passes that nobody races are no longer: to SmolLM2 each one more is about 1.5 % of recomputing 1,040 tokens, and in
# much longer ones attention over what was there before them costs more than that.
_OWN_PASS_TOKENS = 2 * PASS_TOKENS


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The blocks found, and the load: under way, or None if the rest is the engine's.

    decision: None if there is nothing to load. stored_tokens: those that could be loaded.
    """

    decision: Decision | None
    stored_tokens: int
    load: StreamedLoad | None


class SpeculativePrefill:
    """The first tokens of a context, computed until it is known what there is; the pass that is under way then goes on.

    One thread is in `compute`, another one calls `open`.
    """

    def __init__(self, tokens: int, block_tokens: int, request: LoadRequest, clock: Clock) -> None:
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._request = request
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._lock = threading.Lock()
        # Computed, and what will be once the pass under way has ended.
        self._done = self._under_way = 0
        self._is_over = False
        self.start: StreamStart | None = None
        # Whether the pass that was under way when the opening came has been computed.
        self.is_begun_computed = False

    @property
    def tokens(self) -> int:
        """Return how many tokens are computed, without the pass that was under way when something to load was found."""
        return self._done

    def open(self, found: Callable[[int, int], StreamStart]) -> None:
        """Take what `found` says of the tokens that are computed, and those that will be once a pass has ended.

        It is not called once `compute` has ended.
        """
        with self._lock:
            if not self._is_over:
                self.start = found(self._done, self._under_way)

    def compute(self, engine: Engine, is_awaited: Callable[[], bool]) -> None:
        """Compute until there is something to load, or all is computed.

        Once no opening is awaited, or it has nothing to load, the rest is the engine's: the last pass is left to it,
        which computes that with what follows the context.
        """
        try:
            while self._begin_pass(is_awaited()):
                is_computed = engine.compute(self._done, self._under_way, self._is_wanted)
                with self._lock:
                    if self._load is not None:
                        self.is_begun_computed = is_computed
                        self._is_over = True
                        return
                    self._done = self._under_way if is_computed else self._done
        except BaseException:
            self._abandon()
            raise

    @property
    def _load(self) -> StreamedLoad | None:
        return self.start.load if self.start is not None else None

    def _is_wanted(self) -> bool:
        load = self._load
        return load is None or not load.is_ready()

    def _begin_pass(self, is_awaited: bool) -> bool:
        with self._lock:
            rest = self._tokens - self._done
            is_engines = self.start is not None or not is_awaited
            own_passes = math.ceil(rest / _OWN_PASS_TOKENS)
            if self._load is not None or not rest or (is_engines and own_passes == 1):
                self._is_over = True
                return False
            longest = rest // own_passes if is_engines else min(PASS_TOKENS, self._pass_tokens(rest))
            blocks = max(1, longest // self._block_tokens)
            self._under_way = min(self._tokens, self._done + blocks * self._block_tokens)
            return True

    def _pass_tokens(self, rest: int) -> int:
        """Return as `TwoEnded` does how long a pass should be: the link may begin at the other end at any moment."""
        left_s = self._request.deadline_s - (self._clock.monotonic_s() - self._started_s)
        longest = max(rest // 2, self._done)
        if not 0 < left_s < math.inf:
            return longest
        in_time = pass_reach(self._request.prefill, self._done, left_s) - self._done
        return min(longest, in_time) if self._request.kl_goal else max(longest, in_time)

    def _abandon(self) -> None:
        with self._lock:
            self._is_over = True
            if self._load is not None:
                self._load.stop()
