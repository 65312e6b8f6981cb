"""Makes the documents' site, into site/, and checks it: no warning, no dead link inside it, nothing from another host.

Usage: site_pages.py
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
# Elements that a browser fetches by itself, and the attribute that says from where.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
FOREIGN = re.compile(r"^(https?:)?//")
IMPORTED = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"](?:https?:)?//")


class Page(HTMLParser):
    """A page: names to link to, links, and addresses that a browser fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        given = {key: value for key, value in attrs if value}
        self.names |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        address = given.get(FETCHED.get(tag, ""))
        # `rel="canonical"` and its like are told to machines, and fetched by nobody.
        if address and (tag != "link" or given.get("rel") in {"stylesheet", "icon", "preload"}):
            self.fetched.append(address)


def problems(site: Path) -> Iterator[str]:
    """Yield dead links of the pages under a folder, and what they take from other hosts."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        yield from (f"{path.name} fetches {address}" for address in page.fetched if FOREIGN.match(address))
        for link in page.links:
            if FOREIGN.match(link) or link.startswith("mailto:"):
                continue
            target, _, name = unquote(link).partition("#")
            there = (path.parent / target).resolve() if target else path
            if not there.exists():
                yield f"{path.name} links to {link}, which is not there"
            elif name and there in pages and name not in pages[there].names:
                yield f"{path.name} links to {link}, which has no such heading"
    for style in sorted(site.rglob("*.css")):
        if IMPORTED.search(style.read_text(encoding="utf-8")):
            yield f"{style.name} fetches from another host"


def main() -> int:
    """Build and check; return the exit status."""
    build = ("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", SITE / ".doctrees", ROOT / "docs", SITE)
    status = subprocess.run([sys.executable, *map(str, build)], check=False).returncode
    found = list(problems(SITE)) if status == 0 else ["the build failed; its warnings are above"]
    print("\n".join(found) or f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}/, no dead link")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
