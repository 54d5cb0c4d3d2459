"""Real programs under a real keeper: what runs, and in which environment."""

import contextlib
import json
import os
import select
import signal
import stat
import sys
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.model.job import OutcomeKind
from gpuyard.ports import Launch
from tests.executables import write_executable
from tests.integration.engine_fixture import DEADLINE_S, launch_of, log_of, outcome_of, outcomes, wait_for

# Programs


def test_a_program_runs_and_its_output_is_in_its_log(engine: LocalEngine, folder: Path, tmp_path: Path) -> None:
    launch = launch_of(1, "sh", "-c", "pwd -P; echo wrong >&2", cwd=str(tmp_path))
    assert outcome_of(engine, launch).kind is OutcomeKind.SUCCEEDED
    assert log_of(folder, 1) == f"{tmp_path.resolve()}\nwrong\n"


def test_arguments_arrive_as_they_are(engine: LocalEngine, folder: Path) -> None:
    arguments = ["", " ", "a b", "$HOME", "`id`", "*", "\n", "'", '"', "\\", "-n", "ünï", "{}"]
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    outcome_of(engine, launch_of(1, sys.executable, "-c", script, *arguments))
    assert json.loads(log_of(folder, 1)) == arguments


def test_nothing_runs_before_it_is_started_and_discarded_attempts_never_run(
    engine: LocalEngine, tmp_path: Path
) -> None:
    engine.prepare(launch_of(1, "touch", str(tmp_path / "abandoned")), None)
    engine.discard_prepared()
    assert outcome_of(engine, launch_of(2, "true")).kind is OutcomeKind.SUCCEEDED
    engine.prepare(launch_of(3, "touch", str(tmp_path / "waits")), None)
    assert engine.ended() == []
    assert not list(tmp_path.glob("*a*s*"))
    engine.start_prepared()
    assert list(outcomes(engine)) == [3]
    assert (tmp_path / "waits").exists()
    assert not (tmp_path / "abandoned").exists()


def test_a_discarded_attempt_can_be_prepared_again(engine: LocalEngine) -> None:
    engine.prepare(launch_of(1, "true"), None)
    engine.discard_prepared()
    assert outcome_of(engine, launch_of(1, "sh", "-c", "exit 4")).status == 4


def test_many_attempts_at_once_all_start_and_their_ends_are_all_reported(engine: LocalEngine, folder: Path) -> None:
    count = 300
    for job_id in range(1, count + 1):
        engine.prepare(launch_of(job_id, "sh", "-c", f"echo {job_id}; exit {job_id % 100}"), None)
    engine.start_prepared()
    ended = outcomes(engine, count)
    assert {job_id: outcome.status for job_id, outcome in ended.items()} == {n: n % 100 for n in range(1, count + 1)}
    assert [log_of(folder, n) for n in range(1, count + 1)] == [f"{n}\n" for n in range(1, count + 1)]


def test_the_descriptor_is_readable_while_ends_are_left_to_report(engine: LocalEngine, folder: Path) -> None:
    """When very many attempts end together, only some are reported at once."""
    count = 120
    for job_id in range(1, count + 1):
        engine.prepare(launch_of(job_id, "true"), None)
    engine.start_prepared()
    wait_for(lambda: (folder / "journal").read_bytes().count(b" 0 ") == count, "the ends of all")
    ended: list[int] = []
    while len(ended) < count:
        assert select.select([engine.fileno()], [], [], DEADLINE_S)[0], f"{len(ended)} of {count} were reported"
        ended += [one.job_id for one in engine.ended()]
    assert sorted(ended) == list(range(1, count + 1))


def test_a_program_named_like_a_shell_builtin_is_run(engine: LocalEngine, tmp_path: Path) -> None:
    for name in ("exit", "export", "true", "find"):
        write_executable(tmp_path / name, "#!/bin/sh\nexit 7\n")
        launch = launch_of(1, name, "3", environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})
        assert outcome_of(engine, launch).status == 7


@pytest.mark.parametrize("places", ["bin:/usr/bin", ":/bin", "/bin:", "", "/nowhere:.:/bin"])
def test_relative_entries_of_path_are_relative_to_the_job_s_directory(
    engine: LocalEngine, tmp_path: Path, places: str
) -> None:
    program = tmp_path / ("bin/tool" if places.startswith("bin") else "tool")
    program.parent.mkdir(exist_ok=True)
    write_executable(program, "#!/bin/sh\nexit 9\n")
    assert outcome_of(engine, launch_of(1, "tool", cwd=str(tmp_path), environment={"PATH": places})).status == 9


def test_a_file_on_path_that_cannot_be_executed_is_skipped(engine: LocalEngine, tmp_path: Path) -> None:
    for place in ("plain", "folder/tool", "good"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "plain/tool").write_text("")
    write_executable(tmp_path / "good/tool", "#!/bin/sh\nexit 9\n")
    environment = {"PATH": f"{tmp_path}/plain:{tmp_path}/folder:{tmp_path}/good"}
    assert outcome_of(engine, launch_of(1, "tool", environment=environment)).status == 9


def test_a_script_without_an_interpreter_line_is_run_by_sh(engine: LocalEngine, folder: Path, tmp_path: Path) -> None:
    write_executable(tmp_path / "script", 'echo "$0" "$@"; exit 6\n')
    assert outcome_of(engine, launch_of(1, str(tmp_path / "script"), "a b", "c")).status == 6
    assert log_of(folder, 1) == f"{tmp_path}/script a b c\n"


def test_the_program_gets_the_name_it_was_called_by(engine: LocalEngine, folder: Path) -> None:
    outcome_of(engine, launch_of(1, "sh", "-c", "tr '\\0' '\\n' < /proc/$$/cmdline | head -n 1"))
    assert log_of(folder, 1) == "sh\n"


# Environment


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
    "BASH_FUNC_module%%": "() { echo hi\n}",
    "BASH_FUNC_printf%%": "() {  exit 9\n}",
    "BASH_FUNC_[%%": "() {  exit 9\n}",
    "a.b": "1",
    "ü": "2",
    "1": "3",
    "OPTIND": "many",
}


MUCH = {"LONG": "x" * 100_000, "ALSO": "y" * 100_000, **{f"NAME_{n}": "z" * 100 for n in range(5_000)}}


@pytest.mark.parametrize("path", ["/usr/bin:/bin", "", None])
@pytest.mark.parametrize("values", [{}, ODD_VALUES | ODD_NAMES, MUCH], ids=["plain", "odd", "much"])
def test_the_environment_is_exactly_that_of_the_launch(
    engine: LocalEngine, folder: Path, values: dict[str, str], path: str | None
) -> None:
    environment = values if path is None else {**values, "PATH": path}
    launch = Launch(job_id=1, attempt=1, command=("/usr/bin/env", "-0"), cwd="/tmp", environment=environment)
    assert outcome_of(engine, launch).kind is OutcomeKind.SUCCEEDED
    content = (folder / "logs/1.1.log").read_bytes()
    found = dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if item)
    own = {"GPUYARD_QUEUE": str(folder), "GPUYARD_PROGRESS": f"{folder}/logs/1.1.progress"}
    assert found == {**environment, **own}


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_a_job_has_the_daemon_s_umask_and_its_log_is_still_private(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        engine = LocalEngine(folder)
        outcome_of(engine, launch_of(1, "sh", "-c", "umask"))
    finally:
        os.umask(before)
    assert int(log_of(folder, 1), 8) == umask
    places = [folder, *folder.rglob("*")]
    assert len(places) == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in places if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in places if not path.is_dir()} == {0o600}
    engine.close()


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


@pytest.mark.parametrize("number", [None, 0, 50])
def test_a_job_inherits_its_streams_and_its_lease_and_no_other_descriptor(
    engine: LocalEngine, folder: Path, tmp_path: Path, number: int | None
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
        outcome_of(engine, launch_of(1, sys.executable, "-c", LIST_DESCRIPTORS), number)
    os.close(opened)
    found = json.loads(log_of(folder, 1))
    log = str(folder / "logs/1.1.log")
    expected = {"0": "/dev/null", "1": log, "2": log}
    assert found == (expected if number is None else {**expected, "8": str(tmp_path / "lease")})


def test_a_job_has_no_signal_ignored_or_blocked(engine: LocalEngine, folder: Path) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        outcome_of(engine, launch_of(1, "grep", "-E", "Sig(Blk|Ign):", "/proc/self/status"))
    finally:
        signal.signal(signal.SIGHUP, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    masks = [int(line.split()[1], 16) for line in log_of(folder, 1).splitlines()]
    of_the_c_library = 1 << 31 | 1 << 32  # reserved by the C library
    assert [mask & ~of_the_c_library for mask in masks] == [0, 0]


def test_input_comes_from_the_file_that_was_named(engine: LocalEngine, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in put").write_text("what was asked\n")
    outcome_of(engine, launch_of(1, "cat", stdin="in put", cwd=str(tmp_path)))
    assert log_of(folder, 1) == "what was asked\n"
