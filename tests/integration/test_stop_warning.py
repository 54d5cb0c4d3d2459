"""The signal before a stop, with real programs: who gets it, and what follows."""

import sys
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.integration.test_docs import BLOCK, ROOT

# Writes which signals it gets; goes on until SIGTERM.
CATCHES = """
import pathlib, signal, sys
log = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGUSR1, lambda *_: log.write("usr1\\n"))
signal.signal(signal.SIGTERM, lambda *_: (log.write("term\\n"), sys.exit(1)))
log.write("ready\\n")
while True:
    signal.pause()
"""


def catching(tmp_path: Path) -> tuple[str, Path]:
    script, log = tmp_path / "catches.py", tmp_path / "got"
    script.write_text(CATCHES)
    return f"{sys.executable} {script} {log}", log


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_only_processes_that_handle_the_signal_get_it_once_also_over_a_restart(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    command, log = catching(tmp_path)
    # A shell without a trap around it would die of the signal.
    job_id = queue.shell(f"{command}; echo end", gpus=0, time_limit="1h", signal="USR1@3599s", grace="60s")
    until(lambda: "usr1" in lines(log), "the signal")
    until(lambda: queue.job(job_id)["attempts"][0]["warned_at"], "its record")
    queue.restart()
    queue.post("/jobs/cancel", ids=job_id)
    queue.wait(job_id)
    assert lines(log) == ["ready", "usr1", "term"]
    kinds = [event["kind"] for event in queue.get(f"/jobs/{job_id}/history")["events"]]
    assert kinds.count("warned") == 1


def test_a_job_that_an_urgent_one_sends_back_saves_first_and_runs_again(queue: QueueUnderTest, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    trap = f"trap 'echo $GPUYARD_ATTEMPT > {saved}; exit 75' USR1"
    again = f"[ ! -e {saved} ] || exit 0"
    job_id = queue.shell(
        f"{again}; {trap}; : > {tmp_path}/ready; while :; do sleep 0.05; done",
        gpus=2, exclusive=True, on_preempt="requeue", signal="USR1@1h",
    )  # fmt: skip
    until((tmp_path / "ready").exists, "its trap")
    urgent = queue.submit("true", gpus=1, exclusive=True, preempt=True)
    assert queue.wait(f"{job_id} {urgent}")["succeeded"] == 2  # long before the hour is over
    assert saved.read_text() == "1\n"
    assert [each["outcome"] for each in queue.job(job_id)["attempts"]] == ["preempted", "succeeded"]


def test_the_example_of_the_how_to_continues_where_it_was_stopped(queue: QueueUnderTest, tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/save-before-stop.md").read_text()
    (code,) = [code for language, code in BLOCK.findall(page) if language == "python"]
    (tmp_path / "train.py").write_text(code)
    options = {"time_limit": "3s", "signal": "USR1@2500ms", "retries": 50, "retry_on": "timeout"}
    job_id = queue.submit(sys.executable, "train.py", gpus=0, cwd=str(tmp_path), **options)
    assert queue.wait(job_id)["succeeded"] == 1
    attempts = queue.job(job_id)["attempts"]
    assert {each["outcome"] for each in attempts[:-1]} == {"timed-out"}
    assert "continues with step" in queue.log_of(job_id, len(attempts))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"signal": "USR1@5m", "time_limit": "1m"}, "--time-limit is not longer"),
        ({"signal": "USR9"}, "names no signal"),
        ({"signal": "USR1@5m", "engine": "ray"}, "--signal on ray needs a time limit"),
        ({"signal": "USR1@5m", "engine": "other"}, "--signal is not supported on other"),
    ],
)
def test_a_signal_that_cannot_be_sent_is_refused(queue: QueueUnderTest, options: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        queue.submit("true", **options)
