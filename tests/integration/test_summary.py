"""`gpuyard summary` and its route, for a night of thirty jobs of which ten fail in four ways."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.client.client import Client
from gpuyard.errors import UserError
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest

TRAIN = """
import sys
kind, seed = sys.argv[1], int(sys.argv[2])
sys.stderr.write(f"\\r 50%|#####     | {seed}/100")
if kind == "nan":
    raise ValueError(f"loss is NaN at step {7 * seed}")
if kind == "module":
    import flash_attn
if kind == "disk":
    open("/dev/full", "w").write("x" * 99_999)
"""
KINDS = {"fine": 20, "nan": 4, "module": 3, "disk": 2}
CAUSES = [
    {"text": "ValueError: loss is NaN at step …", "count": 4, "ids": "21-24", "first": 21},
    {"text": "ModuleNotFoundError: No module named 'flash_attn'", "count": 3, "ids": "25-27", "first": 25},
    {"text": "OSError: [Errno 28] No space left on device", "count": 2, "ids": "28-29", "first": 28},
    {"text": "sh: 1: frobnicate: not found", "count": 1, "ids": "30", "first": 30},
]


@pytest.fixture(scope="module")
def thirty_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueueUnderTest]:
    home = tmp_path_factory.mktemp("night") / "home"
    script = home.parent / "train.py"
    script.write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUYARD_HOME", str(home))
        patch.setenv("GPUYARD_SIMULATE", "2x24GB")
        queue = QueueUnderTest(home)
        queue.start()
        for kind, count in KINDS.items():
            queue.submit(sys.executable, str(script), kind, "{index}", array=f"1-{count}", vram="1G")
        queue.submit("/bin/sh", "-c", "frobnicate 2>&1 | sed 's/^[^:]*sh: /sh: /'; exit 127", gpus=0)
        queue.wait()
        yield queue
        queue.close()


@pytest.fixture
def night(thirty_jobs: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    monkeypatch.setenv("GPUYARD_HOME", str(thirty_jobs.home))
    return thirty_jobs


def test_the_summary_counts_jobs_and_causes(night: QueueUnderTest) -> None:
    summary = night.get("/summary")
    assert (summary["succeeded"], summary["failed"], summary["failed_ids"]) == (20, 10, "21-30")
    assert summary["causes"] == CAUSES
    assert summary["now"] == {"running": 0, "waiting": 0, "held": 0, "suspended": 0}
    assert summary["gpu_hours"] > 0
    assert summary["energy"]["cost"] is None
    with Client() as client:
        assert client.summary("12h").causes[0].count == 4


def test_the_command_prints_the_causes_and_how_to_retry_them(night: QueueUnderTest) -> None:
    lines = run("summary", "--since", "8h").stdout.splitlines()
    assert lines[1] == "20 succeeded · 10 failed"
    assert "4 x  ValueError: loss is NaN at step …                  21-24" in lines
    assert "1 x  sh: 1: frobnicate: not found                       30" in lines
    assert "gpuyard retry 21-30  runs them again" in lines
    assert lines[-1].startswith("Used: ")
    assert json.loads(run("summary", "--json").stdout)["causes"] == CAUSES
    assert night.job(21)["state"] == "failed"


def test_every_view_of_a_failed_job_says_why(night: QueueUnderTest) -> None:
    why = "ValueError: loss is NaN at step 7 (exit status 1)"
    for verb in ("queue", "why", "history", "show"):
        assert why in run(verb, "21").stdout, verb
    job = night.job(21)
    assert (job["reason"], job["error_line"]) == (why, why.removesuffix(" (exit status 1)"))
    assert job["attempts"][0]["error_line"] == job["error_line"]


def test_a_report_counts_equal_errors(night: QueueUnderTest) -> None:
    causes = night.get("/report")["total"]["causes"]
    assert [(each["error_line"], each["attempts"]) for each in causes] == [
        (cause["text"], cause["count"]) for cause in CAUSES
    ]
    assert "ValueError: loss is NaN at step … (exit status 1)" in run("report").stdout


@pytest.mark.parametrize(
    ("since", "message"),
    [
        ("tomorrow", "'tomorrow' is not a time"),
        ("25:00", "'25:00' is not a time"),
        ("2099-01-01", "'2099-01-01' is in the future"),
        ("9999d", "'9999d' is more than ten years"),
        ("0001-01-01", "'0001-01-01' is out of range"),
    ],
)
def test_a_time_that_cannot_be_is_an_error_that_says_what_to_write(
    night: QueueUnderTest, since: str, message: str
) -> None:
    with Client() as client, pytest.raises(UserError, match=message) as raised:
        client.summary(since)
    assert raised.value.hint is not None
    assert "22:00" in raised.value.hint
    assert night.get("/summary", since="2000-01-01")["failed"] == 10


def test_a_failed_job_that_runs_again_is_no_failure_any_more(queue: QueueUnderTest, tmp_path: Path) -> None:
    gate = queue.gate()
    job = queue.shell(f"[ -e {tmp_path}/fixed ] && read word < {gate}; [ -e {tmp_path}/fixed ]", gpus=0)
    held = queue.submit("true", gpus=0, hold=True)
    queue.until_state(job, "failed")
    assert queue.get("/summary")["failed_ids"] == str(job)
    (tmp_path / "fixed").touch()
    queue.post("/jobs/retry", ids=str(job))
    queue.until_state(job, "running")
    summary = queue.get("/summary", since="1h")
    assert (summary["failed"], summary["now"]["running"], summary["now"]["held"]) == (0, 1, 1)
    gate.write_text("go\n")
    queue.until_state(job, "succeeded")
    assert queue.get("/summary", since="2h")["succeeded"] == 1
    assert queue.job(held)["state"] == "held"
