"""Shared by all tests: a home directory per test, stand-in tools, and the rule about missing programs."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.executables import write_executable
from tests.preloaded import preloaded
from tests.scale import size

# No deadline: how long an example takes depends on the machine. CI uses fixed examples; other runs explore new ones.
settings.register_profile(
    "gpuyard",
    deadline=None,
    max_examples=size(30, full=100),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("gpuyard")

# A shell starts background jobs with SIGINT ignored, and all programs that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def fast_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork Python programs from a preloaded server, except in unit tests: they start few, and some check the start."""
    with contextlib.nullcontext() if "unit" in request.path.parts else preloaded():
        yield


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Isolate the test from the user's files and settings."""
    for name in list(os.environ):
        if name.startswith("GPUYARD_") and name != "GPUYARD_SAMPLES":
            monkeypatch.delenv(name)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setenv("GPUYARD_HOME", str(home))
    return home


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that puts a stand-in on PATH: `tools("nvidia-smi", "print('…')")`, a script in Python if it has
    no interpreter line."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> Path:
        text = script if script.startswith("#!") else f"#!{sys.executable} -S\n{script}\n"
        return write_executable(folder / name, text)

    return put


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure coverage in the programs that the test starts: it costs each a tenth of a second and
    makes them half as fast. For tests with programs that run lines which other tests cover as well."""
    for name in list(os.environ):
        if name.startswith("COV"):
            monkeypatch.delenv(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("linux"):
        if sys.platform != "linux":
            pytest.skip(f"only on Linux: {marker.args[0]}")
    for marker in item.iter_markers("needs"):
        missing = [name for name in marker.args if shutil.which(name) is None]
        if missing and os.environ.get("CI") == "true":
            pytest.fail(f"in CI {', '.join(missing)} must be installed: scripts/system-packages installs it")
        if missing:
            pytest.skip(f"{', '.join(missing)} is not installed")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Wait for all measured programs before coverage is combined: combining fails if a file is renamed meanwhile."""
    result = yield
    deadline = time.monotonic() + 10.0
    is_summed_up_here = not hasattr(session.config, "workerinput")
    while is_summed_up_here and _is_any_measured() and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def _is_any_measured() -> bool:
    """Return whether a measured program still runs that no test waited for. Workers are children of this process."""
    how = os.environ.get("COVERAGE_PROCESS_CONFIG")
    if how is None:
        return False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.ppid() != os.getpid() and process.environ().get("COVERAGE_PROCESS_CONFIG") == how:
                return True
    return False
