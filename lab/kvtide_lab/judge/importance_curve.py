"""Quality against bytes of tide: all tokens alike, and the important ones finer than the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtide.block import BlockBits, BlockMeta
from kvtide.codec import Profile
from kvtide.codec.tide import THIRD, Steps, TideCodec
from kvtide.wire import pack_object
from kvtide_lab.judge.importance_judge import ImportanceJudge, JudgedPrefix
from kvtide_lab.judge.tide_chunked import ChunkedRange, ChunkedTide

# The finest step's KL, and refinements down to it.
QUALITY, REFINEMENTS = 9e-4, 2
# Shares of the tokens that have at least one refinement, and both. All tokens once before some have both, or half of
# them once, is worse for the same bytes.
SHARES = ((0.125, 0.0), (0.25, 0.0), (0.25, 0.125), (0.5, 0.25), (0.75, 0.25), (1.0, 0.25), (1.0, 0.5), (1.0, 1.0))
# The line's steps are so far apart, in units; the last is the base's.
LINE_UNITS = 6
ENTRY_BYTES = 48


class SharePoint(NamedTuple):
    """One choice: share of the raw bytes, and KL in the mean over questions."""

    label: str
    bytes_share: float
    kl: float


def all_tokens(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], profile: Profile, stride: int = 1
) -> list[SharePoint]:
    """Return the line to beat: objects of one step each, half an octave apart times the stride."""
    finest = TideCodec(profile, QUALITY, REFINEMENTS).steps.final_units
    points = []
    for step in range(finest, finest + THIRD * REFINEMENTS + 1, LINE_UNITS * stride):
        codec = TideCodec(profile, QUALITY, 0).with_steps(Steps(step, 0))
        sizes, kls = [], []
        for prefix in prefixes:
            blocks, size = [], 0
            for meta, bits in zip(prefix.metas, prefix.blocks, strict=True):
                sections = codec.encode(meta, bits)
                size += len(pack_object(meta, codec.codec_id, sections, codec.profile))
                out = np.empty_like(bits)
                codec.decode(meta, sections, out)
                blocks.append(out)
            sizes.append(size / (len(blocks) * judge.layout.raw_bytes))
            kls += [judge.decoded(prefix, number, blocks).kl for number in range(len(prefix.questions))]
        points.append(SharePoint(f"all tokens, step {step}", float(np.mean(sizes)), float(np.mean(kls))))
    return points


def over_line(point: SharePoint, line: Sequence[SharePoint]) -> float | None:
    """Return a point's KL over that of the line at the same bytes, log KL between points; None beyond its ends."""
    known = sorted((each.bytes_share, each.kl) for each in line)
    sizes = [size for size, _ in known]
    if not sizes[0] <= point.bytes_share <= sizes[-1]:
        return None
    return float(point.kl / np.exp(np.interp(point.bytes_share, sizes, np.log([kl for _, kl in known]))))


def selective(
    judge: ImportanceJudge, prefixes: Sequence[JudgedPrefix], profile: Profile, stride: int = 1
) -> list[SharePoint]:
    """Return what finer important tokens give: chunks by past uses, over all blocks of a prefix."""
    codec = ChunkedTide(profile, QUALITY, REFINEMENTS)
    totals: dict[tuple[float, float], list[tuple[float, list[float]]]] = {share: [] for share in SHARES[::stride]}
    for prefix in prefixes:
        coded = [codec.encode(meta, bits, scores) for meta, bits, scores in _with_scores(prefix)]
        for shares, found in totals.items():
            blocks, size = _decoded(codec, prefix, coded, shares)
            kls = [judge.decoded(prefix, number, blocks).kl for number in range(len(prefix.questions))]
            found.append((size / (len(blocks) * judge.layout.raw_bytes), kls))
    return [
        SharePoint(
            f"{once:.0%} once, {twice:.0%} twice",
            float(np.mean([size for size, _ in found])),
            float(np.mean([kl for _, kls in found for kl in kls])),
        )
        for (once, twice), found in totals.items()
    ]


_Coded = list[tuple[ChunkedRange, Sequence[NDArray[np.int64]]]]


def _with_scores(prefix: JudgedPrefix) -> list[tuple[BlockMeta, BlockBits, NDArray[np.float32]]]:
    parts = np.split(prefix.scores, len(prefix.metas), axis=1)
    return list(zip(prefix.metas, prefix.blocks, parts, strict=True))


def _decoded(
    codec: ChunkedTide, prefix: JudgedPrefix, coded: Sequence[_Coded], shares: tuple[float, float]
) -> tuple[list[BlockBits], int]:
    """Return blocks with the most important chunks of each range refined, and the bytes that this takes."""
    runs: list[list[dict[int, Sequence[bytes | memoryview]]]] = [[{} for _ in block] for block in coded]
    scores = [part for _, _, part in _with_scores(prefix)]
    size = len(coded) * 256 + sum(len(found.base) + ENTRY_BYTES + 2 * 256 for block in coded for found, _ in block)
    for place, (start, stop) in enumerate(codec.ranges):
        means = [
            (float(scores[block][start:stop][:, tokens].mean()), block, number)
            for block, ranges in enumerate(coded)
            for number, tokens in enumerate(ranges[place][1])
        ]
        for rank, (_, block, number) in enumerate(sorted(means, reverse=True)):
            count = sum(rank < round(share * len(means)) for share in shares)
            run = runs[block][place][number] = coded[block][place][0].chunks[number][:count]
            size += sum(len(data) + ENTRY_BYTES for data in run)
    blocks = []
    for meta, here, found in zip(prefix.metas, runs, coded, strict=True):
        out: BlockBits = np.empty(meta.layout.shape, meta.layout.bits_dtype)
        parts = [(ChunkedRange(whole.base, run), chunks) for run, (whole, chunks) in zip(here, found, strict=True)]
        codec.decode(meta, parts, out)
        blocks.append(out)
    return blocks, size
