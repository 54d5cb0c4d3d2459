"""Lease files that are removed under a running queue: no card is over-booked, and the leases come back."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.ledger import open_ledger
from gpuyard.model.lease import Lease
from tests.integration.queue_fixture import QueueUnderTest, until

# A card has 24 GB.
MOST_OF_A_CARD = "20G"


def leases() -> list[Lease]:
    with contextlib.suppress(EnvironmentFault):  # the directory is being replaced
        return list(open_ledger().leases())
    return []


def remove_one(folder: Path) -> None:
    next(folder.glob("*.lease")).unlink()


def remove_all(folder: Path) -> None:
    for lease in folder.glob("*.lease"):
        lease.unlink()


def replace_folder(folder: Path) -> None:
    os.rename(folder, folder.with_name("gone"))
    folder.mkdir(mode=0o700)
    shutil.rmtree(folder.with_name("gone"))


def remove_folder(folder: Path) -> None:
    os.rename(folder, folder.with_name("gone"))
    shutil.rmtree(folder.with_name("gone"))


def overwrite_all(folder: Path) -> None:
    for lease in folder.glob("*.lease"):
        lease.write_bytes(b"nonsense")


@pytest.mark.parametrize("harm", [remove_one, remove_all, replace_folder, remove_folder, overwrite_all])
def test_no_card_is_over_booked_and_the_leases_are_made_again(
    queue: QueueUnderTest, harm: Callable[[Path], None]
) -> None:
    first, first_gate = queue.start_gated("first", vram=MOST_OF_A_CARD)
    second, second_gate = queue.start_gated("second", vram=MOST_OF_A_CARD)
    before = {lease.id: lease.shares for lease in leases()}
    assert len(before) == 2
    harm(queue.home / "locks")
    waiting = queue.submit("true", vram=MOST_OF_A_CARD)

    def is_over() -> bool:
        return {lease.id: lease.shares for lease in leases()} == before or queue.state(waiting) != "queued"

    until(is_over, "the leases of both jobs, or the start of a third")
    assert queue.state(waiting) == "queued"
    assert {lease.holder.label for lease in leases()} == {f"job {first}", f"job {second}"}
    (notice,) = queue.get("/jobs")["notices"]
    assert "running jobs were removed" in notice
    first_gate.write_text("go\n")
    assert queue.wait(f"{first} {waiting}")["succeeded"] == 2, "a lease that was made again ends with its job"
    second_gate.write_text("go\n")
    queue.wait()


def test_the_next_daemon_makes_the_leases_again(queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated(vram=MOST_OF_A_CARD)
    (lease,) = leases()
    remove_all(queue.home / "locks")
    until(lambda: [each.id for each in leases()] == [lease.id], "the lease")
    queue.restart()
    until(lambda: [each.id for each in leases()] == [lease.id], "the lease, by the next daemon")
    gate.write_text("go\n")
    queue.wait()
    until(lambda: not leases(), "the end of the lease")


def test_leases_that_are_removed_without_a_daemon_count_from_the_start(queue: QueueUnderTest) -> None:
    gates = [queue.start_gated(name, vram=MOST_OF_A_CARD)[1] for name in ("first", "second")]
    waiting = queue.submit("true", vram=MOST_OF_A_CARD)
    queue.kill9()
    remove_all(queue.home / "locks")
    queue.start()
    until(lambda: len(leases()) == 2 or queue.state(waiting) != "queued", "the leases, or a third job")
    assert queue.state(waiting) == "queued"
    for gate in gates:
        gate.write_text("go\n")
    queue.wait()
