"""`python -m bench.gpu_mix` with programs on a simulated GPU in place of the real ones."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# Uses a simulated GPU, as `bench/gpu_mix/train.py` uses a real one.
PROGRAM = """
import hashlib, json, subprocess, sys
name, seed = sys.argv[2], sys.argv[4]
command = [sys.executable, "-m", "gpuyard", "sim-job", "--vram", "2G", *{options}]
subprocess.run(command, check=True)
print(json.dumps({{"sha256": hashlib.sha256((name + seed).encode()).hexdigest(), "peak_mb": 2048.0}}))
"""
DRIVE = (
    "import sys; from bench.gpu_mix.__main__ import main; sys.exit(main(sys.argv[2:], [sys.executable, sys.argv[1]]))"
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    return tmp_path / "program.py"


def measure(program: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", DRIVE, str(program), "--programs", "t5", "--no-warm-up", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)


def test_all_phases_run_and_an_earlier_baseline_serves_again(program: Path, tmp_path: Path) -> None:
    program.write_text(textwrap.dedent(PROGRAM).format(options=["--work", "5"]))
    out, again = tmp_path / "out.json", tmp_path / "again.json"
    done = measure(program, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(out.read_text())
    assert [each["name"] for each in measured["phases"]] == ["alone", "first", "second"]
    assert [each["same_results"] for each in measured["summaries"]] == [2, 2, 2]
    assert all(each["times_faster"] is not None for each in measured["summaries"])
    second = measured["phases"][2]["runs"]
    assert [(run["name"], run["state"], len(run["attempts"])) for run in second] == [
        ("t5-0", "succeeded", 1),
        ("t5-1", "succeeded", 1),
    ]
    assert measure(program, "--phases", "first", "--baseline", str(out), "--out", str(again)).returncode == 0
    assert json.loads(again.read_text())["summaries"][0]["same_results"] == 2


def test_what_takes_too_long_is_ended_with_all_its_processes(program: Path, tmp_path: Path) -> None:
    program.write_text(textwrap.dedent(PROGRAM).format(options=["--seconds", "1h"]))
    out = tmp_path / "out.json"
    # 10 s of this are kept for the end.
    done = measure(program, "--phases", "first", "--minutes", "0.22", "--out", str(out))
    assert done.returncode == 1, done.stdout + done.stderr
    phase = json.loads(out.read_text())["phases"][0]
    assert not phase["is_complete"]
    assert [run["state"] for run in phase["runs"]] == ["cancelled", "cancelled"]
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(program) in (each.info["cmdline"] or [])]
