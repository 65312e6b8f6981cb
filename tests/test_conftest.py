"""What CI allows: no skips but for hardware, a second chance for a few tests of real time, and what is quick."""

from pathlib import Path

import pytest

from tests.lanes import is_quick

CONFTEST = Path(__file__).parent / "conftest.py"
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="chromium is not installed")
def test_marked(): ...

def test_called():
    pytest.skip("no room")

def test_hardware():
    pytest.skip("needs a CUDA device")

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    assert False

def test_fine(): ...
"""
pytest_plugins = ["pytester"]


# A skip that comes from a mark counts as an error, before the test begins.
@pytest.mark.parametrize(("value", "failed", "skipped"), [("", 0, 3), ("1", 1, 1)])
def test_skip_is_a_failure_where_none_is_allowed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, value: str, failed: int, skipped: int
) -> None:
    monkeypatch.setenv("KVTIDE_NO_SKIPS", value)
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, xfailed=1, failed=failed, errors=failed, skipped=skipped)
    if value:
        result.stdout.fnmatch_lines(["*chromium is not installed; KVTIDE_NO_SKIPS allows no skips*"])


def test_module_that_skips_itself_is_a_failure_too(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_NO_SKIPS", "1")
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile("import pytest\npytest.importorskip('no_such_module')\ndef test_fine(): ...")
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(errors=1)


def test_one_failure_is_one_failure(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failing test leaves open is not blamed on those after it."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(
        """
        import gc, socket

        def test_leaves_a_socket():
            class Tier:
                def __init__(self):
                    self.itself, self.socket = self, socket.socket()
            tier = Tier()
            assert not tier

        def test_fine():
            pass

        def test_collects():
            gc.collect()
        """
    )
    # A process of its own: what records a run in this one keeps its tracebacks alive.
    monkeypatch.setenv("PYTHONPATH", str(CONFTEST.parent.parent))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=2, failed=1)


SECOND_CHANCES_MAX = 20
FAILS_ONCE = """
import pathlib, pytest

@pytest.mark.real_time
def test_late():
    here = pathlib.Path("late")
    assert here.exists() or here.write_text("") != 0

def test_other():
    assert {}
"""


@pytest.mark.parametrize("is_other_right", [True, False])
def test_second_chance_is_for_tests_of_real_time_alone(pytester: pytest.Pytester, is_other_right: bool) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(FAILS_ONCE.format(is_other_right))
    pytester.runpytest().assert_outcomes(passed=is_other_right, failed=2 - is_other_right)
    result = pytester.runpytest("--last-failed", "--last-failed-no-failures", "none", "--again")
    if is_other_right:
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["second chance: *::test_late passed"])
    else:
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*no second chance for *::test_other*"])


def test_few_tests_have_a_second_chance() -> None:
    # One of them is in the text above.
    texts = [path.read_text(encoding="utf-8") for path in CONFTEST.parent.rglob("test_*.py")]
    assert 0 < sum(text.count("\n@pytest.mark.real_time\n") for text in texts) <= SECOND_CHANCES_MAX


# The quick lane has what needs no torch and starts nothing, whichever module of ours it would come through.
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
    assert (CONFTEST.parent / module).is_file()
    assert is_quick(CONFTEST.parent / module) is quick
