"""A plugin for pytest: notes the ids of failing tests in a file, as they fail. Loaded with `-p tests.faults.noting`."""

import os
from pathlib import Path

import pytest

PLACE = "PLANTED_FAILURES"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Only where reports come together: workers of xdist have their own and send them on."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[PLACE]).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
