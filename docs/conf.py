"""How Sphinx makes the documents' site; `make site` runs it."""

import re

from sphinx.application import Sphinx

import kvtide

project, author, release = "kvtide", "the kvtide authors", kvtide.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"kvtide {release}"
html_show_sphinx = False
html_copy_source = False
# Links name headings as they do in the repository.
myst_heading_anchors = 4
# In docstrings `x` is code.
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Pages that lie beside `docs` in the repository are files to take along, not pages of the site.
_BESIDE = re.compile(r"\]\(((?:\.\./)+(?:ARCHITECTURE|CHANGELOG|CONTRIBUTING|README|SECURITY|STYLE)\.md)(?:#[^)]*)?\)")


def setup(app: Sphinx) -> None:
    """Let links out of `docs` lead to copies."""

    def point_at_copies(app: Sphinx, name: str, source: list[str]) -> None:
        source[0] = _BESIDE.sub(r"](path:\1)", source[0])

    app.connect("source-read", point_at_copies)
