"""The mutex of a ledger for a program that must not wait: it gets its turn when the others are done."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.errors import LedgerBusy, WaitedTooLong
from gpuyard.ledger.ledger_mutex import MutexTurns, hold_mutex
from tests.unit.ledger import DEADLINE_S, Child, child
from tests.unit.ledger.test_ledger_mutex import hold


class Program:
    def __init__(self, folder: Path) -> None:
        self.turns = MutexTurns(folder)
        self.turns.on_turn = self._note
        self.told = threading.Semaphore(0)

    def _note(self) -> None:
        self.told.release()

    def wait_until_told(self) -> None:
        assert self.told.acquire(timeout=DEADLINE_S), "it is never told"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.turns.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Child]:
    """A process that holds the mutex."""
    with child(hold, tmp_path) as process:
        process.receive()
        yield process


def release(holder: Child) -> None:
    holder.send("go on")
    holder.receive()


def try_to_hold(program: Program) -> None:
    with program.turns.hold():
        pytest.fail("two hold it")


def is_free(folder: Path) -> bool:
    try:
        with hold_mutex(folder, 0.0):
            return True
    except WaitedTooLong:
        return False


def test_a_free_mutex_is_held_for_the_block_only(program: Program, tmp_path: Path) -> None:
    with program.turns.hold():
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_a_program_that_found_it_busy_has_a_turn_after_others(program: Program, holder: Child, tmp_path: Path) -> None:
    with pytest.raises(LedgerBusy):
        try_to_hold(program)
    release(holder)
    program.wait_until_told()
    for _ in range(2):  # for all that one step of the queue does
        with program.turns.hold():
            assert not is_free(tmp_path)
    assert not is_free(tmp_path)
    program.turns.end_turn()
    assert is_free(tmp_path)


def test_a_mutex_that_stays_busy_is_told_of_once_with_its_holder(program: Program, holder: Child) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(LedgerBusy):
        try_to_hold(program)
    program.wait_until_told()
    with pytest.raises(WaitedTooLong, match=r"busy for 0\.2 s") as caught:
        try_to_hold(program)
    if Path("/proc/locks").exists():
        assert f"pid {holder.pid}" in str(caught.value)
    assert not program.told.acquire(timeout=0.3)
    os.kill(holder.pid, signal.SIGCONT)
    release(holder)
    program.wait_until_told()
    with program.turns.hold():
        pass


def test_a_closed_program_keeps_no_mutex_and_is_told_nothing(program: Program, holder: Child, tmp_path: Path) -> None:
    with pytest.raises(LedgerBusy):
        try_to_hold(program)
    program.turns.close()
    release(holder)
    for thread in threading.enumerate():
        if thread.name == "ledger mutex":
            thread.join(DEADLINE_S)
    assert is_free(tmp_path)
    assert not program.told.acquire(blocking=False)


def test_a_mutex_that_is_gone_ends_the_wait(program: Program, holder: Child, tmp_path: Path) -> None:
    with pytest.raises(LedgerBusy):
        try_to_hold(program)
    tmp_path.rename(tmp_path.with_name("moved"))
    program.wait_until_told()
    with pytest.raises(Exception, match="cannot be written"):
        try_to_hold(program)
