"""What each codec costs in bits and in what the model then says: rate against distortion, every byte counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from kvtide.bench.texts import Text
from kvtide.block import BlockLayout
from kvtide.codec import CachegenCodec, ChunkwiseCodec, Codec, LosslessCodec, Profile, RawCodec
from kvtide.codec.cachegen import LEVELS
from kvtide.codec.chunkwise import CHUNKWISE_LEVELS
from kvtide.codec.integers import CODERS
from kvtide.engines.judge import Judge, Verdict

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

    `refinements` are those that were read and decoded; of a codec that has more, only these bytes count.
    """

    codec: str
    level: int
    coder: str
    profile: str
    refinements: int
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
    """All rows, and what they were measured on."""

    model: str
    kv_dtype: str
    contexts: int
    context_tokens: int
    continuation_tokens: int
    greedy_tokens: int
    kinds: list[str]
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


# By codec, level, place of distributions, refinements.
_Verdicts = dict[tuple[str, int, str, int], list[Verdict]]


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
    # The paper's own bins, the coarsest: beside deltas that are not here, finer ones are bits for nothing.
    whole = [case for case in found if (case.name, case.level, case.coder) == ("cachegen", max(LEVELS), "rans")]
    return found + [whole[-1]._replace(refinements=refinements) for refinements in SINGLE_DELTAS]


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
        rows.append(_row(judge, case, rows, verdicts))
    progress("codecs", len(every), len(every))
    return CodecQuality(model_name, layout.dtype.value, len(kinds), *size[1:], kinds, rows)


def _row(judge: Judge, case: _Case, rows: Sequence[QualityRow], verdicts: _Verdicts) -> QualityRow:
    coded = [judge.code(context, case.codec, case.refinements) for context in range(len(judge.contexts))]
    # Coders differ in size and speed, never in what they give back: the model need be asked once.
    key = (case.name, case.level, case.profile, coded[0].refinements)
    if key not in verdicts:
        verdicts[key] = [judge.judge(context, found.decoded) for context, found in enumerate(coded)]
    kls = [verdict.kl for verdict in verdicts[key]]
    raw_bytes, stored_bytes = sum(found.raw_bytes for found in coded), sum(found.stored_bytes for found in coded)
    bits = 8 * judge.layout.dtype.item_bytes * stored_bytes / raw_bytes
    rans = [row for row in rows if (row.codec, row.level, row.profile, row.refinements, row.coder) == (*key, "rans")]
    return QualityRow(
        codec=case.name,
        level=case.level,
        coder=case.coder,
        profile=case.profile,
        refinements=coded[0].refinements,
        bits_per_element=bits,
        kl=fmean(kls),
        kl_stderr=float(np.std(kls) / math.sqrt(len(kls))),
        ppl_change_pct=100 * (math.exp(fmean(verdict.nll_change for verdict in verdicts[key])) - 1),
        top1=fmean(verdict.top1 for verdict in verdicts[key]),
        greedy_match=fmean(verdict.greedy_match for verdict in verdicts[key]),
        size_vs_rans=bits / rans[0].bits_per_element if rans else None,
        encode_mb_s=raw_bytes / 1e6 / sum(found.encode_s for found in coded),
        decode_mb_s=raw_bytes / 1e6 / sum(found.decode_s for found in coded),
    )


def render(result: CodecQuality) -> Table:
    """Return the table that people read."""
    title = f"{result.model}, {result.contexts} contexts of {result.context_tokens} tokens, KV in {result.kv_dtype}"
    columns = (
        "codec",
        "level",
        "coder",
        "tables",
        "refined",
        "bits",
        "KL",
        "±",
        "ppl %",
        "top-1",
        "greedy",
        "× rans",
        "enc",
        "dec MB/s",
    )
    table = Table(*columns, title=title)
    for row in result.rows:
        table.add_row(
            row.codec,
            str(row.level),
            row.coder,
            row.profile,
            str(row.refinements),
            f"{row.bits_per_element:.3f}",
            f"{row.kl:.5f}",
            f"{row.kl_stderr:.5f}",
            f"{row.ppl_change_pct:+.2f}",
            f"{row.top1:.3f}",
            f"{row.greedy_match:.1f}",
            f"{row.size_vs_rans:.3f}" if row.size_vs_rans else "",
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
        if row.kl > 0 and row.level:
            part = f", level {row.level} in part" if row.refinements < whole[row.codec, row.level] else ""
            lines.setdefault(f"{row.codec}, {row.coder}, {row.profile} tables{part}", []).append(row)
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
