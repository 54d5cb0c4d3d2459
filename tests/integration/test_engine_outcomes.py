"""Reported outcomes: how a program ended, why it did not start, and which limit of the machine it hit."""

import os
import resource
import select
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.job import OutcomeKind
from tests.executables import write_executable
from tests.integration.engine_fixture import launch_of, log_of, outcome_of, outcomes, started, wait_for


@pytest.mark.parametrize(
    ("script", "expected"),
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
def test_a_failure_is_reported_with_its_cause(engine: LocalEngine, script: str, expected: tuple[int, str]) -> None:
    outcome = outcome_of(engine, launch_of(1, "sh", "-c", f"ulimit -c 0; {script}"))
    assert outcome.kind is OutcomeKind.FAILED
    assert (outcome.status, outcome.reason) == expected


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
def test_the_reason_why_a_program_cannot_start_is_reported_and_logged(
    engine: LocalEngine, folder: Path, change: dict[str, object], status: int
) -> None:
    fields: dict[str, object] = {"command": ("true",), **change}
    command = fields.pop("command")
    assert isinstance(command, tuple)
    outcome = outcome_of(engine, launch_of(1, *command, **fields))
    assert (outcome.kind, outcome.status) == (OutcomeKind.CANNOT_START, status)
    named = str(next(iter(change.values())) if "command" not in change else command[0])
    assert named in str(outcome.reason)
    assert log_of(folder, 1).startswith("gpuyard: ")
    assert named in log_of(folder, 1)


def test_a_program_whose_log_cannot_be_created_does_not_run(engine: LocalEngine, folder: Path, tmp_path: Path) -> None:
    (folder / "logs/1.1.log").mkdir()
    outcome = outcome_of(engine, launch_of(1, "touch", str(tmp_path / "ran")))
    assert outcome.kind is OutcomeKind.CANNOT_START
    assert "log" in str(outcome.reason)
    assert not (tmp_path / "ran").exists()


def test_a_long_journal_is_emptied_once_all_ends_are_reported(engine: LocalEngine, folder: Path) -> None:
    engine.adopt([])
    (folder / "journal").write_bytes(b"1.1 1 0 .\n" * 200_000)
    assert outcome_of(engine, launch_of(1, "sh", "-c", "exit 3")).status == 3
    assert (folder / "journal").stat().st_size > 1 << 20
    assert engine.ended() == []
    assert (folder / "journal").stat().st_size == 0
    assert outcome_of(engine, launch_of(2, "sh", "-c", "exit 4")).status == 4


def test_without_epoll_the_ends_of_programs_are_found_by_polling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "epoll")
    engine = LocalEngine(folder)
    assert engine.fileno() == -1
    engine.prepare(launch_of(1, "sh", "-c", "exit 3"), None)
    engine.prepare(launch_of(2, "true"), None)
    engine.start_prepared()
    ended: dict[int, int | None] = {}
    wait_for(
        lambda: ended.update((one.job_id, one.outcome.status) for one in engine.ended()) or len(ended) == 2, "both"
    )
    assert ended == {1: 3, 2: 0}
    engine.close()


def test_the_end_names_the_process_that_ended(engine: LocalEngine, folder: Path) -> None:
    started(engine, 1, "sh", "-c", "echo $$")
    started(engine, 2, "no-such-thing")
    ended: dict[int, int | None] = {}
    wait_for(lambda: ended.update((one.job_id, one.pid) for one in engine.ended()) or len(ended) == 2, "both")
    assert ended == {1: int(log_of(folder, 1)), 2: None}


@pytest.mark.parametrize("change", [{"command": ("true", "a\0b")}, {"cwd": "/a\0b"}, {"stdin": "a\0b"}])
def test_a_null_byte_in_a_command_or_path_is_a_user_error(engine: LocalEngine, change: dict[str, object]) -> None:
    launch = msgspec.structs.replace(launch_of(1, "true"), **change)
    with pytest.raises(UserError, match="cannot be passed"):
        engine.prepare(launch, None)
    assert outcome_of(engine, launch_of(2, "true")).kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize("name", ["", "A=B", "A\0B", "=", "\ud800"])
def test_an_invalid_environment_is_a_user_error(engine: LocalEngine, name: str) -> None:
    with pytest.raises(UserError, match="cannot be passed"):
        engine.prepare(launch_of(1, "true", environment={name: "1"}), None)
    assert outcome_of(engine, launch_of(2, "true")).kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize("program", ["true", "script"])
def test_a_command_longer_than_the_system_allows_fails_without_affecting_others(
    engine: LocalEngine, folder: Path, tmp_path: Path, program: str
) -> None:
    """A script without an interpreter line is executed twice: directly, and by `/bin/sh`."""
    write_executable(tmp_path / "script", "exit 0\n")
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    engine.prepare(launch_of(1, program, "x" * 200_000, environment=path), None)
    engine.prepare(launch_of(2, program, environment=path), None)
    engine.start_prepared()
    ended = outcomes(engine, 2)
    assert (ended[1].kind, ended[1].status) == (OutcomeKind.CANNOT_START, 126)
    assert "longer than the system allows" in str(ended[1].reason)
    assert "longer than the system allows" in log_of(folder, 1)
    assert ended[2].kind is OutcomeKind.SUCCEEDED


def test_a_command_that_is_too_long_only_with_its_interpreter_does_not_affect_others(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Find the longest command that runs. With one byte more the system accepts it alone, but not with `/bin/sh`."""
    write_executable(tmp_path / "s", "exit 0\n")
    stack, most = resource.getrlimit(resource.RLIMIT_STACK)[0], 6 << 20
    room = most if stack == resource.RLIM_INFINITY else min(stack // 4, most)
    arguments = ["x" * 100_000] * (room // 100_009 - 1)
    fits, too_long = 0, 240_000
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        rest = ["y" * (length // 2), "z" * (length - length // 2)]
        outcome = outcome_of(engine, launch_of(1, "./s", *arguments, *rest, cwd=str(tmp_path)))
        assert outcome.kind in (OutcomeKind.SUCCEEDED, OutcomeKind.CANNOT_START)
        fits, too_long = (length, too_long) if outcome.kind is OutcomeKind.SUCCEEDED else (fits, length)
    assert 0 < fits < 239_999


def test_a_named_pipe_as_input_is_refused_and_does_not_block_others(
    engine: LocalEngine, folder: Path, pipe: Path
) -> None:
    engine.prepare(launch_of(1, "cat", stdin=str(pipe)), None)
    engine.prepare(launch_of(2, "true"), None)
    engine.start_prepared()
    ended = outcomes(engine, 2)
    assert ended[1].kind is OutcomeKind.CANNOT_START
    assert "is a named pipe" in str(ended[1].reason)
    assert "is a named pipe" in log_of(folder, 1)
    assert ended[2].kind is OutcomeKind.SUCCEEDED


# Numbers above the lowest free one: some of them may be taken in this process.
_ROOMS = 40


def test_running_out_of_descriptors_is_a_fault_and_leaks_none(engine: LocalEngine, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    faults = 0
    for room in range(_ROOMS):
        before = set(os.listdir("/proc/self/fd"))
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, hard))
        try:
            engine.prepare(launch_of(1, "touch", str(tmp_path / "ran")), None)
        except EnvironmentFault:
            faults += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert set(os.listdir("/proc/self/fd")) == before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < faults < _ROOMS
    engine.discard_prepared()
    assert outcome_of(engine, launch_of(2, "true")).kind is OutcomeKind.SUCCEEDED
    assert not (tmp_path / "ran").exists()


def test_an_unusable_folder_is_a_fault_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="file cannot be created"):
        LocalEngine(tmp_path / "file")
