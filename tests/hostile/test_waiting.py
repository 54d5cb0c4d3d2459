"""Attacks on another user's turn: GPUs and places in the queue that the attacker keeps, or seems to keep."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.ledger.ledger import HeldLease, Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex, make_shared_directory
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import Need
from gpuyard.system.processes import this_process
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import anne_gets, ben_holds, gpuyard, record, ticket_order, two_gpus
from tests.hostile.users import ANNE, BEN, act_as, stay_as
from tests.integration.queue_fixture import until
from tests.unit.ledger import DEADLINE_S, Child, child, nothing

_kept: list[HeldLease] = []


@pytest.fixture
def ledger(place: Path) -> Path:
    folder = make_shared_directory(place / "ledger")
    Ledger(folder).claim(this_process(), nothing, DEADLINE_S)
    return folder


def lease_all(folder: str) -> int:
    lease = Acquisition(Ledger(Path(folder)), two_gpus, Need(devices=2), label="mine").attempt()
    assert lease is not None
    _kept.append(lease)
    return os.getpid()


@contextlib.contextmanager
def ben_leases_all(folder: Path) -> Iterator[Child]:
    with child(stay_as, BEN, lease_all, str(folder)) as ben:
        ben.receive()
        yield ben


def why_not(folder: str) -> str:
    """Return what a command of this user says when it gets no GPU."""
    acquisition = Acquisition(Ledger(Path(folder)), two_gpus, Need())
    assert acquisition.attempt() is None
    return "; ".join(reason.text for reason in acquisition.reasons)


@attack(
    "lease all GPUs, and keep them",
    now="remains: leases have no time limit; every command names the holder",
)
def test_lease_all_gpus(ledger: Path) -> None:
    with ben_leases_all(ledger) as ben:
        assert f"held by {BEN}, pid {ben.pid} (mine)" in act_as(ANNE, why_not, str(ledger))


@attack(
    "wait for all GPUs with a high priority, and never take them",
    now="remains: the GPUs are kept free for the ticket; every command names its holder",
)
def test_ticket_that_is_never_used(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.ticket", record(need={"devices": 2}, priority=10**6, label="first"))):
        assert f"reserved for {BEN}, pid 1 (first)" in act_as(ANNE, why_not, str(ledger))


@attack("die with leases and tickets", now="harmless: the kernel unlocks them")
def test_dead_holder(ledger: Path) -> None:
    with ben_leases_all(ledger) as ben:
        ben.kill()
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("stop oneself while waiting first in the queue", now="harmless: nothing is kept free for it")
def test_stopped_ticket_holder(ledger: Path) -> None:
    with child(stay_as, BEN, take_ticket, str(ledger)) as ben:
        ben.receive()
        assert anne_gets(ledger, 1) is None
        os.kill(ben.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(ben.pid).status() == psutil.STATUS_STOPPED, "Ben is stopped")
        assert anne_gets(ledger) == ["G0", "G1"]
        os.kill(ben.pid, signal.SIGCONT)


def take_ticket(folder: str, kept: list[object] = []) -> None:  # noqa: B006 - it is kept on purpose
    kept.append(
        Ledger(Path(folder)).take_ticket(this_process(), Need(devices=2), 0, hold_mutex(Path(folder), DEADLINE_S))
    )


@attack(
    "give one's own ticket an earlier time",
    now="harmless: the time is when the kernel last saw the file change",
)
def test_backdated_ticket(ledger: Path) -> None:
    first = Ledger(ledger).take_ticket(this_process(), Need(), 0, hold_mutex(ledger, DEADLINE_S))
    with ben_holds(ledger, ("1-0.ticket", record(need={"devices": 1}, since=0.0))):
        os.utime(ledger / "1-0.ticket", (0, 0))
        assert ticket_order(ledger) == [os.getuid(), BEN]
    first.release()


@attack(
    "let a lease seem to end, by removing one's own lease file while using the GPU",
    now="harmless: the process counts as foreign, with its memory",
)
def test_own_lease_removed(ledger: Path) -> None:
    with ben_leases_all(ledger):
        (path,) = ledger.glob("*.lease")
        act_as(BEN, os.unlink, str(path))
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("change the record of one's own lease to fewer GPUs while it is held", now="harmless")
def test_own_lease_rewritten(ledger: Path) -> None:
    with ben_leases_all(ledger):
        (path,) = ledger.glob("*.lease")
        act_as(BEN, path.write_bytes, record([{"device_id": "G1"}]))
        assert anne_gets(ledger, 1) == ["G0"]


@attack(
    "put a file with terminal escapes in its name into a folder that is then made a shared lease directory",
    now="refused: the folder holds other files; the name is escaped",
)
def test_shared_directory_over_a_folder_with_files(place: Path) -> None:
    home = place / "anne"
    home.mkdir()
    (home / "\x1b[2Jthesis.tex").write_text("")
    done = gpuyard("leases", "init-shared", str(home))
    assert done.returncode == 2
    assert b"holds other files" in done.stderr
    assert b"\x1b" not in done.stderr
    assert home.stat().st_mode & 0o022 == 0
