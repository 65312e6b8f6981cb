"""The quick lane has what needs no torch and starts nothing, whichever module of ours it would come through."""

from pathlib import Path

import pytest

from tests.lanes import is_quick

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("module", "quick"),
    [
        ("test_tidy.py", True),
        ("index/test_radix.py", True),
        ("test_newcomer.py", False),
        ("deploy/test_manifests.py", False),
        ("e2e/test_demo.py", False),
        ("../gpu/tests/test_swap.py", False),
    ],
)
def test_lane_of_a_module_follows_what_it_imports(module: str, quick: bool) -> None:
    assert (TESTS / module).is_file()
    assert is_quick(TESTS / module) is quick
