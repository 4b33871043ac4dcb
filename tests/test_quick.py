"""`--quick` keeps a case of every test, and refuses a test of which it would keep none."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py")


def quick(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = ["full: takes minutes"]\n')
    pytester.makepyfile("import pytest\n\n" + test)
    return pytester.runpytest("--quick", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("test", "passed"),
    [
        ("def test_it():\n    pass", 1),
        ("@pytest.mark.parametrize('n', [1, 2])\ndef test_it(n):\n    pass", 2),
        ("@pytest.mark.full('2')\n@pytest.mark.parametrize('n', [1, 2])\ndef test_it(n):\n    pass", 1),
        ("@pytest.mark.full(quick='test_small')\ndef test_it():\n    pass\n\n\ndef test_small():\n    pass", 1),
    ],
)
def test_a_test_with_a_quick_case_is_run(pytester, test, passed):
    quick(pytester, test).assert_outcomes(passed=passed, deselected=None if passed == 2 or "full" not in test else 1)


@pytest.mark.parametrize(
    "test",
    [
        "@pytest.mark.full\ndef test_it():\n    pass",
        "@pytest.mark.full('1', '2')\n@pytest.mark.parametrize('n', [1, 2])\ndef test_it(n):\n    pass",
        "@pytest.mark.full(quick='test_small')\ndef test_it():\n    pass",
        "@pytest.mark.full(quick='test_it')\ndef test_it():\n    pass",
        "pytestmark = pytest.mark.full\n\n\ndef test_it():\n    pass",
    ],
)
def test_a_test_without_one_is_refused(pytester, test):
    done = quick(pytester, f"{test}\n\n\ndef test_other():\n    pass")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "test_a_test_without_one_is_refused.py::test_it" in "\n".join(done.errlines)
