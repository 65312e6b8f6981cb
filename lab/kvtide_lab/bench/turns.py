"""Chats whose every turn is computed on what a cache kept of the turns before: does the loss of a codec add up?

Each text is talked with all codecs beside one exact chat; what was found of a text is kept, so that a run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtide.codec import Profile
from kvtide.engines.calibrate.judge import one_torch_thread
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers.watch import model_fingerprint
from kvtide_lab.bench.quality_state import Partial, ids_digest
from kvtide_lab.judge.chat_judge import ChatJudge, ChatSize, TurnVerdict

# The first turn restores nothing: what adds up begins with the second.
FIRST_RESTORED = 1
# A growth that chance alone shows less often than this is a trend.
TREND_P_MAX = 0.05
# Requests and checks that are timed for the share of the check.
IDENTITY_CALLS = 15

# Called with what is being done, and how much of it.
Progress = Callable[[str, int, int], None]


class TurnsSize(NamedTuple):
    """The length of the chats, and their codecs."""

    texts: int
    chat: ChatSize
    codecs: tuple[str, ...]


FULL = TurnsSize(12, ChatSize(10, 128, 32, 32), ("lossless", "tide:5e-3", "tide-deep:5e-3", "cachegen:2"))
QUICK = TurnsSize(1, ChatSize(10, 28, 4, 16), ("lossless", "tide:5e-3"))


class TurnRow(msgspec.Struct, frozen=True):
    """One turn with one codec, over the tokens of all texts. `turn` counts from one; `kl_q90` is of single tokens.

    `kl_once` is the KL after the exact chat's own cache, through the codec once: what `kl` exceeds it by has added up.
    """

    codec: str
    turn: int
    kl: float
    kl_once: float
    kl_q90: float
    top1: float
    hit_tokens: int


class Trend(msgspec.Struct, frozen=True):
    """By how much KL grows a turn, from the second turn on: the mean of the texts' slopes.

    `has_trend`: the slope is above zero by a one-sided sign-flip test over the texts, `p` below TREND_P_MAX. `p` is the
    share of all choices of signs whose mean slope is at least this one, so that fewer than five texts show no trend.
    """

    slope: float
    slope_stderr: float | None
    p: float
    has_trend: bool


class TurnsBench(msgspec.Struct, frozen=True):
    """All rows, what they were measured on, and what they say.

    `trend` is of each codec's `kl`, which grows with the coded share of a prefix too; `trend_added` is of what it
    exceeds `kl_once` by, what adds up alone. `exact_kl_max` is the largest KL of a single token after a lossless
    cache; `identity_share` the share of a warm request of one token that the check of the model takes.
    """

    model: str
    kv_dtype: str
    texts: int
    kinds: list[str]
    user_tokens: int
    answer_tokens: int
    block_tokens: int
    kl_turn_10: dict[str, float]
    trend: dict[str, Trend]
    trend_added: dict[str, Trend]
    exact_kl_max: float
    identity_share: float
    rows: list[TurnRow]


class ChatInputs(msgspec.Struct, frozen=True):
    """All that decides what is found, but for the program. Digests in hex."""

    model: str
    chat: ChatSize
    codecs: tuple[str, ...]
    texts: list[str]
    profiles: list[str]


class ChatSubject(NamedTuple):
    """The texts and the model of the chats."""

    model: Any
    name: str
    size: TurnsSize
    ids: list[list[int]]
    kinds: list[str]


# Of each turn of a text, by codec.
Said = dict[str, TurnVerdict]


def subject_of(
    model: Any, name: str, tokenize: Callable[[str], list[int]], texts: Sequence[Text], size: TurnsSize
) -> ChatSubject:
    """Take the first texts that are long enough. ValueError if none is."""
    needed = size.chat.tokens_needed
    subject = ChatSubject(model, name, size, [], [])
    for text in texts:
        ids = tokenize(text.content[: 8 * needed]) if len(subject.ids) < size.texts else []
        if len(ids) >= needed:
            subject.ids.append(list(ids[:needed]))
            subject.kinds.append(text.kind)
    if not subject.ids:
        raise ValueError(f"no text has the {needed} tokens that the turns need")
    return subject


def partial_of(subject: ChatSubject, profiles: Sequence[Profile], path: Path | None) -> Partial[ChatInputs, Said]:
    """Return where results are kept, with those that a run of the same inputs left. ValueError if others did."""
    inputs = ChatInputs(
        model=model_fingerprint(subject.model).hex(),
        chat=subject.size.chat,
        codecs=subject.size.codecs,
        texts=[ids_digest(ids) for ids in subject.ids],
        profiles=[profile.digest.hex() for profile in profiles],
    )
    return Partial(inputs, Said, path)


def run(
    subject: ChatSubject, profiles: Sequence[Profile], partial: Partial[ChatInputs, Said], progress: Progress
) -> TurnsBench:
    """Talk every text that is not in `partial` yet. RuntimeError if a store fails."""
    size = subject.size
    judge = ChatJudge(subject.model, profiles, size.chat)
    said = []
    with one_torch_thread():
        for text, ids in enumerate(subject.ids):
            progress("texts", text, len(subject.ids))
            found = partial.get("turns", text)
            if found is None:
                found = _talked(judge, ids, size.codecs, progress)
                partial.put("turns", text, found)
            said.append(found)
        progress("texts", len(subject.ids), len(subject.ids))
        with TemporaryDirectory() as folder:
            share = judge.identity_share(subject.ids[0], Path(folder), IDENTITY_CALLS)
    rows = [_row(codec, turn, said) for codec in size.codecs for turn in range(size.chat.turns)]
    exact = [kl for turns in said for turn in turns for kl in turn["lossless"].kl]
    return TurnsBench(
        model=subject.name,
        kv_dtype="float32",
        texts=len(said),
        kinds=subject.kinds,
        user_tokens=size.chat.user_tokens,
        answer_tokens=size.chat.answer_tokens,
        block_tokens=size.chat.block_tokens,
        kl_turn_10={row.codec: row.kl for row in rows if row.turn == size.chat.turns},
        trend={codec: trend_of([_kls(turns, codec) for turns in said]) for codec in size.codecs},
        trend_added={codec: trend_of([_added(turns, codec) for turns in said]) for codec in size.codecs},
        exact_kl_max=max(map(abs, exact)),
        identity_share=share,
        rows=rows,
    )


def _talked(judge: ChatJudge, ids: Sequence[int], codecs: Sequence[str], progress: Progress) -> list[Said]:
    with TemporaryDirectory() as root:
        folders = {codec: Path(root) / str(number) for number, codec in enumerate(codecs)}
        found = []
        for said in judge.turns(ids, folders):
            found.append(said)
            progress("turns", len(found), FULL.chat.turns)
    return found


def _row(codec: str, turn: int, said: Sequence[Sequence[Said]]) -> TurnRow:
    verdicts = [turns[turn][codec] for turns in said]
    kls = [kl for verdict in verdicts for kl in verdict.kl]
    top1 = fmean(same for verdict in verdicts for same in verdict.is_top1)
    once = fmean(kl for verdict in verdicts for kl in verdict.kl_once)
    return TurnRow(codec, turn + 1, fmean(kls), once, float(np.quantile(kls, 0.9)), top1, verdicts[0].hit_tokens)


def _kls(turns: Sequence[Said], codec: str) -> list[float]:
    return [fmean(turn[codec].kl) for turn in turns[FIRST_RESTORED:]]


def _added(turns: Sequence[Said], codec: str) -> list[float]:
    return [fmean(turn[codec].kl) - fmean(turn[codec].kl_once) for turn in turns[FIRST_RESTORED:]]


def trend_of(kls: Sequence[Sequence[float]]) -> Trend:
    """Return the trend of texts' KLs, each one's turn by turn."""
    slopes = np.array([np.polyfit(np.arange(len(each)), each, 1)[0] for each in kls])
    signs = np.array(list(product((1, -1), repeat=len(slopes))))
    # The choice that was found counts as at least itself, whatever the order of the sums.
    p = float(np.mean(signs @ slopes >= slopes.sum() - 1e-12 * np.abs(slopes).sum()))
    stderr = stdev(slopes) / len(slopes) ** 0.5 if len(slopes) > 1 else None
    return Trend(float(slopes.mean()), stderr, p, p < TREND_P_MAX)
