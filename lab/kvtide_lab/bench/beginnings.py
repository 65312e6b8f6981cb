"""Loss of `tide` over what was asked, on many beginnings of texts: first tokens become sinks, and texts choose them.

The bodies are of no list that profiles are fitted on. Where a sink begins was chosen on the runs of `word `, `the ` and
newlines, and held against the bodies: of these the figures are *tuned on*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import msgspec

from kvtide.codec import AwaitingCodec, Codec, CodecRegistry, Profile
from kvtide.engines.calibrate.judge import WholeJudge, coded_prefixes
from kvtide.engines.calibrate.texts import Text, read_texts, texts_at
from kvtide.engines.transformers import BLOCK_TOKENS, ModelContexts
from kvtide.engines.transformers.fingerprint import model_fingerprint
from kvtide.errors import UnencodableBlock
from kvtide_lab.bench.partial import Partial, ids_digest
from kvtide_lab.measuring import Show
from kvtide_lab.subjects import LoadedModel, long_enough

# Kind and file of what follows a beginning.
_BODIES = (
    ("prose", "std/LICENSE.txt"),
    ("python", "std/tarfile.py"),
    ("settings", "site/matplotlib/mpl-data/matplotlibrc"),
    ("c++ header", "site/torch/include/c10/util/Exception.h"),
)
_TEMPLATES = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are helpful.<|eot_id|>",
    "<s>[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\n",
    "<start_of_turn>user\n",
    "<|system|>\nYou are a helpful assistant.<|end|>\n<|user|>\n",
    "Below is an instruction that describes a task.\n\n### Instruction:\n",
    "\n\nHuman: ",
)
_WHITESPACE = (
    *("\n", "\n\n", "\n\n\n", "\n" * 12, " ", "  ", " " * 8, " \n \n", "\n \n", "\t", "\t\t", "\t\t\t", "\r\n"),
    *("\r\n\r\n", "\u00a0", "\u3000\u3000", "\u200b", "\f", "\v\v"),
)
_REPEATED = (
    *("the the the the ", "a a a a a a ", "no no no no ", "word " * 40, "0 " * 16, "aaaaaaaa", "=" * 40, "----\n"),
    *("....", "\0\0\0\0", "\ufffd\ufffd\ufffd", ", , , , ", "and and\n"),
)
_SCRIPTS = (
    "的",
    "在本文中，",
    "これは",
    "이것은 ",
    "هذا ",
    "זה ",
    "यह ",
    "Это ",
    "Αυτό ",
    "นี่คือ",
    "🙂🙂",
    "é",
    "\ufeff",
)
_CODE = (
    *("#!/usr/bin/env python3\nimport os\n", "#include <stdio.h>\n", "// ", "/*\n * ", "def f(x):\n", "<?php\n", "# "),
    *('{"', '[{"id": 1}, ', '<?xml version="1.0"?>\n', "<!DOCTYPE html>\n<html>\n", "---\n", "%PDF-1.4\n", "SELECT *"),
)
_SPECIAL = ("<|endoftext|>", "<|endoftext|><|endoftext|>", "<bos>", "<eos><bos>", "<pad><pad><pad>", "[CLS]", "<s>")
BEGINNINGS = (*_TEMPLATES, *_WHITESPACE, *_REPEATED, *_SCRIPTS, *_CODE, *_SPECIAL)
# Runs that stand later in a text, after so many characters of it.
_LATER = 1200
RUNS = ("\n" * 200, "the " * 150, " " * 600, "\t\n" * 100, "0" * 300, "=" * 400)
_NAME_CHARACTERS = 24


def texts(paths: list[Path] | None, quick: bool) -> list[Text]:
    """Return every beginning before each body, and runs within these; some of them if it is to be quick.

    paths: of the user's bodies; None for four that lie on every machine that can run the model.
    """
    bodies = (read_texts(paths) if paths else texts_at(_BODIES))[: 1 if quick else None]
    beginnings = BEGINNINGS[:: 16 if quick else 1]
    within = [(run, body, body.content[:_LATER] + run) for run in RUNS[: 1 if quick else None] for body in bodies]
    return [
        *(_named(each, body, each + body.content) for each in beginnings for body in bodies),
        *(_named(run, body, front + body.content[_LATER:]) for run, body, front in within),
    ]


def _named(what: str, body: Text, content: str) -> Text:
    shown = ascii(what)
    short = shown if len(shown) <= _NAME_CHARACTERS else f"{shown[:_NAME_CHARACTERS]}…{len(what)}"
    return Text(f"{short} {body.name}", body.kind, content)


# Names of codecs whose profiles are looked for.
CODECS = ("tide-light", "tide", "tide-deep")
QUALITY = 5e-3
CONTEXT_TOKENS, CONTINUATION_TOKENS = 1536, 128


class BeginningInputs(msgspec.Struct, frozen=True):
    """All that decides what is found, but for the program. Digests in hex."""

    model: str
    quality: float
    texts: list[str]
    profiles: list[str]


class Found(msgspec.Struct, frozen=True):
    """One text through one codec, whole objects without refinements. None where a block had to be kept losslessly."""

    bits_per_element: float | None
    kl: float | None


class BeginningRow(msgspec.Struct, frozen=True):
    """One codec on one text."""

    codec: str
    text: str
    bits_per_element: float | None
    kl_over_asked: float | None


class OverAsked(msgspec.Struct, frozen=True):
    """Loss over what was asked: the mean of all texts, and the worst one. unencodable: texts with a lossless block."""

    codec: str
    texts: int
    unencodable: int
    bits_per_element: float
    mean: float
    worst: float
    worst_text: str


class Beginnings(msgspec.Struct, frozen=True):
    """Every codec on every text; rows, the worst first."""

    model: str
    quality: float
    context_tokens: int
    continuation_tokens: int
    over_asked: list[OverAsked]
    rows: list[BeginningRow]


def run(
    of: LoadedModel, profiles: Sequence[Profile], chosen: Sequence[Text], path: Path | None, show: Show
) -> Beginnings:
    """Judge all texts that are not in `path` yet. ValueError if no profile of tide is of this model."""
    contexts = ModelContexts(of.model, BLOCK_TOKENS)
    needed = CONTEXT_TOKENS + CONTINUATION_TOKENS + 1
    judged = long_enough(of, chosen, needed, len(chosen))
    inputs = BeginningInputs(
        model_fingerprint(of.model).hex(),
        QUALITY,
        [ids_digest(ids) for _, ids in judged],
        [profile.digest.hex() for profile in profiles],
    )
    partial = Partial(inputs, Found, path)
    codecs = {name: found for name in CODECS if (found := _codecs(profiles, contexts, f"{name}:{QUALITY}:0"))}
    if not codecs:
        raise ValueError("no profile of tide is of this model: make one with `kvtide calibrate`, name it by --profile")
    for number, (_, ids) in enumerate(judged):
        show("texts", number, len(judged))
        missing = [name for name in codecs if partial.get(name, number) is None]
        judge = WholeJudge(contexts, ids, CONTEXT_TOKENS) if missing else None
        for name in missing:
            assert judge is not None
            partial.put(name, number, [_found(judge, codecs[name])])
    show("texts", len(judged), len(judged))
    rows = list(_rows(codecs, [text.name for text, _ in judged], partial))
    over = [_over_asked(name, [row for row in rows if row.codec == name]) for name in codecs]
    rows.sort(key=lambda row: -(row.kl_over_asked or 0))
    return Beginnings(of.folder.name, QUALITY, CONTEXT_TOKENS, CONTINUATION_TOKENS, over, rows)


def _codecs(profiles: Sequence[Profile], contexts: ModelContexts, spec: str) -> list[Codec]:
    """Return a codec for each group of a model's rows; none without profiles of one calibration."""
    made = CodecRegistry(profiles).make_by_group(spec, contexts.shapes)
    assert isinstance(made, AwaitingCodec)
    return [made.make(profile) for profile in made.first]


def _found(judge: WholeJudge, codecs: Sequence[Codec]) -> Found:
    try:
        (coded,) = coded_prefixes(codecs, judge.context)
    except UnencodableBlock:
        return Found(None, None)
    return Found(coded.bits_per_element, judge.kl(coded.decoded))


def _rows(
    codecs: Iterable[str], names: Sequence[str], partial: Partial[BeginningInputs, Found]
) -> Iterator[BeginningRow]:
    for codec, (number, name) in product(codecs, enumerate(names)):
        (found,) = partial.get(codec, number) or [Found(None, None)]
        yield BeginningRow(codec, name, found.bits_per_element, None if found.kl is None else found.kl / QUALITY)


def _over_asked(codec: str, rows: Sequence[BeginningRow]) -> OverAsked:
    lost = {row.text: row.kl_over_asked for row in rows if row.kl_over_asked is not None}
    bits = [row.bits_per_element for row in rows if row.bits_per_element is not None]
    worst = max(lost, key=lambda text: lost[text], default="")
    none_lost = (0.0, 0.0, 0.0)
    figures = (fmean(bits), fmean(lost.values()), lost[worst]) if lost else none_lost
    return OverAsked(codec, len(rows), len(rows) - len(lost), *figures, worst)
