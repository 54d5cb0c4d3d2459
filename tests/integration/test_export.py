"""`gpuyard export` with a real queue: the script works, matches the submission, and reveals no secrets."""

import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.executables import write_executable
from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest

# Arguments that shells, heredocs or Python could misinterpret.
STRANGE = [
    "a  b",
    "$HOME",
    "it's",
    '"q"',
    "new\nline\nEND\nend",
    "\\back\\",
    "*",
    "",
    "`id`",
    "-n",
    "é\udcff",
    "{x}",
    "!!",
]
SECRET = "hunter2"
# A stand-in for sbatch: records its arguments and input, and prints a job id as Slurm does.
SBATCH = """
import json, os, sys
folder = os.environ["SUBMITTED"]
number = len(os.listdir(folder)) + 1
call = {"arguments": sys.argv[1:], "script": sys.stdin.buffer.read().decode("utf-8", "surrogateescape")}
with open(f"{folder}/{number}", "w") as file:
    json.dump(call, file)
print(f"{number};cluster")
"""
Submitted = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def paused(queue: QueueUnderTest) -> None:
    """A paused queue: all submitted jobs wait."""
    queue.post("/pause")


@pytest.fixture
def submitted(tools: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitted:
    """Run a script with the stand-in on PATH, and return the calls."""
    tools("sbatch", SBATCH)
    folder = tmp_path / "submitted"
    folder.mkdir()
    monkeypatch.setenv("SUBMITTED", str(folder))

    def run_it(script: Path) -> list[dict[str, Any]]:
        subprocess.run([str(script)], check=True, timeout=60)
        return [json.loads((folder / str(number)).read_text()) for number in range(1, len(os.listdir(folder)) + 1)]

    return run_it


def export(site: str, path: Path, *options: str) -> str:
    """Export, and return the messages."""
    result = run_here("export", site, str(path), *options)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-n", str(path)], check=True)
    return result.stderr


def words_given(script: str, folder: Path, environment: dict[str, str] | None = None) -> list[str]:
    """Return the arguments that the program `say` gets when the script starts it."""
    program = folder / "say"
    write_executable(program, "#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **(environment or {})}
    content = script.encode("utf-8", "surrogateescape")
    done = subprocess.run(["sh"], input=content, env=path, capture_output=True, check=True, timeout=60)
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


def test_every_argument_reaches_the_program(queue: QueueUnderTest, tmp_path: Path, submitted: Submitted) -> None:
    queue.submit("say", *STRANGE, cwd=str(tmp_path))
    export("slurm", tmp_path / "script")
    (only,) = submitted(tmp_path / "script")
    assert words_given(only["script"], tmp_path) == STRANGE


def test_no_value_of_an_environment_variable_is_written(queue: QueueUnderTest, tmp_path: Path) -> None:
    queue.submit("true", environment={"PATH": os.environ["PATH"], "TOKEN": SECRET}, env=f"MORE={SECRET}")
    for site in ("slurm", "ray"):
        output = export(site, tmp_path / site)
        assert SECRET not in (tmp_path / site).read_text() + output
        assert "not in the script: all jobs: the environment" in output


def test_a_script_is_executable_or_printed_and_replaced_with_force(queue: QueueUnderTest, tmp_path: Path) -> None:
    queue.submit("true")
    path = tmp_path / "script"
    path.write_text("mine")
    refused = run_here("export", "slurm", str(path))
    assert (refused.returncode, "exists already" in refused.stderr) == (2, True)
    assert path.read_text() == "mine"
    export("slurm", path, "--force")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert path.read_text().startswith("#!/bin/sh\n")
    failed = run_here("export", "slurm", str(tmp_path / "no" / "script"))
    assert (failed.returncode, "cannot be written" in failed.stderr) == (1, True)
    done = run_here("export", "ray", "-")
    assert done.stdout.startswith("#!/bin/sh\n")
    assert "#!/bin/sh" not in done.stderr


def test_all_waiting_jobs_are_exported_or_those_that_are_named(queue: QueueUnderTest, tmp_path: Path) -> None:
    queue.submit("true", array="0-599")
    queue.submit("true", hold=True, name="later")
    queue.submit("true")
    queue.post("/jobs/cancel", ids="602")
    output = export("slurm", tmp_path / "all")
    assert "601 jobs in" in output
    assert "`gpuyard cancel 1-601`" in output
    assert "--array=0-599" in (tmp_path / "all").read_text()
    assert "1 job in" in export("slurm", tmp_path / "one", "name=later")
    ended = export("slurm", tmp_path / "ended", "602")
    assert "1 job in" in ended
    assert "gpuyard cancel" not in ended


def test_a_job_that_cannot_be_exported_is_an_error(queue: QueueUnderTest) -> None:
    errors = {
        "slurm -": (2, "no job is waiting"),
        "slurm - 99": (3, "there is no job 99"),
        "slurm": (2, "which target, and which file?"),
        "pbs -": (2, "which target, and which file?"),
    }
    for arguments, (status, message) in errors.items():
        done = run_here("export", *arguments.split())
        assert (done.returncode, done.stdout, message in done.stderr) == (status, "", True), arguments


def test_the_configuration_sets_the_size_of_a_share(queue: QueueUnderTest, tmp_path: Path) -> None:
    queue.submit("true", vram="6G", tag="night")
    both = '[queue.tags]\nnight = 1\n[slurm]\npartition = "gpu"\nshard_mb = 1024\n[ray]\ngpu_memory = "24G"\n'
    (queue.home / "config.toml").write_text(both)
    for site, options in (("slurm", "--gres=shard:6 --partition=gpu"), ("ray", "--entrypoint-num-gpus=0.25")):
        output = export(site, tmp_path / site)
        assert options in (tmp_path / site).read_text()
        assert "limits on jobs of a tag" in output
        assert "shares of a GPU" not in output
