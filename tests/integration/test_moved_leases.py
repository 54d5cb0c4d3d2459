"""The lease directory of a queue is changed while jobs run: nothing is given twice, at no moment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import make_shared_directory
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.small_disk import mounted_disk

# A card has 24 GB.
MOST_OF_A_CARD = "20G"
SCRIPT = "from gpuyard import GPUScheduler\nwith GPUScheduler(vram='20G', max_wait_time=0) as gpus: print(gpus)"


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two shared lease directories; the queue starts with the first. There is one card."""
    one, two = (make_shared_directory(tmp_path / name) for name in ("one", "two"))
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(one))
    return one, two


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A shared lease directory on another file system."""
    with mounted_disk(tmp_path / "disk", "size=1m") as folder:
        folder.chmod(0o755)
        yield make_shared_directory(folder / "leases")


def leases(folder: Path) -> dict[str, float | None]:
    """Return the reserved memory by label."""
    return {str(lease.holder.label): lease.shares[0].memory_mb for lease in Ledger(folder).leases()}


def try_to_run(*program: str) -> "subprocess.CompletedProcess[str]":
    return run("run", "--vram", MOST_OF_A_CARD, "--wait", "0s", *program)


def move(queue: QueueUnderTest, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.stop()
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(to))
    queue.start()


def test_the_next_daemon_takes_the_leases_along_and_no_card_is_given_twice(
    own_queue: QueueUnderTest, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, (one, two) = own_queue, directories
    queue.start()
    job, gate = queue.start_gated(vram=MOST_OF_A_CARD)
    queue.stop()
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(two))
    refused = try_to_run("echo", "twice")
    assert (refused.returncode, refused.stdout) == (1, ""), "no daemon runs, and the job holds its card in `one`"
    assert "you hold 1 lease in" in refused.stderr
    assert "gpuyard daemon start" in refused.stderr

    queue.start()
    assert leases(one) == leases(two) == {f"job {job}": 20480.0}
    waiting = queue.submit("true", vram=MOST_OF_A_CARD)
    until(lambda: "20 GB needed" in queue.why(waiting), "the reason")
    queue.kill9()
    assert leases(two) == {f"job {job}": 20480.0}, "the program holds it, and no daemon has to"
    assert f"kept for job {job} of root" in try_to_run("echo", "twice").stderr
    queue.start()
    gate.write_text("go\n")
    assert queue.wait()["succeeded"] == 2
    until(lambda: leases(one) == leases(two) == {}, "the end of all leases")
    queue.restart()
    assert os.listdir(one) == [], "the files of ended leases are removed with the last of them"


def test_a_lease_of_a_script_moves_along(
    own_queue: QueueUnderTest, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, (_, two) = own_queue, directories
    queue.start()
    command = [sys.executable, "-m", "gpuyard", "run", "--vram", MOST_OF_A_CARD, "--label", "mine", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as script:
        until(lambda: leases(directories[0]) == {"mine": 20480.0}, "the script's lease")
        move(queue, two, monkeypatch)
        assert leases(two) == {"mine": 20480.0}
        waiting = queue.submit("true", vram=MOST_OF_A_CARD)
        until(lambda: "20 GB needed" in queue.why(waiting), "the reason")
        script.communicate(b"")
    assert queue.wait()["succeeded"] == 1
    assert leases(two) == {}


def test_a_drained_device_stays_drained(
    own_queue: QueueUnderTest, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_queue.start()
    assert run("devices", "drain", "0", "--reason", "its fan is broken").returncode == 0
    move(own_queue, directories[1], monkeypatch)
    waiting = own_queue.submit("true")
    until(lambda: "its fan is broken" in own_queue.why(waiting), "the reason")


def test_commands_and_scripts_with_another_directory_than_the_queue_are_refused(
    own_queue: QueueUnderTest, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, (one, two) = own_queue, directories
    queue.start()
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(two))
    script = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    for said in (try_to_run("echo", "twice").stderr, script.stderr):
        assert f"your queue uses the lease directory {one}" in said
    doctor = run("doctor", "--json")
    assert f"your queue uses the lease directory {one}" in " ".join(json.loads(doctor.stdout)["advice"]), doctor.stderr
    # A job uses the ledger of its queue, regardless of the shell that submitted it.
    job = queue.submit(sys.executable, "-c", SCRIPT, environment=dict(os.environ), vram=MOST_OF_A_CARD)
    queue.wait(job)
    assert queue.log_of(job).splitlines()[-1] == "[0]"
    queue.stop()
    assert try_to_run("echo", "once").stdout == "once\n", "nothing is held in `one`, and no daemon runs"


def test_the_queue_moves_to_another_file_system_only_when_its_jobs_have_ended(
    own_queue: QueueUnderTest, directories: tuple[Path, Path], other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, (one, _) = own_queue, directories
    queue.start()
    job, gate = queue.start_gated(vram=MOST_OF_A_CARD)
    queue.stop()
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(other_disk))
    refused = run("daemon", "start")
    assert refused.returncode == 1
    assert f"the queue cannot move from the lease directory {one}" in refused.stderr
    assert f"until they have ended, start it with GPUYARD_LOCK_DIR={one}" in refused.stderr
    assert leases(one) == {f"job {job}": 20480.0}
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(one))
    queue.start()
    gate.write_text("go\n")
    assert queue.wait(job)["succeeded"] == 1
    move(queue, other_disk, monkeypatch)
    assert queue.wait(queue.submit("true"))["succeeded"] == 1


def test_a_daemon_that_dies_while_it_moves_leaves_all_leases(
    own_queue: QueueUnderTest, directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each of its system calls that make names or write the record: `run` never gets the card."""
    queue, (_, two) = own_queue, directories
    queue.start()
    _, gate = queue.start_gated(vram=MOST_OF_A_CARD)
    queue.stop()
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(two))
    for call in ("link", "pwrite", "ftruncate"):
        for is_after in (False, True):
            died = subprocess.run([sys.executable, "-c", DIES, call, str(is_after)], capture_output=True, check=False)
            assert died.returncode == 9, died.stderr
            assert try_to_run("echo", "twice").stdout == ""
    queue.start()
    gate.write_text("go\n")
    assert queue.wait()["succeeded"] == 1


DIES = """
import os, sys
from pathlib import Path
from gpuyard.ledger import directory_in_use

call, is_after = sys.argv[1], sys.argv[2] == "True"
real = getattr(os, call)
def die(*arguments, **options):
    if is_after:
        real(*arguments, **options)
    os._exit(9)
setattr(os, call, die)
directory_in_use.move_in(Path(os.environ["GPUYARD_LOCK_DIR"]))
"""
