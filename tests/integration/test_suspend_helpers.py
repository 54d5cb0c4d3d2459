"""Suspending with a driver that hangs and helpers that are killed: every job ends up suspended or running."""

import itertools
import os
import signal
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt
from gpuyard.ports import SuspendResult
from tests.integration.driver_fixture import CARD, Card, card, libraries, one_user, tree_of_users, works_on
from tests.integration.engine_fixture import wait_for
from tests.integration.suspend_fixture import (
    helper_pid,
    is_stopped,
    next_result,
    nothing_is_left,
    resumed,
    suspended,
    suspender,
)
from tests.scale import some

__all__ = ["card", "libraries", "nothing_is_left", "suspender"]

pytestmark = pytest.mark.needs("cc")
unmeasured = pytest.mark.usefixtures("unmeasured")


# Drivers that hang


def suspend_until_it_hangs(folder: Path, card: Card, attempt: Attempt) -> tuple[LocalSuspender, SuspendResult]:
    """Suspend with the shortest timeout that reaches the checkpoint, at which the driver hangs.

    On a slow machine a shorter timeout ends before the checkpoint.
    """
    lock, limit_s = folder / "suspending" / f"{attempt.key}.lock", 0.5
    while True:
        impatient = LocalSuspender(folder / "suspending", str(folder), limit_s=limit_s)
        moved = suspended(impatient, attempt)
        wait_for(lambda: card.cuda.is_paused_at("Checkpoint") or not lock.exists(), "the driver, or the helper's end")
        if card.cuda.is_paused_at("Checkpoint"):
            return impatient, moved
        impatient.close()
        limit_s *= 2


def test_a_hanging_suspend_is_reported_and_undone_when_the_driver_continues(
    engine: LocalEngine, folder: Path, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    card.set_free(81920)
    card.cuda.rule("Checkpoint * pause")
    impatient, moved = suspend_until_it_hangs(folder, card, attempt)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert "the driver did not answer" in moved.text
    second = suspended(impatient, attempt)
    assert not second.is_done
    assert "another helper" in second.text
    card.cuda.let_go("Checkpoint")
    works_on(card, pid)
    wait_for(lambda: card.cuda.calls()[-2:] == [f"Restore {pid} 0", f"Unlock {pid} 0"], "the undoing to be over")
    assert impatient.moved() == []
    impatient.close()


def test_a_hanging_resume_is_reported_and_undone_when_the_driver_continues(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    assert suspended(suspender, attempt).is_done
    impatient = LocalSuspender(folder / "suspending", str(folder), limit_s=0.5)
    card.set_free(81920)
    card.cuda.rule("Restore * pause-after")
    moved = resumed(impatient, attempt, 0)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    card.cuda.rule()
    card.cuda.let_go("Restore")
    wait_for(lambda: card.cuda.state(pid) == "checkpointed" and is_stopped(pid), "the undoing")
    assert resumed(suspender, attempt, 0).is_done
    works_on(card, pid)
    impatient.close()


# Helpers that die


STEPS = [
    (is_resumption, function, moment)
    for is_resumption, functions in ((False, ("Lock", "Checkpoint")), (True, ("Restore", "Unlock")))
    for function in functions
    for moment in ("pause", "pause-after")
]


def kill_helper_at(card: Card, function: str) -> None:
    wait_for(lambda: card.cuda.is_paused_at(function), f"the {function}")
    card.cuda.rule()
    os.kill(helper_pid(), signal.SIGKILL)


@unmeasured
@pytest.mark.parametrize("step", some(((step,) for step in STEPS), 0, 3, 4, 7))
def test_a_second_helper_finishes_the_work_of_a_killed_one(
    engine: LocalEngine,
    folder: Path,
    suspender: LocalSuspender,
    card: Card,
    step: tuple[bool, str, str],
) -> None:
    is_resumption, function, moment = step
    attempt, users, _ = tree_of_users(engine, folder)
    if is_resumption:
        assert suspended(suspender, attempt).is_done
    card.cuda.rule(f"{function} {users[1]} {moment}")
    if is_resumption:
        suspender.resume(attempt, {CARD: 1000.0})
    else:
        suspender.suspend(attempt)
    kill_helper_at(card, function)
    moved = next_result(suspender)
    assert (moved.is_done, moved.is_resumed) == (True, is_resumption)
    if is_resumption:
        for pid in users:
            works_on(card, pid)
    else:
        assert card.states(users) == ["checkpointed", "checkpointed"]
        assert all(is_stopped(pid) for pid in users)


@unmeasured
@pytest.mark.parametrize(
    ("step", "then_resumes"),
    some(itertools.product(STEPS, [False, True]), 0, 3, 4, 7, 9, 10, 13, 14),
)
def test_a_new_daemon_finishes_or_undoes_an_interrupted_suspension(
    engine: LocalEngine,
    folder: Path,
    card: Card,
    step: tuple[bool, str, str],
    then_resumes: bool,
) -> None:
    is_resumption, function, moment = step
    attempt, users, _ = tree_of_users(engine, folder)
    old = LocalSuspender(folder / "suspending", str(folder))
    if is_resumption:
        assert suspended(old, attempt).is_done
    card.cuda.rule(f"{function} {users[0]} {moment}")
    if is_resumption:
        old.resume(attempt, {CARD: 1000.0})
    else:
        old.suspend(attempt)
    kill_helper_at(card, function)
    old.close()
    new = LocalSuspender(folder / "suspending", str(folder))
    moved = resumed(new, attempt, 1000) if then_resumes else suspended(new, attempt)
    assert moved.is_done, moved.text
    if then_resumes:
        for pid in users:
            works_on(card, pid)
    else:
        assert card.states(users) == ["checkpointed", "checkpointed"]
        assert all(is_stopped(pid) for pid in users)
        assert resumed(new, attempt, 1000).is_done
    new.close()


def test_a_half_resumed_job_without_free_memory_is_suspended_again(
    engine: LocalEngine, folder: Path, card: Card
) -> None:
    attempt, users, _ = tree_of_users(engine, folder)
    old = LocalSuspender(folder / "suspending", str(folder))
    assert suspended(old, attempt).is_done
    card.cuda.rule(f"Restore {users[1]} pause")
    old.resume(attempt, {CARD: 1000.0})
    kill_helper_at(card, "Restore")
    old.close()
    card.set_free(10)
    new = LocalSuspender(folder / "suspending", str(folder))
    moved = resumed(new, attempt, 1000)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert "not enough memory" in moved.text
    assert card.states(users) == ["checkpointed", "checkpointed"], "no memory of it remains on the card"
    card.set_free(2000)
    assert resumed(new, attempt, 1000).is_done
    new.close()


def test_a_helper_that_dies_twice_is_reported(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    card.cuda.rule("Lock * pause")
    suspender.suspend(attempt)
    wait_for(lambda: card.cuda.is_paused_at("Lock"), "the lock")
    first = helper_pid()
    (card.cuda.folder / "at-Lock").unlink()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: suspender.moved() or card.cuda.is_paused_at("Lock"), "the second helper")
    os.kill(helper_pid(), signal.SIGKILL)
    moved = next_result(suspender)
    assert not moved.is_done
    assert "died twice" in moved.text
    works_on(card, pid)


def test_a_helper_of_a_dead_daemon_finishes_before_the_next_one_begins(
    engine: LocalEngine, folder: Path, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    card.cuda.rule("Checkpoint * pause")
    old = LocalSuspender(folder / "suspending", str(folder))
    old.suspend(attempt)
    wait_for(lambda: card.cuda.is_paused_at("Checkpoint"), "the checkpoint")
    old.close()
    new = LocalSuspender(folder / "suspending", str(folder))
    new.resume(attempt, {CARD: 1.0})
    assert new.moved() == []
    card.cuda.let_go("Checkpoint")
    assert next_result(new).is_done
    assert card.cuda.calls() == [f"{step} {pid} 0" for step in ("Lock", "Checkpoint", "Restore", "Unlock")]
    works_on(card, pid)
    new.close()


def test_several_jobs_are_suspended_at_the_same_time(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    (first, one), (second, other) = one_user(engine, folder), one_user(engine, folder, 2)
    card.cuda.rule(f"Checkpoint {one} pause")
    suspender.suspend(first)
    wait_for(lambda: card.cuda.is_paused_at("Checkpoint"), "the checkpoint of the first")
    moved = suspended(suspender, second)
    assert (moved.job_id, moved.is_done) == (2, True)
    card.cuda.let_go("Checkpoint")
    moved = next_result(suspender)
    assert (moved.job_id, moved.is_done) == (1, True)
    assert card.states([one, other]) == ["checkpointed", "checkpointed"]
