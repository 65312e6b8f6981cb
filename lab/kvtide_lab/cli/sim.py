"""Commands that simulate: `kvtide-lab sim trace | prompts | stream | fairness | pool`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtide.cli.report import JsonOption, emit
from kvtide_lab.cli.sim_stream import stream
from kvtide_lab.sim import (
    HINTS,
    MADE,
    MADE_PREFIX,
    PROBABILITIES,
    PromptSetup,
    Trace,
    WekaReplay,
    compare,
    joined,
    made_trace,
    read_trace,
    run_prompts,
    standing,
)
from kvtide_lab.sim.fairness import FAIRNESS_MIX, ClientMix, FairnessSetup, run_fairness
from kvtide_lab.sim.features import KNOWS, render_features, run_features
from kvtide_lab.sim.groups import STATE_BLOCKS, render_groups, run_groups
from kvtide_lab.sim.policies import POLICIES
from kvtide_lab.sim.pool import KEYS, KEYS_QUICK, SERVERS, SERVERS_MANY, plot_pool, render_pool, run_pool
from kvtide_lab.sim.regions import REQUESTS, REQUESTS_QUICK, render_regions, run_regions
from kvtide_lab.sim.report import (
    StandingReport,
    plot_fairness,
    plot_prompts,
    plot_trace,
    prompt_report,
    render_fairness,
    render_prompts,
    render_standings,
    render_trace,
    standing_report,
    trace_report,
)
from kvtide_lab.sim.shrink import render_shrink, run_shrink

app = typer.Typer(help="Run the real index, planner and scheduler on made-up time.", no_args_is_help=True)
app.command("stream")(stream)

SHARES = ["1%", "3%", "10%", "30%"]
SHARES_QUICK = ["3%", "10%"]
POLICIES_QUICK = ["lru", "arc", "reuse"]
STANDING = ["lru", "slru", "s3fifo", "arc", "score", "fading", "reuse"]
DEFAULT_POLICY = "mix"
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer cases, within 50 s.")]
ClientOption = Annotated[
    list[str] | None,
    typer.Option("--client", help="KIB:COUNT[:CONNECTIONS[:WEIGHT]]; repeats. Default: 16384:1 and 512:7."),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write the figures to this PNG file.")]


@app.command("trace")
def trace(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Mooncake JSONL, Qwen-Bailian JSONL or WEKA compact, gzipped or not; a folder of sessions' texts; "
            f"made:NAME, one of {', '.join(MADE)}. Several give a line each; by default all made-up ones do. "
            "A+B: traces as tenants of one cache."
        ),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help=f"One of {', '.join(POLICIES)}.")] = DEFAULT_POLICY,
    capacity: Annotated[
        list[str] | None, typer.Option("--capacity", help="Blocks, or as in 3% a share of the unique ones; repeats.")
    ] = None,
    compare_all: Annotated[bool, typer.Option("--compare", help="All policies.")] = False,
    room: Annotated[bool, typer.Option("--room", help="Several traces: what room LRU needs for as many hits.")] = False,
    weigh_cost: Annotated[bool, typer.Option("--weigh-cost", help="Tell policies what a prefill costs.")] = False,
    hints: Annotated[
        str | None, typer.Option("--hints", help=f"Advice that comes with the requests: {', '.join(HINTS)}.")
    ] = None,
    sessions: Annotated[int, typer.Option("--sessions", help="WEKA: the first so many sessions; 0 for all.")] = 50,
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replay traces; show hit rates between those of LRU and of Belady's bound."""
    if sessions < 0:
        raise ValueError(f"--sessions must not be negative, got {sessions}")
    names = files or [MADE_PREFIX + name for name in MADE][: 2 if quick else None]
    if len(names) > 1:
        loads = [_trace(name, sessions) for name in names]
        sizes = capacity or (SHARES_QUICK if quick else SHARES)
        emit(_standings(loads, policy, sizes, room, hints), render_standings, as_json)
        return
    loaded = _trace(names[0], sessions)
    shares = [_share(each, loaded.unique_blocks) for each in capacity or (SHARES_QUICK if quick else SHARES)]
    policies = (POLICIES_QUICK if quick else list(POLICIES)) if compare_all else ["lru", policy]
    report = trace_report(loaded, compare(loaded, list(dict.fromkeys(policies)), shares, weigh_cost, hints))
    if plot is not None:
        plot_trace(report, plot)
    emit(report, render_trace, as_json)


def _trace(name: str, sessions: int) -> Trace:
    if "+" in name and not Path(name).exists():
        return joined([_trace(each, sessions) for each in name.split("+")])
    if name.startswith(MADE_PREFIX):
        return made_trace(name.removeprefix(MADE_PREFIX))
    if not (path := Path(name)).exists():
        raise ValueError(f"no trace at {name}")
    return read_trace(path, WekaReplay(sessions_max=sessions or None))


def _standings(
    traces: Sequence[Trace], policy: str, capacity: Sequence[str], room: bool, hints: str | None
) -> StandingReport:
    """Set a policy beside the fixed ones on several traces."""
    fixed = [each for each in STANDING if each != policy]
    shares = [(trace, _share(each, trace.unique_blocks)) for trace in traces for each in capacity]
    return standing_report(policy, [standing(trace, policy, fixed, share, room, hints) for trace, share in shares])


@app.command("features")
def features(
    files: Annotated[
        list[str] | None, typer.Argument(help="As for `trace`. Default: made:sessions and made:tenants.")
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help=f"One of {', '.join(POLICIES)}.")] = DEFAULT_POLICY,
    feature: Annotated[
        list[str] | None, typer.Option("--feature", help=f"Repeats; by default all: {'; '.join(KNOWS)}.")
    ] = None,
    capacity: Annotated[list[str] | None, typer.Option("--capacity", help="As for `trace`; repeats.")] = None,
    sessions: Annotated[int, typer.Option("--sessions", help="WEKA: the first so many sessions; 0 for all.")] = 50,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell a ranking one thing more, of all that there is to know: what each saves alone."""
    names = files or [MADE_PREFIX + name for name in ("tenants", "sessions")][: 1 if quick else None]
    loads = [_trace(name, sessions) for name in names]
    sizes = capacity or SHARES_QUICK[: 1 if quick else None]
    pairs = [(loaded, _share(each, loaded.unique_blocks)) for loaded in loads for each in sizes]
    emit(run_features(pairs, policy, feature), render_features, as_json)


@app.command("shrink")
def shrink(
    file: Annotated[str, typer.Argument(help="A trace, as for `trace`.")] = MADE_PREFIX + "sessions",
    policy: Annotated[str, typer.Option("--policy", help=f"One of {', '.join(POLICIES)}.")] = DEFAULT_POLICY,
    capacity: Annotated[list[str] | None, typer.Option("--capacity", help="As for `trace`, in whole blocks.")] = None,
    sessions: Annotated[int, typer.Option("--sessions", help="WEKA: the first so many sessions; 0 for all.")] = 50,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let refinements of `tide` leave before blocks: hits and what they lose, at equal bytes."""
    loaded = _trace(file, sessions)
    shares = [_share(each, loaded.unique_blocks) for each in capacity or SHARES_QUICK[: 1 if quick else None]]
    emit(run_shrink(loaded, policy, shares), render_shrink, as_json)


@app.command("groups")
def groups(
    file: Annotated[str, typer.Argument(help="A trace, as for `trace`.")] = MADE_PREFIX + "sessions",
    policy: Annotated[str, typer.Option("--policy", help="An order of a memory tier, `?policy=`.")] = DEFAULT_POLICY,
    capacity: Annotated[
        list[str] | None, typer.Option("--capacity", help="As for `trace`, in bytes of blocks.")
    ] = None,
    state_blocks: Annotated[
        float, typer.Option("--state-blocks", help="A state's bytes, in a block's.")
    ] = STATE_BLOCKS,
    sessions: Annotated[int, typer.Option("--sessions", help="WEKA: the first so many sessions; 0 for all.")] = 50,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep states of a hybrid model beside keys and values: hits, bytes and cuts, by how often states are kept."""
    loaded = _trace(file, sessions)
    shares = [_share(each, loaded.unique_blocks) for each in capacity or SHARES_QUICK[: 1 if quick else None]]
    emit(run_groups(loaded, policy, shares, state_blocks), render_groups, as_json)


@app.command("regions")
def regions(
    seed: Annotated[int, typer.Option("--seed", help="Of the requests.")] = 0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Hit rates and bytes between regions, by what they have in common and how fast they synchronise."""
    emit(run_regions(seed, REQUESTS_QUICK if quick else REQUESTS), render_regions, as_json)


@app.command("pool")
def pool(
    servers: Annotated[
        list[int] | None, typer.Option("--servers", help="How many; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of keys and requests.")] = 0,
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Load of a pool's servers, and what a join or a leave moves, for each way to place blocks."""
    counts = tuple(servers) if servers else SERVERS if quick else SERVERS + SERVERS_MANY
    report = run_pool(seed, counts, KEYS_QUICK if quick else KEYS)
    if plot is not None:
        plot_pool(report, plot)
    emit(report, render_pool, as_json)


def _share(capacity: str, unique_blocks: int) -> float:
    """Return a capacity as a share of the unique blocks, at most all of them."""
    number = capacity.removesuffix("%")
    try:
        value = float(number) / 100 if number != capacity else int(number) / unique_blocks
    except ValueError:
        raise ValueError(f"--capacity is a number of blocks or a share as in 3%, got {capacity!r}") from None
    if not value > 0:
        raise ValueError(f"--capacity must be positive, got {capacity!r}")
    return min(1.0, value)


@app.command("prompts")
def prompts(
    seed: Annotated[int, typer.Option("--seed", help="Of the generator.")] = 0,
    pool: Annotated[int, typer.Option("--pool", help="Freed blocks that the pool keeps (K).")] = 4096,
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the random prompt generator: hit rate and items per second against p, with and without the cache."""
    setup = PromptSetup(seed=seed, pool_blocks=pool)
    single = msgspec.structs.replace(setup, frequent_sequences=1)
    points = run_prompts(setup, PROBABILITIES[::3] if quick else PROBABILITIES)
    report = prompt_report(setup, points, run_prompts(single, [1.0])[0])
    if plot is not None:
        plot_prompts(report, plot)
    emit(report, render_prompts, as_json)


@app.command("fairness")
def fairness(
    client: ClientOption = None,
    link: Annotated[float, typer.Option("--link", help="Mbit/s.")] = 1000.0,
    slots: Annotated[int, typer.Option("--slots", help="Slices in flight at most.")] = 2,
    slice_kib: Annotated[int, typer.Option("--slice", help="KiB of a slice.")] = 512,
    round_trip: Annotated[float, typer.Option("--round-trip", help="Milliseconds.")] = 0.5,
    seconds: Annotated[float, typer.Option("--seconds", help="Of made-up time.")] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the lottery and the order of first requests.")] = 0,
    plot: PlotOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Share a link between clients through the server's own scheduler, under every policy."""
    setup = FairnessSetup(
        mix=client_mix(client),
        link_bits_s=1e6 * link,
        slots=slots,
        slice_bytes=slice_kib << 10,
        round_trip_s=round_trip / 1e3,
        duration_s=min(seconds, 20.0) if quick else seconds,
        seed=seed,
    )
    report = run_fairness(setup)
    if plot is not None:
        plot_fairness(report, plot)
    emit(report, render_fairness, as_json)


def client_mix(texts: Sequence[str] | None) -> tuple[ClientMix, ...]:
    """Return what `--client` asks for. ValueError for a text that is not as its help says."""
    return tuple(map(_client, texts)) if texts else FAIRNESS_MIX


def _client(text: str) -> ClientMix:
    try:
        kib, count, *more = text.split(":")
        connections, weight = [*more, *("1", "1")[len(more) :]]
        return ClientMix(int(kib) << 10, int(count), int(connections), float(weight))
    except ValueError as error:
        raise ValueError(f"--client is KIB:COUNT[:CONNECTIONS[:WEIGHT]] in numbers, got {text!r}") from error
