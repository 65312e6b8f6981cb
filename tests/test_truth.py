"""Pages claim what docs/truth.toml says and nothing else, and what claims more is found."""

from importlib.metadata import version
from pathlib import Path

import pytest

import truth
from kvtide.engines.plugin import TESTED_VLLM
from kvtide.engines.surface import snapshots
from truth import ROOT, TRUTH


@pytest.mark.parametrize("page", truth.PAGES, ids=lambda path: path.name)
def test_page_claims_what_the_data_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert truth.renewed(page) == text, "renew it: python tools/truth.py --write"
    assert list(truth.claims(page.name, text)) == []


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("It takes Phi-4 too.", "'Phi-4' is not known"),
        ("It takes Gemma 5.", "'Gemma 5' is not known"),
        ("It takes Llama-3.3-70B.", "'Llama-3.3-70B' is not known"),
        ("It runs in vLLM 0.35.", "'vLLM 0.35' is not known"),
        ("It runs in Ollama.", "'Ollama' is not known"),
        ("It ran on a B200.", "'B200' is not known"),
        ("| restart | 0.17 s |", "the figure '0.17 s' is not known"),
        ("Restoring is 90 times faster.", "the figure '90 times' is not known"),
        ("At 2.5 GB/s from the disk.", "the figure '2.5 GB/s' is not known"),
        ("Models with windows, states or MLA: refused at the start.", "says itself what is supported or refused"),
        ("The connector supports fp8.", "says itself what is supported or refused"),
    ],
)
def test_claim_that_the_data_does_not_have_is_found(claim: str, said: str) -> None:
    (found,) = truth.claims("index.md", f"# Title\n\nGemma 3 in vLLM 0.32 took 0.186 s.\n{claim}\n")
    assert said in found


def test_part_that_was_changed_by_hand_is_renewed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- truth: stores -->\n| moon | proven |\n<!-- end -->\nafter\n")
    text = truth.renewed(page)
    assert "moon" not in text and "Valkey 9" in text
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n")


@pytest.mark.parametrize("figure", [*TRUTH["figures"], TRUTH["measured"]], ids=lambda each: each.get("of", "measured"))
def test_figure_stands_on_a_page_of_benchmarks_beside_its_commit(figure: dict[str, str]) -> None:
    page = (ROOT / "docs" / figure["page"]).read_text(encoding="utf-8")
    assert figure["commit"] in page
    assert figure.get("value", "") in page


def test_versions_are_those_that_tests_run_with() -> None:
    names = " ".join(each["name"] for each in TRUTH["support"])
    assert f"transformers {version('transformers').rpartition('.')[0]}" in names
    assert all(f"vLLM {each.rpartition('.')[0]}," in names for each in TESTED_VLLM)
    assert all(f"vLLM {each}" in names for each in snapshots())
