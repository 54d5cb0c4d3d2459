"""Real programs under real supervisors: what runs, what it finds, and what is told of it."""

import contextlib
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.core.jobs import Attempt, Outcome, OutcomeKind
from gpuyard.engines import local, supervisor
from gpuyard.engines.local import LocalEngine
from gpuyard.engines.tree import boot_id
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ports import Launch, Prepared

DEADLINE_S = 30.0
# bash is used in place of sh where a name is none that a variable can have.
ODD = {"BASH_FUNC_module%%": "() { echo hi\n}"}
SHELLS = pytest.mark.parametrize("odd", [{}, ODD], ids=["sh", "bash"])


def launch_of(job_id: int, *command: str, **other: object) -> Launch:
    environment = {"PATH": os.environ["PATH"], "GPUYARD_JOB_ID": str(job_id), "GPUYARD_ATTEMPT": "1"}
    fields = {"cwd": "/", "environment": environment, "attempt": 1, **other}
    fields["environment"] = {**environment, **fields["environment"]}  # type: ignore[dict-item]
    return Launch(job_id=job_id, command=command, **fields)  # type: ignore[arg-type]


def attempt_of(prepared: Prepared) -> Attempt:
    return Attempt(
        job_id=prepared.job_id,
        number=prepared.attempt,
        pid=prepared.pid,
        pid_started=prepared.pid_started,
        boot_id=boot_id(),
        started_at=0.0,
        log=prepared.log,
    )


def wait_for(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what}"
        select.select([], [], [], 0.005)


def outcomes(engine: LocalEngine, count: int = 1) -> dict[int, Outcome]:
    """What the next so many that end came to, by job."""
    told: dict[int, Outcome] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(told) < count:
        assert time.monotonic() < deadline, f"{len(told)} of {count} ended"
        told.update((one.job_id, one.outcome) for one in engine.ended())
        if len(told) < count:
            select.select([engine.fileno()], [], [], 0.5)
    return told


def outcome_of(engine: LocalEngine, launch: Launch, lease: int | None = None) -> Outcome:
    engine.prepare(launch, lease)
    engine.begin()
    return outcomes(engine)[launch.job_id]


def log_of(folder: Path, job_id: int) -> str:
    return (folder / "logs" / f"{job_id}.1.log").read_text(encoding="utf-8", errors="surrogateescape")


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


@pytest.fixture
def engine(folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(folder)
    yield engine
    engine.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """What a program can wait at until the test lets it go on."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def let_go(pipe: Path) -> None:
    pipe.write_text("go\n")


# What runs


@SHELLS
def test_a_program_runs_and_its_output_is_in_its_log(
    engine: LocalEngine, folder: Path, tmp_path: Path, odd: dict[str, str]
) -> None:
    launch = launch_of(1, "sh", "-c", "pwd -P; echo wrong >&2", cwd=str(tmp_path), environment=odd)
    assert outcome_of(engine, launch).kind is OutcomeKind.SUCCEEDED
    assert log_of(folder, 1) == f"{tmp_path.resolve()}\nwrong\n"


def test_arguments_arrive_as_they_are(engine: LocalEngine, folder: Path) -> None:
    words = ["", " ", "a b", "$HOME", "`id`", "*", "\n", "'", '"', "\\", "-n", "ünï", "{}"]
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    outcome_of(engine, launch_of(1, sys.executable, "-c", script, *words))
    assert json.loads(log_of(folder, 1)) == words


def test_nothing_runs_before_it_is_begun_and_nothing_that_was_abandoned(engine: LocalEngine, tmp_path: Path) -> None:
    prepared = engine.prepare(launch_of(1, "touch", str(tmp_path / "ran")), None)
    engine.abandon()
    wait_for(lambda: is_gone(prepared.pid), "the end of the supervisor")
    outcome_of(engine, launch_of(2, "true"))
    wait_for(lambda: engine.ended() == [] and not Path(f"/proc/{prepared.pid}").exists(), "the supervisor reaped")
    assert not (tmp_path / "ran").exists()


def test_an_attempt_that_was_abandoned_can_be_prepared_again(engine: LocalEngine) -> None:
    engine.prepare(launch_of(1, "true"), None)
    engine.abandon()
    assert outcome_of(engine, launch_of(1, "sh", "-c", "exit 4")).status == 4


@SHELLS
def test_many_at_once_all_begin_and_are_all_told_of(engine: LocalEngine, folder: Path, odd: dict[str, str]) -> None:
    count = 30 if odd else 300
    for job_id in range(1, count + 1):
        engine.prepare(launch_of(job_id, "sh", "-c", f"echo {job_id}; exit {job_id % 100}", environment=odd), None)
    engine.begin()
    told = outcomes(engine, count)
    assert {job_id: outcome.status for job_id, outcome in told.items()} == {n: n % 100 for n in range(1, count + 1)}
    assert [log_of(folder, n) for n in range(1, count + 1)] == [f"{n}\n" for n in range(1, count + 1)]


def test_a_program_named_like_a_builtin_is_the_program(engine: LocalEngine, tmp_path: Path) -> None:
    for name in ("exit", "export", "true", "find"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 7\n")
        (tmp_path / name).chmod(0o755)
        launch = launch_of(1, name, "3", environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})
        assert outcome_of(engine, launch).status == 7


@pytest.mark.parametrize("places", ["bin:/usr/bin", ":/bin", "/bin:", "", "/nowhere:.:/bin"])
def test_relative_places_on_the_path_count_from_the_jobs_directory(
    engine: LocalEngine, tmp_path: Path, places: str
) -> None:
    program = tmp_path / ("bin/tool" if places.startswith("bin") else "tool")
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    assert outcome_of(engine, launch_of(1, "tool", cwd=str(tmp_path), environment={"PATH": places})).status == 9


def test_what_cannot_be_executed_is_passed_over_for_what_can(engine: LocalEngine, tmp_path: Path) -> None:
    for place in ("plain", "folder/tool", "good"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "plain/tool").write_text("")
    (tmp_path / "good/tool").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "good/tool").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/plain:{tmp_path}/folder:{tmp_path}/good"}
    assert outcome_of(engine, launch_of(1, "tool", environment=environment)).status == 9


# What it finds


ODD_VALUES = {
    "PWD": "/elsewhere",
    "OLDPWD": "a 'b' \"c\"\n$d",
    "SHLVL": "7",
    "IFS": "0123456789./",
    "CDPATH": "/tmp:/",
    "ENV": "/nowhere",
    "BASH_ENV": "/nowhere",
    "PS4": "$(exit 3)",
    "gpuyard_word": "mine",
    "gpuyard_place": "/bin/false",
    "gpuyard_rest": "mine too",
    "LINES": "a\nb\n",
    "BYTES": "\udcff\udcfe",
    "EMPTY": "",
}
ODD_NAMES = {
    **ODD,
    "BASH_FUNC_printf%%": "() {  exit 9\n}",
    "BASH_FUNC_[%%": "() {  exit 9\n}",
    "a.b": "1",
    "ü": "2",
    "1": "3",
    "OPTIND": "many",
}


@pytest.mark.parametrize("path", ["/usr/bin:/bin", "", None])
@pytest.mark.parametrize("values", [{}, ODD_VALUES, ODD_NAMES, ODD_VALUES | ODD_NAMES])
def test_the_environment_is_exactly_that_of_the_launch(
    engine: LocalEngine, folder: Path, values: dict[str, str], path: str | None
) -> None:
    environment = values if path is None else {**values, "PATH": path}
    launch = Launch(job_id=1, attempt=1, command=("/usr/bin/env", "-0"), cwd="/tmp", environment=environment)
    assert outcome_of(engine, launch).kind is OutcomeKind.SUCCEEDED
    content = (folder / "logs/1.1.log").read_bytes()
    found = dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if item)
    if values.keys() & ODD_NAMES.keys():
        found.pop("_")
    assert found == {**environment, "GPUYARD_QUEUE": str(folder)}


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_a_job_has_the_daemons_umask_and_its_log_is_private_all_the_same(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        engine = LocalEngine(folder)
        outcome_of(engine, launch_of(1, "sh", "-c", "umask"))
    finally:
        os.umask(before)
    engine.close()
    assert int(log_of(folder, 1), 8) == umask
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert modes == {"queue": 0o700, "logs": 0o700, "journal": 0o600, "1.1.log": 0o600}


LIST_DESCRIPTORS = """
import json, os
found = {}
for name in os.listdir("/proc/self/fd"):
    try:
        found[name] = os.readlink("/proc/self/fd/" + name)
    except OSError:
        pass  # the folder itself, as it was read
print(json.dumps(found))
"""


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


@SHELLS
@pytest.mark.parametrize("number", [None, 0, 8, 9, 50])
def test_a_job_has_its_streams_and_its_lease_and_nothing_else(
    engine: LocalEngine, folder: Path, tmp_path: Path, odd: dict[str, str], number: int | None
) -> None:
    (tmp_path / "lease").touch()
    opened = os.open(tmp_path / "lease", os.O_RDWR)
    with contextlib.ExitStack() as put_back:
        for inherited in (name for name in map(int, os.listdir("/dev/fd")) if name > 2 and _is_inheritable(name)):
            os.set_inheritable(inherited, False)
            put_back.callback(os.set_inheritable, inherited, True)
        if number is not None:
            with contextlib.suppress(OSError):
                put_back.callback(os.dup2, os.dup(number), number)
            os.dup2(opened, number, inheritable=False)
        outcome_of(engine, launch_of(1, sys.executable, "-c", LIST_DESCRIPTORS, environment=odd), number)
    os.close(opened)
    found = json.loads(log_of(folder, 1))
    log = str(folder / "logs/1.1.log")
    expected = {"0": "/dev/null", "1": log, "2": log}
    assert found == (expected if number is None else {**expected, "8": str(tmp_path / "lease")})


@SHELLS
def test_a_job_has_no_signal_ignored_or_blocked(engine: LocalEngine, folder: Path, odd: dict[str, str]) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        outcome_of(engine, launch_of(1, "grep", "-E", "Sig(Blk|Ign):", "/proc/self/status", environment=odd))
    finally:
        signal.signal(signal.SIGHUP, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    masks = [int(line.split()[1], 16) for line in log_of(folder, 1).splitlines()]
    of_the_c_library = 1 << 31 | 1 << 32  # which nobody else can use
    assert [mask & ~of_the_c_library for mask in masks] == [0, 0]


def test_input_comes_from_the_file_that_was_named(engine: LocalEngine, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in put").write_text("what was asked\n")
    outcome_of(engine, launch_of(1, "cat", stdin="in put", cwd=str(tmp_path)))
    assert log_of(folder, 1) == "what was asked\n"


def test_what_is_printed_of_a_command_does_not_show_its_environment() -> None:
    command = supervisor.command(launch_of(1, "true", environment={"TOKEN": "secret"}), "log", 0o022)
    assert command.environment["TOKEN"] == "secret"
    assert "secret" not in repr(command)


# What is told of it


@SHELLS
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 3", (3, "exit status 3")),
        ("exit 255", (255, "exit status 255")),
        ("kill -KILL $$", (137, "signal 9 (SIGKILL)")),
        ("kill -INT $$", (130, "signal 2 (SIGINT)")),
        ("kill -QUIT $$", (131, "signal 3 (SIGQUIT)")),
        ("kill -PIPE $$", (141, "signal 13 (SIGPIPE)")),
        ("kill -TERM 0", (143, "signal 15 (SIGTERM)")),
    ],
)
def test_a_failure_says_how(engine: LocalEngine, odd: dict[str, str], script: str, told: tuple[int, str]) -> None:
    outcome = outcome_of(engine, launch_of(1, "sh", "-c", f"ulimit -c 0; {script}", environment=odd))
    assert outcome.kind is OutcomeKind.FAILED
    assert (outcome.status, outcome.reason) == told


@SHELLS
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"command": ("no-such-thing",)}, 127),
        ({"command": ("/no/such/thing",)}, 127),
        ({"command": ("",)}, 127),
        ({"command": ("/etc/passwd",)}, 126),
        ({"command": ("/tmp",)}, 126),
        ({"cwd": "/no/such/place"}, 126),
        ({"stdin": "/no/such/file"}, 126),
    ],
)
def test_what_cannot_start_says_why_and_so_does_its_log(
    engine: LocalEngine, folder: Path, odd: dict[str, str], change: dict[str, object], status: int
) -> None:
    fields: dict[str, object] = {"command": ("true",), "environment": odd, **change}
    command = fields.pop("command")
    assert isinstance(command, tuple)
    outcome = outcome_of(engine, launch_of(1, *command, **fields))
    assert (outcome.kind, outcome.status) == (OutcomeKind.CANNOT_START, status)
    named = str(next(iter(change.values())) if "command" not in change else command[0])
    assert named in str(outcome.reason)
    assert log_of(folder, 1).startswith("gpuyard: ")
    assert named in log_of(folder, 1)


@SHELLS
def test_a_log_that_cannot_be_made_keeps_the_program_from_running(
    engine: LocalEngine, folder: Path, tmp_path: Path, odd: dict[str, str]
) -> None:
    (folder / "logs/1.1.log").mkdir()
    outcome = outcome_of(engine, launch_of(1, "touch", str(tmp_path / "ran"), environment=odd))
    assert outcome.kind is OutcomeKind.CANNOT_START
    assert "log" in str(outcome.reason)
    assert not (tmp_path / "ran").exists()


@SHELLS
def test_the_status_is_the_programs_whatever_the_supervisor_caught_meanwhile(
    engine: LocalEngine, tmp_path: Path, pipe: Path, odd: dict[str, str]
) -> None:
    script = f"touch {tmp_path}/up; read x < {pipe}; exit 5"
    prepared = engine.prepare(launch_of(1, "sh", "-c", script, environment=odd), None)
    engine.begin()
    wait_for((tmp_path / "up").exists, "the program")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP, signal.SIGQUIT):
        os.kill(prepared.pid, signum)
    let_go(pipe)
    assert outcomes(engine)[1].status == 5


def test_a_killed_supervisor_means_that_the_attempt_is_lost(engine: LocalEngine, tmp_path: Path, pipe: Path) -> None:
    prepared = engine.prepare(launch_of(1, "sh", "-c", f"touch {tmp_path}/up; read x < {pipe}"), None)
    engine.begin()
    wait_for((tmp_path / "up").exists, "the program")
    os.kill(prepared.pid, signal.SIGKILL)
    assert outcomes(engine)[1].kind is OutcomeKind.LOST
    let_go(pipe)


def test_a_signal_while_it_waits_at_the_gate_leaves_it_unbegun(engine: LocalEngine, tmp_path: Path) -> None:
    prepared = engine.prepare(launch_of(1, "touch", str(tmp_path / "ran")), None)
    caught = 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{prepared.pid}/status")
    wait_for(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & caught, "the supervisor's trap")
    os.kill(prepared.pid, signal.SIGTERM)
    assert outcomes(engine)[1].kind is OutcomeKind.UNBEGUN
    engine.prepare(launch_of(2, "true"), None)
    engine.begin()
    assert outcomes(engine)[2].kind is OutcomeKind.SUCCEEDED
    assert not (tmp_path / "ran").exists()


@SHELLS
def test_a_status_that_cannot_be_written_is_written_when_it_can(engine: LocalEngine, odd: dict[str, str]) -> None:
    outcome_of(engine, launch_of(1, "true"))
    prepared = engine.prepare(launch_of(2, "sh", "-c", "exit 3", environment=odd), None)
    unlimited = resource.prlimit(prepared.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    engine.begin()
    children = Path(f"/proc/{prepared.pid}/task/{prepared.pid}/children")
    wait_for(lambda: "sleep" in _names(children.read_text().split()), "the supervisor's second try")
    assert engine.ended() == []
    resource.prlimit(prepared.pid, resource.RLIMIT_FSIZE, unlimited)
    assert outcomes(engine)[2].status == 3


def _names(pids: list[str]) -> list[str]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def test_a_long_journal_is_emptied_once_all_is_told(engine: LocalEngine, folder: Path) -> None:
    engine.adopt([])
    (folder / "journal").write_bytes(b"1.1 1 0 .\n" * 200_000)
    assert outcome_of(engine, launch_of(1, "sh", "-c", "exit 3")).status == 3
    assert (folder / "journal").stat().st_size > 1 << 20
    assert engine.ended() == []
    assert (folder / "journal").stat().st_size == 0
    assert outcome_of(engine, launch_of(2, "sh", "-c", "exit 4")).status == 4


def test_without_pidfds_ends_are_seen_by_looking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_has_pidfds", lambda: False)
    engine = LocalEngine(folder)
    assert engine.fileno() == -1
    engine.prepare(launch_of(1, "sh", "-c", "exit 3"), None)
    engine.prepare(launch_of(2, "true"), None)
    engine.begin()
    told: dict[int, int | None] = {}
    wait_for(lambda: told.update((one.job_id, one.outcome.status) for one in engine.ended()) or len(told) == 2, "both")
    assert told == {1: 3, 2: 0}
    engine.close()


def test_what_no_program_could_be_given_is_the_users_mistake(engine: LocalEngine) -> None:
    with pytest.raises(UserError, match="longer than the system allows"):
        engine.prepare(launch_of(1, "true", "x" * 200_000), None)
    with pytest.raises(UserError, match="cannot be passed"):
        engine.prepare(launch_of(1, "true", "a\0b"), None)
    assert outcome_of(engine, launch_of(2, "true")).kind is OutcomeKind.SUCCEEDED


def test_one_that_cannot_be_watched_does_not_run(engine: LocalEngine, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcome_of(engine, launch_of(1, "true"))
    engine.prepare(launch_of(2, "true"), None)  # the gate is there now
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(EnvironmentFault, match="job 3"):
            engine.prepare(launch_of(3, "touch", str(tmp_path / "ran")), None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    engine.begin()
    assert list(outcomes(engine)) == [2]
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_cannot_be_used_is_a_fault_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be used for the queue"):
        LocalEngine(tmp_path / "file")
