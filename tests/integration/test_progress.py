"""The progress of real jobs: from their output, from gpuyard.progress, and from the file."""

import contextlib
import json
import shlex
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

RECORDINGS = Path(__file__).parents[1] / "data" / "progress"
# A bar that is drawn over itself, and a last line.
SCRIPT = r"""
import sys, time
for step in range(41):
    bar = "█" * (step // 2)
    after = f"{step}/40 [00:00<00:01, 20.0it/s, loss={1 / (step + 1):.3f}]"
    sys.stderr.write(f"\rtrain: {step / 40:4.0%}|{bar:<20}| {after}")
    sys.stderr.flush()
    time.sleep(float(sys.argv[1]))
sys.stderr.write("\n")
print("val/acc=0.75")
"""


def until_progress(queue: QueueUnderTest, job_id: int, is_reached: Callable[[Any], bool]) -> Any:
    until(lambda: is_reached(queue.job(job_id)), f"progress of job {job_id}: {queue.job(job_id)['progress']}")
    return queue.job(job_id)


def has_progress(job: Any) -> bool:
    return job["progress"] is not None


def test_a_running_job_shows_what_it_prints(queue: QueueUnderTest) -> None:
    gate = queue.home.parent / "go"
    recorded = shlex.quote(str(RECORDINGS / "keras.half.txt"))
    job_id = queue.shell(f"cat {recorded}; until [ -e {shlex.quote(str(gate))} ]; do sleep 0.05; done", name="keras")
    job = until_progress(queue, job_id, has_progress)
    assert (job["progress"]["total"], job["progress"]["unit"], job["progress"]["percent"]) == (4, "epoch", 54.17)
    assert not job["progress"]["told"]
    shown = run("queue")
    assert "54% epoch 2.2/4" in shown.stdout
    facts = run("show", str(job_id)).stdout.splitlines()
    assert any(line.startswith("progress: ") and line.endswith("54% epoch 2.2/4") for line in facts)
    gate.touch()
    queue.wait(job_id)


def test_the_last_figures_of_a_job_stay_after_its_end_and_a_restart(queue: QueueUnderTest) -> None:
    job_id = queue.shell("echo 'epoch 1/2 loss=0.5'; echo 'epoch 2/2 loss=0.25 acc: nan'")
    queue.wait(job_id)
    queue.restart()
    job = queue.job(job_id)
    assert job["progress"]["percent"] == 100
    assert job["progress"]["left_s"] is None
    assert job["figures"] == {
        "loss": {"last": 0.25, "least": 0.25, "most": 0.5},
        "acc": {"last": None, "least": None, "most": None},
    }
    assert job["attempts"][0]["figure_curves"]["values"]["loss"] == [0.5, 0.25]
    row = json.loads(run("queue", "--all", "--json").stdout)["jobs"][0]
    assert row["figures"] == job["figures"]


def test_a_job_tells_its_progress_in_python(queue: QueueUnderTest) -> None:
    gate = queue.home.parent / "go"
    program = (
        "import gpuyard, os, time\n"
        "gpuyard.progress(3, 12, unit='epoch', loss=0.5)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
        "gpuyard.progress(11, 12, unit='epoch', loss=0.25)\n"
        "gpuyard.progress(12, 12, unit='epoch', loss=0.125)\n"
    )
    job_id = queue.submit(sys.executable, "-c", program)
    job = until_progress(queue, job_id, has_progress)
    assert (job["progress"]["done"], job["progress"]["percent"], job["progress"]["told"]) == (3, 25, True)
    gate.touch()
    queue.wait(job_id)
    job = queue.job(job_id)
    assert job["progress"]["done"] == 12
    assert job["figures"]["loss"] == {"last": 0.125, "least": 0.125, "most": 0.5}
    until(lambda: not list((queue.home / "logs").glob("*.progress*")), "the removal of its file")


def test_a_job_in_a_shell_writes_its_file(queue: QueueUnderTest) -> None:
    gate = queue.home.parent / "go"
    script = f'echo "7/20 loss=0.5" > "$GPUYARD_PROGRESS"; until [ -e {shlex.quote(str(gate))} ]; do sleep 0.05; done'
    job_id = queue.shell(script)
    job = until_progress(queue, job_id, has_progress)
    assert (job["progress"]["done"], job["progress"]["total"], job["figures"]["loss"]["last"]) == (7, 20, 0.5)
    gate.touch()
    queue.wait(job_id)


def test_each_attempt_has_its_own_progress(queue: QueueUnderTest) -> None:
    job_id = queue.shell('echo "epoch $GPUYARD_ATTEMPT/5 loss=$GPUYARD_ATTEMPT"; exit 1', retries=1, retry_delay=0)
    queue.wait(job_id)
    job = queue.job(job_id)
    assert [each["figures"]["loss"]["last"] for each in job["attempts"]] == [1, 2]


def test_a_job_submitted_by_a_job_does_not_write_its_file(queue: QueueUnderTest) -> None:
    outer = queue.shell("true", environment={"PATH": "/usr/bin:/bin", "GPUYARD_PROGRESS": "/tmp/of-another-job"})
    queue.wait(outer)
    job_id = queue.shell("echo $GPUYARD_PROGRESS", environment={"GPUYARD_PROGRESS": "/tmp/of-another-job"})
    queue.wait(job_id)
    assert queue.log_of(job_id).strip() == str(queue.home / "logs" / f"{job_id}.1.progress")


def last_of(job: Any) -> tuple[object, object]:
    """Return the progress and the last figure of a job that has printed `val/acc=0.75` at its end."""
    return job["progress"] and job["progress"]["percent"], (job["figures"] or {}).get("val/acc", {}).get("last")


def test_what_a_job_printed_last_is_known_as_soon_as_it_has_ended(queue: QueueUnderTest, tmp_path: Path) -> None:
    """Many jobs that end at about the same time, with their output in logs and in files of the user; also short ones,
    which follow each other."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    program = (sys.executable, str(script))
    queue.submit(*program, "0.03", vram="1G", array="0-14")
    queue.submit(*program, "0.03", vram="1G", array="0-7", output=f"{tmp_path}/{{job}}.txt")
    queue.shell("echo 'step 4/4'; echo val/acc=0.75", gpus=0, array="0-59")
    lacking: dict[int, Any] = {}

    def have_ended() -> bool:
        jobs = queue.get("/jobs", state="succeeded", limit="1000")["jobs"]
        lacking.update((job["id"], last_of(job)) for job in jobs if last_of(job) != (100, 0.75))
        return len(jobs) == 15 + 8 + 60

    until(have_ended, "the end of all jobs")
    assert not lacking


def test_what_a_job_printed_last_while_no_daemon_ran_is_read_by_the_next_one(queue: QueueUnderTest) -> None:
    gate = shlex.quote(str(queue.home.parent / "go"))
    wait = f"until [ -e {gate} ]; do sleep 0.05; done"
    printed = queue.shell(f"echo step 1/2; {wait}; echo step 2/2; echo val/acc=0.75")
    told = queue.shell(f"{wait}; echo '8/8 val/acc=0.75' > $GPUYARD_PROGRESS", gpus=0)
    rebooted = queue.shell(f"echo step 2/2; echo val/acc=0.75; {wait}", gpus=0)
    for job_id in (printed, told, rebooted):
        queue.until_state(job_id, "running")
    until(lambda: "val/acc" in queue.log_of(rebooted), "its output")
    queue.kill9()
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database, database:
        database.execute("UPDATE attempts SET boot_id = 'another' WHERE job = ?", (rebooted,))
    (queue.home.parent / "go").touch()
    until(lambda: "val/acc" in queue.log_of(printed), "its end")
    until((queue.home / "logs" / f"{told}.1.progress").exists, "its end")
    queue.start()
    queue.wait()
    assert [last_of(queue.job(job_id)) for job_id in (printed, told, rebooted)] == [(100, 0.75)] * 3
