"""Prefill elsewhere: engine A computes a prompt and stores its blocks as they fill, engine B follows it over a link.

A writes to a server beside it, B reads that server through the link. Both are asked the same prompt at once. In turn
with that, A answers prompts that nobody follows, so that what following costs it is told by neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from kvtide_lab.bench.engine_process import EngineProcess, kvtide_transfer
from kvtide_lab.bench.services import kvtide_words, started
from kvtide_lab.bench.shaped import ShapedProxy
from kvtide_lab.bench.spread import Spread, spread_of

WAYS = ("raw", "lossless", "tide")
_WARM_UP_TOKENS = 300
# The link is cut in the middle of a prompt's computing, for so long.
CUT_AT, CUT_S = 0.5, 3.0
# B waits for a block as long as A takes for so many steps, and for no shorter than a busy machine stops it.
STEPS_WAITED, FOLLOW_S_MIN = 4.0, 0.5


class FollowSize(msgspec.Struct, frozen=True):
    """The amount of work: rounds of a prompt that nobody follows and one that B does. step_tokens: of A's steps."""

    rounds: int = 5
    prompt_tokens: int = 2068
    answer_tokens: int = 16
    step_tokens: int = 128


FULL = FollowSize()
QUICK = FollowSize(rounds=1, prompt_tokens=1044, answer_tokens=8)


class FollowRow(msgspec.Struct, frozen=True):
    """One codec. alone_s, followed_s: until A's first token; slowdown: the second over the first, in pairs. engine_cpu:
    likewise, of the processor time of A's own thread, which busy neighbours don't lengthen.

    ttft_s: until B's first token; ttft_ratio, lag_s: that over A's to the same prompt, and after it. read_bytes: of
    the link, a prompt. idle_cpu: B's processor time, of all threads, over the seconds of its answers. cut_…: of the
    prompt in whose middle the link is cut for CUT_S. changed: B's answers that are not A's.
    """

    codec: str
    follow_s: float
    alone_s: Spread
    followed_s: Spread
    slowdown: Spread
    engine_cpu: Spread
    ttft_s: Spread
    ttft_ratio: Spread
    lag_s: Spread
    restored_tokens: int
    read_bytes: int
    idle_cpu: float
    cut_ttft_ratio: float
    cut_restored_tokens: int
    changed: int


class FollowBench(msgspec.Struct, frozen=True):
    """All rows."""

    model: str
    link_mbit_s: float
    prompt_tokens: int
    step_tokens: int
    rows: list[FollowRow]


class _Together(NamedTuple):
    """Answers to one prompt, A's and B's, and the processor time of A's thread and of B's process."""

    leading: dict[str, Any]
    following: dict[str, Any]
    leading_cpu_s: float
    following_cpu_s: float
    read_bytes: int

    @property
    def ratio(self) -> float:
        return float(self.following["ttft_s"] / self.leading["ttft_s"])


class _Pair(NamedTuple):
    """Both engines of one codec, and the link between A's server and B."""

    leader: EngineProcess
    follower: EngineProcess
    link: ShapedProxy
    answer_tokens: int

    def ask_both(self, ids: Sequence[int], cut_s: float | None = None) -> _Together:
        """Ask both at once. cut_s: when to cut the link."""
        prompt = {"ids": list(ids), "answer_tokens": self.answer_tokens}
        before = self.link.passed_bytes
        with ThreadPoolExecutor(2) as threads:
            waiting = threads.submit(self.follower.generate, [prompt])
            computing = threads.submit(self.leader.generate, [prompt])
            if cut_s is not None:
                time.sleep(cut_s)
                self.link.cut()
                time.sleep(CUT_S)
                self.link.mend()
            led, followed = computing.result(), waiting.result()
        answers = (led["answers"][0], followed["answers"][0])
        return _Together(*answers, led["cpu_s"], followed["process_cpu_s"], self.link.passed_bytes - before)


def run(
    engine: Callable[..., EngineProcess],
    model: str,
    tokens: Sequence[int],
    link_mbit_s: float,
    codecs: Sequence[str],
    size: FollowSize,
    show: Callable[[str, int, int], None],
) -> FollowBench:
    """Measure every codec; `engine` starts one (transfer=, options=). ValueError if the text is too short."""
    # A warm-up, pairs of prompts, and the one with the cut.
    needed = _WARM_UP_TOKENS + (2 * size.rounds + 1) * size.prompt_tokens
    if len(tokens) < needed:
        raise ValueError(f"the text must have {needed} tokens, got {len(tokens)}")
    starts = range(_WARM_UP_TOKENS, needed, size.prompt_tokens)
    prompts = [list(tokens[start : start + size.prompt_tokens]) for start in starts]
    rate, rows = (link_mbit_s * 1e6 / 8).__mul__, list[FollowRow]()
    with started(kvtide_words) as server, ShapedProxy(("127.0.0.1", server.port), rate) as link:
        for number, codec in enumerate(codecs):
            show(codec, number, len(codecs))
            # Lossless and raw objects serve each other's readers: each codec is a tenant.
            transfer = partial(kvtide_transfer, codec=codec, tenant_salt=codec)
            options = {"max_num_batched_tokens": size.step_tokens}
            leading = engine(transfer=transfer(f"http://127.0.0.1:{server.port}"), options=options)
            with leading:
                leading.ask(tokens[:_WARM_UP_TOKENS], 2)
                # How long a step takes is learned from a prompt of the same length, shifted by a token.
                step_s = leading.ask(tokens[1 : 1 + size.prompt_tokens], 1)["ttft_s"] / -(
                    -size.prompt_tokens // size.step_tokens
                )
                follow_s = max(FOLLOW_S_MIN, STEPS_WAITED * step_s)
                following = transfer(f"http://127.0.0.1:{link.port}", follow_s=follow_s)
                with engine(transfer=following, options=options) as follower:
                    follower.ask(list(reversed(tokens[:_WARM_UP_TOKENS])), 2)
                    rows.append(_row(codec, follow_s, _Pair(leading, follower, link, size.answer_tokens), prompts))
    show("done", len(codecs), len(codecs))
    return FollowBench(model, link_mbit_s, size.prompt_tokens, size.step_tokens, rows)


def _row(codec: str, follow_s: float, pair: _Pair, prompts: Sequence[Sequence[int]]) -> FollowRow:
    *rest, last = prompts
    alone, both = list[dict[str, Any]](), list[_Together]()
    for first, second in zip(rest[::2], rest[1::2], strict=True):
        alone.append(pair.leader.generate([{"ids": list(first), "answer_tokens": pair.answer_tokens}]))
        pair.leader.do("settle")
        both.append(pair.ask_both(second))
        pair.leader.do("settle")
        pair.follower.do("settle")
    alone_s = [each["answers"][0]["ttft_s"] for each in alone]
    cut = pair.ask_both(last, CUT_AT * spread_of(alone_s).median)
    answered = [*both, cut]
    return FollowRow(
        codec=codec,
        follow_s=follow_s,
        alone_s=spread_of(alone_s),
        followed_s=spread_of([each.leading["ttft_s"] for each in both]),
        slowdown=spread_of([each.leading["ttft_s"] / mine for each, mine in zip(both, alone_s, strict=True)]),
        engine_cpu=spread_of([each.leading_cpu_s / mine["cpu_s"] for each, mine in zip(both, alone, strict=True)]),
        ttft_s=spread_of([each.following["ttft_s"] for each in both]),
        ttft_ratio=spread_of([each.ratio for each in both]),
        lag_s=spread_of([each.following["ttft_s"] - each.leading["ttft_s"] for each in both]),
        restored_tokens=sum(each.following["cached_tokens"] for each in both) // len(both),
        read_bytes=sum(each.read_bytes for each in both) // len(both),
        idle_cpu=sum(each.following_cpu_s for each in both) / sum(each.following["seconds"] for each in both),
        cut_ttft_ratio=cut.ratio,
        cut_restored_tokens=cut.following["cached_tokens"],
        changed=sum(each.leading["ids"] != each.following["ids"] for each in answered),
    )


def table(result: FollowBench) -> Table:
    """Return the rows as people read them."""
    steps = f"{result.prompt_tokens} tokens in steps of {result.step_tokens}"
    columns = (
        "codec",
        "A alone",
        "A followed",
        "slowed",
        "CPU",
        "B",
        "B / A",
        "lag",
        "restored",
        "MB",
        "B's CPU",
        "cut: B / A",
    )
    shown = Table(
        *columns, "restored", "changed", title=f"{result.model}, {steps}, B behind {result.link_mbit_s:g} Mbit/s"
    )
    for row in result.rows:
        seconds = (row.alone_s.shown(), row.followed_s.shown(), row.slowdown.shown(3), row.engine_cpu.shown(3))
        both = (
            row.ttft_s.shown(),
            row.ttft_ratio.shown(3),
            row.lag_s.shown(),
            str(row.restored_tokens),
            f"{row.read_bytes / 1e6:.1f}",
        )
        cut = (f"{row.cut_ttft_ratio:.2f}", str(row.cut_restored_tokens), str(row.changed))
        shown.add_row(row.codec, *seconds, *both, f"{row.idle_cpu:.2f}", *cut)
    return shown
