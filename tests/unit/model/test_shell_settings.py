"""Umask, niceness and limits of the submitting shell: what differs from the daemon's, and what it may not give."""

import os
import resource

import msgspec
import pytest

from gpuyard.engines.local.engine import OwnShell
from gpuyard.model.shell_environment import UNLIMITED, ShellSettings, differences, unattainable
from gpuyard.system.submitting_shell import hard_limits, read_shell_settings

OWN = ShellSettings(umask=0o022, niceness=5, limits={"NOFILE": 1024, "CORE": 0})


def test_only_differences_have_to_be_applied() -> None:
    assert differences(OWN, OWN) == ShellSettings()
    assert differences(ShellSettings(umask=0o077, niceness=5, limits={"NOFILE": 1024, "CORE": UNLIMITED}), OWN) == (
        ShellSettings(umask=0o077, limits={"CORE": UNLIMITED})
    )


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (ShellSettings(niceness=0), ["niceness 0: the daemon's is 5, and only root may lower it"]),
        (ShellSettings(niceness=19, limits={"NOFILE": 4096}), []),
        (ShellSettings(limits={"NOFILE": 5000}), ["ulimit NOFILE 5000: the daemon's hard limit is 4096"]),
        (ShellSettings(limits={"NOFILE": UNLIMITED}), ["ulimit NOFILE unlimited: the daemon's hard limit is 4096"]),
        (ShellSettings(limits={"CORE": UNLIMITED}), []),
    ],
)
def test_what_the_daemon_may_not_give_is_named(wanted: ShellSettings, texts: list[str]) -> None:
    most = {"NOFILE": 4096, "CORE": UNLIMITED}
    assert unattainable(wanted, OWN, most, is_root=False) == texts
    assert unattainable(wanted, OWN, most, is_root=True) == []


def test_a_process_reads_its_own_settings() -> None:
    before = os.umask(0o135)
    try:
        found = msgspec.convert(read_shell_settings(), ShellSettings)
    finally:
        os.umask(before)
    assert (found.umask, found.niceness) == (0o135, os.getpriority(os.PRIO_PROCESS, 0))
    assert (found.limits["NOFILE"], hard_limits()["NOFILE"]) == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_all_limits_of_a_shell_are_read() -> None:
    found = read_shell_settings()["limits"]
    assert found.keys() == hard_limits().keys()
    assert found["CORE"] == resource.getrlimit(resource.RLIMIT_CORE)[0]


def test_a_job_from_a_shell_like_the_daemon_s_needs_no_change() -> None:
    own = OwnShell(1000)
    settings = read_shell_settings()
    settings["limits"]["NOFILE"] = 1000
    same = msgspec.convert(settings, ShellSettings)
    assert own.changes(None) == own.changes(same) == (1000, None)
    files = msgspec.structs.replace(same, limits={**same.limits, "NOFILE": 3})
    assert own.changes(files) == (9, None)  # the lease's descriptor fits
    nicer = msgspec.structs.replace(same, niceness=19, limits={**same.limits, "CORE": 7})
    assert own.changes(nicer) == (1000, (None, 19, {resource.RLIMIT_CORE: 7}))
