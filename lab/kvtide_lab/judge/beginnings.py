"""Beginnings of texts, before which a codec's promise is judged: first tokens become sinks, and texts choose them.

None was looked at when a codec or a profile was made; the bodies are of no list that profiles are fitted on.
"""

from __future__ import annotations

from kvtide.engines.calibrate.texts import Text, texts_at

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


def texts_with_beginnings(quick: bool) -> list[Text]:
    """Return every beginning before each of four bodies, and runs within these; some of them if it is to be quick."""
    bodies = texts_at(_BODIES)[: 1 if quick else None]
    beginnings = BEGINNINGS[:: 16 if quick else 1]
    return [
        *(_named(each, body, each + body.content) for each in beginnings for body in bodies),
        *(_named(run, body, _with_run(body.content, run)) for run in RUNS[: 1 if quick else None] for body in bodies),
    ]


def _with_run(content: str, run: str) -> str:
    return content[:_LATER] + run + content[_LATER:]


def _named(what: str, body: Text, content: str) -> Text:
    shown = ascii(what)
    short = shown if len(shown) <= _NAME_CHARACTERS else f"{shown[:_NAME_CHARACTERS]}…{len(what)}"
    return Text(f"{short} {body.name}", body.kind, content)
