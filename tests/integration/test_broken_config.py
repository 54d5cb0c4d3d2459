"""A configuration file that cannot be read: what only shows answers, and nothing starts by guessed settings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.config import check_config
from gpuyard.errors import UserError
from tests.integration.queue_fixture import QueueUnderTest, until

BROKEN = '[queue]\ncpu_jobs = "three"\n'
FAULT = "config.toml:2: [queue] cpu_jobs takes a whole number, not text in quotes"


@pytest.fixture
def file(own_queue: QueueUnderTest) -> Iterator[Path]:
    """The configuration file, which is gone when the fixture of the queue looks at the leases."""
    own_queue.home.mkdir(mode=0o700)
    yield own_queue.home / "config.toml"
    (own_queue.home / "config.toml").unlink()


@pytest.mark.parametrize("verb", ["queue", "devices", "doctor"])
def test_what_only_shows_answers_with_a_warning(own_queue: QueueUnderTest, file: Path, verb: str) -> None:
    file.write_text(BROKEN)
    own_queue.start()
    command = [sys.executable, "-m", "gpuyard", verb, "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert shown.stderr == f"warning: {own_queue.home}/{FAULT}\n"
    assert shown.stdout.startswith("{")


def test_a_daemon_starts_nothing_until_the_file_can_be_read(
    own_queue: QueueUnderTest, file: Path, tmp_path: Path
) -> None:
    queue, leases = own_queue, tmp_path / "leases"
    config = f"[leases]\ndirectory = '{leases}'\n"
    file.write_text(config)
    queue.start()
    queue.post("/pause")
    job = queue.shell("true")
    queue.stop()
    file.write_text(BROKEN)
    queue.start()
    queue.post("/unpause")
    until(lambda: FAULT in queue.why(job), "the reason")
    assert queue.state(job) == "queued"
    assert any(FAULT in notice for notice in queue.get("/jobs")["notices"])
    with pytest.raises(UserError, match=r"\[queue\] cpu_jobs takes a whole number"):
        queue.shell("true")
    # It stays where the leases of running jobs are, although the file does not name the directory any more.
    assert (queue.home / "lease-directories").read_text().split() == [str(leases)]
    file.write_text(config)
    queue.wait()
    assert queue.state(job) == "succeeded"
    file.write_text(BROKEN)
    assert queue.state(queue.shell("true")) in ("queued", "running", "succeeded")
    queue.wait()
    until(lambda: any("stay in force" in notice for notice in queue.get("/jobs")["notices"]), "the notice")


def test_a_daemon_that_finds_another_lease_directory_in_the_mended_file_asks_for_a_restart(
    own_queue: QueueUnderTest, file: Path, tmp_path: Path
) -> None:
    queue = own_queue
    file.write_text(BROKEN)
    queue.start()
    file.write_text(f"[leases]\ndirectory = '{tmp_path / 'leases'}'\n")
    wanted = "names another lease directory: run `gpuyard daemon restart`"
    until(lambda: any(wanted in notice for notice in queue.get("/jobs")["notices"]), "the notice")


def test_a_file_that_is_larger_than_the_memory_is_refused_in_one_line(own_queue: QueueUnderTest, file: Path) -> None:
    file.touch()
    os.truncate(file, 50 << 30)
    own_queue.start()
    line = f"the configuration is not read: {file} is too large: configuration has at most 1 MB"
    for arguments, status, start in ((("queue",), 0, "warning: "), (("submit", "--gpus", "0", "true"), 2, "gpuyard: ")):
        command = [sys.executable, "-m", "gpuyard", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr.splitlines()[0]) == (status, start + line)
    with pytest.raises(UserError, match="is too large"):
        check_config()
