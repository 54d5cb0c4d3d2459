"""Planting a fault, running the tests against it, and reporting the result."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.fault import Fault
from tests.faults.results import append_result, is_settled, read_report, read_results, report
from tests.faults.sandbox import Run, Sandbox
from tests.faults.trials import THE_WHOLE_RUN, BrokenRun, Result, Stage, Trials

FAULT = Fault(id="core-x", file="x.py", old="a < b", new="a > b", breaks="It breaks.", near=("tests/test_x.py",))
PASSED, FAILED, NONE_CHOSEN, MISUSED = 0, 1, 5, 4


class Copy(Sandbox):
    """A sandbox that does not run pytest: the result of each run is given."""

    def __init__(self, tmp_path: Path, *runs: Run) -> None:
        self.tree = tmp_path
        self.calls: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
        self._next_mtime = 0
        self._runs = list(runs)
        (tmp_path / FAULT.file).write_text("return a < b\n")

    def pytest(self, *arguments: str, timeout_s: float, environment: Mapping[str, str]) -> Run:
        self.calls.append((arguments, environment))
        assert (self.tree / FAULT.file).read_text() == "return a > b\n"
        return self._runs.pop(0)


def run(status: int | None, *failed: str) -> Run:
    return Run(status=status, failed=list(failed), output="its output")


def test_the_old_text_of_a_fault_must_occur_exactly_once() -> None:
    assert FAULT.applied_to("if a < b:") == "if a > b:"
    for source in ("", "a < b < a < b"):
        with pytest.raises(ValueError, match="not once"):
            FAULT.applied_to(source)


def test_the_file_is_restored_and_compiled_again_each_time(tmp_path: Path) -> None:
    copy, path = Copy(tmp_path), tmp_path / FAULT.file
    times = []
    for _ in range(2):
        with copy.planted(FAULT):
            times.append(int(path.stat().st_mtime))
            assert path.read_text() == "return a > b\n"
        times.append(int(path.stat().st_mtime))
        assert path.read_text() == "return a < b\n"
    assert len(set(times)) == len(times)


def test_a_test_that_fails_twice_catches_the_fault(tmp_path: Path) -> None:
    copy = Copy(tmp_path, run(FAILED, "t::one"), run(FAILED, "t::one"))
    result = Trials(copy, 3).judge(FAULT, Stage.FULL)
    assert (result.caught, result.test, result.by_chance) == (Stage.NEAR, "t::one", ())
    assert "tests/test_x.py" in copy.calls[0][0]
    assert copy.calls[1][0][-1] == "t::one"


def test_a_test_that_fails_once_is_left_out_and_the_others_are_run_again(tmp_path: Path) -> None:
    copy = Copy(tmp_path, run(FAILED, "t::odd"), run(PASSED), run(PASSED))
    result = Trials(copy, 3).judge(FAULT, Stage.NEAR)
    assert (result.caught, result.tried, result.by_chance) == (None, Stage.NEAR, ("t::odd",))
    assert "--deselect=t::odd" in copy.calls[2][0]


def test_a_run_that_never_ends_catches_the_fault_without_a_test_name(tmp_path: Path) -> None:
    result = Trials(Copy(tmp_path, run(None)), 3).judge(FAULT, Stage.NEAR)
    assert (result.caught, result.test) == (Stage.NEAR, THE_WHOLE_RUN)


def test_a_fault_that_is_not_caught_is_tried_with_make_test_and_then_make_test_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_FULL", "set by the caller")
    copy = Copy(tmp_path, run(NONE_CHOSEN), *[run(PASSED)] * 5, run(FAILED, "t::ray"), run(FAILED, "t::ray"))
    result = Trials(copy, 3).judge(FAULT, Stage.FULL)
    assert (result.caught, result.test) == (Stage.FULL, "t::ray")
    for at, (arguments, environment) in enumerate(copy.calls):
        is_full = at >= 4
        assert ("not full" in arguments) is not is_full
        assert environment.get("GPUYARD_FULL") == ("1" if is_full else None)
    assert [calls[0][-1].rpartition("/")[2] for calls in copy.calls[1:7]] == ["tests", "slurm", "ray"] * 2


def test_stages_that_were_tried_before_are_skipped(tmp_path: Path) -> None:
    before = Result(id=FAULT.id, digest=FAULT.digest, tried=Stage.NEAR, seconds=5.0)
    copy = Copy(tmp_path, *[run(PASSED)] * 3)
    result = Trials(copy, 3).judge(FAULT, Stage.TEST, before)
    assert len(copy.calls) == 3
    assert (result.caught, result.tried) == (None, Stage.TEST)
    assert result.seconds >= 5.0


def test_a_broken_run_of_pytest_gives_no_result(tmp_path: Path) -> None:
    with pytest.raises(BrokenRun, match="its output"):
        Trials(Copy(tmp_path, run(MISUSED)), 3).judge(FAULT, Stage.NEAR)


def test_a_log_gives_the_last_result_of_each_unchanged_fault(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert read_results(log, [FAULT]) == {}
    missed = Result(id=FAULT.id, digest=FAULT.digest, tried=Stage.NEAR, by_chance=("t::odd",))
    caught = Result(id=FAULT.id, digest=FAULT.digest, tried=Stage.TEST, caught=Stage.TEST, test="t::one", seconds=1.5)
    changed = Result(id=FAULT.id, digest="of another text", tried=Stage.FULL)
    for result in (missed, caught, changed):
        append_result(log, result)
    with log.open("a") as file:
        file.write('{"id": "core-x", "dig')
    assert read_results(log, [FAULT]) == {FAULT.id: caught}
    assert is_settled(caught, Stage.FULL)
    assert is_settled(missed, Stage.NEAR)
    assert not is_settled(missed, Stage.TEST)
    assert not is_settled(None, Stage.NEAR)


def test_a_report_counts_by_area_and_names_the_test_that_caught_each(tmp_path: Path) -> None:
    other = Fault(id="core-y", file="y.py", old="a", new="b", breaks="A.", near=("tests/test_y.py",))
    results = {
        FAULT.id: Result(id=FAULT.id, digest="12ab", tried=Stage.NEAR, caught=Stage.NEAR, test="tests/test_x.py::one"),
        other.id: Result(id=other.id, digest="34cd", tried=Stage.FULL),
    }
    untried = replace(other, id="core-z")
    lines = report({"core": [FAULT, other, untried], "store": []}, results).splitlines()
    assert "| core | 3 | 1 | 0 | 0 | 1 | 1 |" in lines
    assert "| **all** | 3 | 1 | 0 | 0 | 1 | 1 |" in lines
    assert "| `core-x` | `tests/test_x.py::one` | near | `12ab` |" in lines
    assert "| `core-y` | - | survived | `34cd` |" in lines
    assert "| `core-z` | - | not tried | - |" in lines
    assert "## store" not in lines


@pytest.mark.parametrize(
    ("tried", "caught", "test"),
    [
        (Stage.NEAR, Stage.NEAR, "tests/test_x.py::one[a|b]"),
        (Stage.FULL, Stage.FULL, "tests/test_x.py::one"),
        (Stage.NEAR, None, None),
        (Stage.FULL, None, None),
    ],
)
def test_a_page_keeps_the_results_of_unchanged_faults(tried: Stage, caught: Stage | None, test: str | None) -> None:
    result = Result(id=FAULT.id, digest=FAULT.digest, tried=tried, caught=caught, test=test)
    page = report({"core": [FAULT]}, {FAULT.id: result})
    assert read_report(page, [FAULT]) == {FAULT.id: result}
    assert read_report(page, [replace(FAULT, new="a == b")]) == {}, "it has changed"
    assert read_report(report({"core": [FAULT]}, {}), [FAULT]) == {}, "it was not tried"


def test_a_sandbox_runs_its_own_package_in_any_environment(tmp_path: Path) -> None:
    """It has its own files and shares the installed packages; only the start of a program is slow here."""
    root = tmp_path / "root"
    (root / "src" / "planted_package").mkdir(parents=True)
    (root / "src" / "planted_package" / "__init__.py").write_text("NUMBER = 1\n")
    (root / "ignored").write_text("")
    (root / ".gitignore").write_text("ignored\n.venv\n")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    (root / ".venv").symlink_to(sys.prefix)
    sandbox = Sandbox(root, tmp_path / "copy")
    assert not (sandbox.tree / "ignored").exists()
    fault = Fault(id="x", file="src/planted_package/__init__.py", old="1", new="2", breaks="It.", near=())
    ask = [str(sandbox.python), "-I", "-c", "import planted_package, psutil; print(planted_package.NUMBER)"]
    with sandbox.planted(fault):
        assert subprocess.check_output(ask, env={"PATH": os.defpath}, text=True) == "2\n"
    assert subprocess.check_output(ask, env={"PATH": os.defpath}, text=True) == "1\n"
