"""A plugin for pytest: appends the id of each failing test to a file. Loaded with `-p tests.faults.record_failures`."""

import os
from pathlib import Path

import pytest

FILE_VARIABLE = "PLANTED_FAILURES"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _record(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _record(report)


def _record(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Record a failure, except in workers of xdist, which send their reports to the main process."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[FILE_VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
