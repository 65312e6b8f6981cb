"""Chats whose every turn is computed on what a cache kept of the turns before: does the loss of a codec add up?

Each text is talked with all codecs beside one exact chat; what was found of a text is kept, so that a run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import DynamicCache

from kvtide.codec import Profile
from kvtide.engines.calibrate.texts import Text
from kvtide.engines.transformers import CachedModel, attach, model_layout
from kvtide.engines.transformers.fingerprint import model_fingerprint
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.judge.quality import one_torch_thread
from kvtide_lab.measuring import Show
from kvtide_lab.subjects import LoadedModel, long_enough

# What a turn stores must be there in the next one; on a busy machine that takes a while.
FLUSH_S_MAX = 120.0


class ChatSize(NamedTuple):
    """The length of a chat. Of each turn the user says the first tokens, the model the others."""

    turns: int
    user_tokens: int
    answer_tokens: int
    block_tokens: int

    @property
    def turn_tokens(self) -> int:
        """Return the tokens that a turn adds."""
        return self.user_tokens + self.answer_tokens

    @property
    def tokens_needed(self) -> int:
        """Return the tokens that a text must have."""
        return self.turns * self.turn_tokens


class TurnVerdict(NamedTuple):
    """The model's loss on a turn's tokens: KL of each, in nats, from the exact chat, and where the top token is its.

    hit_tokens: how many the turn restored.
    """

    kl: list[float]
    is_top1: list[bool]
    hit_tokens: int


class ChatJudge:
    """A model, and chats of one size with it."""

    def __init__(self, model: Any, profiles: Sequence[Profile], size: ChatSize) -> None:
        self._model = model
        self._profiles = profiles
        self._size = size
        # Every turn attaches again, as a new process would; the weights are read once for all of them.
        self._fingerprint = model_fingerprint(model)
        self._layout = model_layout(model, size.block_tokens)

    def turns(self, ids: Sequence[int], folders: Mapping[str, Path]) -> Iterator[dict[str, TurnVerdict]]:
        """Talk a text with every codec at once, each on a store in a folder of its own; yield each turn's verdicts.

        Answers are the text's own, said token by token. RuntimeError if a turn's blocks are not stored, or not loaded
        in the next one.
        """
        size = self._size
        past, hits = DynamicCache(config=self._model.config), 0
        for turn in range(size.turns):
            whole = torch.tensor([ids[: (turn + 1) * size.turn_tokens]])
            past = self._cut(past, hits)
            exact = self._say(self._cut(past, hits), whole)
            yield {codec: self._take(codec, folder, whole, exact, past) for codec, folder in folders.items()}
            self._answer(self._model, whole, past_key_values=past)
            # The answer's last token is not run, the prompt's last one not restored.
            hits = (past.get_seq_length() // size.block_tokens) * size.block_tokens

    def _attached(self, codec: str, folder: Path) -> CachedModel:
        tokens, profiles = self._size.block_tokens, self._profiles
        return attach(
            self._model, str(folder), codec=codec, profiles=profiles, block_tokens=tokens, fingerprint=self._fingerprint
        )

    def _take(
        self, codec: str, folder: Path, whole: torch.Tensor, exact: torch.Tensor, past: DynamicCache
    ) -> TurnVerdict:
        """Take a turn: restore, judge what is said after that, answer, store. past: what an exact codec restores."""
        prompt, hits = whole[:, : -self._size.answer_tokens], past.get_seq_length()
        with self._attached(codec, folder) as cached:
            said = self._say(cached.restored(prompt), whole)
            self._answer(cached, whole)
            report = cached.last
            assert report is not None
            if report.hit_tokens != hits or report.bypass is not None:
                raise RuntimeError(f"{codec} restored {report.hit_tokens} of {hits} tokens, bypass: {report.bypass}")
            if not cached.cache.flush(FLUSH_S_MAX):
                raise RuntimeError(f"{codec} did not store a turn within {FLUSH_S_MAX:g} s")
        is_top1 = (exact.argmax(-1) == said.argmax(-1)).tolist()
        return TurnVerdict((exact.exp() * (exact - said)).sum(-1).tolist(), is_top1, hits)

    def _say(self, past: DynamicCache, whole: torch.Tensor) -> torch.Tensor:
        """Run what is after a cache; return what the model says of the turn's tokens: (tokens, vocabulary), log."""
        count = self._size.turn_tokens
        with torch.inference_mode():
            rest = whole[:, past.get_seq_length() :]
            output = self._model(rest, past_key_values=past, use_cache=True, logits_to_keep=count)
        logits: torch.Tensor = output.logits[0].float()
        return logits.log_softmax(-1)

    def _answer(self, model: Any, whole: torch.Tensor, **arguments: Any) -> None:
        """Have the user's tokens read and the answer's ones said, whatever the model would rather say."""
        prompt = whole[:, : -self._size.answer_tokens]
        arguments.setdefault("attention_mask", torch.ones_like(prompt))
        model.generate(
            prompt,
            max_new_tokens=self._size.answer_tokens,
            do_sample=False,
            prefix_allowed_tokens_fn=lambda _, said: [int(whole[0, said.shape[0]])],
            **arguments,
        )

    def _cut(self, past: DynamicCache, tokens: int) -> DynamicCache:
        """Return another cache with the first tokens of one; torch appends to neither in place."""
        cut = DynamicCache(config=self._model.config)
        if tokens:
            for layer, whole in zip(cut.layers, past.layers, strict=True):
                layer.lazy_initialization(whole.keys, whole.values)
                layer.keys, layer.values = whole.keys[..., :tokens, :], whole.values[..., :tokens, :]
        return cut


# The first turn restores nothing: what adds up begins with the second.
FIRST_RESTORED = 1
# A growth that chance alone shows less often than this is a trend.
TREND_P_MAX = 0.05


class TurnsSize(NamedTuple):
    """The length of the chats, and their codecs."""

    texts: int
    chat: ChatSize
    codecs: tuple[str, ...]


FULL = TurnsSize(12, ChatSize(10, 128, 32, 32), ("lossless", "tide:5e-3", "tide-deep:5e-3", "cachegen:2"))
QUICK = TurnsSize(1, ChatSize(10, 28, 4, 16), ("lossless", "tide:5e-3"))


class TurnRow(msgspec.Struct, frozen=True):
    """One turn with one codec, over the tokens of all texts. `turn` counts from one; `kl_q90` is of single tokens."""

    codec: str
    turn: int
    kl: float
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

    `trend` is of each codec's `kl`; `exact_kl_max` is the largest KL of a token after a lossless cache.
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
    exact_kl_max: float
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


def subject_of(of: LoadedModel, texts: Sequence[Text], size: TurnsSize) -> ChatSubject:
    """Take the first texts that are long enough. ValueError if none is."""
    found = long_enough(of, texts, size.chat.tokens_needed, size.texts)
    return ChatSubject(of.model, of.folder.name, size, [ids for _, ids in found], [text.kind for text, _ in found])


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
    subject: ChatSubject, profiles: Sequence[Profile], partial: Partial[ChatInputs, Said], show: Show
) -> TurnsBench:
    """Talk every text that is not in `partial` yet. RuntimeError if a store fails."""
    size = subject.size
    judge = ChatJudge(subject.model, profiles, size.chat)
    said = []
    with one_torch_thread():
        for text, ids in enumerate(subject.ids):
            show("texts", text, len(subject.ids))
            found = partial.get("turns", text)
            if found is None:
                found = _talked(judge, ids, size.codecs, show)
                partial.put("turns", text, found)
            said.append(found)
        show("texts", len(subject.ids), len(subject.ids))
    rows = [_row(codec, turn, said) for codec in size.codecs for turn in range(size.chat.turns)]
    exact = [kl for turns in said for turn in turns for kl in turn["lossless"].kl]
    restored = [turns[FIRST_RESTORED:] for turns in said]
    return TurnsBench(
        model=subject.name,
        kv_dtype="float32",
        texts=len(said),
        kinds=subject.kinds,
        user_tokens=size.chat.user_tokens,
        answer_tokens=size.chat.answer_tokens,
        block_tokens=size.chat.block_tokens,
        kl_turn_10={row.codec: row.kl for row in rows if row.turn == size.chat.turns},
        trend={
            codec: trend_of([[fmean(turn[codec].kl) for turn in turns] for turns in restored]) for codec in size.codecs
        },
        exact_kl_max=max(map(abs, exact)),
        rows=rows,
    )


def _talked(judge: ChatJudge, ids: Sequence[int], codecs: Sequence[str], show: Show) -> list[Said]:
    with TemporaryDirectory() as root:
        folders = {codec: Path(root) / str(number) for number, codec in enumerate(codecs)}
        found = []
        for said in judge.turns(ids, folders):
            found.append(said)
            show("turns", len(found), FULL.chat.turns)
    return found


def _row(codec: str, turn: int, said: Sequence[Sequence[Said]]) -> TurnRow:
    verdicts = [turns[turn][codec] for turns in said]
    kls = [kl for verdict in verdicts for kl in verdict.kl]
    top1 = fmean(same for verdict in verdicts for same in verdict.is_top1)
    return TurnRow(codec, turn + 1, fmean(kls), float(np.quantile(kls, 0.9)), top1, verdicts[0].hit_tokens)


def trend_of(kls: Sequence[Sequence[float]]) -> Trend:
    """Return the trend of texts' KLs, each one's turn by turn."""
    slopes = np.array([np.polyfit(np.arange(len(each)), each, 1)[0] for each in kls])
    signs = np.array(list(product((1, -1), repeat=len(slopes))))
    # The choice that was found counts as at least itself, whatever the order of the sums.
    p = float(np.mean(signs @ slopes >= slopes.sum() - 1e-12 * np.abs(slopes).sum()))
    stderr = stdev(slopes) / len(slopes) ** 0.5 if len(slopes) > 1 else None
    return Trend(float(slopes.mean()), stderr, p, p < TREND_P_MAX)
