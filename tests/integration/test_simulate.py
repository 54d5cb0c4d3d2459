"""`gpuyard simulate` on the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.unit.simulator.samples import write_traces

TRACE = """\
at_s,program,duration_s,peak_mb,load_percent
0,python train.py --lr 1,600,6000,30
5,python train.py --lr 1,600,6000,30
9,python train.py --lr 1,600,6000,30
12,python huge.py,600,30000,60
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    monkeypatch.setenv("GPUYARD_TRACES", str(write_traces(tmp_path / "traces")))
    (tmp_path / "trace.csv").write_text(TRACE)
    return tmp_path


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuyard", "simulate", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)


def simulated(*arguments: str) -> Any:
    done = simulate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_table_has_a_row_per_policy_and_pass_and_counts_omitted_jobs(folder: Path) -> None:
    done = simulate("trace.csv", "--devices", "1x24GB")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "3 jobs on 1x24GB"
    assert lines[1] == "left out: 1 job that needs more than these GPUs have"
    rows = [line.split()[:2] for line in lines[-6:]]
    assert rows == [[policy, number] for policy in ("fifo", "declared", "gpuyard") for number in ("1", "2")]


def test_the_second_pass_uses_the_estimates_of_the_first(folder: Path) -> None:
    found = simulated("trace.csv", "--devices", "1x24GB", "--policy", "fifo,gpuyard")
    assert (found["jobs"], found["too_large"], found["never_ran"]) == (3, 1, 0)
    makespans = {(each["policy"], each["pass_number"]): each["makespan_s"] for each in found["passes"]}
    assert makespans["fifo", 1] == makespans["fifo", 2] == pytest.approx(1800.0)
    assert makespans["gpuyard", 2] < makespans["gpuyard", 1] < makespans["fifo", 1]
    assert found["bound"]["makespan_s"] <= makespans["gpuyard", 2]
    assert all(each["lost"] == 0 for each in found["passes"])


def test_a_mix_is_reproducible_by_its_seed_and_can_be_saved(folder: Path) -> None:
    options = ("--devices", "2x24GB", "--policy", "gpuyard", "--passes", "1")
    drawn = simulated("--mix", "lucid,carma", "--jobs", "20", "--seed", "5", "--save", "drawn.csv", *options)
    assert drawn == simulated("--mix", "lucid,carma", "--jobs", "20", "--seed", "5", *options)
    assert drawn["passes"] == simulated("drawn.csv", *options)["passes"]
    assert drawn != simulated("--mix", "lucid,carma", "--jobs", "20", "--seed", "6", *options)


def test_pods_that_never_ran_are_reported(folder: Path) -> None:
    done = simulate("traces/alibaba-openb_pod_list_default.csv", "--devices", "2x16GB", "--policy", "declared")
    assert "left out: 2 pods that used no GPU or never ran" in done.stdout


def test_the_chart_is_written(folder: Path) -> None:
    done = simulate("trace.csv", "--devices", "1x24GB", "--picture", "out.svg")
    assert done.returncode == 0, done.stderr
    assert ET.parse(folder / "out.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a trace, or generate one with --mix"),
        (("trace.csv", "--mix", "lucid"), "give a trace, or generate one with --mix"),
        (("--mix", "imagenet"), "there is no mix 'imagenet'"),
        (("trace.csv", "--policy", "lifo"), "there is no policy 'lifo'"),
        (("trace.csv", "--devices", "1x2GB"), "none of the 4 jobs could run on 1x2GB"),
        (("trace.csv", "--devices", "many"), "many"),
        (("trace.csv", "--picture", "out.jpg"), "a picture is drawn as SVG or PNG"),
        (("trace.csv", "--picture", "missing/out.svg"), "cannot be written"),
        (("traces/carma-summary.csv",), "unknown columns"),
    ],
)
def test_an_error_is_one_line(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = simulate(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mix_needs_the_directory_of_measurements(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUYARD_TRACES")
    done = simulate("--mix", "lucid")
    assert "set GPUYARD_TRACES to their directory" in done.stderr
