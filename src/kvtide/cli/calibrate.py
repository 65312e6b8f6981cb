"""`kvtide calibrate` makes a model's profile from texts; `kvtide profile` lists the profiles that a store needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvtide.cli.report import CONSOLE, JsonOption, emit_json, format_bytes, narrow_table, progress_bars
from kvtide.cli.store import (
    DEFAULT_STORE,
    STATS_LIMIT,
    HeadsOption,
    NamespaceOption,
    ObjectRow,
    StoreOption,
    listed,
    looking_at,
    rows_of,
)
from kvtide.codec import Profile
from kvtide.codec.published import PROFILE_KINDS, ProfileFitter
from kvtide.codec.tide import COSTS
from kvtide.engines import installed_profiles, read_profile

TextOption = Annotated[list[Path] | None, typer.Option("--text", help="Texts of your own; may be given several times.")]
_TIDE_KINDS = tuple(f"tide-{cost}" for cost in COSTS)
_KINDS = (*PROFILE_KINDS, *_TIDE_KINDS)
_Progress = Callable[[str, int, int], None]


class _Subject:
    """The model and the texts as token ids."""

    def __init__(self, folder: str, contents: Sequence[str], tokens: int) -> None:
        from kvtide.engines import transformers

        tokenizer = transformers.load_tokenizer(folder)
        self.model = transformers.load_model(folder)
        self.name = Path(folder).name
        self.layout = transformers.model_layout(self.model, transformers.BLOCK_TOKENS)
        self.texts = [tokenizer(content[: 8 * tokens]).input_ids[:tokens] for content in contents]


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")],
    model: Annotated[str | None, typer.Argument(help="A model folder; default: SmolLM2-135M.")] = None,
    text: TextOption = None,
    codec: Annotated[str, typer.Option("--codec", help=f"One of {', '.join(_KINDS)}.")] = "tide-layer",
    tokens: Annotated[int, typer.Option("--tokens", min=256, help="Tokens of each text.")] = 1664,
    as_json: JsonOption = False,
) -> None:
    """Fit a profile: what a codec needs to know of one model, from texts, once.

    Profiles of tide are fitted in three passes; one that was stopped goes on from `OUTPUT.partial`.
    """
    from kvtide.engines.calibrate import calibration_texts, read_texts
    from kvtide.engines.transformers import converted_folder

    if codec not in _KINDS:
        raise ValueError(f"profiles are made for {', '.join(_KINDS)}, got {codec!r}")
    chosen = read_texts(text) if text else calibration_texts()
    subject = _Subject(model or str(converted_folder()), [item.content for item in chosen], tokens)
    report: dict[str, Any] = {}
    with progress_bars() as show:
        if codec in _TIDE_KINDS:
            profile, report = _tide(subject, codec.removeprefix("tide-"), output, show)
        else:
            profile = _published(subject, codec, show)
    data = profile.to_bytes()
    output.write_bytes(data)
    found = {"profile": str(output), "digest": profile.digest.hex(), "codec": codec, "model": profile.model}
    if as_json:
        sizes = {"texts": profile.texts, "tokens": profile.tokens, "profile_bytes": len(data)}
        emit_json({**found, **sizes, **report})
        return
    CONSOLE.print(f"{output}: {format_bytes(len(data))}, fitted on {profile.tokens} tokens of {profile.texts} texts")
    CONSOLE.print(f"digest {profile.digest.hex()}")
    if report:
        _print_report(report)


def _published(subject: _Subject, codec: str, show: _Progress) -> Profile:
    from kvtide.engines.calibrate import capture_blocks

    fitter = ProfileFitter(codec, subject.name, subject.layout)
    for number, ids in enumerate(subject.texts):
        show("texts", number, len(subject.texts))
        blocks = capture_blocks(subject.model, ids, subject.layout)
        if not fitter.deviation.any():
            fitter.scale(blocks)
        for bits in blocks:
            fitter.add(bits)
    show("texts", len(subject.texts), len(subject.texts))
    return fitter.profile(len(subject.texts))


def _tide(subject: _Subject, cost: str, output: Path, show: _Progress) -> tuple[Profile, dict[str, Any]]:
    from kvtide.engines.calibrate import TideCalibration

    partial = output.with_name(f"{output.name}.partial")
    calibration = TideCalibration(subject.model, subject.name, cost, subject.texts, subject.layout, partial)
    profile, report = calibration.run(show)
    return profile, msgspec.to_builtins(report)


def _print_report(report: dict[str, Any]) -> None:
    table = Table("step", "bits an element", "KL", title=f"Predicted, from {report['held_out_texts']} held-out texts")
    for point in report["points"]:
        table.add_row(str(point["step_units"]), f"{point['bits_per_element']:.3f}", f"{point['kl']:.5f}")
    CONSOLE.print(table)
    ratio = report["held_out_over_fitted"]
    if ratio is None:
        CONSOLE.print("too few texts to hold any out: the table is that of texts that were fitted on")
    else:
        verdict = " [bold]: overfitted, give more texts[/]" if report["is_overfitted"] else ""
        CONSOLE.print(f"held-out texts take {100 * (ratio - 1):+.1f} % bits of what fitted ones do{verdict}")


class ProfileRow(msgspec.Struct, frozen=True):
    """A profile by its digest: whose it is, where it is from ("" if it is not here), and what needs it."""

    profile: str
    model: str
    codec: str
    found: str
    objects: int
    stored_bytes: int


def profile(
    files: Annotated[list[Path] | None, typer.Argument(help="Profiles beside those that are installed.")] = None,
    url: StoreOption = DEFAULT_STORE,
    namespace: NamespaceOption = "",
    limit: HeadsOption = STATS_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """Show which profiles a store's blocks need, and whether they are here: without it a block is a miss."""
    known = {each.digest.hex(): "installed" for each in installed_profiles()}
    known |= {read_profile(path).digest.hex(): str(path) for path in files or ()}
    with looking_at(url) as tier:
        rows = rows_of(tier, listed(tier, namespace)[: limit or None])
    groups: dict[tuple[str, str, str], list[ObjectRow]] = {}
    for row in rows:
        if row.profile:
            groups.setdefault((row.profile, row.model, row.codec), []).append(row)
    found = [
        ProfileRow(*name, known.get(name[0], ""), len(members), sum(row.stored_bytes for row in members))
        for name, members in sorted(groups.items())
    ]
    if as_json:
        emit_json({"store": url, "looked_into": len(rows), "rows": found})
        return
    table = narrow_table("profile", "model", "codec", "here", ">blocks", ">stored")
    for each in found:
        here = "yes" if each.found else "no"
        figures = (str(each.objects), format_bytes(each.stored_bytes))
        table.add_row(each.profile[:12], escape(each.model), escape(each.codec), here, *figures)
    CONSOLE.print(table if found else f"none of {len(rows)} blocks needs a profile")
    if any(not each.found for each in found):
        CONSOLE.print("What is not here is a miss: give the file to attach(profiles=[read_profile(FILE)]).")
