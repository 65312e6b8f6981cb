"""What each codec costs in bits and in what the model then says: rate against distortion, every byte counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Group
from rich.table import Table

from kvtide.bench.quality_goals import BitsAtKl, bits_at_kl, embedded_penalty, ratio_to_tide
from kvtide.bench.texts import Text
from kvtide.block import BlockLayout
from kvtide.codec import CachegenCodec, ChunkwiseCodec, Codec, LosslessCodec, Profile, RawCodec, TideCodec
from kvtide.codec.cachegen import LEVELS
from kvtide.codec.chunkwise import CHUNKWISE_LEVELS
from kvtide.codec.integers import CODERS
from kvtide.codec.tide import THIRD, Steps
from kvtide.engines.judge import CodedContext, Judge, Verdict

__all__ = ["CodecQuality", "QualityRow", "QualitySize", "plot", "render", "run"]


class QualitySize(NamedTuple):
    """How much is judged."""

    contexts: int
    context_tokens: int
    continuation: int
    greedy: int


FULL = QualitySize(contexts=12, context_tokens=1536, continuation=128, greedy=32)
QUICK = QualitySize(contexts=1, context_tokens=256, continuation=128, greedy=8)

# Called with what is being done, and how much of it.
Progress = Callable[[str, int, int], None]


class QualityRow(msgspec.Struct, frozen=True):
    """One codec at one level. `profile` says where the distributions are: shared, payload, or none needed.

    Of a codec with refinements a row may be of objects that end at one of them. Of tide `quality` is what the whole
    object was asked for, `over_single` by how much the row's bits exceed those of an object of the same step without
    refinements.
    """

    codec: str
    level: int
    coder: str
    profile: str
    quality: float | None
    refinements: int
    over_single: float | None
    bits_per_element: float
    kl: float
    kl_stderr: float
    ppl_change_pct: float
    top1: float
    greedy_match: float
    size_vs_rans: float | None
    encode_mb_s: float
    decode_mb_s: float


class CodecQuality(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and what they say.

    `cachegen_over_tide` (shared tables) and `chunkwise_over_tide` (tables in the payload) are bits over those of
    tide-deep at a KL of 5e-3; `embedded_penalty` is the largest `over_single`.
    """

    model: str
    kv_dtype: str
    contexts: int
    context_tokens: int
    continuation_tokens: int
    greedy_tokens: int
    kinds: list[str]
    cachegen_over_tide: float | None
    chunkwise_over_tide: float | None
    embedded_penalty: float | None
    at_kl: list[BitsAtKl]
    rows: list[QualityRow]


# Of cachegen's nine positions in a group: how many single deltas follow the anchors in the rows that are not whole.
SINGLE_DELTAS = (0, 1, 3, 6)


class _Case(NamedTuple):
    """`refinements`: how many are read, None for all."""

    name: str
    level: int
    coder: str
    profile: str
    codec: Codec
    refinements: int | None = None
    quality: float | None = None


# By codec, level, place of distributions, refinements.
_Verdicts = dict[tuple[str, int, str, int], list[Verdict]]
# What objects of tide are asked for, and how many refinements they get: the last has prefixes of all qualities.
TIDE_QUALITIES = ((1e-2, 1), (4.5e-3, 1), (4e-3, 1), (9e-4, 3))
TIDE_QUALITIES_QUICK = ((4e-3, 1),)


def cases(profiles: Sequence[Profile], layout: BlockLayout, quick: bool) -> list[_Case]:
    """Return every codec, level, coder and place of distributions; shared ones where a profile fits.

    With `quick`, the finest and the coarsest level of each codec only.
    """
    found = [_Case("raw", 0, "none", "none", RawCodec()), _Case("lossless", 0, "rans", "none", LosslessCodec())]
    for name, maker, levels in (("cachegen", CachegenCodec, LEVELS), ("chunkwise", ChunkwiseCodec, CHUNKWISE_LEVELS)):
        fitting = next((p for p in profiles if p.kind == name and p.fits(layout)), None)
        for level in (min(levels), max(levels)) if quick else levels:
            for profile in (None, fitting) if fitting else (None,):
                for number, coder in enumerate(CODERS):
                    where = "shared" if profile else "payload"
                    found.append(_Case(name, level, coder.name, where, maker(level, number, profile)))
    return found + _anchor_cases(found) + _tide_cases(profiles, layout, quick)


def _anchor_cases(found: Sequence[_Case]) -> list[_Case]:
    # The paper's own bins, the coarsest: beside deltas that are not here, finer ones are bits for nothing.
    whole = [case for case in found if (case.name, case.level, case.coder) == ("cachegen", max(LEVELS), "rans")]
    return [whole[-1]._replace(refinements=refinements) for refinements in SINGLE_DELTAS]


def _tide_cases(profiles: Sequence[Profile], layout: BlockLayout, quick: bool) -> list[_Case]:
    return [
        _Case(profile.kind, 0, "rans", "shared", TideCodec(profile, quality, refinements), quality=quality)
        for profile in profiles
        if profile.kind.startswith("tide") and profile.fits(layout)
        for quality, refinements in (TIDE_QUALITIES_QUICK if quick else TIDE_QUALITIES)
    ]


def run(
    model: Any,
    model_name: str,
    tokenize: Callable[[str], list[int]],
    layout: BlockLayout,
    texts: Sequence[Text],
    profiles: Sequence[Profile],
    size: QualitySize,
    progress: Progress,
) -> CodecQuality:
    """Judge every case on the first texts that are long enough. ValueError if none is."""
    judge = Judge(model, layout, size.context_tokens, size.continuation, size.greedy)
    kinds: list[str] = []
    for text in texts:
        ids = tokenize(text.content[: 8 * judge.tokens_needed])
        if len(kinds) < size.contexts and len(ids) >= judge.tokens_needed:
            progress("contexts", len(kinds), size.contexts)
            judge.add(ids)
            kinds.append(text.kind)
    if not kinds:
        raise ValueError(f"no text has the {judge.tokens_needed} tokens that a context and its continuation need")
    progress("contexts", size.contexts, size.contexts)
    every = cases(profiles, layout, size == QUICK)
    rows: list[QualityRow] = []
    verdicts: _Verdicts = {}
    for number, case in enumerate(every):
        progress("codecs", number, len(every))
        if isinstance(case.codec, TideCodec):
            rows += _tide_rows(judge, case, case.codec)
        else:
            rows.append(_row(judge, case, rows, verdicts))
    progress("codecs", len(every), len(every))
    at_kl = bits_at_kl(rows)
    ratios = (ratio_to_tide(at_kl, "cachegen", "shared"), ratio_to_tide(at_kl, "chunkwise", "payload"))
    judged = (model_name, layout.dtype.value, len(kinds), *size[1:], kinds)
    return CodecQuality(*judged, *ratios, embedded_penalty(rows), at_kl, rows)


def _row(judge: Judge, case: _Case, rows: Sequence[QualityRow], verdicts: _Verdicts) -> QualityRow:
    coded = [judge.code(context, case.codec, case.refinements) for context in range(len(judge.contexts))]
    # Coders differ in size and speed, never in what they give back: the model need be asked once.
    key = (case.name, case.level, case.profile, coded[0].refinements)
    if key not in verdicts:
        verdicts[key] = [judge.judge(context, found.decoded) for context, found in enumerate(coded)]
    bits = _bits(judge, coded)
    rans = [row for row in rows if (row.codec, row.level, row.profile, row.refinements, row.coder) == (*key, "rans")]
    return _said(judge, case, coded, verdicts[key], size_vs_rans=bits / rans[0].bits_per_element if rans else None)


def _tide_rows(judge: Judge, case: _Case, codec: TideCodec) -> list[QualityRow]:
    """Return a row for each refinement at which the objects may end."""
    contexts = range(len(judge.contexts))
    by_context = [judge.code_prefixes(context, codec) for context in contexts]
    rows = []
    for refinement in range(codec.steps.refinements + 1):
        coded = [prefixes[refinement] for prefixes in by_context]
        verdicts = [judge.judge(context, coded[context].decoded) for context in contexts]
        units = codec.steps.final_units + THIRD * (codec.steps.refinements - refinement)
        single = codec.with_steps(Steps(units, 0))
        single_bits = _bits(judge, [judge.code(context, single) for context in contexts])
        over_single = _bits(judge, coded) / single_bits - 1
        rows.append(_said(judge, case, coded, verdicts, over_single=over_single))
    return rows


def _bits(judge: Judge, coded: Sequence[CodedContext]) -> float:
    raw_bytes, stored_bytes = sum(found.raw_bytes for found in coded), sum(found.stored_bytes for found in coded)
    return 8 * judge.layout.dtype.item_bytes * stored_bytes / raw_bytes


def _said(
    judge: Judge,
    case: _Case,
    coded: Sequence[CodedContext],
    verdicts: Sequence[Verdict],
    over_single: float | None = None,
    size_vs_rans: float | None = None,
) -> QualityRow:
    kls = [verdict.kl for verdict in verdicts]
    raw_bytes = sum(found.raw_bytes for found in coded)
    return QualityRow(
        codec=case.name,
        level=case.level,
        coder=case.coder,
        profile=case.profile,
        quality=case.quality,
        refinements=coded[0].refinements,
        over_single=over_single,
        bits_per_element=_bits(judge, coded),
        kl=fmean(kls),
        kl_stderr=float(np.std(kls) / math.sqrt(len(kls))),
        ppl_change_pct=100 * (math.exp(fmean(verdict.nll_change for verdict in verdicts)) - 1),
        top1=fmean(verdict.top1 for verdict in verdicts),
        greedy_match=fmean(verdict.greedy_match for verdict in verdicts),
        size_vs_rans=size_vs_rans,
        encode_mb_s=raw_bytes / 1e6 / sum(found.encode_s for found in coded),
        decode_mb_s=raw_bytes / 1e6 / sum(found.decode_s for found in coded),
    )


def render(result: CodecQuality) -> Group:
    """Return the tables that people read."""
    return Group(_render_rows(result), _render_goals(result))


def _render_goals(result: CodecQuality) -> Table:
    table = Table("codec", "coder", "tables", "KL", "bits", "best row", title="bits at a KL, between rows")
    for each in result.at_kl:
        bits = ("" if bits is None else f"{bits:.3f}" for bits in (each.bits_per_element, each.bits_of_row))
        table.add_row(each.codec, each.coder, each.profile, f"{each.kl:g}", *bits)
    return table


def _render_rows(result: CodecQuality) -> Table:
    title = f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, KV in {result.kv_dtype}"
    columns = (
        "codec",
        "level",
        "refinements",
        "coder",
        "tables",
        "bits",
        "KL",
        "±",
        "ppl %",
        "top-1",
        "greedy",
        "× rans",
        "over single %",
        "enc",
        "dec MB/s",
    )
    table = Table(*columns, title=title)
    for row in result.rows:
        table.add_row(
            row.codec,
            f"{row.quality:g}" if row.quality else str(row.level),
            str(row.refinements),
            row.coder,
            row.profile,
            f"{row.bits_per_element:.3f}",
            f"{row.kl:.5f}",
            f"{row.kl_stderr:.5f}",
            f"{row.ppl_change_pct:+.2f}",
            f"{row.top1:.3f}",
            f"{row.greedy_match:.1f}",
            f"{row.size_vs_rans:.3f}" if row.size_vs_rans else "",
            "" if row.over_single is None else f"{100 * row.over_single:+.2f}",
            f"{row.encode_mb_s:.0f}",
            f"{row.decode_mb_s:.0f}",
        )
    return table


def plot(result: CodecQuality, path: Path) -> str | None:
    """Draw rate against distortion, KL on a log scale; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[QualityRow]] = {}
    whole: dict[tuple[str, int], int] = {}
    for row in result.rows:
        whole[row.codec, row.level] = max(row.refinements, whole.get((row.codec, row.level), 0))
    for row in result.rows:
        if row.kl > 0:
            is_part = row.level and row.refinements < whole[row.codec, row.level]
            part = f", level {row.level} in part" if is_part else ""
            lines.setdefault(f"{row.codec}, {row.coder}, {row.profile} tables{part}", []).append(row)
    for rows in lines.values():
        rows.sort(key=lambda row: row.bits_per_element)
    for name, rows in lines.items():
        style = "o-" if "rans" in name else "s--"
        axes.plot([row.bits_per_element for row in rows], [row.kl for row in rows], style, label=name, markersize=4)
    axes.set_yscale("log")
    axes.set_xlabel("bits per KV element, everything counted")
    axes.set_ylabel("KL of the continuation, nats")
    axes.set_title(f"{result.model}: lower left is better")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return str(path)
