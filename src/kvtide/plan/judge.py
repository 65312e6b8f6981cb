"""Load, compute, or both? One judge for every engine and way of loading, from what was measured and is kept. Pure."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvtide.outcomes import Why
from kvtide.plan.speeds import HarmonicRate, PrefillMeter, PrefillSpeed

if TYPE_CHECKING:
    from kvtide.plan.base import Request

# A way that needs both link and engine must save so much of the time to be worth it.
_SAVING_MIN = 0.05
# Shorter steps and loads say more about overheads than about speed.
SAMPLE_TOKENS_MIN = 64
# Share of the newest sample in an estimate.
_NEWEST_SHARE = 0.5
# A speed of loading that nobody has measured for so long is unknown again: a slow store gets another chance.
MEMORY_S = 60.0
# No load is given less: below this, scheduling decides and not the store.
DEADLINE_S_MIN = 0.1


class Decision(NamedTuple):
    """A way to fill a context, by the reason for it; seconds by loading and by computing alone, inf if unknown."""

    why: Why
    load_s: float
    recompute_s: float


def decide(
    request: Request, bytes_per_s: float | None, latency_s: float = 0.0, decode_token_s: float = 0.0
) -> Decision:
    """Choose the way to the earliest start. Loading counts what is needed least: bases, or smallest levels.

    bytes_per_s: expected rate, None if unknown. latency_s: until the first byte. decode_token_s: of a loaded token.
    """
    assert min(latency_s, decode_token_s) >= 0
    assert bytes_per_s is None or bytes_per_s >= 0
    recompute_s = request.prefill.seconds(0, request.tokens)
    if not bytes_per_s:
        return Decision(Why.UNKNOWN_LINK if bytes_per_s is None else Why.LINK_SLOWER, math.inf, recompute_s)
    load_s, both_s = latency_s, recompute_s
    for chunk in reversed(request.chunks):
        load_s += chunk.sizes[0] / bytes_per_s
        decode_s = decode_token_s * (request.tokens - chunk.start)
        both_s = min(both_s, max(load_s, request.prefill.seconds(0, chunk.start)) + decode_s)
    load_s += decode_token_s * request.tokens
    if both_s > (1 - _SAVING_MIN) * recompute_s:
        why = Why.LINK_SLOWER
    elif both_s > (1 - _SAVING_MIN) * load_s:
        why = Why.LINK_FASTER
    else:
        why = Why.BOTH_ENDS
    return Decision(why, load_s, recompute_s)


class LinkEstimate:
    """Estimates of the path to the tiers: rate, and the shortest delay seen."""

    def __init__(self) -> None:
        self.estimator = HarmonicRate()
        self.latency_s = math.inf

    @property
    def in_flight_bytes(self) -> float:
        """Return how much must be asked for ahead to keep the link busy; 0 while it is unknown."""
        rate = self.estimator.bytes_per_s()
        return 0.0 if rate is None or math.isinf(self.latency_s) else rate * self.latency_s


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
        self._tokens_per_s = sample if known is None else known + _NEWEST_SHARE * (sample - known)
        self._seen_s = now_s

    def known(self, now_s: float, memory_s: float = float("inf")) -> float | None:
        """Return the estimate, None if there is none as young as `memory_s`."""
        return self._tokens_per_s if self._tokens_per_s and now_s - self._seen_s <= memory_s else None


class JudgeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A judge's knowledge, kept over a restart. 0: unknown. decode_token_s: by codec."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    tokens_per_s: float = 0.0
    double_at: float = 0.0
    decode_token_s: dict[str, float] = {}

    def __post_init__(self) -> None:
        figures = [self.bytes_per_s, self.latency_s, self.tokens_per_s, self.double_at, *self.decode_token_s.values()]
        if not all(0 <= each < math.inf for each in figures) or len(self.decode_token_s) > CODECS_MAX:
            raise ValueError("a judge's figures are finite and not negative")


# Codecs whose decoding is remembered.
CODECS_MAX = 32


class Judge:
    """Knows link, decoding and prefill from one load to the next. Thread-safe."""

    def __init__(self, load_s_max: float = math.inf) -> None:
        """load_s_max: no load may take longer."""
        self.link = LinkEstimate()
        self._load_s_max = load_s_max
        self._lock = threading.Lock()
        self._meter = PrefillMeter()
        self._restored = JudgeRecord()
        self._load = Speed()
        self._decode_token_s: dict[str, float] = {}
        self._left_alone_since_s = math.inf

    def note_prefill(self, start: int, stop: int, seconds: float) -> None:
        """Take the duration of a pass over tokens [start, stop) of a prompt; short ones are ignored."""
        if stop - start >= SAMPLE_TOKENS_MIN and seconds > 0:
            with self._lock:
                self._meter.note(start, stop, seconds)

    def note_load(self, tokens: int, seconds: float, now_s: float, came: int | None = None) -> None:
        """Take the duration of a load, from the decision to the last page; extrapolated if so many tokens `came`."""
        with self._lock:
            self._load.note(tokens, seconds if came is None else seconds * tokens / max(1, came), now_s)

    def note_decode(self, codec_id: str, tokens: int, seconds: float) -> None:
        """Take what decoding tokens took."""
        with self._lock:
            if tokens and (codec_id in self._decode_token_s or len(self._decode_token_s) < CODECS_MAX):
                self._decode_token_s[codec_id] = seconds / tokens

    def prefill(self) -> PrefillSpeed | None:
        """Return the engine's speed; the last process's until this one has measured. None if nobody has."""
        with self._lock:
            speed, known = self._meter.speed(), self._restored
        if speed is None and known.tokens_per_s:
            return PrefillSpeed(known.tokens_per_s, known.double_at or math.inf)
        return speed

    def decode_token_s(self, codec_id: str) -> float:
        """Return what decoding a token takes, 0 while that is unknown."""
        with self._lock:
            return self._decode_token_s.get(codec_id, self._restored.decode_token_s.get(codec_id, 0.0))

    def bytes_per_s(self) -> float | None:
        """Return the link's rate, None if it is unknown."""
        return self.link.estimator.bytes_per_s() or self._restored.bytes_per_s or None

    def latency_s(self) -> float:
        """Return the link's delay, 0 while it is unknown."""
        return self._restored.latency_s if math.isinf(self.link.latency_s) else self.link.latency_s

    def decide(self, request: Request, codec_id: str, now_s: float) -> Decision:
        """Choose the way to the earliest start. A link that was left alone for `MEMORY_S` is unknown, once."""
        found = decide(request, self.bytes_per_s(), self.latency_s(), self.decode_token_s(codec_id))
        since_s = min(self._left_alone_since_s, now_s) if found.why is Why.LINK_SLOWER else math.inf
        is_over = now_s - since_s > MEMORY_S
        self._left_alone_since_s = math.inf if is_over else since_s
        return found._replace(why=Why.UNKNOWN_LINK) if is_over else found

    def is_load_faster(self, tokens: int, now_s: float) -> bool:
        """Tell whether loading whole blocks should end before computing would; True while a speed is unknown."""
        prefill, load = self.prefill(), self._load.known(now_s, MEMORY_S)
        return prefill is None or load is None or tokens / load < prefill.seconds(0, tokens)

    def deadline_s(self, tokens: int) -> float:
        """Return the longest that a load may take: as long as computing would, and never over `load_s_max`."""
        prefill = self.prefill()
        computing_s = self._load_s_max if prefill is None else max(DEADLINE_S_MIN, prefill.seconds(0, tokens))
        return min(self._load_s_max, computing_s)

    def record(self) -> JudgeRecord:
        """Return what is known, for `restore`."""
        speed, decode = self.prefill(), {**self._restored.decode_token_s, **self._decode_token_s}
        return JudgeRecord(
            self.bytes_per_s() or 0.0,
            self.latency_s(),
            speed.tokens_per_s if speed else 0.0,
            speed.double_at if speed and not math.isinf(speed.double_at) else 0.0,
            dict(list(decode.items())[:CODECS_MAX]),
        )

    def restore(self, record: JudgeRecord) -> None:
        """Go by what another process knew, until this one has measured."""
        self._restored = record
