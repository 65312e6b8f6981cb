"""The documents by what a newcomer does with them, and their site; what checks both can fail."""

from pathlib import Path
from typing import Any

import pytest

import newcomer
import site_pages
import wheel

FENCE = "```"
BLOCKS = {page: list(newcomer.blocks_of(page.read_text(encoding="utf-8"))) for page in newcomer.PAGES}
RUN = [page for page, blocks in BLOCKS.items() if any(map(newcomer.is_run, blocks))]
# Where newcomers begin; of the other pages a day sees that all they show exists.
BY_DAY = {"README.md", "quickstart.md"}


@pytest.mark.parametrize("document", newcomer.PAGES, ids=lambda path: path.name)
def test_page_shows_links_and_commands_that_exist(document: Path) -> None:
    assert list(newcomer.still_problems(document)) == []


@pytest.mark.parametrize(
    "document",
    [pytest.param(page, marks=[pytest.mark.nightly] * (page.name not in BY_DAY), id=page.name) for page in RUN],
)
def test_blocks_of_a_page_work_as_shown(document: Path) -> None:
    assert list(newcomer.run_problems(document)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[there](nowhere.md)", "links to nowhere.md"),
        ("[there](#nothing)", "links to #nothing"),
        ("as `kvtide fly` says", "no command fly"),
        ("as `kvtide stats --swiftly` says", "no option --swiftly"),
        (f"{FENCE}text\nkvtide-lab bench disk | moon\n{FENCE}", "no command moon"),
        (f"{FENCE}toml\na = \n{FENCE}", "is no toml"),
        (f"{FENCE}\nkvtide stats\n{FENCE}", "a block without a language"),
        (f"{FENCE}sh\nfalse\n{FENCE}", "exit status 1"),
        (f"{FENCE}python\nraise KeyError(input_ids.shape[1])\n{FENCE}", "a traceback: KeyError: 600"),
        (f"{FENCE}sh\nprintf '│%090d│\\n' 7\n{FENCE}", "a table of 92 columns"),
        (f"{FENCE}sh\nkvtide serve --tier moon://\n{FENCE}", "ended with status 2"),
    ],
)
def test_what_does_not_work_is_found(tmp_path: Path, text: str, problem: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    found = [*newcomer.still_problems(page), *newcomer.run_problems(page)]
    assert len(found) == 1
    assert problem in found[0]


def test_skipped_block_is_not_run_but_its_commands_have_to_exist(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- newcomer: skip needs a moon -->\n{FENCE}sh\nkvtide ls --moon\nfalse\n{FENCE}\n")
    (block,) = newcomer.blocks_of(page.read_text())
    assert block.skip == "needs a moon"
    assert list(newcomer.run_problems(page)) == []
    assert list(newcomer.still_problems(page)) == ["line 1: kvtide ls: no option --moon"]


def test_readmes_example_finds_in_its_second_run_what_the_first_stored(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    input_ids = torch.randint(1, 256, (1, 600), generator=torch.Generator().manual_seed(1))
    for said in ("0 tokens came", "512 tokens came"):
        exec(wheel.readme_example(tmp_path), {"model": tiny_model, "input_ids": input_ids})
        assert said in capsys.readouterr().out


@pytest.mark.nightly
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
def test_page_with_a_problem_is_found_and_good_links_are_none(tmp_path: Path, page: str, problem: str) -> None:
    good = '<h1 id="here"><a href="#here"><a href="index.html#here"><a href="https://x.y">'
    (tmp_path / "index.html").write_text(f"{good}{page}")
    (found,) = site_pages.problems(tmp_path)
    assert problem in found
