"""The keeper outlives the daemon: later daemons report each attempt once, and only started attempts run."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.local import keeper_connection
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.model.job import Attempt, HandedOver, OutcomeKind, Started
from gpuyard.ports import Ended, Launch, Prepared
from gpuyard.system.processes import python_command
from tests.integration.engine_fixture import (
    daemon,
    is_gone,
    launch_of,
    let_go,
    log_of,
    outcome_of,
    outcomes,
    started,
    wait_for,
    wait_until_gone,
)


def sockets_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "keepers").glob("*.sock"))


def waiting(tmp_path: Path, name: str, pipe: Path, status: int) -> tuple[str, ...]:
    return "sh", "-c", f"echo ran; touch {tmp_path}/{name}; read x < {pipe}; exit {status}"


def ended_in_order(engine: LocalEngine, count: int) -> list[Ended]:
    """Wait for `count` ends and return them in order of arrival, with duplicates."""
    ended: list[Ended] = []

    def have_ended() -> bool:
        ended.extend(engine.ended())
        return len(ended) >= count

    wait_for(have_ended, f"{count} ends")
    return ended


# The daemon is killed


def test_a_daemon_killed_before_it_starts_attempts_leaves_no_program_and_no_keeper(
    folder: Path, tmp_path: Path
) -> None:
    launches = [launch_of(n, "touch", str(tmp_path / f"ran{n}")) for n in (1, 2)]
    with daemon(folder, "wait", *launches) as first:
        keeper = first.attempts[0].keeper_pid
        assert not is_gone(keeper)
        first.kill()
    wait_until_gone(keeper, "the keeper")
    wait_for(lambda: sockets_in(folder) == [], "the end of its socket")
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    assert {one.job_id: one.outcome.kind for one in engine.ended()} == dict.fromkeys((1, 2), OutcomeKind.NEVER_STARTED)
    assert engine.ended() == []
    engine.close()
    assert not list(tmp_path.glob("ran*"))


@pytest.mark.parametrize("repetition", range(5))
def test_a_daemon_killed_right_after_starting_has_started_each_attempt_once(
    folder: Path, tmp_path: Path, repetition: int
) -> None:
    """The next daemon may start before the keeper has carried out its orders."""
    count = 50 * repetition + 1
    launches = [launch_of(n, "sh", "-c", f"echo ran >> {tmp_path}/ran{n}; exit {n % 100}") for n in range(count)]
    with daemon(folder, "begin", *launches) as first:
        first.kill()
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    ended = outcomes(engine, count)
    assert {job_id: outcome.status for job_id, outcome in ended.items()} == {n: n % 100 for n in range(count)}
    assert [(tmp_path / f"ran{n}").read_text() for n in range(count)] == ["ran\n"] * count
    engine.close()


def test_the_next_daemon_reports_the_attempts_of_a_killed_one(folder: Path, tmp_path: Path, pipe: Path) -> None:
    launches = [
        launch_of(1, "sh", "-c", f"touch {tmp_path}/first; exit 7"),
        launch_of(2, *waiting(tmp_path, "up", pipe, 8)),
        launch_of(3, "sh", "-c", f"touch {tmp_path}/also; exec sleep 600"),
    ]
    with daemon(folder, "begin", *launches) as first:
        wait_for(lambda: all((tmp_path / name).exists() for name in ("first", "up", "also")), "the programs")
        first.kill()
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    engine.adopt(first.attempts)
    assert [(one.job_id, one.outcome.status) for one in ended_in_order(engine, 1)] == [(1, 7)]
    engine.signal(first.attempts[2], signal.SIGKILL)
    let_go(pipe)
    ended = ended_in_order(engine, 2)
    assert sorted((one.job_id, one.outcome.status) for one in ended) == [(2, 8), (3, 137)]
    wait_until_gone(first.attempts[0].keeper_pid, "the keeper")
    assert engine.ended() == []
    engine.close()


def test_an_attempt_that_ended_before_adoption_wakes_the_event_loop(folder: Path) -> None:
    with daemon(folder, "begin", launch_of(1, "true")) as first:
        first.kill()
    wait_until_gone(first.attempts[0].keeper_pid, "the keeper")
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    engine.close()


def test_three_generations_of_daemons_each_report_earlier_attempts(folder: Path, tmp_path: Path, pipe: Path) -> None:
    attempts: list[Attempt] = []
    for number in (1, 2, 3):
        ends = launch_of(10 + number, "sh", "-c", f"touch {tmp_path}/done{number}; exit {number}")
        stays = launch_of(number, *waiting(tmp_path, f"up{number}", pipe, 20 + number))
        with daemon(folder, "begin", ends, stays, adopted=attempts) as each:
            wait_for(lambda n=number: (tmp_path / f"up{n}").exists() and (tmp_path / f"done{n}").exists(), "both")  # type: ignore[misc]
            attempts = [*attempts, *each.attempts]
            each.kill()
    keepers = {attempt.keeper_pid for attempt in attempts}
    assert len(keepers) == 3
    assert not any(map(is_gone, keepers))
    engine = LocalEngine(folder)
    engine.adopt(attempts)
    over = {one.job_id: one.outcome.status for one in ended_in_order(engine, 3)}
    assert over == {11: 1, 12: 2, 13: 3}
    own = started(engine, 4, *waiting(tmp_path, "up4", pipe, 24))
    wait_for((tmp_path / "up4").exists, "the fourth")
    for number in (1, 2, 3, 4):
        engine.signal(next(one for one in [*attempts, own] if one.job_id == number), signal.SIGUSR1)
    assert {job_id: one.status for job_id, one in outcomes(engine, 4).items()} == dict.fromkeys((1, 2, 3, 4), 138)
    for keeper in keepers:
        wait_until_gone(keeper, "a keeper")
    assert [log_of(folder, number) for number in (1, 2, 3, 4)] == ["ran\n"] * 4
    engine.close()


def test_an_attempt_that_never_started_runs_when_it_is_prepared_again(folder: Path, tmp_path: Path, pipe: Path) -> None:
    with daemon(folder, "wait", launch_of(1, "true")) as first:
        first.kill()
    with daemon(folder, "begin", launch_of(1, *waiting(tmp_path, "up", pipe, 6))) as second:
        wait_for((tmp_path / "up").exists, "the program")
        second.kill()
    engine = LocalEngine(folder)
    engine.adopt(second.attempts)
    let_go(pipe)
    assert outcomes(engine)[1].status == 6
    engine.close()


# The keeper is killed


def test_attempts_of_a_killed_keeper_are_lost_and_the_next_job_gets_a_new_keeper(
    engine: LocalEngine, tmp_path: Path, pipe: Path
) -> None:
    attempts = [started(engine, n, *waiting(tmp_path, f"up{n}", pipe, 0)) for n in (1, 2)]
    wait_for(lambda: (tmp_path / "up1").exists() and (tmp_path / "up2").exists(), "the programs")
    programs = [engine.pid_of(attempt) for attempt in attempts]
    os.kill(attempts[0].keeper_pid, signal.SIGKILL)
    assert {one.kind for one in outcomes(engine, 2).values()} == {OutcomeKind.LOST}
    third = engine.prepare(launch_of(3, "sh", "-c", "exit 3"), None)
    assert third.keeper_pid != attempts[0].keeper_pid
    engine.start_prepared()
    assert outcomes(engine)[3].status == 3
    for attempt, program in zip(attempts, programs, strict=True):
        assert program is not None
        assert not is_gone(program)
        assert engine.signal(attempt, signal.SIGKILL) == 1
        wait_until_gone(program, "what it left")


def test_after_a_keeper_is_killed_unsent_attempts_never_started_and_running_ones_are_lost(
    engine: LocalEngine, tmp_path: Path, pipe: Path
) -> None:
    first = started(engine, 1, *waiting(tmp_path, "up", pipe, 0))
    wait_for((tmp_path / "up").exists, "the program")
    engine.prepare(launch_of(2, "touch", str(tmp_path / "ran")), None)
    os.kill(first.keeper_pid, signal.SIGKILL)
    wait_until_gone(first.keeper_pid, "the keeper")
    engine.start_prepared()
    ended = outcomes(engine, 2)
    assert {job_id: one.kind for job_id, one in ended.items()} == {1: OutcomeKind.LOST, 2: OutcomeKind.NEVER_STARTED}
    let_go(pipe)
    assert not (tmp_path / "ran").exists()


def test_an_attempt_prepared_for_a_dead_keeper_never_started(engine: LocalEngine, tmp_path: Path) -> None:
    first = engine.prepare(launch_of(1, "touch", str(tmp_path / "ran")), None)
    os.kill(first.keeper_pid, signal.SIGKILL)
    wait_until_gone(first.keeper_pid, "the keeper")
    assert engine.ended() == []
    second = engine.prepare(launch_of(2, "touch", str(tmp_path / "ran")), None)
    assert second.keeper_pid != first.keeper_pid
    engine.start_prepared()
    assert {one.kind for one in outcomes(engine, 2).values()} == {OutcomeKind.NEVER_STARTED}
    assert outcome_of(engine, launch_of(1, "sh", "-c", "exit 4")).status == 4
    assert not (tmp_path / "ran").exists()


def _have_keepers_die(monkeypatch: pytest.MonkeyPatch, *, at: str, first: str = "") -> None:
    """Have keepers kill themselves when they call this function of `os`; `first` is carried out right before that."""
    dies = f"def {at}(*arguments, **options):\n    {first or 'pass'}\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    patch = f"import os, signal\nusual = os.{at}\n{dies}os.{at} = {at}\n"

    def dying(*arguments: str, options: tuple[str, ...]) -> tuple[str, ...]:
        command = python_command(*arguments, options=options)
        return tuple(f"{patch}{part}" if part.startswith("import sys") else part for part in command)

    monkeypatch.setattr(keeper_connection, "python_command", dying)


@pytest.mark.linux
def test_a_silent_program_whose_keeper_is_killed_as_it_starts_is_lost(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_keepers_die(monkeypatch, at="posix_spawn", first="usual(*arguments, **options)")
    started(engine, 1, "true")
    assert outcomes(engine)[1].kind is OutcomeKind.LOST


# Slices


def slice_of(tmp_path: Path, first: str, count: int = 4) -> Launch:
    """Return a launch that runs `first`, and others after it that each add a line to a file."""
    rest = (launch_of(n, "sh", "-c", f"echo {n} >> {tmp_path}/ran") for n in range(2, count + 1))
    return launch_of(1, "sh", "-c", first, rest=tuple(rest))


def ran(tmp_path: Path) -> list[str]:
    path = tmp_path / "ran"
    return path.read_text().split() if path.exists() else []


def upcoming_of(prepared: Prepared) -> Attempt:
    return Attempt(job_id=prepared.job_id, number=prepared.attempt, phase=HandedOver(at=0.0), log=prepared.log)


def test_a_slice_runs_in_order_and_each_turn_is_reported(engine: LocalEngine, tmp_path: Path) -> None:
    prepared = engine.prepare(slice_of(tmp_path, "exit 3"), None)
    assert [each.job_id for each in prepared.rest] == [2, 3, 4]
    engine.start_prepared()
    assert {n: one.status for n, one in outcomes(engine, 4).items()} == {1: 3, 2: 0, 3: 0, 4: 0}
    assert ran(tmp_path) == ["2", "3", "4"]
    begun = engine.site_changes()
    assert [(each.job_id, each.keeper_pid) for each in begun] == [(n, prepared.keeper_pid) for n in (2, 3, 4)]
    assert sorted(each.at or 0.0 for each in begun) == [each.at for each in begun]
    assert engine.site_changes() == []


def test_a_program_that_cannot_start_does_not_end_its_slice(engine: LocalEngine, tmp_path: Path) -> None:
    launch = slice_of(tmp_path, "exit 0")
    missing = launch_of(9, "/no/such/program")
    engine.prepare(msgspec.structs.replace(launch, rest=(missing, *launch.rest)), None)
    engine.start_prepared()
    kinds = {n: one.kind for n, one in outcomes(engine, 5).items()}
    assert kinds.pop(9) is OutcomeKind.CANNOT_START
    assert set(kinds.values()) == {OutcomeKind.SUCCEEDED}


def test_what_is_withdrawn_from_a_slice_never_starts(engine: LocalEngine, tmp_path: Path, pipe: Path) -> None:
    prepared = engine.prepare(slice_of(tmp_path, f"read x < {pipe}"), None)
    engine.start_prepared()
    for each in prepared.rest[:2]:
        engine.withdraw(upcoming_of(each))
    assert {n: one.kind for n, one in outcomes(engine, 2).items()} == dict.fromkeys((2, 3), OutcomeKind.NEVER_STARTED)
    let_go(pipe)
    assert {n: one.kind for n, one in outcomes(engine, 2).items()} == dict.fromkeys((1, 4), OutcomeKind.SUCCEEDED)
    assert ran(tmp_path) == ["4"]


@pytest.mark.linux
def test_no_job_takes_its_turn_beside_a_process_that_was_left_behind(engine: LocalEngine, tmp_path: Path) -> None:
    engine.prepare(slice_of(tmp_path, "sleep 600 & exit 0"), None)
    engine.start_prepared()
    kinds = {n: one.kind for n, one in outcomes(engine, 4).items()}
    assert kinds.pop(1) is OutcomeKind.SUCCEEDED
    assert set(kinds.values()) == {OutcomeKind.NEVER_STARTED}
    engine.signal(Attempt(job_id=1, number=1, phase=Started(at=0.0)), signal.SIGKILL)


@pytest.mark.parametrize("stops_keeper", [False, True])
def test_a_slice_ends_with_its_daemon(folder: Path, tmp_path: Path, pipe: Path, *, stops_keeper: bool) -> None:
    with daemon(folder, "begin", slice_of(tmp_path, f"touch {tmp_path}/up; read x < {pipe}")) as first:
        wait_for((tmp_path / "up").exists, "the first program")
        keeper = first.attempts[0].keeper_pid
        if stops_keeper:  # it finds both: the end of the program, and that of its daemon
            os.kill(keeper, signal.SIGSTOP)
        first.kill()
        let_go(pipe)
        os.kill(keeper, signal.SIGCONT)
    waiting = [Attempt(job_id=n, number=1, phase=HandedOver(at=0.0)) for n in (2, 3, 4)]
    engine = LocalEngine(folder)
    engine.adopt([*first.attempts, *waiting])
    kinds = {n: one.kind for n, one in outcomes(engine, 4).items()}
    assert kinds.pop(1) is OutcomeKind.SUCCEEDED
    assert set(kinds.values()) == {OutcomeKind.NEVER_STARTED}
    assert ran(tmp_path) == []
    engine.close()


def test_the_next_daemon_finds_what_had_begun_in_a_slice(folder: Path, tmp_path: Path, pipe: Path) -> None:
    launch = launch_of(1, "true", rest=(launch_of(2, *waiting(tmp_path, "up", pipe, 5)), launch_of(3, "true")))
    with daemon(folder, "begin", launch) as first:
        wait_for((tmp_path / "up").exists, "the second program")
        first.kill()
    engine = LocalEngine(folder)
    engine.adopt([Attempt(job_id=n, number=1, phase=HandedOver(at=0.0)) for n in (2, 3)])
    assert outcomes(engine)[3].kind is OutcomeKind.NEVER_STARTED
    assert [(each.job_id, each.keeper_pid) for each in engine.site_changes()] == [(2, first.attempts[0].keeper_pid)]
    let_go(pipe)
    assert outcomes(engine)[2].status == 5
    engine.close()


def test_an_adopting_daemon_notices_a_killed_keeper(folder: Path, tmp_path: Path, pipe: Path) -> None:
    with daemon(folder, "begin", launch_of(1, *waiting(tmp_path, "up", pipe, 0))) as first:
        wait_for((tmp_path / "up").exists, "the program")
        first.kill()
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    assert engine.ended() == []
    os.kill(first.attempts[0].keeper_pid, signal.SIGKILL)
    assert outcomes(engine)[1].kind is OutcomeKind.LOST
    engine.close()
    let_go(pipe)


# The end of the keeper


def test_a_keeper_stays_while_a_job_runs_and_leaves_no_socket_behind(folder: Path, tmp_path: Path, pipe: Path) -> None:
    with daemon(folder, "begin", launch_of(1, *waiting(tmp_path, "up", pipe, 0)), launch_of(2, "true")) as first:
        wait_for((tmp_path / "up").exists, "the program")
        first.kill()
    keeper = first.attempts[0].keeper_pid
    journal = folder / "journal"
    wait_for(lambda: f"2.1 {keeper} 0 " in journal.read_text(), "the end of the second")
    assert not is_gone(keeper)
    assert sockets_in(folder) == [f"{keeper}.sock"]
    let_go(pipe)
    wait_until_gone(keeper, "the keeper")
    assert sockets_in(folder) == []
    assert f"1.1 {keeper} 0 " in journal.read_text()
    assert (folder / "keepers/log").read_text() == ""


def test_a_keeper_ends_when_its_engine_is_closed_and_not_before(folder: Path) -> None:
    engine = LocalEngine(folder)
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    assert started(engine, 2, "true").keeper_pid == keeper
    outcomes(engine)
    engine.close()
    wait_until_gone(keeper, "the keeper")
    assert sockets_in(folder) == []


def test_the_socket_of_a_killed_keeper_is_removed(folder: Path) -> None:
    engine = LocalEngine(folder)
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: engine.ended() == [] and sockets_in(folder) == [], "the end of its socket")
    engine.close()


def test_a_daemon_that_starts_removes_the_sockets_of_dead_keepers_and_no_other(
    folder: Path, tmp_path: Path, pipe: Path
) -> None:
    with daemon(folder, "begin", launch_of(1, *waiting(tmp_path, "up", pipe, 0))) as first:
        wait_for((tmp_path / "up").exists, "the program")
        first.kill()
    alive = f"{first.attempts[0].keeper_pid}.sock"
    with contextlib.chdir(folder / "keepers"), socket.socket(socket.AF_UNIX) as dead:
        dead.bind("999999999.sock")
    assert sockets_in(folder) == sorted([alive, "999999999.sock"])
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    assert sockets_in(folder) == [alive]
    let_go(pipe)
    assert outcomes(engine)[1].status == 0
    engine.close()


def test_no_signal_except_sigkill_ends_a_keeper(engine: LocalEngine, tmp_path: Path, pipe: Path) -> None:
    attempt = started(engine, 1, *waiting(tmp_path, "up", pipe, 5))
    wait_for((tmp_path / "up").exists, "the program")
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(attempt.keeper_pid, signum)
    let_go(pipe)
    assert outcomes(engine)[1].status == 5
    assert started(engine, 2, "true").keeper_pid == attempt.keeper_pid
    assert outcomes(engine)[2].status == 0


def test_a_folder_with_a_long_path_works(tmp_path: Path, pipe: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    with daemon(folder, "begin", launch_of(1, *waiting(tmp_path, "up", pipe, 6))) as first:
        wait_for((tmp_path / "up").exists, "the program")
        first.kill()
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    let_go(pipe)
    assert outcomes(engine)[1].status == 6
    engine.close()


def test_a_finished_job_leaves_no_zombie_process(engine: LocalEngine) -> None:
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    assert Path(f"/proc/{keeper}/task/{keeper}/children").read_text() == ""
