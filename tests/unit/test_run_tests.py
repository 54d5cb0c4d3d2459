"""The script behind `make test`: failed tests are run once more, alone."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.executables import write_executable
from tests.known import known

RUN_TESTS = Path(__file__).parents[2] / "scripts" / "run-tests"
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
    loader = importlib.machinery.SourceFileLoader("run_tests", str(RUN_TESTS))
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


SYSTEM_PACKAGES = Path(__file__).parents[2] / "scripts/system-packages"
LOCKED = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4242 (unattended-upgr)"


@pytest.fixture
def bare_tools(tmp_path: Path) -> Path:
    for name in ("date", "chmod", "rm", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    write_executable(tmp_path / "id", "#!/bin/sh\necho 0\n")
    write_executable(tmp_path / "sleep", f"#!/bin/sh\necho sleep >> {tmp_path}/calls\n")
    return tmp_path


def install(bare_tools: Path, apt_get: str) -> tuple[str, list[str]]:
    """Run the script with this `apt-get`; return its standard error, and the calls of apt-get and sleep."""
    write_executable(bare_tools / "apt-get", f'#!/bin/sh\necho "$*" >> {bare_tools}/calls\n{apt_get}\n')
    environment = {**os.environ, "PATH": str(bare_tools), "CI": "false"}
    done = subprocess.run(
        ["/bin/sh", SYSTEM_PACKAGES], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    return done.stderr, (bare_tools / "calls").read_text().splitlines()


def test_it_says_that_it_waits_for_another_apt_and_waits(bare_tools: Path) -> None:
    busy = f"[ -e {bare_tools}/was-busy ] || {{ echo > {bare_tools}/was-busy; echo '{LOCKED}' >&2; exit 100; }}"
    said, calls = install(bare_tools, busy)
    assert said.startswith(f"waiting for up to 10 minutes: {LOCKED}\n")
    assert said.count("waiting") == 1
    assert calls[:3] == ["-o DPkg::Lock::Timeout=0 update -qq", "sleep", "-o DPkg::Lock::Timeout=600 update -qq"]
    assert calls[3].startswith("-o DPkg::Lock::Timeout=0 install -y -qq --no-install-recommends gcc tmux")


def test_it_gives_up_at_once_on_other_errors_and_says_why(bare_tools: Path) -> None:
    said, calls = install(bare_tools, "echo 'E: Unable to locate package' >&2; exit 100")
    assert said.startswith("E: Unable to locate package\n")
    assert "sleep" not in calls


def test_it_gives_up_after_ten_minutes(bare_tools: Path) -> None:
    (bare_tools / "date").unlink()
    write_executable(
        bare_tools / "date",
        f"#!/bin/sh\necho x >> {bare_tools}/ticks; set -- $(cat {bare_tools}/ticks); echo $(($# * 200))\n",
    )
    said, calls = install(bare_tools, f"echo '{LOCKED}' >&2; exit 100")
    assert calls.count("-o DPkg::Lock::Timeout=600 update -qq") == 2
    assert "missing: cc (Debian package gcc)" in said


RELEASE_NOTES = Path(__file__).parents[2] / "scripts/release-notes"
CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.2.3] - 2026-11-20

### Added

- A verb.

## 1.2.30, unreleased

- Another.

[1.2.3]: https://example.org/1.2.3
"""


@pytest.fixture
def changed_project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/release-notes").write_bytes(RELEASE_NOTES.read_bytes())
    (tmp_path / "src/gpuyard").mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def notes(changed_project: Path, version: str, tag: str) -> "subprocess.CompletedProcess[str]":
    (changed_project / "src/gpuyard/version.py").write_text(f'__version__ = "{version}"\n')
    command = [sys.executable, str(changed_project / "scripts/release-notes"), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "expected"), [("1.2.3", "### Added\n\n- A verb.\n"), ("1.2.30", "- Another.\n")])
def test_a_release_has_the_notes_of_its_version(changed_project: Path, version: str, expected: str) -> None:
    ran = notes(changed_project, version, f"v{version}")
    assert (ran.returncode, ran.stdout) == (0, expected)


def test_a_wrong_tag_or_version_is_refused(changed_project: Path) -> None:
    ran = notes(changed_project, "1.2.30", "v1.2.3")
    assert ran.returncode == 1, "a tag that differs from the version is refused"
    assert "the tag is v1.2.3, and src/gpuyard/version.py says 1.2.30" in ran.stderr
    ran = notes(changed_project, "1.2.4", "v1.2.4")
    assert ran.returncode == 1
    assert "CHANGELOG.md has no section for 1.2.4" in ran.stderr, "a version missing in the changelog is refused"
