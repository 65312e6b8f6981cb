"""The register is whole: each capability has one test, a documented option and its row in docs/capabilities.md."""

import ast
from collections import Counter

import pytest
from tests.doors.capability import Capability
from tests.doors.page import PAGE, ROOT, capabilities, marked_tests, page, section, words
from tests.doors.register import LEFT, door


def functions(file: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_names_are_unique() -> None:
    names = Counter([each.name for each in capabilities()] + [each.name for each in LEFT])
    assert [name for name, count in names.items() if count > 1] == []


def test_each_capability_has_exactly_one_test() -> None:
    marked = Counter(name for name, _ in marked_tests())
    proofs = {each.name: marked[each.name] + bool(each.proven_by) for each in capabilities()}
    assert {name: count for name, count in proofs.items() if count != 1} == {}
    assert set(marked) <= set(proofs)


@pytest.mark.parametrize("each", [each for each in capabilities() if each.proven_by], ids=lambda each: each.name)
def test_proof_exists_elsewhere(each: Capability) -> None:
    file, _, name = each.proven_by.partition("::")
    assert name.startswith("test_") and name in functions(file)


@pytest.mark.parametrize("each", capabilities(), ids=lambda each: each.name)
def test_option_is_documented(each: Capability) -> None:
    text = section(each.documented)
    assert text is not None, f"no such heading: {each.documented}"
    assert [word for word in words(each.option) if word not in text] == []


def test_what_is_left_names_what_opens_it() -> None:
    assert [each.name for each in LEFT if not (each.option and each.opens_with)] == []


def test_unknown_door_is_refused() -> None:
    with pytest.raises(KeyError, match="not in the register"):
        door("of nobody")


def test_page_is_what_the_register_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.doors.page --write"
