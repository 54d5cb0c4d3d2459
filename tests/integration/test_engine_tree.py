"""What outlives a daemon is found again: its attempts by the next one, their processes by a signal, and nobody else."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gpuyard.core.jobs import Attempt, OutcomeKind
from gpuyard.engines import tree
from gpuyard.engines.local import LocalEngine
from gpuyard.ports import Launch, Prepared
from tests.integration.test_engine import SHELLS, attempt_of, is_gone, launch_of, let_go, outcomes, wait_for

# Tells its pid once it is what the test needs, then waits for the signal.
WAIT = "open(sys.argv[1], 'w').write(str(os.getpid())); os.rename(sys.argv[1], sys.argv[1] + '.pid'); signal.pause()"
HIDE = {
    "stays": "",
    "leaves the session": "os.setsid()",
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


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(tmp_path / "queue")
    yield engine
    engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """What a program can wait at until the test lets it go on."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def started(engine: LocalEngine, job_id: int, *command: str) -> Attempt:
    prepared = engine.prepare(launch_of(job_id, *command), None)
    engine.begin()
    return attempt_of(prepared)


def hiding(tmp_path: Path, name: str, how: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, signal\n{HIDE[how]}\n{WAIT}", str(tmp_path / name)]


def pid_in(tmp_path: Path, name: str) -> int:
    path = tmp_path / f"{name}.pid"
    wait_for(path.exists, f"the process {name}")
    return int(path.read_text())


@pytest.mark.parametrize("how", HIDE)
def test_it_reaches_one_that(engine: LocalEngine, tmp_path: Path, how: str) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", how))
    pid = pid_in(tmp_path, "one")
    assert engine.signal(attempt, signal.SIGTERM) >= 1
    wait_for(lambda: is_gone(pid), "its end")
    assert engine.signal(attempt, signal.SIGKILL) == 0


@pytest.mark.parametrize("how", ["stays", "leaves the session", "is an orphan", "is a child that forgot everything"])
def test_where_there_is_no_proc_it_reaches_one_that(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(tree, "_IS_LINUX", False)
    attempt = started(engine, 1, *hiding(tmp_path, "one", how))
    pid = pid_in(tmp_path, "one")
    assert engine.signal(attempt, signal.SIGKILL) >= 1
    wait_for(lambda: is_gone(pid), "its end")
    assert engine.signal(attempt, signal.SIGKILL) == 0


def test_it_reaches_a_whole_tree_and_the_supervisor_tells_of_it(engine: LocalEngine, tmp_path: Path) -> None:
    script = "\n".join(f"{' '.join(map(_quoted, hiding(tmp_path, str(n), how)))} &" for n, how in enumerate(HIDE))
    attempt = started(engine, 1, "sh", "-c", f"{script}\nwait")
    pids = [pid_in(tmp_path, str(n)) for n in range(len(HIDE))]
    assert engine.signal(attempt, signal.SIGKILL) >= len(pids)
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid), "its end")  # type: ignore[misc]
    assert outcomes(engine)[1].status == 137


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def test_those_that_a_dead_supervisor_left_are_found(engine: LocalEngine, tmp_path: Path) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    pid = pid_in(tmp_path, "one")
    os.kill(attempt.pid, signal.SIGKILL)
    outcomes(engine)
    assert engine.signal(attempt, signal.SIGKILL) == 1
    wait_for(lambda: is_gone(pid), "its end")


def test_other_jobs_and_whoever_reads_the_log_are_left_alone(engine: LocalEngine, tmp_path: Path) -> None:
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
        wait_for(lambda: is_gone(mine), "its end")
        assert reader.poll() is None
        reader.communicate()
        assert reader.returncode == 0
    assert not is_gone(theirs)
    assert engine.signal(other, signal.SIGKILL) == 1
    wait_for(lambda: is_gone(theirs), "its end")


@pytest.mark.parametrize("change", [{"pid_started": 1.0}, {"boot_id": "another"}])
def test_a_session_is_not_believed_where_its_leader_is_another(
    engine: LocalEngine, tmp_path: Path, change: dict[str, object]
) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    pid = pid_in(tmp_path, "one")
    stranger = msgspec.structs.replace(attempt, job_id=9, log=None, **change)
    assert engine.signal(stranger, signal.SIGKILL) == 0
    assert not is_gone(pid)
    assert engine.signal(attempt, signal.SIGKILL) == 1


def test_a_daemon_that_a_job_started_does_not_kill_itself_with_the_job(tmp_path: Path) -> None:
    """It carries the job's environment, and so do its own supervisors until they begin."""
    script = f"""
import signal
from pathlib import Path
from gpuyard.core.jobs import Attempt
from gpuyard.engines.local import LocalEngine
from gpuyard.ports import Launch
engine = LocalEngine(Path({str(tmp_path / "queue")!r}))
job = Attempt(job_id=1, number=1, pid=1, pid_started=1.0, boot_id=None, started_at=0.0)
print(engine.signal(job, signal.SIGKILL))
"""
    marks = {"GPUYARD_JOB_ID": "1", "GPUYARD_ATTEMPT": "1", "GPUYARD_QUEUE": str(tmp_path / "queue")}
    answer = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **marks}, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "0\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_users_process_is_left_alone(engine: LocalEngine, tmp_path: Path) -> None:
    attempt = started(engine, 1, *hiding(tmp_path, "one", "stays"))
    pid_in(tmp_path, "one")
    marks = {"GPUYARD_JOB_ID": "1", "GPUYARD_ATTEMPT": "1", "GPUYARD_QUEUE": str(tmp_path / "queue")}
    with subprocess.Popen(["cat"], user=65534, env=marks, stdin=subprocess.PIPE) as other:
        assert engine.signal(attempt, signal.SIGKILL) == 1
        other.communicate()
    assert other.returncode == 0


def test_a_chain_of_forks_does_not_outrun_the_kill(engine: LocalEngine, tmp_path: Path) -> None:
    """Each process leaves the session, forks the next and ends; some thousands of them, in case it is not caught."""
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


def test_a_signal_that_can_be_answered_is_sent_once(engine: LocalEngine, tmp_path: Path) -> None:
    script = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))\n"
    wait = WAIT.replace("signal.pause()", "\nwhile True: signal.pause()")
    attempt = started(engine, 1, sys.executable, "-c", script + wait, str(tmp_path / "one"))
    pid_in(tmp_path, "one")
    log = Path(str(attempt.log))
    assert engine.signal(attempt, signal.SIGTERM) == 1
    wait_for(lambda: log.read_text() == "heard\n", "the answer")
    assert engine.signal(attempt, signal.SIGKILL) == 1
    assert outcomes(engine)[1].status == 137
    assert log.read_text().startswith("heard\n")
    assert log.read_text().count("heard") == 1


# Who survives whom

DAEMON = """
import sys, time
from pathlib import Path
import msgspec
from gpuyard.engines.local import LocalEngine
from gpuyard.ports import Launch
engine = LocalEngine(Path(sys.argv[1]))
prepared = [engine.prepare(msgspec.json.decode(text, type=Launch), None) for text in sys.argv[3:]]
if sys.argv[2] == "begin":
    engine.begin()
print(msgspec.json.encode(prepared).decode(), flush=True)
time.sleep(600)
"""


@contextmanager
def daemon(folder: Path, word: str, *launches: Launch) -> Iterator[tuple[int, list[Attempt]]]:
    """Another process with an engine, and what it prepared; killed in the end, if it was not before."""
    texts = [msgspec.json.encode(launch).decode() for launch in launches]
    with subprocess.Popen([sys.executable, "-c", DAEMON, str(folder), word, *texts], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        prepared = msgspec.json.decode(process.stdout.readline(), type=list[Prepared])
        yield process.pid, [attempt_of(one) for one in prepared]
        process.kill()


@SHELLS
def test_killing_the_daemon_before_it_begins_leaves_nothing_run(
    folder: Path, tmp_path: Path, odd: dict[str, str]
) -> None:
    launches = [launch_of(n, "touch", str(tmp_path / f"ran{n}"), environment=odd) for n in (1, 2)]
    with daemon(folder, "wait", *launches) as (pid, attempts):
        assert not any(is_gone(attempt.pid) for attempt in attempts)
        os.kill(pid, signal.SIGKILL)
        for attempt in attempts:
            wait_for(lambda pid=attempt.pid: is_gone(pid), "the end of the supervisor")  # type: ignore[misc]
    engine = LocalEngine(folder)
    engine.adopt(attempts)
    ended = (*engine.ended(), *engine.ended())
    assert {one.job_id: one.outcome.kind for one in ended} == dict.fromkeys((1, 2), OutcomeKind.UNBEGUN)
    engine.close()
    assert not list(tmp_path.glob("ran*"))
    assert (folder / "journal").read_text().count("unbegun") == 2


@SHELLS
def test_another_daemon_tells_of_what_a_killed_one_began(
    folder: Path, tmp_path: Path, pipe: Path, odd: dict[str, str]
) -> None:
    launches = [
        launch_of(1, "sh", "-c", "exit 7", environment=odd),
        launch_of(2, "sh", "-c", f"touch {tmp_path}/up; read x < {pipe}; exit 8", environment=odd),
        launch_of(3, "sh", "-c", f"touch {tmp_path}/also; exec sleep 600", environment=odd),
    ]
    with daemon(folder, "begin", *launches) as (pid, attempts):
        wait_for(lambda: (tmp_path / "up").exists() and (tmp_path / "also").exists(), "the programs")
        wait_for(lambda: is_gone(attempts[0].pid), "the end of the first")
        os.kill(pid, signal.SIGKILL)
    engine = LocalEngine(folder)
    engine.adopt(attempts)
    engine.adopt(attempts)
    assert [(one.job_id, one.outcome.status) for one in engine.ended()] == [(1, 7)]
    engine.signal(attempts[2], signal.SIGKILL)
    let_go(pipe)
    assert {job_id: outcome.status for job_id, outcome in outcomes(engine, 2).items()} == {2: 8, 3: 137}
    assert engine.ended() == []
    engine.close()


@pytest.mark.parametrize("change", [{"pid_started": 1.0}, {"boot_id": "another"}])
def test_a_pid_that_is_another_process_now_is_not_adopted(
    folder: Path, tmp_path: Path, pipe: Path, change: dict[str, object]
) -> None:
    with daemon(folder, "begin", launch_of(1, "sh", "-c", f"touch {tmp_path}/up; read x < {pipe}")) as (_, attempts):
        wait_for((tmp_path / "up").exists, "the program")
        engine = LocalEngine(folder)
        engine.adopt([msgspec.structs.replace(attempts[0], **change)])
        assert [one.outcome.kind for one in engine.ended()] == [OutcomeKind.LOST]
        engine.close()
        let_go(pipe)
        wait_for(lambda: is_gone(attempts[0].pid), "the end of the supervisor")


def test_a_pid_that_is_a_thread_now_is_not_adopted(engine: LocalEngine) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    was = Attempt(job_id=1, number=1, pid=thread.native_id, pid_started=None, boot_id=None, started_at=0.0)
    engine.adopt([was])
    assert [one.outcome.kind for one in engine.ended()] == [OutcomeKind.LOST]
    done.set()
    thread.join()


def test_a_stale_line_of_the_same_attempt_is_not_taken_for_its_end(folder: Path, tmp_path: Path, pipe: Path) -> None:
    with daemon(folder, "wait", launch_of(1, "true")) as (pid, attempts):
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: is_gone(attempts[0].pid), "the end of the supervisor")
    script = f"touch {tmp_path}/up; read x < {pipe}; exit 6"
    with daemon(folder, "begin", launch_of(1, "sh", "-c", script)) as (pid, attempts):
        wait_for((tmp_path / "up").exists, "the program")
        os.kill(pid, signal.SIGKILL)
    engine = LocalEngine(folder)
    engine.adopt(attempts)
    assert engine.ended() == []
    os.kill(attempts[0].pid, signal.SIGKILL)
    assert outcomes(engine)[1].kind is OutcomeKind.LOST
    engine.close()
    let_go(pipe)
