"""Umask, niceness and limits of the submitting shell: what differs from the daemon's, and what it may not give."""

import os
import resource

import msgspec
import pytest

from gpuyard.engines.local.engine import OwnShell
from gpuyard.model.shell_environment import (
    UNLIMITED,
    ShellSettings,
    differences,
    secret_variables,
    thread_variables,
    unattainable,
)
from gpuyard.system.submitting_shell import hard_limits, read_shell_settings

OWN = ShellSettings(umask=0o022, niceness=5, limits={"NOFILE": 1024, "CORE": 0})


def test_settings_are_read_and_only_differences_applied() -> None:
    assert differences(OWN, OWN) == ShellSettings(), "only differences have to be applied"
    assert differences(ShellSettings(umask=0o077, niceness=5, limits={"NOFILE": 1024, "CORE": UNLIMITED}), OWN) == (
        ShellSettings(umask=0o077, limits={"CORE": UNLIMITED})
    )
    # A process reads its own settings.
    before = os.umask(0o135)
    try:
        found = msgspec.convert(read_shell_settings(), ShellSettings)
    finally:
        os.umask(before)
    assert (found.umask, found.niceness) == (0o135, os.getpriority(os.PRIO_PROCESS, 0))
    assert (found.limits["NOFILE"], hard_limits()["NOFILE"]) == resource.getrlimit(resource.RLIMIT_NOFILE)
    found = read_shell_settings()["limits"]
    assert found.keys() == hard_limits().keys()
    assert found["CORE"] == resource.getrlimit(resource.RLIMIT_CORE)[0], "all limits of a shell are read"


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


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "TOKEN", "GITHUB_TOKEN_2", "WANDB_API_KEY", "OPENAI_APIKEY", "SSH_KEY", "KEY", "PGPASSWORD",
        "DB_PWD", "MYSQL_PASS", "GITHUB_PAT", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "CLIENT_SECRET", "my_secret",
        "GOOGLE_APPLICATION_CREDENTIALS", "GPG_PASSPHRASE",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert secret_variables({name: "x", "HOME": "/home/ada"}) == (name,)


@pytest.mark.parametrize(
    "name",
    ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYMAP", "XDG_PATH", "COMPASS", "AWS_REGION"],
)
def test_names_of_other_variables(name: str) -> None:
    assert secret_variables({name: "/x"}) == ()


def test_urls_with_passwords_and_patterns() -> None:
    urls = {"A_URL": "postgres://ada:pw@db:5432/runs", "B_URL": "http://proxy:3128", "C": "http://ada@host:80/x:y@z"}
    assert secret_variables(urls) == ("A_URL",), "a URL with a password is a secret"
    environment = dict.fromkeys(["LAB_CODE", "LAB_NAME", "GPG_KEY", "HF_TOKEN"], "x")
    assert secret_variables(environment, ("LAB_*", "!LAB_NAME", "!GPG_KEY")) == ("HF_TOKEN", "LAB_CODE")
    assert secret_variables(environment, ("!*",)) == (), "patterns add names and take names out and the last counts"
    assert secret_variables(environment, ("!*", "HF_*")) == ("HF_TOKEN",)


@pytest.mark.parametrize(
    ("cpus", "environment", "variables"),
    [
        (None, {}, {}),
        (4, {}, {"GPUYARD_CPUS": "4", "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}),
        (4, {"OMP_NUM_THREADS": "1"}, {"GPUYARD_CPUS": "4", "MKL_NUM_THREADS": "4"}),
        (0.5, {}, {"GPUYARD_CPUS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
    ],
)
def test_own_threads_stay(cpus: float | None, environment: dict[str, str], variables: dict[str, str]) -> None:
    assert thread_variables(cpus, environment) == variables
