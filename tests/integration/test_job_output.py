"""Where the output of a job goes: files that the user names, standard error apart, and times before each line."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.client.client import Client
from gpuyard.engines.common import job_logs
from gpuyard.engines.common import program_outcome as oom_evidence
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.errors import GpuyardError
from gpuyard.ports import Ended
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.engine_fixture import engine, folder, launch_of  # noqa: F401 - fixtures
from tests.integration.queue_fixture import QueueUnderTest, is_gone, until

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ", re.MULTILINE)
HEADLINE = re.compile(r"^--- gpuyard: job (\d+), attempt (\d+), \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---$", re.MULTILINE)


def test_output_goes_to_the_files_of_the_patterns_and_every_reader_finds_it(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    first = queue.shell(
        "echo out $0; echo err >&2", gpus=0, array="3-4", name="train", cwd=str(work), output="logs/%x-%2a.out",
        error="logs/{job}.err",
    )  # fmt: skip
    queue.wait()
    assert sorted(os.listdir(work / "logs")) == [f"{first}.err", f"{first + 1}.err", "train-03.out", "train-04.out"]
    assert (work / "logs" / "train-03.out").read_text() == "out /bin/sh\n"
    assert queue.job(first)["log"] == str(work / "logs" / "train-03.out")
    assert run("logs", "--stdout", str(first)).stdout == "out /bin/sh\n"
    assert run("logs", "--stderr", str(first)).stdout == "err\n"
    both = run("logs", str(first))
    assert (both.stdout, "--- standard error ---" in both.stderr) == ("out /bin/sh\nerr\n", True)
    assert run("logs", "-f", str(first)).stdout == "out /bin/sh\nerr\n"
    assert queue.get(f"/jobs/{first}/log")["text"] == "out /bin/sh\n"
    assert queue.get(f"/jobs/{first}/log", stream="both")["text"] == "out /bin/sh\nerr\n"
    with Client() as client:
        assert (client.logs(first), client.logs(first, stderr=True)) == ("out /bin/sh\n", "err\n")
        assert "".join(client.logs(first, follow=True, stderr=True)) == "err\n"
    assert not list((queue.home / "logs").iterdir())


def test_headlines_begin_a_line_where_a_program_does_not_end_its_last(queue: QueueUnderTest, tmp_path: Path) -> None:
    gate, out = queue.gate(), tmp_path / "out"
    script = f'printf "out "; printf err >&2; [ "$GPUYARD_ATTEMPT" = 2 ] || {{ read word < {gate}; exit 1; }}'
    job = queue.shell(script, gpus=0, retries=1, retry_delay="0s", output=str(out), error=f"{tmp_path}/{{attempt}}")
    until(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text() == "err", "the first attempt")
    following = [*GPUYARD, "logs", "-f", "--raw", "--stderr", str(job)]
    with subprocess.Popen(following, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.read(3) == "err"
        gate.write_text("go\n")
        assert follower.stdout.read() == "\n--- attempt 2 ---\nerr"
    assert HEADLINE.sub("--", out.read_text()) == "out \n--\nout "
    both = [*GPUYARD, "logs", str(job)]
    shown = subprocess.run(both, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    assert shown.endswith("\nout \n--- standard error ---\nerr")


def test_standard_error_in_the_same_log_is_not_told_apart(queue: QueueUnderTest) -> None:
    job = queue.submit("true", gpus=0)
    queue.wait(job)
    refused = run("logs", "--stderr", str(job))
    assert (refused.returncode, "submit it with --split-stderr" in refused.stderr) == (2, True)
    with Client() as client, pytest.raises(GpuyardError, match="standard error of job"):
        client.logs(job, stderr=True)


def test_attempts_append_to_one_file_and_each_is_judged_by_its_own_output(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    """The first attempt runs out of memory, the second fails in silence: no second time out of memory."""
    out = tmp_path / "out.txt"
    says = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    script = f'[ "$GPUYARD_ATTEMPT" -gt 1 ] || echo "{says}"; exit 1'
    job = queue.shell(script, vram="2G", output=str(out))
    queue.wait(job)
    assert [each["outcome"] for each in queue.job(job)["attempts"]] == ["out-of-memory", "failed"]
    (separated,) = HEADLINE.findall(out.read_text())
    assert separated == (str(job), "2")
    assert HEADLINE.sub("--", run("logs", "-f", "--attempt", "1", str(job)).stdout) == f"{says}\n--\n"
    apart = queue.shell(script, vram="2G", output=f"{tmp_path}/{{attempt}}.txt")
    queue.wait(apart)
    assert (tmp_path / "1.txt").read_text() == f"{says}\n"
    assert (tmp_path / "2.txt").read_text() == ""


def test_a_follower_sees_attempts_that_share_a_file_once(queue: QueueUnderTest, tmp_path: Path) -> None:
    gate = queue.gate()
    script = f'echo attempt $GPUYARD_ATTEMPT; [ "$GPUYARD_ATTEMPT" = 2 ] || {{ read word < {gate}; exit 1; }}'
    job = queue.shell(script, gpus=0, retries=1, output=str(tmp_path / "out"))
    with subprocess.Popen([*GPUYARD, "logs", "-f", str(job)], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "attempt 1\n"
        gate.write_text("go\n")
        assert HEADLINE.sub("--", follower.stdout.read()) == "--\nattempt 2\n"


def test_a_file_that_cannot_be_written_is_named(queue: QueueUnderTest, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    job = queue.submit("true", gpus=0, output=str(tmp_path / "folder"))
    queue.wait(job)
    answer = queue.job(job)
    assert (answer["outcome"], answer["reason"]) == (
        "cannot-start",
        f"the output {tmp_path}/folder cannot be written",
    )


def test_cancelling_a_job_leaves_others_that_append_to_the_same_file(queue: QueueUnderTest, tmp_path: Path) -> None:
    out = tmp_path / "shared.txt"
    first, second = (queue.shell("echo begun; exec sleep 600", gpus=0, output=str(out)) for _ in range(2))
    until(lambda: out.exists() and out.read_text().count("begun") == 2, "both programs")
    with out.open("a") as ours, subprocess.Popen(["sleep", "600"], stdout=ours) as outsider:
        assert queue.post("/jobs/cancel", ids=str(first))["count"] == 1
        queue.wait(first)
        assert queue.state(second) == "running"
        assert outsider.poll() is None
        outsider.kill()


def test_standard_error_has_a_log_of_its_own_and_says_what_went_wrong(queue: QueueUnderTest) -> None:
    says = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    script = f'echo fine; [ "$GPUYARD_ATTEMPT" -gt 1 ] || {{ echo "{says}" >&2; exit 1; }}'
    job = queue.shell(script, vram="2G", split_stderr=True)
    queue.wait(job)
    assert [each["outcome"] for each in queue.job(job)["attempts"]] == ["out-of-memory", "succeeded"]
    assert queue.log_of(job) == "fine\n"
    assert run("logs", "--attempt", "1", "--stderr", str(job)).stdout == f"{says}\n"
    queue.post("/clean", older_than_s=0)
    assert not list((queue.home / "logs").iterdir())


def test_lines_have_their_times_also_after_the_daemon_died(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    job = queue.shell(f"echo one; echo two >&2; read word < {gate}; echo three; kill -9 $$", gpus=0, timestamps=True)
    queue.until_state(job, "running")
    until(lambda: "two" in run("logs", str(job)).stdout, "its first lines")
    queue.kill9()
    gate.write_text("go\n")
    queue.start()
    queue.wait(job)
    lines = queue.log_of(job).splitlines(keepends=True)
    assert [TIME.sub("", line) for line in lines] == ["one\n", "two\n", "three\n"]
    assert all(map(TIME.match, lines))
    assert queue.job(job)["reason"] == f"signal 9 ({signal.SIGKILL.name})"


def test_a_process_that_was_left_behind_keeps_its_times(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    job = queue.shell(f"(read word < {gate}; echo late) & echo main", gpus=0, timestamps=True, split_stderr=True)
    queue.wait(job)
    gate.write_text("go\n")
    until(lambda: queue.log_of(job).endswith("late\n"), "its line")
    assert [TIME.sub("", line) for line in queue.log_of(job).splitlines()] == ["main", "late"]
    until(lambda: all(map(is_gone, queue.processes())), "the end of the relay")


def test_times_do_not_hide_why_a_program_failed(queue: QueueUnderTest) -> None:
    says = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    lines = f"Traceback (most recent call last):\n  File x\n{says}"
    script = f'[ "$GPUYARD_ATTEMPT" -gt 1 ] || {{ echo "{lines}" >&2; exit 1; }}'
    job = queue.shell(script, vram="2G", timestamps=True)
    missing = queue.submit("no-such-program", gpus=0, timestamps=True)
    queue.wait()
    assert [each["outcome"] for each in queue.job(job)["attempts"]] == ["out-of-memory", "succeeded"]
    assert queue.job(missing)["reason"] == "there is no program no-such-program"


def test_a_log_with_times_is_never_longer_than_its_cap(queue: QueueUnderTest) -> None:
    most = 0

    def has_ended() -> bool:
        nonlocal most
        if log.exists():
            most = max(most, log.stat().st_blocks * 512)
        return queue.state(job) == "succeeded"

    job = queue.shell("yes | head -c 1000000", gpus=0, log_cap="4M", timestamps=True)
    log = queue.home / "logs" / f"{job}.1.log"
    until(has_ended, "its end")
    assert 1 << 20 < most < 6 << 20


def test_an_error_in_a_file_of_the_user_is_the_reason_of_this_attempt_alone(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    """Standard error comes first; what the file held before is not the reason."""
    out, error = tmp_path / "out", tmp_path / "err"
    script = "echo 'ValueError: in vain'; [ $GPUYARD_ATTEMPT = 2 ] || echo 'KeyError: 1' >&2; exit 3"
    job = queue.shell(script, gpus=0, retries=1, retry_delay="0s", output=str(out), error=str(error))
    queue.wait()
    first, second = queue.job(job)["attempts"]
    assert (first["error_line"], second["error_line"]) == ("KeyError: 1", "ValueError: in vain")
    assert queue.job(job)["reason"] == "ValueError: in vain (exit status 3)"


def test_a_disk_that_hangs_holds_up_neither_the_queue_nor_other_jobs(
    engine: LocalEngine,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung, goes_on, open_log = tmp_path / "hung", threading.Event(), job_logs.open_log

    def hang(path: Path) -> Any:
        if path == hung:
            goes_on.wait(90)
        return open_log(path)

    monkeypatch.setattr(oom_evidence, "open_log", hang)
    monkeypatch.setattr(oom_evidence, "_MOST_S", 90.0)
    fails = ("sh", "-c", "echo 'ValueError: x'; exit 3")
    engine.prepare(launch_of(1, *fails, output=str(hung)), None)
    engine.prepare(launch_of(2, *fails), None)
    engine.start_prepared()
    ended: list[Ended] = []

    def has_ended(count: int) -> bool:
        ended.extend(engine.ended())
        return len(ended) == count

    until(lambda: has_ended(1), "the end of the job on the other disk")
    assert [(each.job_id, each.outcome.error_line) for each in ended] == [(2, "ValueError: x")]
    assert engine.ended() == []
    goes_on.set()
    until(lambda: has_ended(2), "the end of the job on the hung disk")
    assert (ended[1].job_id, ended[1].outcome.error_line) == (1, "ValueError: x")
