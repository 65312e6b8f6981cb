"""Links of Markdown documents, and where they lead."""

import re
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")


def anchors(document: Path) -> set[str]:
    """Return headings of a document as links name them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> Iterator[str]:
    """Yield links to files and headings that are not there."""
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        file = document.parent / target if target else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"links to {target}{anchor and '#' + anchor}"
