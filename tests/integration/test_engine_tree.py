"""A signal reaches all processes of an attempt, even in other sessions, and no other process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local import attempt_processes as system_processes
from gpuyard.engines.local.attempt_processes import TrackedProcess
from gpuyard.engines.local.engine import LocalEngine
from tests.integration.engine_fixture import is_gone, outcomes, started, wait_for, wait_until_gone

# Prints its pid once it is in the state that the test needs, then waits for the signal.
WAIT = "open(sys.argv[1], 'w').write(str(os.getpid())); os.rename(sys.argv[1], sys.argv[1] + '.pid'); signal.pause()"
HIDE = {
    "stays": "",
    "leaves the session": "os.fork() and os._exit(os.waitstatus_to_exitcode(os.wait()[1]) and 1); os.setsid()",
    "is an orphan": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)",
    "is an orphan that forgot its environment": """
if len(sys.argv) == 2:
    os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"], {})
""",
    "is a child that forgot everything": """
if len(sys.argv) == 2:
    if os.fork():
        os.wait()
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1); os.dup2(nowhere, 2)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"], {})
""",
}


def hiding(tmp_path: Path, name: str, how: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, signal\n{HIDE[how]}\n{WAIT}", str(tmp_path / name)]


def pid_in(tmp_path: Path, name: str) -> int:
    path = tmp_path / f"{name}.pid"
    wait_for(path.exists, f"the process {name}")
    return int(path.read_text())


@pytest.mark.parametrize("how", HIDE)
def test_a_signal_reaches_a_process_that(engine: LocalEngine, tmp_path: Path, how: str) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", how))
    pid = pid_in(tmp_path, "one")
    assert engine.signal(attempt, signal.SIGTERM) >= 1
    wait_until_gone(pid, "it")
    wait_for(lambda: engine.signal(attempt, 0) == 0, "the end of all")


def test_one_reading_of_the_process_table_serves_all_attempts(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [started(engine, job_id, "sleep", "600") for job_id in range(1, 6)]
    wait_for(lambda: all(map(engine.pid_of, attempts)), "the programs")
    read_table, readings = system_processes.all_processes, []

    def count_readings() -> Iterator[TrackedProcess]:
        readings.append(1)
        return read_table()

    monkeypatch.setattr(process_tree, "all_processes", count_readings)
    assert engine.signal_each(attempts, signal.SIGTERM) == [None] * 5, "the caller does not wait for the table"
    wait_for(lambda: None not in engine.signal_each(attempts, 0), "the thread")
    assert engine.signal_each(attempts, signal.SIGTERM) == [1] * 5
    assert len(outcomes(engine, 5)) == 5
    assert len(readings) == 2


def test_an_attempt_that_was_cut_off_has_ended_when_its_processes_are_killed(
    engine: LocalEngine, tmp_path: Path
) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "leaves the session"))
    pid = pid_in(tmp_path, "one")
    program = engine.pid_of(attempt)
    assert program is not None
    os.kill(program, signal.SIGKILL)
    wait_for(lambda: engine.ended(lambda *_: True), "its end")
    wait_until_gone(pid, "what it left")


@pytest.mark.parametrize("how", ["stays", "leaves the session", "is an orphan", "is a child that forgot everything"])
def test_without_proc_a_signal_reaches_a_process_that(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(system_processes, "_IS_LINUX", False)
    attempt = started(engine, 1, *hiding(tmp_path, "one", how))
    pid = pid_in(tmp_path, "one")
    assert engine.signal(attempt, signal.SIGKILL) >= 1
    wait_until_gone(pid, "it")
    wait_for(lambda: engine.signal(attempt, 0) == 0, "the end of all")


def test_a_signal_reaches_a_whole_tree_and_the_keeper_reports_its_end(engine: LocalEngine, tmp_path: Path) -> None:
    script = "\n".join(f"{' '.join(map(_quoted, hiding(tmp_path, str(n), how)))} &" for n, how in enumerate(HIDE))
    attempt = started(engine, 1, "sh", "-c", f"{script}\nwait")
    pids = [pid_in(tmp_path, str(n)) for n in range(len(HIDE))]
    assert engine.signal(attempt, signal.SIGKILL) >= len(pids)
    for pid in pids:
        wait_until_gone(pid, "it")
    assert outcomes(engine)[1].status == 137


def _quoted(argument: str) -> str:
    return "'" + argument.replace("'", "'\\''") + "'"


@pytest.mark.parametrize("how", HIDE)
def test_after_the_keeper_was_killed_a_signal_reaches_a_process_that(
    engine: LocalEngine, tmp_path: Path, how: str
) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", how))
    pid = pid_in(tmp_path, "one")
    os.kill(attempt.keeper_pid, signal.SIGKILL)
    outcomes(engine)
    assert engine.signal(attempt, signal.SIGKILL) >= 1
    wait_until_gone(pid, "it")


def test_a_signal_spares_other_jobs_and_readers_of_the_log(engine: LocalEngine, tmp_path: Path) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    other = started(engine, 2, *hiding(tmp_path, "other", "is an orphan"))
    mine, theirs = pid_in(tmp_path, "one"), pid_in(tmp_path, "other")
    reads = "import sys; file = open(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", reads, str(attempt.log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"up\n"
        assert engine.signal(attempt, signal.SIGKILL) == 1
        wait_until_gone(mine, "it")
        assert reader.poll() is None
        reader.communicate()
        assert reader.returncode == 0
    assert not is_gone(theirs)
    assert engine.signal(other, signal.SIGKILL) == 1
    wait_until_gone(theirs, "it")


@pytest.mark.parametrize("change", [{"job_id": 9}, {"number": 2}])
def test_a_signal_spares_another_attempt_of_the_same_keeper(
    engine: LocalEngine, tmp_path: Path, change: dict[str, int]
) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    pid = pid_in(tmp_path, "one")
    other = msgspec.structs.replace(attempt, log=None, **change)
    assert engine.signal(other, signal.SIGKILL) == 0
    assert engine.pid_of(other) is None
    assert not is_gone(pid)
    assert engine.signal(attempt, signal.SIGKILL) == 1


def test_a_signal_spares_the_same_job_of_another_queue(engine: LocalEngine, tmp_path: Path) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    pid = pid_in(tmp_path, "one")
    other = LocalEngine(tmp_path / "other")
    assert other.signal(msgspec.structs.replace(attempt, log=None), signal.SIGKILL) == 0
    assert not is_gone(pid)
    other.close()
    assert engine.signal(attempt, signal.SIGKILL) == 1


def test_the_programs_own_process_is_known_while_it_runs(engine: LocalEngine, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/main; {' '.join(map(_quoted, hiding(tmp_path, 'one', 'leaves the session')))}"
    attempt = started(engine, 1, "sh", "-c", f"{script}; true")
    child = pid_in(tmp_path, "one")
    main = int((tmp_path / "main").read_text())
    assert main != child
    assert engine.pid_of(attempt) == main
    assert engine.signal(attempt, signal.SIGKILL) >= 2
    outcomes(engine)
    assert engine.pid_of(attempt) is None


def test_a_daemon_that_a_job_started_does_not_kill_itself_with_the_job(tmp_path: Path) -> None:
    """It has the job's environment; its keeper and the keeper's other jobs continue too."""
    script = f"""
import select, signal
from pathlib import Path
from gpuyard.model.job import Attempt, Started
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.local.attempt_processes import TrackedProcess
from gpuyard.ports import Launch
engine = LocalEngine(Path({str(tmp_path / "queue")!r}))
engine.prepare(Launch(job_id=2, attempt=1, command=("sleep", "0.01"), cwd="/", environment={{}}), None)
engine.start_prepared()
job = Attempt(job_id=1, number=1, phase=Started(at=0.0, keeper_pid=1), boot_id=None)
print(engine.signal(job, signal.SIGKILL))
while not (ended := engine.ended()):
    select.select([engine.fileno()], [], [])
print(ended[0].outcome.kind)
"""
    marks = {"GPUYARD_JOB_ID": "1", "GPUYARD_ATTEMPT": "1", "GPUYARD_QUEUE": str(tmp_path / "queue")}
    answer = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **marks}, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "0\nsucceeded\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_a_signal_spares_another_user_s_process(engine: LocalEngine, tmp_path: Path) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    pid_in(tmp_path, "one")
    marks = {"GPUYARD_JOB_ID": "1", "GPUYARD_ATTEMPT": "1", "GPUYARD_QUEUE": str(tmp_path / "queue")}
    with subprocess.Popen(["cat"], user=65534, env=marks, stdin=subprocess.PIPE) as other:
        assert engine.signal(attempt, signal.SIGKILL) == 1
        other.communicate()
    assert other.returncode == 0


def test_a_chain_of_forks_does_not_outrun_the_kill(engine: LocalEngine, tmp_path: Path) -> None:
    """Each process leaves the session, forks the next and ends; some thousands, in case the kill misses them."""
    chain = """
import os, sys
nowhere = os.open(os.devnull, os.O_RDWR)
open(sys.argv[1], "w").close()
for number in range(4_000):
    if os.fork():
        os._exit(0)
    os.setsid()
    for _ in range(50_000):
        pass
open(sys.argv[2], "w").close()
"""
    attempt = started(engine, 1, sys.executable, "-c", chain, str(tmp_path / "up"), str(tmp_path / "escaped"))
    wait_for((tmp_path / "up").exists, "the chain")
    wait_for(lambda: engine.signal(attempt, signal.SIGKILL) == 0, "the end of the chain")
    assert not (tmp_path / "escaped").exists()


def test_a_signal_that_can_be_handled_is_sent_once(engine: LocalEngine, tmp_path: Path) -> None:
    script = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))\n"
    wait = WAIT.replace("signal.pause()", "\nwhile True: time.sleep(0.05)")
    attempt = started(engine, 1, sys.executable, "-c", script + wait, str(tmp_path / "one"))
    pid_in(tmp_path, "one")
    log = Path(str(attempt.log))
    assert engine.signal(attempt, signal.SIGTERM) == 1
    wait_for(lambda: log.read_text() == "heard\n", "the answer")
    assert engine.signal(attempt, signal.SIGKILL) == 1
    assert outcomes(engine)[1].status == 137
    assert log.read_text().startswith("heard\n")
    assert log.read_text().count("heard") == 1
