"""Jobs in containers of real rootless podman, with simulated GPUs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executables import write_executable
from tests.integration.podman_fixture import IMAGE, UID, PodmanUser, kill, podman_user
from tests.integration.queue_fixture import until
from tests.unit.ledger import as_root

pytestmark = [as_root, pytest.mark.needs("podman", "runc", "newuidmap", "nsenter")]

SIM_JOB = (sys.executable, "-m", "gpuyard", "sim-job")


@pytest.fixture(scope="module")
def user() -> Iterator[PodmanUser]:
    with podman_user() as user:
        yield user


def command_lines() -> str:
    texts = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            texts.append(Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)


def hold(user: PodmanUser, *arguments: str, **environment: str) -> int:
    """Start a job in a container that holds 3 GB until it is stopped, and return its id."""
    command = ("--", *SIM_JOB, "--vram", "3G", "--seconds", "1h")
    job_id = user.submit("--vram", "4G", *arguments, *command, **environment)
    until(lambda: "holding 3 GB" in user.log_of(job_id), "the memory of its program")
    return job_id


def test_the_program_has_the_user_folder_and_environment_of_the_host(user: PodmanUser) -> None:
    script = 'id -u; pwd; echo "$TOKEN/$PATH/$GPUYARD_JOB_ID/$CUDA_VISIBLE_DEVICES"; echo written > result; cat /data/x'
    (user.work / "data").mkdir()
    (user.work / "data" / "x").write_text("mounted\n")
    job_id = user.submit("--mount", "data:/data:ro", "--", "/bin/sh", "-c", script, TOKEN="two\nlines")
    user.wait(job_id)
    variables = f"two\nlines//usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin/{job_id}/0"
    assert user.log_of(job_id) == f"{UID}\n{user.work}\n{variables}\nmounted\n"
    assert (user.work / "result").stat().st_uid == UID
    assert user.job(job_id)["container"]["tool"] == "podman"
    assert user.containers() == []


def test_the_pause_process_of_podman_does_not_keep_the_lease_of_the_job_that_started_it(user: PodmanUser) -> None:
    pause = user.pause_pid()
    assert pause is not None
    kill(pause)
    job_id = user.submit("--", "true")
    user.wait(job_id)
    assert user.pause_pid() not in (None, pause)
    until(lambda: "No leases" in user.gpuyard("leases"), "the end of its lease")


def test_its_memory_is_measured_and_cancel_ends_it(user: PodmanUser) -> None:
    job_id = hold(user, "--env", "TOKEN=hidden-5731")
    assert "hidden-5731" not in command_lines()
    (container,) = user.containers()
    assert container["Labels"]["gpuyard.job"] == str(job_id)
    until(lambda: user.job(job_id)["attempts"][0]["peaks_mb"] == {"SIM-0": 3072.0}, "its measured memory")
    user.gpuyard("cancel", str(job_id))
    user.wait(job_id)
    attempt = user.job(job_id)["attempts"][0]
    assert (attempt["outcome"], attempt["status"]) == ("cancelled", 143)
    until(lambda: not user.containers(), "the removal of its container")
    assert "No leases" in user.gpuyard("leases")


@pytest.mark.parametrize("with_keeper", [False, True], ids=["of the daemon", "of the daemon and the keeper"])
def test_no_container_survives_its_job_after_a_kill(user: PodmanUser, *, with_keeper: bool) -> None:
    job_id = hold(user)
    daemon = user.daemon_pid()
    assert daemon is not None
    kill(daemon)
    if with_keeper:
        for socket in (user.queue_home / "keepers").glob("*.sock"):
            kill(int(socket.stem))
    else:
        assert user.job(job_id)["state"] == "running"  # as the next daemon sees it
        user.gpuyard("cancel", str(job_id))
    user.wait(job_id)
    assert user.job(job_id)["attempts"][0]["outcome"] == ("lost" if with_keeper else "cancelled")
    until(lambda: not user.containers(), "the removal of its container")
    until(lambda: "No leases" in user.gpuyard("leases"), "the end of its lease")
    until(lambda: not any((user.queue_home / "containers").iterdir()), "the end of its record")


def test_a_container_whose_client_was_killed_keeps_its_gpu_until_it_is_removed(user: PodmanUser) -> None:
    tools, hangs, called = user.home / "tools", user.work / "hangs", user.work / "called"
    tools.mkdir()
    write_executable(
        tools / "podman",
        f'#!/bin/sh\nif [ "$1" = rm ]; then : > {called}; while [ -e {hangs} ]; do sleep 0.05; done; fi\n'
        'exec /usr/bin/podman "$@"\n',
    )
    job_id = hold(user, PATH=f"{tools}:/usr/bin:/bin")
    hangs.touch()
    kill(user.job(job_id)["attempts"][0]["pid"])
    until(called.exists, "the removal")
    waits = user.submit("--gpus", "2", "--exclusive", "--", "true")
    state, next_state = user.job(job_id)["state"], user.job(waits)["state"]
    is_late = "was not removed within 10 s" in (user.queue_home / "daemon.log").read_text()  # the machine is busy
    hangs.unlink()
    user.wait(job_id)
    until(lambda: not user.containers(), "the removal of its container")
    user.wait(waits)
    assert (state, next_state) == ("running", "queued") or is_late
    assert user.job(job_id)["status"] == 137


def test_a_signal_reaches_the_program_once(user: PodmanUser) -> None:
    script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done"
    job_id = user.submit("--gpus", "0", "--grace", "1s", "--", "/bin/sh", "-c", script)
    until(lambda: "ready" in user.log_of(job_id), "its program")
    user.gpuyard("cancel", str(job_id))
    user.wait(job_id)
    assert user.log_of(job_id) == "ready\nasked\n"
    until(lambda: not user.containers(), "the removal of its container")


def test_the_signal_before_a_stop_reaches_only_what_handles_it_and_once(user: PodmanUser) -> None:
    script = (
        "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True));"
        "print('ready', flush=True); [signal.pause() for _ in iter(int, 1)]"
    )
    # Neither the shell nor the init of the container handles it: it would end the shell.
    around = ("/bin/sh", "-c", f'{sys.executable} -I -S -c "{script}"; echo end')
    job_id = user.submit("--gpus", "0", "--time-limit", "1h", "--signal", "USR1@3599s", "--", *around)
    until(lambda: "signal USR1" in user.gpuyard("history", str(job_id)), "the signal")
    assert "signal USR1 to 1 process," in user.gpuyard("history", str(job_id))
    user.gpuyard("cancel", str(job_id))
    user.wait(job_id)
    assert user.log_of(job_id) == "ready\nusr1\n"


def test_a_container_that_the_command_starts_is_the_jobs_where_its_environment_says_so(user: PodmanUser) -> None:
    marks = ("GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE", "GPUYARD_LEASE")
    options = " ".join(f"--env {name}" for name in marks)
    script = f"podman run --detach --rm --volume /usr:/usr:ro {options} {IMAGE} sleep 3600; sleep 3600"
    text = user.gpuyard("submit", "--name", "bare", "--", "/bin/sh", "-c", script)
    assert "gpuyard submit --image" in text
    until(lambda: any(each["State"] == "running" for each in user.containers()), "its container")
    user.gpuyard("cancel", "name=bare")
    user.wait("name=bare")
    until(lambda: not user.containers(), "the end of its container")


def test_it_is_suspended_and_resumed(user: PodmanUser) -> None:
    job_id = user.submit("--vram", "4G", "--", *SIM_JOB, "--vram", "3G", "--work", "200")
    until(lambda: "holding 3 GB" in user.log_of(job_id), "the memory of its program")
    user.gpuyard("suspend", str(job_id))
    until(lambda: user.job(job_id)["state"] == "suspended", "the suspension")
    user.gpuyard("resume", str(job_id))
    user.wait(job_id)
    assert "200 units, checksum" in user.log_of(job_id)


def test_an_image_that_does_not_exist_is_named_as_the_reason(user: PodmanUser) -> None:
    user.gpuyard("submit", "--name", "missing", "--image", "localhost/no-such-image", "--", "true")
    user.wait("name=missing")
    assert "podman could not run the container" in user.gpuyard("show", "name=missing")
    assert IMAGE in user.run("podman", "images")
