"""`kvtide calibrate` makes a model's profile from texts, for a file or for the store of the model's engines."""

from __future__ import annotations

import hashlib
import math
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from kvtide.cli.profile import FingerprintOption, SaltOption, adding, names_of, store_profile
from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_bytes, progress_bars
from kvtide.clock import SystemClock
from kvtide.codec import Profile
from kvtide.codec.published import PROFILE_KINDS, ProfileFitter
from kvtide.codec.tide import COSTS
from kvtide.config import cache_home
from kvtide.tier import shown_url

TextOption = Annotated[list[Path] | None, typer.Option("--text", help="Texts of your own; may be given several times.")]
_TIDE_KINDS = tuple(f"tide-{cost}" for cost in COSTS)
_KINDS = (*PROFILE_KINDS, *_TIDE_KINDS)
_SEED = 1
_Progress = Callable[[str, int, int], None]


class _Subject:
    """The model, and texts as its token ids."""

    def __init__(self, folder: str, tokens: int) -> None:
        from kvtide.engines import transformers

        self.model = transformers.load_model(folder)
        self.name = Path(folder).name
        self.block_tokens = transformers.BLOCK_TOKENS
        self._tokens = tokens
        self._tokenizer: Any = None
        if any(Path(folder).glob("tokenizer*")) or (Path(folder) / "vocab.json").exists():
            self._tokenizer = transformers.load_tokenizer(folder)
        else:
            print(f"no tokenizer in {folder}: tokens are bytes of the texts, and any", file=sys.stderr)

    def ids(self, contents: Sequence[str]) -> list[list[int]]:
        """Return the first tokens of each text; without a tokenizer its bytes, and as many texts of random tokens."""
        tokens = self._tokens
        if self._tokenizer is not None:
            return [self._tokenizer(content[: 8 * tokens]).input_ids[:tokens] for content in contents]
        size = self.model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng([_SEED, len(contents)])
        found = [[byte % size for byte in content.encode()[:tokens]] for content in contents]
        return [*found, *(rng.integers(0, size, len(ids)).tolist() for ids in found)]


def calibrate(
    model: Annotated[str | None, typer.Argument(help="A model folder; default: SmolLM2-135M.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file to write the profile to.")] = None,
    url: Annotated[str | None, typer.Option("--store", help="The store in which engines look for it.")] = None,
    fingerprint: FingerprintOption = "",
    tenant_salt: SaltOption = "",
    text: TextOption = None,
    pieces: Annotated[
        int, typer.Option("--snippets", min=0, help="Instead of whole texts, so many pieces of files of many kinds.")
    ] = 0,
    codec: Annotated[str, typer.Option("--codec", help=f"One of {', '.join(_KINDS)}.")] = "tide-layer",
    tokens: Annotated[int, typer.Option("--tokens", min=256, help="Tokens of each text.")] = 1664,
    seconds: Annotated[float, typer.Option("--seconds", help="Stop after so long; run it again to go on.")] = math.inf,
    memory: Annotated[int, typer.Option("--memory-bytes", min=0, help="Take no more memory than this; 0: any.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fit a profile: what a codec needs to know of one model, from texts, once.

    A model with several groups of layers (windows, latents, states beside attention) gets one of tide for each group
    that keeps rows of tokens; files of all but the first are FILE-1, FILE-2, ….

    With --store the model's engines find it, also those that run already. Profiles of tide are fitted in four passes;
    one that was stopped goes on.
    """
    from kvtide.engines.calibrate import read_texts, snippets
    from kvtide.engines.transformers import converted_folder

    if codec not in _KINDS:
        raise ValueError(f"profiles are made for {', '.join(_KINDS)}, got {codec!r}")
    if output is None and url is None:
        raise ValueError("say where the profile is to go: --store URL, --output FILE, or both")
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    own = [each.content for each in (read_texts(text) if text else snippets(pieces) if pieces else [])]
    folder = Path(model or converted_folder())
    if url:
        # What is wrong with the store is an error now, and not when all is done.
        with adding(url):
            pass
    subject = _Subject(str(folder), tokens)
    names = names_of(folder, fingerprint, tenant_salt, subject.model) if url else []
    report: dict[str, Any] = {}
    with progress_bars() as bars:
        show = _Progressing(bars, seconds)
        if codec in _TIDE_KINDS:
            partial = _partial(output, folder, codec)
            profiles, report = _tide(subject, own, codec.removeprefix("tide-"), partial, show)
        else:
            profiles = [_published(subject, own, codec, show)]
    _keep(profiles, output, url, names)
    _say(_Outcome(str(output or ""), url or "", codec), profiles, report, as_json)


class _Outcome(NamedTuple):
    profile: str
    store: str
    codec: str


def _say(outcome: _Outcome, profiles: Sequence[Profile], report: dict[str, Any], as_json: bool) -> None:
    first, sizes = profiles[0], [len(each.to_bytes()) for each in profiles]
    fitted_on = {"texts": first.texts, "tokens": first.tokens, "profile_bytes": sum(sizes)}
    if as_json:
        rows = [
            {"group": each.group, "digest": each.digest.hex(), "profile_bytes": size}
            for each, size in zip(profiles, sizes, strict=True)
        ]
        found = {**outcome._asdict(), "digest": first.digest.hex(), "model": first.model}
        emit_json({**found, **fitted_on, **report, "rows": rows})
        return
    where = " and ".join(each for each in (outcome.profile, outcome.store and shown_url(outcome.store)) if each)
    size = format_bytes(fitted_on["profile_bytes"])
    CONSOLE.print(f"{where}: {size}, fitted on {first.tokens} tokens of {first.texts} texts")
    for each in profiles:
        CONSOLE.print(f"digest {each.digest.hex()} {escape(each.group)}".rstrip())
    _print_report(report)


def _keep(profiles: Sequence[Profile], output: Path | None, url: str | None, names: Sequence[bytes]) -> None:
    if output is not None:
        for number, each in enumerate(profiles):
            path = output.with_stem(f"{output.stem}-{number}") if number else output
            path.write_bytes(each.to_bytes())
    if url:
        with adding(url) as tier:
            for each in profiles:
                store_profile(tier, each, names)


class _Progressing:
    """Tells of each text, in lines where stderr is no terminal, and ends the fitting when its time is over."""

    def __init__(self, bars: _Progress, seconds: float) -> None:
        self._bars = bars
        self._seconds = seconds
        self._clock = SystemClock()
        self._started_s = self._clock.monotonic_s()

    def __call__(self, step: str, done: int, total: int) -> None:
        self._bars(step, done, total)
        if not sys.stderr.isatty():
            print(f"{step} {done}/{total}", file=sys.stderr, flush=True)
        if self._clock.monotonic_s() - self._started_s > self._seconds:
            raise ValueError(f"stopped after {self._seconds:.0f} s, at text {done} of {total}: run it again to go on")


def _partial(output: Path | None, folder: Path, codec: str) -> Path:
    """Return the file in which an unfinished fitting is kept."""
    if output is not None:
        return output.with_name(f"{output.name}.partial")
    name = hashlib.sha256(f"{folder.resolve()} {codec}".encode()).hexdigest()
    partial = cache_home() / "calibrations" / f"{name[:32]}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    return partial


def _published(subject: _Subject, own: Sequence[str], codec: str, show: _Progress) -> Profile:
    from kvtide.engines.calibrate import calibration_texts, capture_blocks
    from kvtide.engines.transformers import model_layout

    layout = model_layout(subject.model, subject.block_tokens)
    fitter = ProfileFitter(codec, subject.name, layout)
    all_ids = subject.ids(own or [each.content for each in calibration_texts()])
    for number, ids in enumerate(all_ids):
        show("texts", number, len(all_ids))
        blocks = capture_blocks(subject.model, ids, layout)
        if not fitter.deviation.any():
            fitter.scale(blocks)
        for bits in blocks:
            fitter.add(bits)
    show("texts", len(all_ids), len(all_ids))
    return fitter.profile(len(all_ids))


def _tide(
    subject: _Subject, own: Sequence[str], cost: str, partial: Path, show: _Progress
) -> tuple[list[Profile], dict[str, Any]]:
    """own: some of these texts are judged on; empty for those of the package, which has others to judge on."""
    from kvtide.engines.calibrate import TextSplit, TideCalibration, calibration_texts, held_out_texts, split_texts

    if own:
        split = split_texts(subject.ids(own))
    else:
        of_package = (calibration_texts(), held_out_texts())
        split = TextSplit(*(subject.ids([each.content for each in texts]) for texts in of_package))
    calibration = TideCalibration(subject.model, subject.name, cost, split, subject.block_tokens, partial)
    profiles, report = calibration.run(show)
    return profiles, msgspec.to_builtins(report)


def _print_report(report: dict[str, Any]) -> None:
    if not report:
        return
    table = Table("step", "bits an element", "KL", title=f"Predicted, from {report['held_out_texts']} held-out texts")
    for point in report["points"]:
        table.add_row(str(point["step_units"]), f"{point['bits_per_element']:.3f}", f"{point['kl']:.5f}")
    CONSOLE.print(table)
    ratio = report["held_out_over_fitted"]
    if ratio is None:
        CONSOLE.print("too few texts to hold any out: the table is that of texts that were fitted on")
    else:
        verdict = " [bold]: overfitted, give more texts[/]" if report["is_overfitted"] else ""
        if report["texts_wanted"]:
            verdict += f"; about {report['texts_wanted']} more texts would halve that"
        CONSOLE.print(f"held-out texts take {100 * (ratio - 1):+.1f} % bits of what fitted ones do{verdict}")
