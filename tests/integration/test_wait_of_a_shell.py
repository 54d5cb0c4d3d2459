"""`gpuyard wait` without ids: the jobs of the shell or script that asks, each reported once; and stuck jobs."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.client.client import Client
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, end_leftovers

GPUYARD = f"{sys.executable} -m gpuyard"
SUBMIT = f"{GPUYARD} submit --gpus 0 --"


@pytest.fixture(autouse=True)
def home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    yield own_home
    end_leftovers(own_home)


def script(text: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as cron would: in a session of its own."""
    command = ["/bin/sh", "-c", f"{text}\n:"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, start_new_session=True)


def statuses(text: str) -> list[str]:
    return [line for line in script(text).stdout.splitlines() if line.startswith("status")]


WAIT = f'{GPUYARD} wait; echo "status $?"'


def test_a_failure_before_the_wait_is_reported_once() -> None:
    ended = f"{SUBMIT} false; until {GPUYARD} queue --state failed --json | grep -q '\"id\"'; do :; done"
    assert statuses(f"{ended}; {SUBMIT} true; {WAIT}; {WAIT}") == ["status 5", "status 0"]


def test_each_of_two_scripts_waits_for_its_own_jobs() -> None:
    held = script(f"{GPUYARD} submit --gpus 0 --hold -- true; {SUBMIT} false; {GPUYARD} wait 2").stdout.split()
    assert held == ["1", "2"]
    assert statuses(f"{SUBMIT} true; {WAIT}") == ["status 0"], "neither the held job nor the failure is its own"


def test_jobs_of_programs_that_a_script_starts_are_its_jobs() -> None:
    nested = f"({SUBMIT} true); /bin/sh -c '{SUBMIT} false; :'; echo x | while read x; do {SUBMIT} true; done"
    waited = script(f"{nested}; {WAIT}")
    assert "status 5" in waited.stdout
    assert "gpuyard: 2 failed" in waited.stderr


def test_a_wait_that_was_interrupted_or_timed_out_reports_nothing() -> None:
    slow = f"{GPUYARD} submit --gpus 0 --retries 1 --retry-delay 1s -- false"
    early = f"{GPUYARD} wait --timeout 0s; echo status $?"
    assert statuses(f"{slow}; {early}; {WAIT}") == ["status 124", "status 5"]


def test_a_job_that_runs_again_is_reported_again() -> None:
    again = f"{GPUYARD} retry 2"
    three = f"{GPUYARD} submit --gpus 0 --array 1-3 -- sh -c 'exit $(({{index}} == 2))'"
    assert statuses(f"{three}; {WAIT}; {WAIT}; {again}; {WAIT}; {WAIT}") == [
        "status 5", "status 0", "status 5", "status 0",
    ]  # fmt: skip


def test_ids_that_were_waited_for_are_not_reported_again() -> None:
    assert statuses(f"{GPUYARD} wait $({SUBMIT} false); {SUBMIT} true; {WAIT}") == ["status 0"]


def test_a_shell_without_jobs_waits_for_all_that_are_unfinished() -> None:
    script(f"{GPUYARD} submit --gpus 0 --retries 1 --retry-delay 1s -- false")
    waited = script(WAIT)
    assert "this shell has submitted no jobs: waiting for all 1" in waited.stderr
    assert "status 5" in waited.stdout
    assert "nothing to wait for" in script(WAIT).stderr


def test_wait_ends_where_only_held_jobs_and_jobs_behind_them_are_left() -> None:
    waited = script(f"{GPUYARD} submit --gpus 0 --hold -- true; {SUBMIT} true; "
                    f"{GPUYARD} submit --gpus 0 --after 1 -- true; {WAIT}; {GPUYARD} wait 2; echo status $?; "
                    f"{GPUYARD} release 1; {WAIT}")  # fmt: skip
    assert [line for line in waited.stdout.splitlines() if line.startswith("status")] == [
        "status 7", "status 0", "status 0",
    ]  # fmt: skip
    assert "2 jobs will not start by themselves" in waited.stderr
    assert "1 is held: `gpuyard release 1` lets it start" in waited.stderr
    assert "3 is blocked: it waits for 1" in waited.stderr


def test_a_job_that_waits_for_a_held_and_for_a_running_job_is_not_stuck(own_queue: QueueUnderTest) -> None:
    own_queue.start()
    running, gate = own_queue.start_gated(gpus=0)
    held = own_queue.submit("true", gpus=0, hold=True)
    behind = own_queue.submit("true", gpus=0, after=[f"{held},{running}"])
    ask = {"ids": f"{held} {behind}", "timeout": "0", "stuck": "1"}
    assert not own_queue.get("/wait", **ask)["is_stuck"], "the running job may fail, which rejects it"
    gate.write_text("go\n")
    own_queue.wait(running)
    answer = own_queue.get("/wait", **{**ask, "timeout": "30"})
    assert (answer["is_stuck"], answer["stuck_count"]) == (True, 2)


def test_the_client_waits_for_the_jobs_of_its_process() -> None:
    script(f"{GPUYARD} submit --gpus 0 --hold -- true")
    with Client() as client:
        client.submit("false", gpus=0)
        result = client.wait()
        assert (result.done, result.failed_count, result.chosen_by) == (True, 1, "shell")
        assert client.wait().selection == ""
        client.submit("true", gpus=0, hold=True)
        assert client.wait().is_stuck


def test_progress_counts_the_jobs_that_are_waited_for(own_queue: QueueUnderTest) -> None:
    own_queue.start()
    own_queue.submit("true", gpus=0, hold=True, array="1-20")
    answer = own_queue.get("/wait", ids="1-3", timeout="0")
    assert (answer["left"], answer["running"]) == (3, 0)
    assert run("cancel", "all").returncode == 0
