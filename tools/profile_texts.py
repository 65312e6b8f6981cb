"""Write the texts that the profiles of SmolLM2-135M are fitted on, as far as this machine has them, and their list.

python tools/profile_texts.py FOLDER; then for each profile
kvtide calibrate --codec tide-layer --tokens 1409 -o FILE $(printf -- '--text %s ' FOLDER/*.txt)
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

from kvtide.engines.calibrate import calibration_texts, snippets

LIST = Path(__file__).parents[1] / "lab" / "kvtide_lab" / "profiles" / "texts.csv"
# Pieces by kind: mostly English and code, a tenth of it Chinese, since its tokens are pieces of characters.
WANTED: Mapping[str, int] = MappingProxyType(
    {
        "python": 36,
        "c header": 40,
        "change log": 28,
        "readme": 36,
        "licence": 28,
        "manual": 36,
        "c++ header": 24,
        "perl": 14,
        "prose": 18,
        "json": 14,
        "javascript": 4,
        "html": 12,
        "csv": 8,
        "chinese": 34,
        "japanese": 5,
        "korean": 5,
        "messages in many languages": 10,
        "words of many languages": 6,
        "manual in other languages": 12,
    }
)
# Manuals that codecs are judged on by kind.
JUDGED = ("git-rebase", "tmux.1")
CHARACTERS_MAX = 8 * 1409


def main(folder: Path) -> None:
    """Write texts in turns of kinds, so that those that are held out are of many kinds."""
    folder.mkdir(parents=True, exist_ok=True)
    by_kind = {}
    for kind, count in WANTED.items():
        found = [each for each in snippets(3 * count + 10, [kind]) if not any(name in each.name for name in JUDGED)]
        by_kind[kind] = found[:count]
    by_kind["package"] = calibration_texts()
    seen, rows = set[str](), list[tuple[str, str, int, str]]()
    for turn in zip_longest(*([(kind, text) for text in texts] for kind, texts in by_kind.items())):
        for kind, text in filter(None, turn):
            content = text.content[:CHARACTERS_MAX]
            digest = hashlib.sha256(content.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                (folder / f"{len(rows):03d}.txt").write_text(content, encoding="utf-8")
                rows.append((kind, text.name, len(content), digest[:16]))
    with LIST.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("kind", "file", "characters", "sha256"), *rows])
    print(f"{len(rows)} texts in {folder}, listed in {LIST.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
