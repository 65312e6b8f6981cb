"""Real texts of mixed kinds that lie on every machine that can run the model: some to fit on, others to judge on."""

from __future__ import annotations

import gzip
import hashlib
import sys
import sysconfig
import zlib
from collections.abc import Collection, Sequence
from functools import partial
from itertools import islice, repeat, zip_longest
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

TEXT_BYTES_MAX = 1 << 20
# Shorter files don't fill a context.
TEXT_BYTES_MIN = 7000

# Kind and file; the folders are the standard library (std) and the installed packages (site). More than are needed: a
# distribution may leave some out. No file is in two lists. Nothing was fitted or tuned on these, but where a sink
# begins was held against the first eight:
_EVALUATION = (
    ("licence", "site/matplotlib-*.dist-info/LICENSE"),
    ("python", "std/zipfile.py"),
    ("change log", "std/idlelib/NEWS2x.txt"),
    ("c++ header", "site/torch/include/c10/core/TensorImpl.h"),
    ("readme", "site/tqdm-*.dist-info/METADATA"),
    ("yaml", "site/torchgen/packaged/autograd/derivatives.yaml"),
    ("licences", "site/pillow-*.dist-info/licenses/LICENSE"),
    ("markdown", "site/pyparsing/ai/best_practices.md"),
    ("names", "site/sympy-*.dist-info/licenses/AUTHORS"),
    ("rst", "site/numpy/ma/README.rst"),
    ("python", "std/difflib.py"),
    ("python", "std/pdb.py"),
)
# On these steps, prices, pulls and the law by position of `tide` were chosen:
_TUNED = (
    ("prose", "std/email/architecture.rst"),
    ("licence", "site/numpy-*.dist-info/licenses/LICENSE.txt"),
    ("python", "std/argparse.py"),
    ("python", "std/asyncio/base_events.py"),
    ("html", "std/idlelib/help.html"),
    ("change log", "std/idlelib/NEWS.txt"),
    ("c header", "site/numpy/_core/include/numpy/ndarraytypes.h"),
    ("readme", "site/torch-*.dist-info/METADATA"),
    ("json", "site/torch/_dynamo/graph_break_registry.json"),
    ("csv", "site/matplotlib/mpl-data/sample_data/Stocks.csv"),
    ("javascript", "site/matplotlib/backends/web_backend/js/mpl.js"),
    ("python", "std/statistics.py"),
    ("python", "std/mailbox.py"),
    ("python", "std/turtle.py"),
)
_CALIBRATION = (
    ("licence", "site/hypothesis-*.dist-info/licenses/LICENSE.txt"),
    ("python", "std/_pydecimal.py"),
    ("python", "std/typing.py"),
    ("readme", "site/transformers-*.dist-info/METADATA"),
    ("c header", "site/numpy/_core/include/numpy/npy_math.h"),
    ("prose", "std/idlelib/README.txt"),
    ("data", "std/html/entities.py"),
    ("change log", "std/idlelib/HISTORY.txt"),
    ("json", "site/hypothesis-*.dist-info/sboms/*.json"),
    ("readme", "site/matplotlib-*.dist-info/METADATA"),
    ("python", "std/optparse.py"),
)


# Of texts that profiles are fitted on: more cost time.
_CALIBRATION_MAX = 10

# Kinds of snippets and their files: of the standard library, of packages, and of Debian where they are installed.
_SNIPPETS = (
    ("python", "std/**/*.py"),
    ("words of many languages", "/usr/share/i18n/locales/*_*"),
    ("manual in other languages", "/usr/share/man/[a-z][a-z]*/man[1-8]/*.gz"),
    ("messages in many languages", "/usr/share/locale/*/LC_MESSAGES/*.mo"),
    ("chinese", "/usr/share/locale/zh*/LC_MESSAGES/*.mo"),
    ("chinese", "/usr/share/man/zh*/man[1-8]/*.gz"),
    ("japanese", "/usr/share/locale/ja/LC_MESSAGES/*.mo"),
    ("korean", "/usr/share/locale/ko/LC_MESSAGES/*.mo"),
    ("c header", "/usr/include/**/*.h"),
    ("change log", "/usr/share/doc/*/changelog*.gz"),
    ("c++ header", "site/torch/include/ATen/*.h"),
    ("licence", "/usr/share/doc/*/copyright"),
    ("manual", "/usr/share/man/man[1-8]/*.gz"),
    ("json", "site/**/*.json"),
    ("html", "/usr/share/doc/**/*.html"),
    ("csv", "site/**/*.csv"),
    ("perl", "/usr/share/perl/**/*.p[lm]"),
    ("readme", "site/*.dist-info/METADATA"),
    ("prose", "/usr/share/doc/*/README*"),
    ("javascript", "site/**/*.js"),
    ("c header", "site/numpy/_core/include/**/*.h"),
)
# Of six texts or more one in three is judged on, up to six; of many one in six, up to twelve: texts of a kind differ by
# factors, so that two of them say little of others.
_TEXTS_TO_SPLIT, _HELD_OUT_FEW, _HELD_OUT_MANY = 6, 6, 12
SNIPPET_CHARACTERS = 6000
# Kinds of the pieces that a profile's curve is judged on, one of each that there is: the last five lie on every machine
# that can run the model.
_HELD_OUT_KINDS = "licence", "prose", "manual in other languages", "python", "c header", "c++ header", "json", "readme"
# A user's texts may lose so many times what those pieces lose: with 1.5 a licence that Qwen2.5-Coder 1.5B has by heart
# lost 1.93 times what was asked for; on SmolLM2 and Gemma 3 270M others lose no more.
HELD_OUT_UNLIKE = 2.0
_SNIPPET_CHARACTERS_MIN = 2500
_MO_MAGIC = (0x950412DE).to_bytes(4, "little")
# A folder may hold any number of files.
_FILES_MAX = 4000


class Text(NamedTuple):
    """A text and what kind it is."""

    name: str
    kind: str
    content: str


class TextSplit(NamedTuple):
    """Token ids of the texts that a profile is fitted on, and of those that its curve is judged on."""

    fitted: list[list[int]]
    held_out: list[list[int]]


def split_texts(texts: Sequence[Sequence[int]]) -> TextSplit:
    """Hold some texts out, spread over all. Fewer than six are all fitted on."""
    count = len(texts)
    few, many = min(count // 3, _HELD_OUT_FEW), min(count // 6, _HELD_OUT_MANY)
    held_out = max(few, many) if count >= _TEXTS_TO_SPLIT else 0
    chosen = {(number + 1) * count // held_out - 1 for number in range(held_out)}
    split = TextSplit([], [])
    for number, ids in enumerate(texts):
        split[number in chosen].append(list(ids))
    return split


def evaluation_texts() -> list[Text]:
    """Return the texts that codecs are judged on: twelve where everything is installed."""
    return texts_at(_EVALUATION)


def calibration_texts() -> list[Text]:
    """Return the texts that profiles are fitted on, ten where all are installed; none is among the evaluation texts."""
    names = sorted(topics)
    reference = "\n\n".join(str(topics[name]) for name in names[: len(names) // 2])
    return [Text("pydoc topics", "reference", reference), *texts_at(_CALIBRATION)][:_CALIBRATION_MAX]


def held_out_texts() -> list[Text]:
    """Return the pieces that the curve of a profile is judged on, each of another kind; none is of a file above."""
    return [piece for kind in _HELD_OUT_KINDS for piece in snippets(1, [kind])]


def snippets(count: int, kinds: Collection[str] = ()) -> list[Text]:
    """Return at most so many pieces of files, all kinds in turn, the same each time on one machine.

    None is of a file of the three lists above. kinds: these alone; empty for all. ValueError for an unknown one.
    """
    known = {kind for kind, _ in _SNIPPETS}
    if unknown := sorted(set(kinds) - known):
        raise ValueError(f"no texts of kind {', '.join(unknown)}, expected some of {', '.join(sorted(known))}")
    taken = {path for _, pattern in (*_EVALUATION, *_TUNED, *_CALIBRATION) for path in _paths(pattern)}
    # Files of a kind that are far apart come first.
    wanted = [each for each in _SNIPPETS if not kinds or each[0] in kinds]
    scattered = partial(sorted, key=lambda path: hashlib.sha256(bytes(path)).digest())
    files = [zip(repeat(kind), scattered(set(_paths(name)) - taken)) for kind, name in wanted]
    pairs = (pair for turn in zip_longest(*files) for pair in turn if pair is not None)
    found = (text for kind, path in pairs if (text := _snippet(kind, path)) is not None)
    by_content: dict[str, Text] = {}
    while len(by_content) < count and (text := next(found, None)) is not None:
        by_content.setdefault(text.content, text)
    return list(by_content.values())


def _snippet(kind: str, path: Path) -> Text | None:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(TEXT_BYTES_MAX)
    except (OSError, EOFError, zlib.error):
        return None
    content = (_translations(data) if path.suffix == ".mo" else data).decode("utf-8", errors="ignore")
    start = max(0, len(content) // 3 - SNIPPET_CHARACTERS // 2)
    piece = content[start : start + SNIPPET_CHARACTERS]
    return Text(path.name, kind, piece) if len(piece) >= _SNIPPET_CHARACTERS_MIN and "\0" not in piece else None


def _translations(data: bytes) -> bytes:
    """Return the translated messages of a GNU .mo file in lines, nothing if it is none: they follow the originals."""
    if data[:4] != _MO_MAGIC:
        return b""
    table = int.from_bytes(data[16:20], "little")
    # Lengths and offsets in turn; the first message is the file's own header.
    second = int.from_bytes(data[table + 12 : table + 16], "little")
    return data[second:].replace(b"\0", b"\n")


def read_texts(paths: list[Path]) -> list[Text]:
    """Return the user's texts, at most TEXT_BYTES_MAX characters. ValueError for a file that can't be read as UTF-8."""
    texts = []
    for path in paths:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                texts.append(Text(str(path), "user's", file.read(TEXT_BYTES_MAX)))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"can't read text {path}: {error}") from error
    return texts


def texts_at(names: Sequence[tuple[str, str]]) -> list[Text]:
    """Return the texts of some kinds at some places, `std/…` or `site/…`, those that are there and long enough."""
    texts = (
        Text(path.name, kind, path.read_bytes()[:TEXT_BYTES_MAX].decode("utf-8", errors="replace"))
        for kind, name in names
        for path in _paths(name)[:1]
    )
    return [text for text in texts if len(text.content) >= TEXT_BYTES_MIN]


def _paths(name: str) -> list[Path]:
    """Return the files that a pattern names, in order, at most _FILES_MAX."""
    # Packages may come from several folders: a .pth file adds some that the installation's own scheme does not name.
    site = [Path(each) for each in sys.path if each and "-packages" in each]
    folders = {"std": [Path(sysconfig.get_path("stdlib"))], "site": site, "": [Path("/")]}
    source, _, pattern = name.partition("/")
    return [found for folder in folders[source] for found in sorted(islice(folder.glob(pattern), _FILES_MAX))]
