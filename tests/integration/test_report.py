"""`gpuyard report` with a real daemon and real jobs: its figures agree with those of the queue."""

import contextlib
import json
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from tests.fakes.queue_command import GPUYARD, run, run_on_terminal
from tests.integration.queue_fixture import QueueUnderTest, until

HOSTILE = "<script>alert(1)</script>"


def report(*arguments: str) -> Any:
    result = run("report", "--json", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def jobs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("queue", "--all", "--json").stdout)["jobs"]
    return found


def group(answer: Any, name: str) -> Any:
    (found,) = [each for each in answer["groups"] if each["group"] == name]
    return found


def measured(queue: QueueUnderTest, job_id: int) -> bool:
    attempts = queue.job(job_id)["attempts"]
    return bool(attempts) and bool(attempts[-1]["peaks_mb"])


@pytest.mark.usefixtures("unmeasured")
def test_a_report_agrees_with_the_queue(queue: QueueUnderTest, tmp_path: Path) -> None:
    assert "No job ran in this time." in run("report").stdout
    gate = queue.gate()
    held = f"{' '.join(GPUYARD)} sim-job --vram 3G --seconds 600 & read word < {gate}; kill $!; wait; true"
    good = queue.shell(held, name=HOSTILE, vram="4G", environment=dict(os.environ))
    queue.shell("exit 3", name="bad", vram="4G", array="0-1")
    ending = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "exit 1")
    oom = queue.shell(
        f'[ "$GPUYARD_ATTEMPT" -ge 2 ] || {{ echo "{ending[0]}" >&2; {ending[1]}; }}', name="grew", vram="1G"
    )
    queue.submit("true", gpus="0")
    until(lambda: measured(queue, good), "the job's measured memory")

    live = report("--by", "name")
    assert (live["total"]["running"], group(live, HOSTILE)["succeeded"]) == (1, 0)
    assert group(live, HOSTILE)["gpu_hours"] > 0
    gate.write_text("go\n")
    queue.wait()

    answer = report("--by", "name")
    shown = jobs()
    total = answer["total"]
    assert (total["jobs"], total["attempts"]) == (len(shown), sum(job["attempt"] for job in shown))
    assert total["succeeded"] == Counter(job["outcome"] for job in shown)["succeeded"] == 3
    assert [(cause["outcome"], cause["status"], cause["where"], cause["attempts"], cause["healed"])
            for cause in total["causes"]] == [
        ("failed", 3, None, 2, 0), ("out-of-memory", None, "device", 1, 1),
    ]  # fmt: skip
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database:
        (ran_s,) = database.execute("SELECT sum(ended_at - started_at) FROM attempts WHERE devices <> ''").fetchone()
    assert total["gpu_hours"] * 3600 == pytest.approx(ran_s)
    assert sum(sum(row["gpu_hours"]) for row in answer["picture"]["rows"]) == pytest.approx(total["gpu_hours"])
    assert {each["group"]: each["jobs"] for each in answer["groups"]} == {HOSTILE: 1, "bad": 2, "grew": 1, "-": 1}
    assert group(answer, HOSTILE)["memory"]["unused_percent"] == pytest.approx(25.0)
    assert group(answer, "bad")["memory"]["unused_percent"] is None
    assert group(answer, "grew")["attempts"] == queue.job(oom)["attempt"] == 2
    assert answer["box"]["devices"] == 2
    assert [use["label"] for use in answer["devices"]][:1] == [queue.job(good)["gpu_labels"][0]]

    page = tmp_path / "week.html"
    assert run("report", "--by", "name", "--html", str(page)).stdout == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "out of GPU memory" in run_on_terminal("report", columns=80)


WRITE_A_TIME = "write it as 30s, 10m, 4h, 2h30m, 02:30:00 or a number of seconds"


def test_errors_name_a_remedy(queue: QueueUnderTest, tmp_path: Path) -> None:
    for arguments, message in (
        (("--by", "moon"), "gpuyard: --by cannot be 'moon'\n  it can be user, workspace, name\n"),
        (("--since", "5s"), "gpuyard: a report on 5s cannot be made\n  give it from 1m to 3660d, such as 7d\n"),
        (("--since", "soon"), f"gpuyard: 'soon' is not a time\n  {WRITE_A_TIME}\n"),
    ):
        result = run("report", *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    nowhere = tmp_path / "missing" / "week.html"
    result = run("report", "--html", str(nowhere))
    assert (result.returncode, result.stderr) == (
        1, f"gpuyard: '{nowhere}' cannot be written: No such file or directory\n",
    )  # fmt: skip
    with pytest.raises(UserError, match="by: cannot be 'moon'"):
        queue.get("/report", by="moon")
