"""The script behind `make test`: failed tests are run once more, alone."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.known import known

SCRIPT = Path(__file__).parents[2] / "scripts" / "run-tests"
FAILS_ONCE = """
import pathlib
def test_once():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    if not mark.exists():
        mark.touch()
        assert False
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with two groups that run at the same time."""
    loader = importlib.machinery.SourceFileLoader("run_tests", str(SCRIPT))
    module: Any = importlib.util.module_from_spec(known(importlib.util.spec_from_loader("run_tests", loader)))
    monkeypatch.setitem(sys.modules, "run_tests", module)
    loader.exec_module(module)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    one, two = (module.Group(name=name, arguments=(f"test_{name}.py",)) for name in ("one", "two"))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "stages", lambda *, full: [[one, two]])
    monkeypatch.setattr(module, "is_covered", lambda *, full: True)
    (tmp_path / "test_one.py").write_text("def test_it(): pass\n")
    return module


@pytest.mark.parametrize(("full", "status", "word"), [(False, 0, "green"), (True, 1, "RED")])
def test_a_flaky_test_is_reported_and_fails_a_full_run_only(
    runner: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], *, full: bool, status: int, word: str
) -> None:
    (tmp_path / "test_two.py").write_text(FAILS_ONCE)
    assert runner.main(full=full) == status
    *_, flaky, verdict = capfd.readouterr().out.splitlines()
    assert flaky == "flaky: test_two.py::test_once (failed beside other tests, passed alone)"
    assert verdict.startswith(f"tests: {word}, ")


def test_a_test_that_fails_alone_fails_the_run(runner: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marked = "import pytest\n@pytest.mark.full\ndef test_long(): assert False\n"
    (tmp_path / "test_two.py").write_text(f"{FAILS_ONCE}\ndef test_it(): assert False\n{marked}")
    assert runner.main(full=False) == 1
    *_, failed, flaky, verdict = capfd.readouterr().out.splitlines()
    assert failed == "failed: test_two.py::test_it"
    assert flaky.startswith("flaky: test_two.py::test_once")
    assert verdict.startswith("tests: RED, ")


def test_a_module_that_cannot_be_imported_fails_the_run(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("import no_such_module\n")
    assert runner.main(full=False) == 1


def test_coverage_below_the_minimum_fails_the_run(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "stages", lambda *, full: [])
    assert runner.main(full=False) == 0
    monkeypatch.setattr(runner, "is_covered", lambda *, full: False)
    assert runner.main(full=False) == 1


def test_many_failures_are_not_run_again(runner: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    count = runner.MOST_FAILURES + 1
    (tmp_path / "test_two.py").write_text("".join(f"def test_{n}(): assert False\n" for n in range(count)))
    assert runner.main(full=False) == 1
    out = capfd.readouterr().out
    assert "once more, alone" not in out
    assert out.count("\nfailed: ") == count


def test_a_run_that_was_killed_is_red(runner: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_two.py").write_text("import os, signal\ndef test_it(): os.kill(os.getpid(), signal.SIGKILL)\n")
    assert runner.main(full=False) == 1
    assert capfd.readouterr().out.splitlines()[-1].startswith("tests: RED, ")
