"""The supervisor on a cluster node: it runs its element once, forwards signals, and records the end."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.engines.cluster import node_supervisor
from gpuyard.engines.cluster.submission_dir import VOID, ElementStart, ElementTrace, Finish, SubmissionDirs
from gpuyard.engines.common.program_outcome import StartContext, outcome_of
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.job import OutcomeKind
from gpuyard.model.lease import Need
from gpuyard.model.shell_environment import ShellSettings
from gpuyard.model.stopping import parse_warning
from gpuyard.ports import Launch
from tests.integration.engine_fixture import is_gone, launch_of, let_go, wait_for, wait_until_gone
from tests.scale import size
from tests.small_disk import mounted_disk
from tests.unit.ledger import as_root

Supervisor = subprocess.Popen[str]
# The exit status of a supervisor that ran nothing: not 0, or the site would report success.
NOT_FIRST = 75
TOKEN = "submission"
# Runs a supervisor with shorter time limits than the real ones.
HASTY = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuyard.engines.cluster import node_supervisor;"
    "vars(node_supervisor).update(eval(sys.argv.pop(1))); node_supervisor.main()"
)


class Node:
    """Starts supervisors as a site does: with a small environment of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.submissions = SubmissionDirs(tmp_path / "shared")
        self._logs = tmp_path / "logs"
        self._logs.mkdir()
        self._started: list[Supervisor] = []

    def write(self, *launches: Launch) -> None:
        self.submissions.write(TOKEN, [(each, str(self._logs / str(n))) for n, each in enumerate(launches)])

    def start(self, number: int = 0, environment: dict[str, str] | None = None, **figures: float) -> Supervisor:
        path = Path(self.submissions.path(TOKEN))
        digest = self.submissions.digest(TOKEN) if path.exists() else "none"
        command = [*node_supervisor.command(str(path), digest), str(number)]
        if figures:
            command[command.index("-c") + 1] = HASTY
            command.insert(command.index("-c") + 3, repr(figures))
        return self.start_command(command, environment)

    def start_command(self, command: list[str], environment: dict[str, str] | None = None) -> Supervisor:
        process = subprocess.Popen(
            command, env=environment or {}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._started.append(process)
        return process

    def run(self, *launches: Launch, environment: dict[str, str] | None = None) -> Finish:
        """Run element 0 and return its recorded end."""
        self.write(*launches)
        self.start(environment=environment).wait(60)
        return self.end_of()

    def log(self, number: int = 0) -> str:
        return (self._logs / str(number)).read_text(encoding="utf-8", errors="surrogateescape")

    def logs(self) -> list[str]:
        return sorted(path.name for path in self._logs.iterdir())

    def trace(self, number: int = 0) -> ElementTrace:
        return self.submissions.traces(TOKEN).get(number, ElementTrace())

    def end_of(self, number: int = 0) -> Finish:
        end = self.trace(number).ended
        assert end is not None
        return end

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Return a function that waits for the file `pid` and returns its content; kill the program at the end."""

    def pid() -> int:
        wait_for(lambda: _content(tmp_path / "pid"), "the program")
        return int(_content(tmp_path / "pid"))

    yield pid
    if _content(tmp_path / "pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid(), signal.SIGKILL)


def _content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def shell(script: str, job_id: int = 1, **other: object) -> Launch:
    return launch_of(job_id, "sh", "-c", script, **other)


# Running


def test_a_program_has_the_umask_of_the_shell_that_submitted_it_and_the_limits_of_the_node(node: Node) -> None:
    submitted = ShellSettings(umask=0o027, niceness=19, limits={"NOFILE": 50})
    node.write(shell("test $(umask) = 0027 && test $(nice) != 19 && test $(ulimit -n) -gt 50", shell=submitted))
    assert node.start().wait(60) == 0


def test_the_supervisor_records_and_returns_the_status_of_its_program(node: Node) -> None:
    before = time.time()
    node.write(shell("exit 1"), shell("echo out; echo err >&2; pwd; exit 7", 17, cwd="/usr", attempt=3))
    process = node.start(1)
    assert process.wait(60) == 7
    assert node.log(1) == "out\nerr\n/usr\n"
    trace = node.trace(1)
    assert isinstance(trace.started, ElementStart)
    assert trace.started.node == os.uname().nodename
    assert trace.started.pid == process.pid
    assert trace.ended is not None
    assert trace.ended.word == "7"
    assert before - 0.01 <= trace.started.at <= trace.ended.at <= time.time()
    assert node.trace(0) == ElementTrace()


def test_output_goes_to_the_files_that_the_user_named_with_times_where_asked_for(node: Node, tmp_path: Path) -> None:
    out, err = tmp_path / "new/out", tmp_path / "err"
    err.write_text("before\n")
    script = "echo to out; echo to err >&2; exit 3"
    assert node.run(shell(script, output=str(out), error=str(err), timestamps=True)).word == "3"
    time_and_text = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[^ ]* to "
    assert re.fullmatch(time_and_text + "out\n", out.read_text())
    assert re.fullmatch("before\n--- gpuyard: job 1, attempt 1, .* ---\n" + time_and_text + "err\n", err.read_text())
    assert node.logs() == []


def test_a_program_leads_its_own_session_and_inherits_only_its_streams(node: Node) -> None:
    # No shell here: it would hold pipe ends for a moment and replace itself with its last command.
    node.run(shell("echo $$; cut -d' ' -f5,6 /proc/$$/stat; ls /proc/$$/fd; :"))
    pid, session, *descriptors = node.log().splitlines()
    assert session == f"{pid} {pid}"
    assert node.end_of().pid == int(pid)
    assert descriptors[:3] == ["0", "1", "2"]
    assert not any(int(number) in range(3, 10) for number in descriptors)


@pytest.mark.parametrize(
    ("word", "status", "fields"),
    [
        ("no-program", 127, {"command": ("no-such-program",)}),
        ("not-executable", 126, {"command": ("/etc/passwd",)}),
        ("not-executable", 126, {"command": ("true", "a\0b")}),
        ("no-directory", 126, {"cwd": "/no/such/place"}),
        ("no-stdin", 126, {"stdin": "/no/such/input"}),
        ("too-long", 126, {"environment": {"LONG": "x" * 4_000_000}}),
    ],
)
def test_a_program_that_cannot_start_has_the_same_reason_as_a_local_job(
    node: Node, word: str, status: int, fields: dict[str, object]
) -> None:
    command = fields.pop("command", ("true",))
    terms = ClusterTerms(need=Need(), name="job")
    node.write(launch_of(1, *command, terms=terms, **fields))  # type: ignore[misc]
    assert node.start().wait(60) == status
    end = node.end_of()
    assert (end.word, end.pid, end.usage) == (word, None, None)
    outcome = outcome_of(end.word, node.submissions.read(TOKEN)[1][0].context)
    assert outcome.kind is OutcomeKind.CANNOT_START
    assert outcome.status == status


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small disk without inodes."""
    with mounted_disk(tmp_path / "small", "size=64k,nr_inodes=1") as folder:
        yield folder


@as_root
def test_a_program_whose_log_finds_no_space_has_not_begun(node: Node, small_disk: Path, tmp_path: Path) -> None:
    node.submissions.write(TOKEN, [(launch_of(1, "touch", str(tmp_path / "ran")), str(small_disk / "log"))])
    assert node.start(_GIVE_UP_AFTER_S=0.1, _TRY_AGAIN_S=0.02).wait(60) == NOT_FIRST
    outcome = outcome_of(node.end_of().word, StartContext())
    assert outcome.kind is OutcomeKind.NEVER_STARTED
    assert outcome.reason == "no log can be written: No space left on device"
    assert not (tmp_path / "ran").exists()


@as_root
def test_a_start_that_was_claimed_and_did_not_begin_is_withdrawn_if_that_cannot_be_written(
    node: Node, small_disk: Path
) -> None:
    """So the engine can see that it never started, and offers it again."""
    node.submissions.write(TOKEN, [(launch_of(1, "true"), str(small_disk / "log"))])
    path = node.submissions.path(TOKEN)
    (Path(path) / "0.ended").mkdir()  # in its place, so that it cannot be written
    (Path(path) / "0.ended" / "x").touch()
    assert node.start(_GIVE_UP_AFTER_S=0.1, _TRY_AGAIN_S=0.02).wait(60) == NOT_FIRST
    assert not (Path(path) / "0.started").exists()


@pytest.mark.parametrize("hindrance", ["forgotten", "no such element", "garbled"])
def test_a_supervisor_that_cannot_begin_reports_it_and_leaves_no_trace(node: Node, hindrance: str) -> None:
    node.write(shell("exit 0"))
    if hindrance == "forgotten":
        node.submissions.forget(TOKEN)
    if hindrance == "garbled":
        Path(node.submissions.path(TOKEN), "submission.json").write_text("{")
    process = node.start(9 if hindrance == "no such element" else 0)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"of the submission in {node.submissions.path(TOKEN)} cannot start" in errors
    assert not list(Path(node.submissions.path(TOKEN)).glob("*.started"))


# At most once


def test_only_one_of_several_supervisors_runs_an_element(node: Node, tmp_path: Path) -> None:
    node.write(shell(f"echo ran >> {tmp_path}/ran; exit 7"))
    processes = [node.start() for _ in range(size(15, full=50))]
    statuses = sorted(process.wait(60) for process in processes)
    assert statuses == [7] + [NOT_FIRST] * (len(processes) - 1)
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert node.end_of().word == "7"


def test_an_element_is_either_voided_or_run(node: Node, tmp_path: Path) -> None:
    numbers = range(24)
    node.write(*(shell(f"touch {tmp_path}/ran{n}; exit 7", n) for n in numbers))
    processes = [node.start(number) for number in numbers]
    wait_for(lambda: node.submissions.traces(TOKEN), "the first to begin")
    voided = {number: node.submissions.void(TOKEN, number) for number in reversed(numbers)}
    assert [process.wait(60) for process in processes] == [NOT_FIRST if voided[number] else 7 for number in numbers]
    assert [(tmp_path / f"ran{number}").exists() for number in numbers] == [not voided[n] for n in numbers]
    assert [node.trace(number).started is VOID for number in numbers] == [voided[n] for n in numbers]
    assert [node.trace(number).ended is None for number in numbers] == [voided[n] for n in numbers]


def test_a_killed_supervisor_records_no_end_and_its_element_never_runs_again(
    node: Node, tmp_path: Path, program: Callable[[], int]
) -> None:
    node.write(shell(f"echo ran >> {tmp_path}/ran; echo $$ > {tmp_path}/pid; exec sleep 600"))
    first = node.start()
    pid = program()
    first.kill()
    first.wait()
    assert not is_gone(pid)  # the site ends the remaining processes
    assert node.start().wait(60) == NOT_FIRST
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert node.trace().started not in (None, VOID)
    assert node.trace().ended is None


# Signals


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "CONT", "TSTP"])
def test_a_signal_reaches_the_program_and_the_supervisor_records_the_end(node: Node, tmp_path: Path, name: str) -> None:
    script = (
        "import os, signal, time;"
        f"signal.signal(signal.SIG{name}, lambda *_: [print('got {name}', flush=True), os._exit(5)]);"
        f"open('{tmp_path}/up', 'w'); [time.sleep(0.05) for _ in iter(int, 1)]"
    )
    node.write(launch_of(1, sys.executable, "-I", "-S", "-c", script))
    process = node.start()
    wait_for((tmp_path / "up").exists, "the program")
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.wait(60) == 5
    assert node.log() == f"got {name}\n"
    assert node.end_of().word == "5"


def test_the_signal_before_the_end_only_reaches_processes_that_handle_it(node: Node, tmp_path: Path) -> None:
    script = (
        "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(9));"
        f"open('{tmp_path}/up', 'w'); [signal.pause() for _ in iter(int, 1)]"
    )
    terms = ClusterTerms(need=Need(devices=0), name="x", warning=parse_warning("USR1"))
    # The shell has no trap: it would die of the signal, and not print the status of the program.
    node.write(shell(f'{sys.executable} -I -S -c "{script}"; echo status $?', terms=terms))
    process = node.start()
    wait_for((tmp_path / "up").exists, "the program")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert node.log() == "status 9\n"


def test_the_signal_before_the_end_reaches_a_program_in_a_session_of_its_own_once_it_handles_it(
    node: Node, tmp_path: Path, pipe: Path
) -> None:
    script = (
        f"import os, signal; signal.alarm(50); open('{tmp_path}/up', 'w'); open('{pipe}').read();"
        "signal.signal(signal.SIGUSR1, lambda *_: os._exit(9)); [signal.pause() for _ in iter(int, 1)]"
    )
    terms = ClusterTerms(need=Need(devices=0), name="x", warning=parse_warning("USR1"))
    node.write(shell(f'setsid --wait {sys.executable} -I -S -c "{script}"; echo status $?', terms=terms))
    process = node.start()
    wait_for((tmp_path / "up").exists, "the program")
    process.send_signal(signal.SIGUSR1)  # too early: none of them handles it
    let_go(pipe)
    assert process.wait(60) == 0
    assert node.log() == "status 9\n"


def test_the_supervisor_warns_a_program_before_the_users_time_limit(node: Node) -> None:
    script = "trap 'echo asked; exit 75' USR1; for each in $(seq 500); do sleep 0.1; done"
    warning = parse_warning("USR1@3599s")
    terms = ClusterTerms(need=Need(devices=0), name="x", limit_s=3600.0, warning=warning)
    end = node.run(shell(script, terms=terms))
    assert (end.word, node.log()) == ("75", "asked\n")
    assert end.warned_at is not None
    assert end.warned_at <= end.at


def test_a_program_may_run_on_after_a_signal(node: Node, tmp_path: Path, pipe: Path) -> None:
    """Also if the site repeats the signal."""
    script = (
        f"trap 'touch {tmp_path}/asked; read x < {pipe}; echo saved; exit 0' TERM; trap '' USR1;"
        f"touch {tmp_path}/up; while :; do sleep 0.01; done"
    )
    node.write(shell(script))
    process = node.start()
    wait_for((tmp_path / "up").exists, "the program")
    process.terminate()
    wait_for((tmp_path / "asked").exists, "the program's answer")
    process.send_signal(signal.SIGUSR1)
    assert node.trace().ended is None
    let_go(pipe)
    assert process.wait(60) == 0
    assert node.log().endswith("saved\n")  # after the shell's message about its child, which got the signal too


def test_a_signal_reaches_all_process_groups_of_the_session(node: Node, tmp_path: Path) -> None:
    child = f"import os, time; os.setpgid(0, 0); open('{tmp_path}/up', 'w'); time.sleep(600)"
    node.write(launch_of(1, "sh", "-c", f'trap "" TERM; {sys.executable} -c "$CHILD"', environment={"CHILD": child}))
    process = node.start()
    wait_for((tmp_path / "up").exists, "the program's child")
    process.send_signal(signal.SIGHUP)  # ends the shell and its child, which would otherwise keep the log open
    assert process.wait(60) == 128 + signal.SIGHUP
    wait_for(lambda: not _writers_of(tmp_path / "logs/0"), "the end of the child")


def _writers_of(log: Path) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(place) == str(log):
                found.append(place.parts[2])
    return found


def test_signals_ignored_or_blocked_by_the_site_are_forwarded_too(node: Node, tmp_path: Path) -> None:
    node.write(shell(f"touch {tmp_path}/up; exec sleep 600"))
    command = [*node_supervisor.command(node.submissions.path(TOKEN), node.submissions.digest(TOKEN)), "0"]
    blocking = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = node.start_command([sys.executable, "-c", blocking, *command])
    wait_for((tmp_path / "up").exists, "the program")
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 128 + signal.SIGHUP


# Lost


def test_an_element_given_up_by_the_engine_is_killed_with_its_session(node: Node, tmp_path: Path) -> None:
    child = f"import os, time; os.setpgid(0, 0); open('{tmp_path}/up', 'w'); time.sleep(600)"
    script = f"echo $$ > {tmp_path}/pid; trap '' TERM; {sys.executable} -c \"$CHILD\"; exit 3"
    node.write(shell(script, environment={"CHILD": child}))
    process = node.start()
    wait_for((tmp_path / "up").exists, "the program's child")
    node.submissions.mark_lost(TOKEN, 0)
    assert process.wait(60) == 137
    wait_until_gone(int(_content(tmp_path / "pid")), "the program")
    wait_for(lambda: not _writers_of(tmp_path / "logs/0"), "the end of its child")
    assert node.end_of().word == node_supervisor.GIVEN_UP


def test_a_submission_directory_missing_for_a_while_ends_nothing_and_gets_the_end_later(
    node: Node, tmp_path: Path
) -> None:
    """The whole directory is missing, not only the file by which the supervisor knows that it is still wanted."""
    node.write(shell(f"echo $$ > {tmp_path}/pid; sleep 0.5; exit 4"))
    process = node.start(CHECK_LOST_EVERY_S=0.01, _TRY_AGAIN_S=0.05)
    wait_for(lambda: _content(tmp_path / "pid"), "the program")
    (tmp_path / "shared").rename(tmp_path / "away")
    wait_until_gone(int(_content(tmp_path / "pid")), "the program")
    assert process.poll() is None
    (tmp_path / "away").rename(tmp_path / "shared")
    assert process.wait(60) == 4
    assert node.end_of().word == "4"


# A full disk


@contextlib.contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Keep files of this process from growing: like a full disk, but with another error."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    yield
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def waiting(tmp_path: Path, pipe: Path, status: int) -> Launch:
    return shell(f"echo $$ > {tmp_path}/pid; read x < {pipe}; exit {status}")


def test_an_end_is_written_when_a_full_disk_has_space_again(node: Node, tmp_path: Path, pipe: Path) -> None:
    node.write(waiting(tmp_path, pipe, 6))
    process = node.start(_TRY_AGAIN_S=0.05)
    wait_for(lambda: _content(tmp_path / "pid"), "the program")
    with full_disk(process.pid):
        let_go(pipe)
        wait_until_gone(int(_content(tmp_path / "pid")), "the program")
        process.terminate()  # as a site does to end it
        assert process.poll() is None
        assert node.trace().ended is None
    assert process.wait(60) == 6
    assert node.end_of().word == "6"
    assert not list(Path(node.submissions.path(TOKEN)).glob("*draft*"))


def test_if_the_disk_stays_full_the_exit_status_reports_the_end_to_the_site(
    node: Node, tmp_path: Path, pipe: Path
) -> None:
    node.write(waiting(tmp_path, pipe, 6))
    process = node.start(_TRY_AGAIN_S=0.02, _GIVE_UP_AFTER_S=0.1)
    wait_for(lambda: _content(tmp_path / "pid"), "the program")
    with full_disk(process.pid):
        let_go(pipe)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 6
    assert f"{node.submissions.path(TOKEN)}/0.ended cannot be written: File too large" in errors
    assert node.trace().ended is None


# The environment


def test_the_program_gets_its_environment_byte_for_byte(node: Node) -> None:
    odd = os.fsdecode(b'\xff\xfe caf\xc3\xa9 \n "quoted" {}')
    script = "import os, sys; sys.stdout.buffer.write(os.environb[b'ODD'] + b'|' + os.fsencode(sys.argv[1]))"
    odd_words = (sys.executable, "-c", script, odd)
    assert node.run(launch_of(1, *odd_words, environment={"ODD": odd})).word == "0"
    assert os.fsencode(node.log()) == os.fsencode(f"{odd}|{odd}")


def test_each_element_has_its_own_environment(node: Node) -> None:
    kinds = ({"A": "1", "B": "2"}, {"A": "1", "C": "3"}, {"A": "other"})
    node.write(*(shell('echo "$A,$B,$C,${B-unset}"', n, environment=kind) for n, kind in enumerate(kinds)))
    for number in range(3):
        node.start(number).wait(60)
    assert [node.log(number) for number in range(3)] == ["1,2,,2\n", "1,,3,unset\n", "other,,,unset\n"]


def test_the_program_gets_only_the_sites_own_variables_of_its_environment(node: Node) -> None:
    sites = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "n0", "RAY_ADDRESS": "here", "CUDA_VISIBLE_DEVICES": "3"}
    submitted = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4", "CUDA_VISIBLE_DEVICES": "0", "MINE": "kept"}
    node.run(launch_of(1, "env", environment=submitted), environment={**sites, "HOME": "/node", "PATH": "/no"})
    variables = dict(line.split("=", 1) for line in node.log().splitlines())
    assert {name: variables.get(name) for name in (*sites, *submitted, "HOME")} == {
        **sites, "SLURM_ARRAY_TASK_ID": None, "MINE": "kept", "HOME": None,
    }  # fmt: skip
    assert variables["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("submitted", "own", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}, {"CUDA_VISIBLE_DEVICES": "GPU-7"}),
        ({"HIP_VISIBLE_DEVICES": "3"}, {"ROCR_VISIBLE_DEVICES": "0"}, {"ROCR_VISIBLE_DEVICES": "0"}),
        ({"ZE_AFFINITY_MASK": "1", "NVIDIA_VISIBLE_DEVICES": "all", "GPU_DEVICE_ORDINAL": "0"}, {}, {}),
        ({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}, {"CUDA_VISIBLE_DEVICES": "2"},
         {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}, {},
         {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"PATH": "/bin"}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({"SLURM_NTASKS": "8", "SLURMD_NODENAME": "login", "SLURM_CONF": "/etc/slurm.conf"}, {},
         {"SLURM_CONF": "/etc/slurm.conf"}),
        ({"SLURM_CONF": "/mine"}, {"SLURM_CONF": "/run/slurm.conf"}, {"SLURM_CONF": "/run/slurm.conf"}),
        ({"RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": "mine"}, {"RAY_ADDRESS": "its"},
         {"RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": "its"}),
        ({"TMPDIR": "/no/such/place"}, {}, {}),
        ({"TMPDIR": "/usr"}, {}, {"TMPDIR": "/usr"}),
        ({"TMPDIR": "/usr"}, {"TMPDIR": "/tmp/of/job"}, {"TMPDIR": "/tmp/of/job"}),
    ],
)  # fmt: skip
def test_each_variable_comes_from_the_submission_or_from_the_node(
    submitted: dict[str, str], own: dict[str, str], expected: dict[str, str]
) -> None:
    assert node_supervisor.program_environment({"MINE": "kept", **submitted}, own) == {"MINE": "kept", **expected}


# Measured usage


def hold(megabytes: int) -> tuple[str, ...]:
    script = f"kept = bytearray({megabytes} << 20); kept[::4096] = b'x' * len(kept[::4096])"
    return sys.executable, "-I", "-S", "-c", script


def test_the_ram_of_a_short_program_comes_from_the_kernel(node: Node) -> None:
    usage = node.run(launch_of(1, *hold(200))).usage
    assert usage is not None
    assert usage.ram_mb is not None
    assert 200 < usage.ram_mb < 260
    assert usage.peaks_mb == {}
    assert not list(Path(node.submissions.path(TOKEN)).glob("*.usage"))


def test_the_meter_records_the_device_memory_of_a_longer_program(node: Node, own_home: Path, unmeasured: None) -> None:
    command = (sys.executable, "-m", "gpuyard", "sim-job", "--vram", "8G", "--seconds", "600")
    simulated = {"GPUYARD_SIMULATE": "2x24GB", "GPUYARD_HOME": str(own_home), "CUDA_VISIBLE_DEVICES": "0"}
    node.write(launch_of(1, *command, environment=simulated))
    process = node.start(environment={"CUDA_VISIBLE_DEVICES": "SIM-1"})
    usage_file = Path(node.submissions.path(TOKEN), "0.usage")
    wait_for(lambda: usage_file.exists() and json.loads(usage_file.read_text())["peaks_mb"], "peaks of the meter")
    process.terminate()
    assert process.wait(60) == 143
    end = node.end_of()
    assert end.usage is not None
    assert end.usage.peaks_mb == {"SIM-1": 8192.0}
    assert end.usage.ram_mb is not None
    assert end.usage.curve[0][1] == 8192.0
    assert end.usage.curve[0][0] > 2.0


def test_a_failed_meter_does_not_affect_the_program(node: Node, tmp_path: Path, pipe: Path, unmeasured: None) -> None:
    script = f"echo $$ > {tmp_path}/pid; read x < {pipe}; exit 6"
    node.write(shell(script, environment={"GPUYARD_SIMULATE": "nonsense"}))
    process = node.start(_METER_AFTER_S=0.0)
    assert process.stderr is not None
    wait_for(lambda: "nonsense" in process.stderr.readline(), "the meter's complaint")  # type: ignore[union-attr]
    let_go(pipe)
    assert process.wait(60) == 6
    end = node.end_of()
    assert end.word == "6"
    assert end.usage is not None
    assert end.usage.ram_mb is not None
