"""Logs that exist before their attempts begin can be told from the empty logs of attempts that have begun."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.engines.common.unused_log import begin_log, create_log, is_unused

pytestmark = pytest.mark.linux  # elsewhere files have no sticky bit, and no prefetch queue exists


def begin(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    begin_log(descriptor)
    os.close(descriptor)


def create(log: Path) -> None:
    assert create_log(str(log))


def test_a_log_is_unused_until_its_attempt_begins(tmp_path: Path) -> None:
    log = tmp_path / "1.1.log"
    create(log)
    assert is_unused(log)
    begin(log)
    assert not is_unused(log)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_no_umask_hides_what_a_log_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        create(tmp_path / "1.1.log")
    finally:
        os.umask(before)
    assert is_unused(tmp_path / "1.1.log")


def test_an_unused_log_of_an_earlier_daemon_is_used_again(tmp_path: Path) -> None:
    log = tmp_path / "1.1.log"
    create(log)
    create(log)
    assert is_unused(log)


def test_a_log_that_never_was_unused_keeps_its_mode(tmp_path: Path) -> None:
    log = tmp_path / "1.1.log"
    log.touch(0o640)
    log.chmod(0o640)
    begin(log)
    assert stat.S_IMODE(log.stat().st_mode) == 0o640


def begun(log: Path) -> None:
    create(log)
    begin(log)


def written(log: Path) -> None:
    create(log)
    log.write_text("output\n", encoding="utf-8")


def link(log: Path) -> None:
    create(log.with_name("unused"))
    log.symlink_to(log.with_name("unused"))


def hard_link(log: Path) -> None:
    create(log.with_name("unused"))
    log.hardlink_to(log.with_name("unused"))


def sticky_pipe(log: Path) -> None:
    os.mkfifo(log)
    log.chmod(0o1600)


def sticky_folder(log: Path) -> None:
    log.mkdir()
    log.chmod(0o1700)


@pytest.mark.parametrize("make", [begun, written, link, hard_link, sticky_pipe, sticky_folder])
def test_what_else_is_in_its_place_is_neither_used_nor_changed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    log = tmp_path / "1.1.log"
    make(log)
    before = log.lstat()
    assert not create_log(str(log))
    assert not is_unused(log)
    after = log.lstat()
    assert (after.st_mode, after.st_ino, after.st_size) == (before.st_mode, before.st_ino, before.st_size)


def test_a_file_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "1.1.log"
    create(log)
    monkeypatch.setattr(os, "geteuid", lambda: log.stat().st_uid + 1)
    assert not is_unused(log)
    assert not create_log(str(log))


def test_where_no_log_can_be_created_there_is_none(tmp_path: Path) -> None:
    assert not create_log(str(tmp_path / "absent" / "1.1.log"))
