"""Errors of the system when a program is started: which ones pass, what they say, and what they leave behind."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpuyard.engines.common import spawn_program
from gpuyard.engines.common.program_outcome import StartContext, limit_of, outcome_of
from gpuyard.engines.common.spawn_program import SpawnSpec, StartFailure, spawn
from gpuyard.model.job import OutcomeKind

PASSING = [
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS,
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spawn` changes the directory of its process, which is back where it was after the test."""
    monkeypatch.chdir(tmp_path)


def raising(number: int, only: str = "") -> Callable[..., Any]:
    """Return a function that fails with this error, for paths that contain `only`."""

    def fail(path: str, *arguments: Any, **options: Any) -> Any:
        if only in str(path):
            raise OSError(number, os.strerror(number))
        return original(path, *arguments, **options)

    original = os.stat if only else _never
    return fail


def _never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError


def word_of(tmp_path: Path, **changes: Any) -> str:
    """Start a program that cannot be started, and return the word for it."""
    spec = SpawnSpec(("true",), {"PATH": os.defpath}, "/", ((str(tmp_path / "log"), 1),), "")
    null = os.open(os.devnull, os.O_RDWR)
    try:
        with pytest.raises(StartFailure) as failure:
            spawn(spec._replace(**changes), None, null)
    finally:
        os.close(null)
    return failure.value.word


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("call", ["open", "chdir", "posix_spawn"])
def test_a_limit_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    before = os.getcwd()
    with monkeypatch.context() as patched:
        if call == "open":
            patched.setattr(spawn_program, "_open_log", _open_log_failing(number))
        else:
            patched.setattr(os, call, raising(number))
        word = word_of(tmp_path)
    os.chdir(before)
    assert outcome_of(word, StartContext()).kind is OutcomeKind.NEVER_STARTED
    limit = limit_of(word)
    assert limit is not None
    assert os.strerror(number) in limit.text
    assert limit.remedy
    assert not (tmp_path / "log").exists()


def _open_log_failing(number: int) -> Callable[[str], int]:
    open_log = spawn_program._open_log

    def fail(path: str) -> int:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "open", raising(number))
            return open_log(path)

    return fail


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ELOOP])
def test_any_other_error_is_the_job_s_own_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "chdir", raising(number))
    assert word_of(tmp_path) == "no-directory"
    assert "cannot be entered" in (tmp_path / "log").read_text()


def test_an_unreadable_disk_on_the_path_hides_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", raising(errno.EIO, "/broken/"))
    word = word_of(tmp_path, command=("no-such-program",), environment={"PATH": f"/broken:{os.defpath}"})
    assert word == "unbegun-program-eio"
    limit = limit_of(word)
    assert limit is not None
    assert limit.is_own
    null = os.open(os.devnull, os.O_RDWR)
    spec = SpawnSpec(("true",), {"PATH": f"/broken:{os.defpath}"}, "/", ((str(tmp_path / "log"), 1),), "")
    os.waitpid(spawn(spec, None, null), 0)
    os.close(null)


def test_a_full_disk_that_hides_the_reason_means_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", raising(errno.ENOSPC))
    assert word_of(tmp_path, directory="/no/such") == "unbegun-log-enospc"


@pytest.mark.parametrize(("number", "is_own"), [(errno.EIO, True), (errno.EMFILE, False), (errno.ENOMEM, False)])
def test_a_file_of_the_job_concerns_no_other_unless_the_system_lacks_something(number: int, *, is_own: bool) -> None:
    limit = limit_of(f"unbegun-input-{errno.errorcode[number].lower()}")
    assert limit is not None
    assert limit.is_own is is_own


@pytest.mark.parametrize("word", ["unbegun", "unbegun-x-enospc", "unbegun-log-nonsense", "0", "no-program", ""])
def test_other_words_name_no_limit(word: str) -> None:
    assert limit_of(word) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
@pytest.mark.parametrize("cpus", [(0,), (100_000,)], ids=["one", "refused by the system"])
def test_a_start_leaves_our_own_cpus_as_they_were(tmp_path: Path, cpus: tuple[int, ...]) -> None:
    before = os.sched_getaffinity(0)
    allowed = cpus if cpus[0] == 100_000 else (min(before),)
    spec = SpawnSpec(("true",), {"PATH": os.defpath}, "/", ((str(tmp_path / "log"), 1),), "", cpus=allowed)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        assert os.waitpid(spawn(spec, None, null), 0)[1] == 0
        assert os.sched_getaffinity(0) == before
        assert word_of(tmp_path, command=("no-such-program",), cpus=allowed) == "no-program"
        assert os.sched_getaffinity(0) == before
    finally:
        os.close(null)
