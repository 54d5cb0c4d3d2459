"""Jobs whose programs run under a container daemon: a stand-in for docker starts them outside of their jobs."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.queue_fixture import QueueUnderTest, is_gone, until

# `docker run [OPTIONS] img COMMAND` starts COMMAND as a daemon would, with the variables that --env names, waits for
# its end and passes SIGTERM on. `docker rm -f NAME` kills it, but waits while a file "hang" is beside it. Calls are
# noted in the file "calls".
DOCKER = """
import json, os, signal, sys, time
place = os.path.dirname(os.path.abspath(__file__))
arguments = sys.argv[1:]
with open(f"{place}/calls", "a") as file:
    print(json.dumps(arguments), file=file)
if arguments[0] == "rm":
    while os.path.exists(f"{place}/hang"):
        time.sleep(0.02)
    with open(f"{place}/{arguments[-1]}") as file:
        os.kill(int(file.read()), signal.SIGKILL)
    sys.exit()
given = {"PATH": os.environ["PATH"], "GPUYARD_HOME": os.environ["GPUYARD_HOME"],
         "GPUYARD_SIMULATE": os.environ["GPUYARD_SIMULATE"]}
options, command = arguments[:arguments.index("img")], arguments[arguments.index("img") + 1:]
given |= {name: os.environ[name] for flag, name in zip(options, options[1:]) if flag == "--env" and name in os.environ}
name = options[options.index("--name") + 1] if "--name" in options else "bare"
reading, writing = os.pipe()
if not os.fork():
    os.setsid()
    child = os.fork()
    if child:
        os.write(writing, str(child).encode())
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2, 8):
        os.dup2(null, number)
    os.execvpe(command[0], command, given)
pid = os.read(reading, 20).decode()
with open(f"{place}/{name}", "w") as file:
    file.write(pid)
signal.signal(signal.SIGTERM, lambda *_: os.kill(int(pid), signal.SIGTERM))
def runs():
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
while runs():
    time.sleep(0.02)
"""
SIM_JOB = (sys.executable, "-m", "gpuyard", "sim-job")


@pytest.fixture
def docker(own_home: Path, tools: Callable[[str, str], Path]) -> Path:
    """The folder of the stand-in, which is the configured tool."""
    own_home.mkdir()
    (own_home / "config.toml").write_text('[containers]\ntool = "docker"\n')
    return tools("docker", DOCKER).parent


def variables() -> dict[str, str]:
    names = ("PATH", "GPUYARD_HOME", "GPUYARD_SIMULATE")
    return {name: os.environ[name] for name in names} | {"TOKEN": "hidden-9417"}


def start(queue: QueueUnderTest, docker: Path) -> tuple[int, int]:
    """Start a job in a container, wait until its memory is measured, and return its id and the pid of its program."""
    command = (*SIM_JOB, "--vram", "3G", "--seconds", "1h")
    job_id = queue.submit(*command, image="img", vram="4G", environment=variables(), cwd=str(docker))
    until(lambda: peaks(queue, job_id) == {"SIM-0": 3072.0}, "its measured memory")
    (name,) = docker.glob("gpuyard-*")
    return job_id, int(name.read_text())


def peaks(queue: QueueUnderTest, job_id: int) -> dict[str, float]:
    attempts = queue.job(job_id)["attempts"]
    return dict(attempts[0]["peaks_mb"]) if attempts else {}


def test_work_of_a_container_daemon_is_measured_and_ends_with_a_cancel(docker: Path, queue: QueueUnderTest) -> None:
    job_id, program = start(queue, docker)
    assert "hidden-9417" not in (docker / "calls").read_text()
    queue.post("/jobs/cancel", ids=str(job_id))
    queue.wait(job_id)
    until(lambda: is_gone(program), "the end of its work")
    assert queue.state(job_id) == "cancelled"


def test_a_container_whose_client_was_killed_is_removed(docker: Path, queue: QueueUnderTest) -> None:
    job_id, program = start(queue, docker)
    os.kill(queue.job(job_id)["attempts"][0]["pid"], signal.SIGKILL)
    queue.wait(job_id)
    until(lambda: is_gone(program), "the end of its work")
    assert '["rm", "-f", "gpuyard-' in (docker / "calls").read_text()
    assert queue.job(job_id)["status"] == 137


def test_the_gpus_are_free_only_when_the_container_is_removed(docker: Path, queue: QueueUnderTest) -> None:
    job_id, program = start(queue, docker)
    (docker / "hang").touch()
    next_job = queue.submit("true", gpus=2, exclusive=True)
    os.kill(queue.job(job_id)["attempts"][0]["pid"], signal.SIGKILL)
    until(lambda: '["rm", "-f", "gpuyard-' in (docker / "calls").read_text(), "the removal")
    assert queue.wait(queue.submit("true", gpus=0))["succeeded"] == 1  # a few steps later
    states = (queue.state(job_id), queue.state(next_job), is_gone(program))
    assert queue.daemon is not None
    # The latter after 10 s, on a machine that is busy.
    assert states == ("running", "queued", False) or "was not removed within 10 s" in queue.daemon.log
    (docker / "hang").unlink()
    assert queue.wait(f"{job_id} {next_job}")["succeeded"] == 1
    assert is_gone(program)
    assert queue.job(job_id)["status"] == 137


def test_a_bare_docker_run_is_explained_and_never_learned_to_need_nothing(docker: Path, queue: QueueUnderTest) -> None:
    command = ("docker", "run", "img", *SIM_JOB, "--vram", "10G", "--seconds", "1h")
    answer = queue.send(*command, environment=variables())
    assert ["--image" in note for note in answer["notes"]] == [True]
    job_id = answer["first"]
    until((docker / "bare").exists, "its work")
    program = int((docker / "bare").read_text())
    until(lambda: queue.get("/devices")["devices"][0]["memory_used_mb"] == 10240.0, "its memory")
    os.kill(program, signal.SIGKILL)
    queue.wait(job_id)
    assert queue.state(job_id) == "succeeded"
    assert {each["memory_mb"] for each in queue.get("/estimates")["estimates"]} == {None}


def test_the_runs_of_a_batch_run_in_containers(docker: Path, queue: QueueUnderTest, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    options = ("--count", "2", "--image", "img", "--mount", "data:/data:ro", "--output-root", "out", "--max-cpu", "100")
    batch = [sys.executable, "-m", "gpuyard", "batch", *options, "--", "touch", "{output}/written"]
    subprocess.run(batch, cwd=tmp_path, check=True, capture_output=True)
    assert queue.counts() == {"succeeded": 3}  # with the job that sums them up
    assert len(list(tmp_path.glob("out/run-*/written"))) == 2
    calls = [json.loads(line) for line in (docker / "calls").read_text().splitlines()]
    for call in calls:
        mounts = [mount.partition("source=")[2] for flag, mount in itertools.pairwise(call) if flag == "--mount"]
        out = f"{tmp_path}/out"
        own = [f"{tmp_path},target={tmp_path}", f"{out},target={out}", f"{tmp_path}/data,target=/data,ro"]
        assert mounts[:-1] == own
        assert mounts[-1].endswith(".progress"), "the file in which it may write its progress"
    assert [call[call.index("img") + 1] for call in calls] == ["touch", "touch"]


def test_the_tasks_of_a_workspace_run_in_containers(docker: Path, queue: QueueUnderTest, tmp_path: Path) -> None:
    folder, data = tmp_path / "sweep", tmp_path / "data"
    (folder / "configs").mkdir(parents=True)
    data.mkdir()
    (folder / "configs" / "a.yml").write_text("lr: 1\n")
    (folder / "train.py").write_text("import os; open(os.environ['GPUYARD_MARKER'], 'w').close()\n")
    settings = {"sessions": "none", "image": "img", "mounts": ["../data:/data:ro"], "python_env": sys.executable}
    (folder / "scheduler_config.yml").write_text(json.dumps({**settings, "output_dir": "../out", "log_dir": "logs"}))
    start = [sys.executable, "-m", "gpuyard", "workspace", "start"]
    subprocess.run(start, cwd=folder, check=True, capture_output=True)
    queue.wait()
    assert queue.counts() == {"succeeded": 1}
    call = json.loads((docker / "calls").read_text())
    mounts = [mount.partition("source=")[2] for flag, mount in itertools.pairwise(call) if flag == "--mount"]
    out = f"{tmp_path}/out"
    assert mounts[:-1] == [f"{folder},target={folder}", f"{out},target={out}", f"{data},target=/data,ro"]
    assert mounts[-1].endswith(".progress"), "the file in which it may write its progress"
    assert call[call.index("img") :] == ["img", sys.executable, "train.py", "--config_path", "configs/a.yml"]
