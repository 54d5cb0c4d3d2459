"""`make demo`, the first thing that people run: the whole of it, on simulated GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.executables import write_executable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("unmeasured")
def test_the_demo_runs_all_its_jobs_and_says_what_sharing_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = write_executable(tmp_path / "gpuyard", f'#!/bin/sh\nexec {sys.executable} -m gpuyard "$@"\n')
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    done = subprocess.run(
        [ROOT / "scripts/demo", command],
        capture_output=True, text=True, timeout=180, check=False, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    figures = re.fullmatch(r"24 jobs in \d+ s; one at a time they would have taken (\d+) s\.", last)
    assert figures is not None, last
    assert int(figures[1]) > 60, "36 s of the array, 24 of the sweep, and the others"
    assert "24 succeeded" in done.stdout
    assert list(folder.iterdir()) == [], "it leaves nothing behind"
