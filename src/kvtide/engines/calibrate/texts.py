"""Real texts of mixed kinds that lie on every machine that can run the model: some to fit on, others to judge on."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

TEXT_BYTES_MAX = 1 << 20
# Shorter files don't fill a context.
TEXT_BYTES_MIN = 7000

# Kind and file; the folders are the standard library (std) and the installed packages (site). More than are needed: a
# distribution may leave some out. No file is in both lists.
_EVALUATION = (
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


class Text(NamedTuple):
    """A text and what kind it is."""

    name: str
    kind: str
    content: str


def evaluation_texts() -> list[Text]:
    """Return the texts that codecs are judged on: twelve or more where everything is installed."""
    return [*_found(_EVALUATION), _reference(evaluation=True)]


def calibration_texts() -> list[Text]:
    """Return the texts that profiles are fitted on; none of them is among the evaluation texts."""
    return [*_found(_CALIBRATION), _reference(evaluation=False)]


def read_texts(paths: list[Path]) -> list[Text]:
    """Return the user's texts. ValueError for a file that can't be read as UTF-8."""
    texts = []
    for path in paths:
        try:
            texts.append(Text(str(path), "user's", path.read_bytes()[:TEXT_BYTES_MAX].decode("utf-8", errors="strict")))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"can't read text {path}: {error}") from error
    return texts


def _found(names: tuple[tuple[str, str], ...]) -> Iterator[Text]:
    # Packages may come from several folders: a .pth file adds some that the installation's own scheme does not name.
    folders = {"std": [Path(sysconfig.get_path("stdlib"))], "site": [Path(each) for each in sys.path if each]}
    for kind, name in names:
        source, _, pattern = name.partition("/")
        for path in [found for folder in folders[source] for found in sorted(folder.glob(pattern))][:1]:
            content = path.read_bytes()[:TEXT_BYTES_MAX].decode("utf-8", errors="replace")
            if len(content) >= TEXT_BYTES_MIN:
                yield Text(path.name, kind, content)


def _reference(evaluation: bool) -> Text:
    names = sorted(topics)
    half = names[len(names) // 2 :] if evaluation else names[: len(names) // 2]
    return Text("pydoc topics", "reference", "\n\n".join(str(topics[name]) for name in half))
