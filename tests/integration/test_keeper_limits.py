"""The keeper at its limits: full disk, no descriptors, a daemon that does not read, leases, many jobs."""

import contextlib
import fcntl
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.local import attempt_processes, keeper_connection
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import OutcomeKind
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.ports import Ended
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

MANY = 1_000


@contextlib.contextmanager
def limited(pid: int, kind: int, most: int) -> Iterator[None]:
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, hard))
    yield
    resource.prlimit(pid, kind, (soft, hard))


@contextlib.contextmanager
def full_disk(pid: int, size: int = 0) -> Iterator[None]:
    """Limit the files of this process to `size` bytes: like a full disk, with another errno."""
    with limited(pid, resource.RLIMIT_FSIZE, size):
        yield


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: attempt_processes.is_stopped(pid), "its stop")


# The journal cannot be written


def test_no_attempt_starts_while_the_journal_cannot_be_written(
    engine: LocalEngine, folder: Path, tmp_path: Path
) -> None:
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    with full_disk(keeper):
        for number in (2, 3):
            engine.prepare(launch_of(number, "touch", str(tmp_path / "ran")), None)
        engine.start_prepared()
        ended = outcomes(engine, 2)
        assert {one.kind for one in ended.values()} == {OutcomeKind.NEVER_STARTED}
        assert {one.reason for one in ended.values()} == {"the keeper's journal cannot be written: File too large"}
    assert not (tmp_path / "ran").exists()
    assert outcome_of(engine, launch_of(2, "sh", "-c", "exit 5")).status == 5
    words = [line.split()[2] for line in (folder / "journal").read_text().splitlines() if line.startswith("2.1 ")]
    assert words == ["unbegun-journal-efbig", "began", "5"]


def test_an_attempt_that_runs_after_all_is_not_reported_as_never_started_later(
    engine: LocalEngine, folder: Path, tmp_path: Path, pipe: Path
) -> None:
    """The keeper could not record that the attempt never started; when it can, the same attempt has been sent again."""
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    with full_disk(keeper):
        assert outcome_of(engine, launch_of(2, "true")).kind is OutcomeKind.NEVER_STARTED
        os.kill(keeper, signal.SIGSTOP)
    started(engine, 2, "sh", "-c", f"touch {tmp_path}/up; read x < {pipe}; exit 7")
    os.kill(keeper, signal.SIGCONT)
    wait_for((tmp_path / "up").exists, "the program")
    words = [line.split()[2] for line in (folder / "journal").read_text().splitlines() if line.startswith("2.1 ")]
    assert words[-1] == "began"
    let_go(pipe)
    assert outcomes(engine)[2].status == 7


@pytest.mark.parametrize("fits", [0, 5])
def test_an_exit_status_that_cannot_be_written_is_reported_and_written_later(
    folder: Path, tmp_path: Path, pipe: Path, fits: int
) -> None:
    script = f"touch {tmp_path}/up; read x < {pipe}; exit 3"
    with daemon(folder, "begin", launch_of(1, "sh", "-c", script)) as first:
        wait_for((tmp_path / "up").exists, "the program")
        keeper = first.attempts[0].keeper_pid
        first.kill()
    with full_disk(keeper, (folder / "journal").stat().st_size + fits):
        before = LocalEngine(folder)
        before.adopt(first.attempts)
        let_go(pipe)
        assert outcomes(before)[1].status == 3
        before.close()
        assert not is_gone(keeper)
    wait_until_gone(keeper, "the keeper, which had something to write")
    after = LocalEngine(folder)
    after.adopt(first.attempts)
    assert outcomes(after)[1].status == 3
    after.close()


def test_an_end_that_cannot_be_written_reaches_a_daemon_that_connects_later(
    folder: Path, tmp_path: Path, pipe: Path
) -> None:
    """Another job keeps the keeper alive, so that the daemon does not read the journal again."""
    script = f"touch {tmp_path}/up; read x < {pipe}; exit 3"
    with daemon(folder, "begin", launch_of(1, "sh", "-c", script), launch_of(2, "sleep", "600")) as first:
        wait_for((tmp_path / "up").exists, "the program")
        keeper = first.attempts[0].keeper_pid
        wait_for(lambda: len(children_of(keeper)) == 2, "both programs")
        other = children_of(keeper)[1]  # the kernel lists them in the order of their start
        first.kill()
    with full_disk(keeper, (folder / "journal").stat().st_size):
        let_go(pipe)
        wait_for(lambda: children_of(keeper) == [other], "the end of the program")
        after = LocalEngine(folder)
        after.adopt(first.attempts)
        assert outcomes(after)[1].status == 3
    os.kill(other, signal.SIGKILL)
    assert outcomes(after)[2].status == 137
    after.close()


# What keeps programs from starting


def limits(engine: LocalEngine, count: int) -> list[ResourceLimit | None]:
    """Wait for the next ends, and return the limits that kept the attempts from starting."""
    found: list[Ended] = []

    def have_come() -> bool:
        found.extend(engine.ended())
        return len(found) >= count

    wait_for(have_come, "the ends")
    return [each.limit for each in found]


def test_a_keeper_that_may_start_no_program_says_so_and_leaves_no_log(engine: LocalEngine, folder: Path) -> None:
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    with limited(keeper, resource.RLIMIT_AS, 1 << 20):
        started(engine, 2, "true")
        (limit,) = limits(engine, 1)
        assert limit is not None
        assert limit.text == "no program can be started: Cannot allocate memory"
        assert "free some memory" in limit.remedy
        assert not limit.is_own
    assert [path.name for path in (folder / "logs").iterdir()] == ["1.1.log"]
    assert outcome_of(engine, launch_of(2, "true")).status == 0


def test_a_keeper_that_ends_at_once_is_a_limit_and_not_a_failure(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(keeper_connection, "python_command", lambda *_, **__: (sys.executable, "-I", "-S", "-c", ""))
        started(engine, 1, "true")
        (limit,) = limits(engine, 1)
    assert limit is not None
    assert "keeper of jobs" in limit.text
    assert outcome_of(engine, launch_of(1, "true")).status == 0


def test_jobs_have_the_limit_on_open_files_that_the_engine_was_given(folder: Path) -> None:
    engine = LocalEngine(folder, open_files=100)
    assert outcome_of(engine, launch_of(1, "sh", "-c", "ulimit -Sn")).status == 0
    assert log_of(folder, 1) == "100\n"
    engine.close()


# A daemon that does not read, and a keeper that does not


def test_many_ends_while_the_daemon_is_busy_are_all_reported(engine: LocalEngine, folder: Path) -> None:
    for number in range(MANY):
        engine.prepare(launch_of(number, "true"), None)
    engine.start_prepared()
    wait_for(lambda: (folder / "journal").read_text().count(" 0 ") == MANY, "the ends of all")
    assert {one.status for one in outcomes(engine, MANY).values()} == {0}


def test_many_ends_before_an_adopting_daemon_reads_are_all_reported_and_no_other(folder: Path) -> None:
    with daemon(folder, "begin", *(launch_of(n, "sleep", "600") for n in range(MANY))) as first:
        first.kill()
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    keeper = first.attempts[0].keeper_pid
    wait_for(lambda: len(children_of(keeper)) == MANY, "all of them")
    assert engine.ended() == []
    *others, last = children_of(keeper)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: (folder / "journal").read_text().count(" 137 ") == len(others), "the ends of all but one")
    assert {one.status for one in outcomes(engine, len(others)).values()} == {137}
    assert engine.ended() == []
    os.kill(last, signal.SIGKILL)
    assert [one.status for one in outcomes(engine).values()] == [137]
    engine.close()


def test_a_stopped_keeper_is_sent_nothing_more_and_starts_what_it_received_when_resumed(
    engine: LocalEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_connection, "_SEND_TIMEOUT_MS", 100)
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    count = 300
    for number in range(count):
        engine.prepare(launch_of(number, "true", environment={"LONG": "x" * 10_000}), None)
    stop(keeper)
    engine.start_prepared()
    never_started = [one.job_id for one in engine.ended()]
    assert 0 < len(never_started) < count
    assert outcome_of(engine, launch_of(count, "true")).status == 0  # by another keeper
    assert [f"the keeper {keeper} is stopped" in line for line in engine.problems()] == [True]
    os.kill(keeper, signal.SIGCONT)
    ended = outcomes(engine, count - len(never_started))
    assert {one.status for one in ended.values()} == {0}
    assert sorted([*ended, *never_started]) == list(range(count))
    assert engine.problems() == []
    assert not any((folder / f"logs/{number}.1.log").exists() for number in never_started)


def test_new_jobs_start_with_another_keeper_while_one_is_stopped_and_wait_when_many_are(
    engine: LocalEngine, pipe: Path, tmp_path: Path
) -> None:
    attempt = started(engine, 1, "sh", "-c", f"touch {tmp_path}/up; read x < {pipe}; exit 3")
    wait_for((tmp_path / "up").exists, "the program")
    stopped = [attempt.keeper_pid]
    stop(stopped[0])
    try:
        while len(stopped) < keeper_connection._MOST_SILENT + 1:
            keeper = started(engine, 2, "true").keeper_pid
            assert keeper not in stopped
            assert outcomes(engine)[2].status == 0
            engine.start_prepared()  # the end of a step, in which the keeper was heard
            stop(keeper)
            stopped.append(keeper)
        with pytest.raises(EnvironmentFault, match="do not answer") as raised:
            engine.prepare(launch_of(2, "true"), None)
        assert f"kill -CONT {' '.join(map(str, stopped[:-1]))}" in str(raised.value.hint)
        let_go(pipe)
        assert engine.ended() == []
    finally:
        for keeper in stopped:
            os.kill(keeper, signal.SIGCONT)
    assert outcomes(engine)[1].status == 3
    assert outcome_of(engine, launch_of(2, "true")).status == 0


def test_daemons_that_are_killed_while_the_keeper_is_stopped_leave_its_jobs_running(
    folder: Path, pipe: Path, tmp_path: Path
) -> None:
    """Each leaves a connection that the keeper has not accepted, until the kernel refuses further ones."""
    script = f"touch {tmp_path}/up; read x < {pipe}; exit 3"
    with daemon(folder, "begin", launch_of(1, "sh", "-c", script)) as first:
        wait_for((tmp_path / "up").exists, "the program")
        first.kill()
    keeper = first.attempts[0].keeper_pid
    stop(keeper)
    try:
        for _ in range(12):
            with daemon(folder, "wait", adopted=first.attempts) as later:
                later.kill()
        engine = LocalEngine(folder)
        engine.adopt(first.attempts)
        assert engine.ended() == []
        assert [f"`kill -CONT {keeper}`" in line for line in engine.problems()] == [True]
        assert outcome_of(engine, launch_of(2, "true")).status == 0
        let_go(pipe)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert outcomes(engine)[1].status == 3
    assert engine.problems() == []
    engine.close()


def test_an_unreachable_keeper_that_is_killed_counts_as_gone(folder: Path, pipe: Path, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/up; read x < {pipe}"
    with daemon(folder, "begin", launch_of(1, "sh", "-c", script)) as first:
        wait_for((tmp_path / "up").exists, "the program")
        first.kill()
    keeper = first.attempts[0].keeper_pid
    stop(keeper)
    for _ in range(12):
        with daemon(folder, "wait", adopted=first.attempts) as later:
            later.kill()
    engine = LocalEngine(folder)
    engine.adopt(first.attempts)
    assert engine.ended() == []
    os.kill(keeper, signal.SIGKILL)
    wait_until_gone(keeper, "the keeper")
    assert outcomes(engine)[1].kind is OutcomeKind.LOST
    engine.close()
    let_go(pipe)


# Leases


def lease_in(tmp_path: Path, name: str) -> int:
    descriptor = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def is_held(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def files_of(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}


def test_a_lease_is_held_only_by_its_own_job_until_that_ends(engine: LocalEngine, tmp_path: Path, pipe: Path) -> None:
    leases = [tmp_path / f"lease{n}" for n in range(3)]
    descriptors = [lease_in(tmp_path, lease.name) for lease in leases]
    for number, descriptor in enumerate([*descriptors, None]):
        script = f"touch {tmp_path}/up{number}; read x < {pipe}"
        keeper = engine.prepare(launch_of(number, "sh", "-c", script), descriptor).keeper_pid
    engine.start_prepared()
    for descriptor in descriptors:
        os.close(descriptor)
    wait_for(lambda: all((tmp_path / f"up{number}").exists() for number in range(4)), "the programs")
    programs = {pid: {path.name for path in leases if str(path) in files_of(pid)} for pid in children_of(keeper)}
    assert sorted(map(sorted, programs.values())) == [[], ["lease0"], ["lease1"], ["lease2"]]
    assert all(map(is_held, leases))
    for pid, held in programs.items():
        os.kill(pid, signal.SIGKILL)
        outcomes(engine)  # reported after the lease is free
        assert not any(is_held(tmp_path / name) for name in held)
    assert not any(str(path) in files_of(keeper) for path in leases)


# Forks twice, leaves the session and closes everything; `forget` also clears the environment. Writes its pid to a file.
DAEMONISE = """
import os, signal, sys
if len(sys.argv) == 3:
    os.fork() and os._exit(0)
    os.setsid()
    os.fork() and os._exit(0)
    os.closerange(0, 4096)
    environment = dict(os.environ)
    if sys.argv[2] == "forget":
        environment = {}
        os.open(environment.get("LOG", os.devnull), os.O_RDWR)
    os.execve(sys.executable, [sys.executable, "-c", sys.orig_argv[2], *sys.argv[1:], "again"], environment)
os.chdir("/")
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""


def daemonised(engine: LocalEngine, tmp_path: Path, job_id: int, how: str = "keep") -> tuple[int, Path]:
    """Run a job that leaves a daemon behind. Return the daemon's pid and the job's lease."""
    lease, told = lease_in(tmp_path, f"lease{job_id}"), tmp_path / f"daemon{job_id}"
    script = f"{sys.executable} -c '{DAEMONISE}' {told} {how}; while ! test -e {told}; do sleep 0.01; done; exit 3"
    engine.prepare(launch_of(job_id, "sh", "-c", script), lease)
    engine.start_prepared()
    os.close(lease)
    assert outcomes(engine)[job_id].status == 3
    return int(told.read_text()), tmp_path / f"lease{job_id}"


def test_a_process_that_daemonised_and_closed_everything_keeps_its_jobs_lease(
    engine: LocalEngine, tmp_path: Path
) -> None:
    daemon_pid, lease = daemonised(engine, tmp_path, 1)
    assert outcome_of(engine, launch_of(2, "true")).status == 0
    assert not any("lease1" in path for path in files_of(daemon_pid))
    assert is_held(lease)
    os.kill(daemon_pid, signal.SIGKILL)
    wait_for(lambda: not is_held(lease), "the end of the lease")
    assert not any("lease1" in path for path in files_of(started(engine, 3, "true").keeper_pid))
    outcomes(engine)


def test_each_daemonised_process_keeps_the_lease_of_its_own_job(engine: LocalEngine, tmp_path: Path) -> None:
    (first, first_lease), (second, second_lease) = (daemonised(engine, tmp_path, number) for number in (1, 2))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not is_held(first_lease), "the end of its lease")
    assert is_held(second_lease)
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: not is_held(second_lease), "the end of its lease")


def test_a_child_of_a_daemonised_process_keeps_the_lease_when_that_ends(engine: LocalEngine, tmp_path: Path) -> None:
    lease, pids = lease_in(tmp_path, "lease"), tmp_path / "pids"
    inner = f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; exec sleep 600"
    closing = "exec 0<&- 1>&- 2>&- 8>&-"
    script = f"setsid sh -c '{closing}; {inner}' & while ! test -e {pids}; do sleep 0.01; done"
    engine.prepare(launch_of(1, "sh", "-c", script), lease)
    engine.start_prepared()
    os.close(lease)
    outcomes(engine)
    parent, child = map(int, pids.read_text().split())
    os.kill(parent, signal.SIGKILL)
    wait_until_gone(parent, "the parent")
    assert outcome_of(engine, launch_of(2, "true")).status == 0
    assert is_held(tmp_path / "lease")
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: not is_held(tmp_path / "lease"), "the end of the lease")


def test_a_keeper_stays_for_a_process_that_was_left_behind_and_keeps_its_lease(folder: Path, tmp_path: Path) -> None:
    engine = LocalEngine(folder)
    keeper = started(engine, 9, "true").keeper_pid
    outcomes(engine)
    daemon_pid, lease = daemonised(engine, tmp_path, 1)
    engine.close()
    later = LocalEngine(folder)
    assert outcome_of(later, launch_of(2, "true")).status == 0
    later.close()
    assert is_held(lease)
    os.kill(daemon_pid, signal.SIGKILL)
    wait_until_gone(keeper, "the keeper")
    assert not is_held(lease)


def test_a_process_that_also_cleared_its_environment_is_not_found(engine: LocalEngine, tmp_path: Path) -> None:
    """Nothing connects it with its job any more: a tmux server that a job starts is such a process."""
    daemon_pid, lease = daemonised(engine, tmp_path, 1, "forget")
    assert not is_held(lease)
    os.kill(daemon_pid, signal.SIGKILL)


def test_the_lease_of_an_attempt_that_does_not_start_is_released_at_once(engine: LocalEngine, tmp_path: Path) -> None:
    keeper = started(engine, 1, "true").keeper_pid
    outcomes(engine)
    for number, is_full in ((2, False), (3, True)):
        descriptor = lease_in(tmp_path, f"lease{number}")
        with full_disk(keeper) if is_full else contextlib.nullcontext():
            engine.prepare(launch_of(number, "no-such-thing"), descriptor)
            engine.start_prepared()
            os.close(descriptor)
            outcomes(engine)
        assert not is_held(tmp_path / f"lease{number}")


def test_many_attempts_start_at_once_each_with_its_lease_and_a_long_environment(
    engine: LocalEngine, folder: Path, tmp_path: Path
) -> None:
    """Every third attempt has no lease, so that order alone cannot match leases to attempts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * MANY), hard), hard))
    script = "readlink /proc/self/fd/8; echo ${#LONG}"
    descriptors: dict[int, int] = {}
    for number in range(MANY):
        if number % 3:
            descriptors[number] = lease_in(tmp_path, f"lease{number}")
        launch = launch_of(number, "sh", "-c", script, environment={"LONG": "x" * 100_000})
        engine.prepare(launch, descriptors.get(number))
    engine.start_prepared()
    for descriptor in descriptors.values():
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {one.status for one in outcomes(engine, MANY).values()} == {0}
    leases = [f"{tmp_path}/lease{number}\n" if number % 3 else "" for number in range(MANY)]
    assert [log_of(folder, number) for number in range(MANY)] == [f"{lease}100000\n" for lease in leases]
    assert not any(is_held(tmp_path / f"lease{number}") for number in descriptors)


def test_a_keeper_out_of_descriptors_runs_no_job_without_its_lease(
    engine: LocalEngine, folder: Path, tmp_path: Path
) -> None:
    keeper = started(engine, 0, "true").keeper_pid
    outcomes(engine)
    count = 150
    descriptors = {number: lease_in(tmp_path, f"lease{number}") for number in range(1, count + 1)}
    with limited(keeper, resource.RLIMIT_NOFILE, 60):
        for number, descriptor in descriptors.items():
            engine.prepare(launch_of(number, "readlink", "/proc/self/fd/8"), descriptor)
        engine.start_prepared()
        ended = outcomes(engine, count)
    ran = [number for number, one in ended.items() if one.kind is OutcomeKind.SUCCEEDED]
    assert 0 < len(ran) < count
    assert {one.kind for number, one in ended.items() if number not in ran} == {OutcomeKind.NEVER_STARTED}
    assert [log_of(folder, number) for number in ran] == [f"{tmp_path}/lease{number}\n" for number in ran]
    for descriptor in descriptors.values():
        os.close(descriptor)
    assert not any(is_held(tmp_path / f"lease{number}") for number in descriptors)
