"""Suspending real processes through a fake CUDA driver, with the faults of the real one."""

import os
import signal
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import OutcomeKind
from tests.integration.driver_fixture import (
    CARD,
    USER,
    Card,
    card,
    children_of,
    libraries,
    one_user,
    tree_of_users,
    users_in,
    works_on,
)
from tests.integration.engine_fixture import let_go, outcomes, wait_for
from tests.integration.suspend_fixture import (
    is_stopped,
    next_result,
    nothing_is_left,
    resumed,
    script,
    suspended,
    suspender,
    wait_for_line,
)

__all__ = ["card", "libraries", "nothing_is_left", "suspender"]

pytestmark = pytest.mark.needs("cc")


def test_a_process_tree_is_suspended_stopped_and_resumed(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, users, shell = tree_of_users(engine, folder)
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.is_resumed, moved.text) == (True, False, "")
    assert card.states(users) == ["checkpointed", "checkpointed"]
    assert all(is_stopped(pid) for pid in (shell, *children_of(shell)))
    assert [line.split()[0] for line in card.cuda.calls()] == ["Lock", "Lock", "Checkpoint", "Checkpoint"]
    moved = resumed(suspender, attempt, 4096)
    assert (moved.is_done, moved.is_resumed) == (True, True)
    for pid in users:
        works_on(card, pid)
    assert not any(is_stopped(pid) for pid in (shell, *children_of(shell)))
    card.finish()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize(
    "refusal",
    [
        ("Lock", "600", "did not pause in time"),
        ("Checkpoint", "801", "managed memory"),
        ("Checkpoint", "304", "did not allow it"),
        ("Checkpoint", "999", "error 999"),
    ],
)
def test_if_one_process_cannot_be_suspended_the_whole_tree_runs_on(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card, refusal: tuple[str, str, str]
) -> None:
    function, code, says = refusal
    attempt, users, shell = tree_of_users(engine, folder)
    card.cuda.rule(f"{function} {users[1]} fail {code}")
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert says in moved.text
    assert str(users[1]) in moved.text
    for pid in users:
        works_on(card, pid)
    assert not any(is_stopped(pid) for pid in (shell, *children_of(shell)))


def test_an_unreadable_card_does_not_count_as_free(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    assert suspended(suspender, attempt).is_done
    suspender.resume(attempt, {"GPU-gone": 1.0})
    moved = next_result(suspender)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert "GPU-gone cannot be read" in moved.text
    assert is_stopped(pid)


def test_after_a_failed_restore_a_job_can_only_be_ended(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, _ = one_user(engine, folder)
    assert suspended(suspender, attempt).is_done
    card.cuda.rule("Restore * fail 2")
    moved = resumed(suspender, attempt, 0)
    assert (moved.is_done, moved.is_ruined) == (False, True)
    assert "not enough free memory" in moved.text
    card.cuda.rule()
    assert resumed(suspender, attempt, 0).is_ruined, "even with enough free memory"
    assert engine.signal(attempt, signal.SIGTERM) == 1
    assert outcomes(engine)[1].status == 128 + signal.SIGTERM


def test_after_a_failure_in_the_driver_a_process_tree_can_only_be_ended(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, users, shell = tree_of_users(engine, folder)
    (card.cuda.folder / str(users[1])).write_text("3")
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.is_ruined) == (False, True)
    assert f"process {users[1]} has failed" in moved.text
    assert not any(is_stopped(pid) for pid in (shell, *children_of(shell)))


def test_a_busy_driver_is_waited_for(engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card) -> None:
    attempt, pid = one_user(engine, folder)
    (card.cuda.folder / str(pid)).write_text("4")
    suspender.suspend(attempt)
    wait_for((folder / "suspending" / "1.1.lock").exists, "the helper at work")
    (card.cuda.folder / str(pid)).write_text("2")
    assert next_result(suspender).is_done
    assert card.cuda.calls() == []
    assert is_stopped(pid)


def test_a_process_that_ends_meanwhile_does_not_stop_the_suspension(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, users, _ = tree_of_users(engine, folder)
    card.cuda.rule(f"Checkpoint {users[0]} end")
    assert suspended(suspender, attempt).is_done
    assert card.cuda.state(users[1]) == "checkpointed"
    assert resumed(suspender, attempt, 0).is_done
    works_on(card, users[1])


def test_a_process_started_while_others_are_locked_is_suspended_too(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    card.cuda.rule(f"Lock {pid} pause")
    suspender.suspend(attempt)
    wait_for(lambda: card.cuda.is_paused_at("Lock"), "the lock of the first")
    (card.cuda.folder / "spawn").touch()
    users = users_in(folder, 1, 2)
    card.cuda.let_go("Lock")
    assert next_result(suspender).is_done
    assert card.states(users) == ["checkpointed", "checkpointed"]
    assert all(is_stopped(pid) for pid in users)
    assert resumed(suspender, attempt, 0).is_done
    for pid in users:
        works_on(card, pid)


def test_a_job_stopped_with_sigstop_can_be_suspended(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    attempt, pid = one_user(engine, folder)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid), "the stop")
    assert suspended(suspender, attempt).is_done
    assert card.cuda.state(pid) == "checkpointed"
    assert resumed(suspender, attempt, 0).is_done
    works_on(card, pid)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_suspended_job_that_got_sigcont_is_stopped_again(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card, resumes: bool
) -> None:
    attempt, users, shell = tree_of_users(engine, folder)
    assert suspended(suspender, attempt).is_done
    for pid in (shell, users[0]):
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda pid=pid: not is_stopped(pid), "the process to run")  # type: ignore[misc]
    if resumes:
        card.set_free(10)
        assert "not enough memory" in resumed(suspender, attempt, 1000).text
    else:
        assert suspended(suspender, attempt).is_done
    assert all(is_stopped(pid) for pid in (shell, *users))
    assert card.states(users) == ["checkpointed", "checkpointed"]


def test_a_job_without_device_memory_is_only_stopped(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card, pipe: Path
) -> None:
    attempt = script(engine, 1, f"print('here', flush=True); open({str(pipe)!r}).read()\n{USER}", devices=(CARD,))
    wait_for_line(folder, 1, "here")
    assert suspended(suspender, attempt).is_done
    assert card.cuda.calls() == []
    assert resumed(suspender, attempt, 0).is_done
    let_go(pipe)
    works_on(card, users_in(folder, 1, 1)[0])


def test_processes_that_share_device_memory_are_not_suspended(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card
) -> None:
    segment = Path(f"/dev/shm/gpuyard-test-{os.getpid()}")
    segment.write_bytes(bytes(4096))
    try:
        attempt, users, _ = tree_of_users(engine, folder, str(segment))
        moved = suspended(suspender, attempt)
    finally:
        segment.unlink()
    assert not moved.is_done
    assert "share memory" in moved.text
    for pid in users:
        works_on(card, pid)
