"""`kvtide-lab sim trace | regions | pool | prompts | stream | fairness`: what is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from kvtide.cli.report import JsonOption
from kvtide_lab.cli.options import QuickOption, tell
from kvtide_lab.sim.fairness import FAIRNESS_MIX, ClientMix, FairnessSetup, run_fairness
from kvtide_lab.sim.links import GBIT, LINK_MODELS, Link, link_named, read_link
from kvtide_lab.sim.made import HELD_OUT, MADE, MADE_PREFIX, made_trace
from kvtide_lab.sim.policies import POLICIES
from kvtide_lab.sim.pool import KEYS, KEYS_QUICK, SERVERS, SERVERS_MANY, run_pool
from kvtide_lab.sim.prompts import PROBABILITIES, PromptReport, PromptSetup, run_prompts
from kvtide_lab.sim.regions import REQUESTS, REQUESTS_QUICK, run_regions
from kvtide_lab.sim.replay import HINTS, compare, standing, standing_report, trace_report
from kvtide_lab.sim.stream import STREAM_POLICIES, StreamSetup, stream_report, sweep
from kvtide_lab.sim.workload import Trace, WekaReplay, joined, read_trace

app = typer.Typer(help="Run the real index, planner and scheduler on made-up time.", no_args_is_help=True)

SHARES = ["1%", "3%", "10%", "30%"]
SHARES_QUICK = ["3%", "10%"]
POLICIES_QUICK = ["lru", "arc", "reuse"]
STANDING = ["lru", "slru", "s3fifo", "arc", "lfu", "fading", "reuse"]
DEFAULT_POLICY = "mix"
_STREAM = StreamSetup()
TRIALS_QUICK = 30
SeedOption = Annotated[int, typer.Option("--seed", help="Of what is made up.")]
PolicyOption = Annotated[str, typer.Option("--policy", help=f"One of {', '.join(POLICIES)}.")]
CapacityOption = Annotated[
    list[str] | None, typer.Option("--capacity", help="Blocks, or as in 3% a share of the unique ones; repeats.")
]
SessionsOption = Annotated[int, typer.Option("--sessions", help="WEKA: the first so many sessions; 0 for all.")]
ClientOption = Annotated[
    list[str] | None,
    typer.Option("--client", help="KIB:COUNT[:CONNECTIONS[:WEIGHT]]; repeats. Default: 16384:1 and 512:7."),
]


@app.command("trace")
def trace(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Mooncake JSONL, Qwen-Bailian JSONL or WEKA compact, gzipped or not; a folder of sessions' texts; "
            f"made:NAME, one of {', '.join(MADE)}. Several give a line each; by default those held out do. "
            "A+B: traces as tenants of one cache."
        ),
    ] = None,
    policy: PolicyOption = DEFAULT_POLICY,
    capacity: CapacityOption = None,
    compare_all: Annotated[bool, typer.Option("--compare", help="All policies.")] = False,
    hints: Annotated[
        str | None, typer.Option("--hints", help=f"Advice that comes with the requests: {', '.join(HINTS)}.")
    ] = None,
    sessions: SessionsOption = 50,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replay traces; show hit rates between those of LRU and of Belady's bound."""
    if sessions < 0:
        raise ValueError(f"--sessions must not be negative, got {sessions}")
    names = files or [MADE_PREFIX + name for name in HELD_OUT][: 2 if quick else None]
    sizes = capacity or (SHARES_QUICK if quick else SHARES)
    if len(names) > 1:
        fixed = [each for each in STANDING if each != policy]
        found = [
            standing(loaded, policy, fixed, _share(each, loaded.unique_blocks), hints)
            for loaded in (_trace(name, sessions) for name in names)
            for each in sizes
        ]
        tell(standing_report(policy, found), as_json)
        return
    loaded = _trace(names[0], sessions)
    shares = [_share(each, loaded.unique_blocks) for each in sizes]
    policies = (POLICIES_QUICK if quick else list(POLICIES)) if compare_all else ["lru", policy]
    report = trace_report(loaded, compare(loaded, list(dict.fromkeys(policies)), shares, hints))
    tell(report, as_json)


def _trace(name: str, sessions: int) -> Trace:
    if "+" in name and not Path(name).exists():
        return joined([_trace(each, sessions) for each in name.split("+")])
    if name.startswith(MADE_PREFIX):
        return made_trace(name.removeprefix(MADE_PREFIX))
    if not (path := Path(name)).exists():
        raise ValueError(f"no trace at {name}")
    return read_trace(path, WekaReplay(sessions_max=sessions or None))


def _share(capacity: str, unique_blocks: int) -> float:
    """Return a capacity as a share of the unique blocks, at most all of them."""
    number = capacity.removesuffix("%")
    try:
        value = float(number) / 100 if number != capacity else int(number) / unique_blocks
    except (ValueError, OverflowError):
        raise ValueError(f"--capacity is a number of blocks or a share as in 3%, got {capacity!r}") from None
    if not value > 0:
        raise ValueError(f"--capacity must be positive, got {capacity!r}")
    return min(1.0, value)


@app.command("regions")
def regions(seed: SeedOption = 0, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Hit rates and bytes between regions, by what they have in common and how fast they synchronise."""
    tell(run_regions(seed, REQUESTS_QUICK if quick else REQUESTS), as_json)


@app.command("pool")
def pool(seed: SeedOption = 0, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Load of a pool's servers, and what a join or a leave moves, for each way to place blocks."""
    counts, keys = (SERVERS, KEYS_QUICK) if quick else (SERVERS + SERVERS_MANY, KEYS)
    tell(run_pool(seed, counts, keys), as_json)


@app.command("prompts")
def prompts(
    seed: SeedOption = 0,
    pool: Annotated[int, typer.Option("--pool", help="Freed blocks that the pool keeps (K).")] = 4096,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the random prompt generator: hit rate and items per second against p, with and without the cache."""
    setup = PromptSetup(seed=seed, pool_blocks=pool)
    single = msgspec.structs.replace(setup, frequent_sequences=1)
    points = run_prompts(setup, PROBABILITIES[::3] if quick else PROBABILITIES)
    report = PromptReport(setup, points, run_prompts(single, [1.0])[0])
    tell(report, as_json)


@app.command("stream")
def stream(
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            help=f"A model ({', '.join(LINK_MODELS)}), a trace or a folder of traces; repeats. Default: all models.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help=f"all, or some of {', '.join(STREAM_POLICIES)}; repeats.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Tokens; repeats.")] = None,
    slo: Annotated[list[float] | None, typer.Option("--slo", help="Seconds to the first token; repeats.")] = None,
    mean_gbit: Annotated[float, typer.Option("--mean-gbit", help="Mean of traces and models; 0: as traces are.")] = 3.0,
    decode_cores: Annotated[
        int, typer.Option("--decode-cores", help="Cores that decode; 0: decoding takes no time.")
    ] = _STREAM.decode_cores,
    trials: Annotated[int | None, typer.Option("--trials", help="Requests for each row.")] = None,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Misses, TTFT and quality of every streaming policy on every link that changes, beside the oracle's."""
    if not mean_gbit >= 0:
        raise ValueError(f"--mean-gbit must not be negative, got {mean_gbit}")
    setup = msgspec.structs.replace(
        _STREAM,
        context_tokens=tuple(context or _STREAM.context_tokens),
        slo_s=tuple(slo or _STREAM.slo_s),
        trials=trials or (TRIALS_QUICK if quick else _STREAM.trials),
        decode_cores=decode_cores,
        seed=seed,
    )
    links = [found for name in link or list(LINK_MODELS) for found in _links(name, mean_gbit * GBIT, seed)]
    names = list(STREAM_POLICIES) if policy in (None, ["all"]) else list(dict.fromkeys(policy or ()))
    report = stream_report(setup, sweep(setup, links, names))
    tell(report, as_json)


def _links(name: str, mean_bytes_per_s: float, seed: int) -> Sequence[Link]:
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise ValueError(f"no traces in {name}")
    elif path.is_file():
        files = [path]
    else:
        return [link_named(name, np.random.default_rng(seed), mean_bytes_per_s or 3 * GBIT)]
    traces = [read_link(file) for file in files]
    return [trace.scaled(mean_bytes_per_s) for trace in traces] if mean_bytes_per_s else traces


@app.command("fairness")
def fairness(
    client: ClientOption = None,
    link: Annotated[float, typer.Option("--link", help="Mbit/s.")] = 1000.0,
    seconds: Annotated[float, typer.Option("--seconds", help="Of made-up time.")] = 60.0,
    seed: SeedOption = 0,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Share a link between clients through the server's own scheduler, under every policy."""
    setup = FairnessSetup(
        mix=client_mix(client), link_bits_s=1e6 * link, duration_s=min(seconds, 20.0) if quick else seconds, seed=seed
    )
    report = run_fairness(setup)
    tell(report, as_json)


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
