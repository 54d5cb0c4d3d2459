"""Notifications of the daemon about jobs, the queue and GPUs; a slow target never delays the daemon."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import run
from tests.in_time import in_time
from tests.integration.queue_fixture import QueueUnderTest, is_gone, until

TELL = (
    "import json, os, sys\n"
    "variables = {name[8:].lower(): value for name, value in os.environ.items() if name.startswith('GPUYARD_')}\n"
    "with open(sys.argv[1], 'a') as file: file.write(json.dumps(variables) + '\\n')\n"
)
RUNS_OUT = "[ $GPUYARD_OOM_COUNT != 0 ] || { echo 'torch.OutOfMemoryError: CUDA out of memory.'; exit 1; }"


class RecordingTarget:
    """A command that appends the messages it gets to a file."""

    def __init__(self, folder: Path, python: str, name: str) -> None:
        (folder / "tell.py").write_text(TELL)
        self.path = folder / name
        self.command = f"{python} -S {folder}/tell.py {self.path}"

    @property
    def all(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def await_title(self, text: str) -> dict[str, str]:
        until(lambda: any(text in each["title"] for each in self.all), f"'{text}' among {self.all}")
        return next(each for each in self.all if text in each["title"])


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str], RecordingTarget]:
    import sys

    return lambda name: RecordingTarget(tmp_path, sys.executable, name)


def configure(queue: QueueUnderTest, **notify: Any) -> None:
    queue.home.mkdir(exist_ok=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in notify.items()]
    (queue.home / "config.toml").write_text("\n".join(["[notify]", *lines, ""]))
    os.utime(queue.home / "config.toml", ns=(0, hash(tuple(lines)) & 0xFFFFFFFFFFFF))


def test_each_event_is_sent_to_the_targets_that_subscribed_to_it(
    own_queue: QueueUnderTest, target: Callable[[str], RecordingTarget]
) -> None:
    queue, all_, mine = own_queue, target("all"), target("mine")
    configure(queue, on=["failed", "queue-empty", "out-of-memory"], to=[all_.command], per_minute=100)
    queue.start()

    cancelled, _ = queue.start_gated(gpus=0)
    failed = queue.shell("exit 3", gpus=0, name="$(touch>bad)")
    message = all_.await_title(f"Job {failed} ($(touch>bad)) failed")
    assert (message["event"], message["job_id"], message["job_name"]) == ("failed", str(failed), "$(touch>bad)")
    assert (message["job_state"], message["log"]) == ("failed", queue.job(failed)["log"])
    assert "exit status 3" in message["body"]

    short = queue.shell(RUNS_OUT, notify=[f"out-of-memory={mine.command}", f"finished={mine.command}"])
    all_.await_title(f"Job {short} ran out of memory and will run again with more")
    mine.await_title(f"Job {short} ran out of memory")
    mine.await_title(f"Job {short} finished")

    assert not [each for each in all_.all if "queue-empty" in each["event"]]
    queue.post("/jobs/cancel", ids=str(cancelled))
    summed_up = all_.await_title("The queue is empty")["body"]
    assert summed_up == "No jobs are left. Since the queue was last empty: 1 finished, 1 failed, 1 cancelled."
    assert not [each for each in all_.all if f"Job {cancelled} " in each["title"] or "finished" in each["event"]]


def test_a_gpu_that_is_free_again_is_notified(
    own_queue: QueueUnderTest, target: Callable[[str], RecordingTarget]
) -> None:
    configure(own_queue, on=["gpu-free"], to=[target("all").command], gpu_free_s=0.5)
    own_queue.start()
    own_queue.wait(own_queue.submit("true"))
    assert target("all").await_title("GPU 0 (Simulated 24 GB) is free")["event"] == "gpu-free"


def test_a_fault_of_a_gpu_is_notified_once(own_queue: QueueUnderTest, target: Callable[[str], RecordingTarget]) -> None:
    configure(own_queue, on=["gpu-fault"], to=[target("all").command], gpu_free_s=0.5)
    simulated = own_queue.home / "simulated"
    simulated.mkdir(parents=True)
    (simulated / "health.json").write_text('{"SIM-0": {"remap_failed": true, "throttle": ["hw-thermal"]}}')
    own_queue.start()
    message = target("all").await_title("GPU 0 (Simulated 24 GB) is faulty")
    assert message["event"] == "gpu-fault"
    assert "rows of its memory cannot be remapped" in message["body"]
    own_queue.restart()
    own_queue.wait(own_queue.submit("true", vram="1G"))
    assert len([each for each in target("all").all if "is faulty" in each["title"]]) == 1


def test_a_changed_configuration_is_applied_and_secrets_are_not_shown(
    own_queue: QueueUnderTest, target: Callable[[str], RecordingTarget]
) -> None:
    queue, one, other = own_queue, target("one"), target("other")
    configure(queue, on=["finished"], to=[])
    queue.start()
    job_id = queue.submit("true", gpus=0, hold=True, notify=["failed", "json://127.0.0.1:1/hidden-path"])
    assert queue.job(job_id)["notify"] == [
        {"events": ["failed"], "target": None},
        {"events": ["finished", "failed", "out-of-memory"], "target": "json://…"},
    ]
    shown = run("show", str(job_id)).stdout
    assert "notify: as configured on failed; json://… on finished, failed, out-of-memory\n" in shown
    assert "no notification will be sent" in queue.send("true", gpus=0, notify=["failed"])["notes"][0]

    configure(queue, on=["finished"], to=[one.command])
    until(lambda: queue.wait(queue.submit("true", gpus=0)) and one.all, "the new configuration's first message")
    configure(queue, on=["failed"], to=[other.command])
    until(lambda: queue.wait(queue.shell("exit 1", gpus=0)) and other.all, "the next configuration's first message")
    assert "hidden-path" not in json.dumps(queue.job(job_id))
    assert queue.daemon is not None
    assert "hidden-path" not in queue.daemon.log


@pytest.mark.usefixtures("unmeasured")
def test_an_array_is_notified_in_a_few_messages_that_omit_no_job(
    own_queue: QueueUnderTest, target: Callable[[str], RecordingTarget]
) -> None:
    queue, mine = own_queue, target("mine")
    configure(queue, per_minute=3)
    queue.start()
    queue.wait(queue.send("true", gpus=0, array="1-50", notify=[f"finished={mine.command}"])["ids"])

    def counted() -> int:
        return sum(int(each["title"].split()[0]) if each["title"][0].isdigit() else 1 for each in mine.all)

    until(lambda: len(mine.all) == 3 or counted() == 50, "as many messages as there may be, or all jobs in fewer")
    daemon = queue.daemon
    queue.stop()
    assert daemon is not None
    left = sum(map(int, re.findall(r"(\d+) notifications were not sent", daemon.log)))
    assert counted() + left == 50
    assert len(mine.all) <= 3


@pytest.mark.usefixtures("unmeasured")
def test_hanging_targets_delay_neither_jobs_nor_the_end_of_the_daemon(
    own_queue: QueueUnderTest, tmp_path: Path
) -> None:
    queue, pids = own_queue, tmp_path / "pids"
    hangs = [f"echo $$ >> {pids}; exec sleep 600 # {number}" for number in range(3)]
    configure(queue, on=["finished"], to=[*hangs, "no-such-program", "echo no luck; exit 1"])
    queue.start()
    for count in range(1, 4):
        assert queue.wait(queue.submit("true", gpus=0))["failed_count"] == 0, count
    daemon = queue.daemon
    assert daemon is not None
    until(lambda: pids.exists() and len(pids.read_text().split()) == 3, "all that hang")
    until(lambda: "no luck" in daemon.log and "no-such-program: not found" in daemon.log, "what went wrong")

    def restart() -> None:
        queue.stop()
        queue.start()

    in_time(30.0, restart)
    assert all(is_gone(int(pid)) for pid in pids.read_text().split()[:3])
