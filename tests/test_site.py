"""The documents' site is built without a warning and asks no other host; what checks that can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import site_pages


def test_site_is_built_without_a_warning_or_a_dead_link(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    status = site_pages.main()
    assert (status, "no dead link" in capfd.readouterr().out) == (0, True)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<a href="gone.html">', "which is not there"),
        ('<a href="#gone">', "no such heading"),
        ('<script src="https://cdn.example/x.js"></script>', "fetches https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "fetches //fonts.example/x.css"),
    ],
)
def test_page_with_a_problem_is_found(tmp_path: Path, page: str, problem: str) -> None:
    (tmp_path / "index.html").write_text(f'<p id="here">{page}</p>')
    (found,) = site_pages.problems(tmp_path)
    assert problem in found


def test_links_to_pages_and_headings_are_no_problem(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="here"><a href="#here"><a href="index.html#here"><a href="https://x.y">'
    )
    assert list(site_pages.problems(tmp_path)) == []
