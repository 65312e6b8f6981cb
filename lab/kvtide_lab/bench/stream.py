"""Streaming as a user has it: `attach` over shaped links, judged by what the model says on the cache that came of it.

Every policy stands beside plain recomputing and beside the paper's system, on texts that no profile was calibrated on.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.table import Table

from kvtide.codec import Profile
from kvtide.plan.base import StreamPolicy
from kvtide.plan.policies import POLICIES, AnchorFirst, is_by_level, policy_named
from kvtide_lab.bench.stream_world import Played, StreamDoor, StreamSize, StreamWorld
from kvtide_lab.sim.links import Link
from kvtide_lab.sim.report import new_figure

# An embedded copy of four levels: a base of about half a bit, and three refinements to where the curve flattens.
TIDE = "tide:9e-4:3"
LEVELS, ANCHORS = "cachegen:1-4", "cachegen:2"
RECOMPUTE, RIVAL = "recompute", "cachegen"
FULL = StreamSize(context_tokens=2048, block_tokens=256, answer_tokens=128, texts=3)
QUICK = StreamSize(context_tokens=512, block_tokens=64, answer_tokens=64, texts=1)
# By so much of its bound a first token may be late: the noise of a machine.
LATE = 1.05
# The law holds where it is so near; smaller losses are noise beside what anybody asks for.
CLOSE, KL_MIN = 0.25, 2e-5

# Called with what is being done, and how much of it.
Progress = Callable[[str, int, int], None]


class LinkRoute(NamedTuple):
    """A link, and whether each play begins at another moment of it."""

    link: Link
    is_trace: bool = False


class StreamBenchRow(msgspec.Struct, frozen=True):
    """One policy over one link, the mean of its texts (of seconds the median).

    codec: of what was loaded. kl_model, kl_copy: the model's own KL in nats on the cache that was built, for text that
    goes on and for answers that copy. kl_law: what the loss law says of the former. bytes: passed the link.
    share_computed: of the context.
    """

    policy: str
    codec: str
    link: str
    ttft_s: float
    kl_model: float
    kl_copy: float
    kl_law: float | None
    bytes: int
    share_computed: float


class StreamVerdict(NamedTuple):
    """The rows' verdict for kvtide or against it; None where there is nothing to compare.

    ttft_within: share of kvtide's rows whose first token came by the deadline, or as early as by recomputing.
    kl_vs_cachegen: share of links on which one of its policies has half of CacheGen's KL or less, no later.
    law_within_25: share of rows in which the law is within 25 % of the model's KL, where anything rough was loaded.
    """

    ttft_within: float | None
    kl_vs_cachegen: float | None
    law_within_25: float | None


class StreamBench(msgspec.Struct, frozen=True):
    """All rows and what they say (StreamVerdict). load_before, load_after: processes that wanted to run, ours too."""

    context_tokens: int
    texts: int
    tide: str
    recompute_s: float
    deadline_s: float
    load_before: float
    load_after: float
    ttft_within: float | None
    kl_vs_cachegen: float | None
    law_within_25: float | None
    rows: list[StreamBenchRow]


def all_doors(tide: str = TIDE) -> list[StreamDoor]:
    """Return all ways to load: whole, to a quality, and by every policy that has a name."""
    codecs = {name: _codec_of(policy_named(name), tide) for name in POLICIES}
    named = [StreamDoor(name, codec, policy=name, is_timed=True) for name, codec in codecs.items()]
    return [StreamDoor("whole", tide), StreamDoor("to 5e-3", tide, quality=5e-3), *named]


def _codec_of(policy: StreamPolicy, tide: str) -> str:
    """Return what a policy is made for: tide's refinements, the paper's levels, or anchors and deltas of one level."""
    if is_by_level(policy):
        return LEVELS
    return ANCHORS if isinstance(policy, AnchorFirst) else tide


def run(
    model: Any,
    texts: Sequence[Sequence[int]],
    profiles: Sequence[Profile],
    routes: Sequence[LinkRoute],
    doors: Sequence[StreamDoor],
    size: StreamSize,
    progress: Progress,
) -> StreamBench:
    """Play every way over every link. ValueError for too few texts that are long enough, or no profile that fits."""
    load_before = os.getloadavg()[0]
    with StreamWorld(model, texts, size, profiles) as world:
        codecs = list(dict.fromkeys(door.codec for door in doors))
        for done, codec in enumerate(codecs):
            progress("contexts", done, len(codecs))
            world.store(codec)
        tail_s = statistics.median(world.tail_s(codecs[0], text) for text in range(size.texts))
        recompute_s = statistics.median(world.recompute_s(text) for text in range(size.texts))
        deadline_s = size.slo_share * recompute_s
        rows: list[StreamBenchRow] = []
        total = len(routes) * (1 + len(doors))
        for route in routes:
            plain_s = [world.recompute_s(text) for text in range(size.texts)]
            rows.append(
                row_of(RECOMPUTE, "", route.link.name, [Played(each, 0.0, 0.0, None, 0, 1.0) for each in plain_s])
            )
            for door in doors:
                progress("rows", len(rows), total)
                start_within_s = max(0.0, deadline_s - tail_s) if door.is_timed else None
                played = _plays(world, route, door, start_within_s, statistics.median(plain_s))
                rows.append(row_of(door.name, door.codec, route.link.name, played))
        progress("rows", total, total)
    loads, tide = (load_before, os.getloadavg()[0]), doors[0].codec
    verdict = verdict_of(rows, deadline_s)
    return StreamBench(size.context_tokens, size.texts, tide, recompute_s, deadline_s, *loads, *verdict, rows)


def _plays(
    world: StreamWorld, route: LinkRoute, door: StreamDoor, start_within_s: float | None, recompute_s: float
) -> list[Played]:
    link, turns = route.link, world.size.texts
    moments = [turn * link.cycle_s / (turns + 1) if route.is_trace else 0.0 for turn in range(turns + 1)]
    with world.attached(door, start_within_s) as cached:
        world.warm(cached, link, moments[-1], recompute_s)
        return [world.play(door, cached, turn, link, moments[turn]) for turn in range(turns)]


def row_of(policy: str, codec: str, link: str, played: Sequence[Played]) -> StreamBenchRow:
    """Return what the plays of one way over one link say together."""
    laws = [each.kl_law for each in played if each.kl_law is not None]
    return StreamBenchRow(
        policy,
        codec,
        link,
        statistics.median(each.ttft_s for each in played),
        statistics.fmean(each.kl_model for each in played),
        statistics.fmean(each.kl_copy for each in played),
        statistics.fmean(laws) if len(laws) == len(played) else None,
        round(statistics.fmean(each.link_bytes for each in played)),
        statistics.fmean(each.share_computed for each in played),
    )


def verdict_of(rows: Sequence[StreamBenchRow], deadline_s: float) -> StreamVerdict:
    """Return what rows say; kvtide's are those of its own codec."""
    plain_s = {row.link: row.ttft_s for row in rows if row.policy == RECOMPUTE}
    rivals = {row.link: row for row in rows if row.policy == RIVAL}
    ours = [row for row in rows if row.codec.startswith("tide")]
    within = [row.ttft_s <= LATE * max(deadline_s, plain_s[row.link]) for row in ours]
    halved = [
        any(
            row.kl_model <= max(rival.kl_model / 2, KL_MIN)
            for row in ours
            if row.link == link and row.ttft_s <= LATE * rival.ttft_s
        )
        for link, rival in rivals.items()
    ]
    near = [
        abs(row.kl_law / row.kl_model - 1) <= CLOSE for row in ours if row.kl_law is not None and row.kl_model > KL_MIN
    ]
    return StreamVerdict(*(statistics.fmean(each) if each else None for each in (within, halved, near)))


def render(result: StreamBench) -> Table:
    """Return the rows as a table."""
    shares = (result.ttft_within, result.kl_vs_cachegen, result.law_within_25)
    within, halved, near = ("none" if share is None else f"{share:.0%}" for share in shares)
    caption = (
        f"in time: {within} of kvtide's rows; half of CacheGen's KL, no later: {halved} of links; "
        f"law within 25 %: {near} of rows; load {result.load_before:.1f} to {result.load_after:.1f}"
    )
    title = (
        f"{result.context_tokens} tokens, {result.texts} held-out texts, {result.tide}; "
        f"recomputing {result.recompute_s:.2f} s, deadline {result.deadline_s:.2f} s"
    )
    table = Table(title=title, caption=caption)
    for column in ("link", "policy", "TTFT", "KL goes on", "KL copies", "law", "MB", "computed"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("link", "policy") else "right")
    for row in result.rows:
        table.add_row(
            row.link,
            row.policy,
            f"{row.ttft_s:.2f} s",
            f"{row.kl_model:.2g}",
            f"{row.kl_copy:.2g}",
            "" if row.kl_law is None else f"{row.kl_law:.2g}",
            f"{row.bytes / 1e6:.2f}",
            f"{row.share_computed:.0%}",
            end_section=row is result.rows[-1] or row.link != result.rows[result.rows.index(row) + 1].link,
        )
    return table


def plot(result: StreamBench, path: Path) -> None:
    """Draw the time to the first token against KL, a panel for each link. ValueError if matplotlib is not installed."""
    links = list(dict.fromkeys(row.link for row in result.rows))
    figure = new_figure((3.2 * len(links), 4))
    panels = figure.subplots(1, len(links), squeeze=False, sharey=True)[0]
    for link, axes in zip(links, panels, strict=True):
        for number, row in enumerate(row for row in result.rows if row.link == link):
            # A log axis has no 0.
            kls = [max(KL_MIN, kl) for kl in (row.kl_model, row.kl_copy)]
            axes.plot([row.ttft_s] * 2, kls, "-", color=f"C{number}", alpha=0.4)
            axes.plot(row.ttft_s, kls[0], "o", color=f"C{number}", label=row.policy)
            axes.plot(row.ttft_s, kls[1], "^", color=f"C{number}")
        axes.axvline(result.deadline_s, color="k", linestyle=":")
        axes.set(yscale="log", title=link, xlabel="first token, s")
    panels[0].set_ylabel("KL: goes on (o), copies (^)")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
    figure.savefig(path, dpi=150)
