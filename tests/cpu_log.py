"""A pytest plugin that logs the CPU seconds of each test, the programs it starts included.

`python -m pytest -p tests.cpu_log --cpu-log DIR` writes one file per worker with a line per test: CPU seconds, wall
seconds, test id.
`scripts/cpu-table DIR` sums them up by directory and file.

Where the process may make a control group (root on Linux), each worker gets one, so daemons that outlive their parent
are counted too. Elsewhere only children that were waited for are counted.
"""

import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-log", metavar="DIR", type=Path, help="log the CPU seconds of each test to a file in DIR")


def pytest_configure(config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--cpu-log")
    if folder is not None:
        config.pluginmanager.register(_CpuLog(folder.resolve()))


class _CpuLog:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.tsv").open("a", encoding="utf-8", buffering=1)
        self._cpu_s = (_group_clock(f"pytest-{os.getpid()}") if sys.platform == "linux" else None) or _children_clock

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        cpu_s, began = self._cpu_s(), time.monotonic()
        result = yield
        self._file.write(f"{self._cpu_s() - cpu_s:.4f}\t{time.monotonic() - began:.4f}\t{item.nodeid}\n")
        return result


def _group_clock(name: str) -> Callable[[], float] | None:
    """Move this process into a control group below its present one. Return a clock of that group, or None."""
    groups = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    is_v1 = "cpuacct" in groups
    present = Path("/sys/fs/cgroup", "cpuacct" if is_v1 else "") / groups["cpuacct" if is_v1 else ""].strip("/")
    group = present / name
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    if is_v1:
        return lambda: int((group / "cpuacct.usage").read_text()) / 1e9
    return lambda: int((group / "cpu.stat").read_text().split()[1]) / 1e6


def _children_clock() -> float:
    return sum(os.times()[:4])
