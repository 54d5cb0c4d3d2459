import os
import subprocess

import msgspec
import pytest

from gpuyard.system.processes import is_alive, start_time, this_process, tidy_label, user_name


def test_this_process_is_told_from_others_by_more_than_its_pid() -> None:
    me = this_process("train")
    assert (me.uid, me.pid, me.label) == (os.getuid(), os.getpid(), "train")
    assert me.user == user_name(os.getuid())
    assert is_alive(me)
    assert me.pid_started is not None
    assert not is_alive(msgspec.structs.replace(me, pid_started=me.pid_started - 100))
    assert not is_alive(msgspec.structs.replace(me, boot_id="an earlier boot"))
    assert not is_alive(msgspec.structs.replace(me, uid=me.uid + 1))
    assert is_alive(msgspec.structs.replace(me, boot_id=None, pid_started=None))


def test_a_process_that_has_ended_is_not_alive() -> None:
    program = subprocess.Popen(["true"])
    program.wait()
    ended = msgspec.structs.replace(this_process(), pid=program.pid)
    assert start_time(program.pid) is None
    assert not is_alive(ended)
    assert not is_alive(msgspec.structs.replace(ended, pid=10**30))


def test_a_user_without_a_name_is_shown_by_uid_and_a_label_without_controls() -> None:
    assert user_name(3_999_999_999) == "3999999999"
    assert tidy_label("two\nlines\x1b[31m\x07 ünï") == "two\\nlines\\x1b[31m\\x07 ünï"
    assert len(tidy_label("x" * 1000) or "") == 200
    assert tidy_label(None) is None


def test_without_a_boot_id_or_with_another_wall_clock_a_process_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    pslinux = pytest.importorskip("psutil._pslinux")
    booted = pslinux.boot_time()
    monkeypatch.setattr(pslinux, "boot_time", lambda: booted + 86_400.0)  # it is the wall clock minus the uptime
    assert start_time(os.getpid()) == me.pid_started
    assert is_alive(me)
    monkeypatch.setattr("gpuyard.system.processes.boot_id", lambda: None)
    assert this_process().boot_id is None
    assert is_alive(this_process())
