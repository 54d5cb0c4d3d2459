"""What a job takes from the shell that submitted it: umask, niceness and limits; which of its environment variables
look secret; and the variables that tell programs how many CPUs they have.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

# The names of resource limits without RLIMIT_, as in getrlimit(2).
LimitName: TypeAlias = Literal[
    "AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC", "RSS", "RTPRIO", "RTTIME",
    "SIGPENDING", "STACK",
]  # fmt: skip
UNLIMITED = -1
# The names of the processes that started the sender of a submission, the nearest first: its script, its shell.
Submitters: TypeAlias = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=100)], ...], Meta(max_length=16)]


class ShellSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`limits` are soft limits; -1 is no limit. What is not given is as in the daemon."""

    umask: Annotated[int, Meta(ge=0, le=0o777)] | None = None
    niceness: Annotated[int, Meta(ge=-20, le=19)] | None = None
    limits: dict[LimitName, Annotated[int, Meta(ge=UNLIMITED)]] = {}


def differences(wanted: ShellSettings, own: ShellSettings) -> ShellSettings:
    """Return the settings that differ from the daemon's own; only these have to be applied."""
    return ShellSettings(
        umask=None if wanted.umask == own.umask else wanted.umask,
        niceness=None if wanted.niceness == own.niceness else wanted.niceness,
        limits={name: soft for name, soft in wanted.limits.items() if own.limits.get(name) != soft},
    )


def unattainable(wanted: ShellSettings, own: ShellSettings, most: Mapping[str, int], *, is_root: bool) -> list[str]:
    """Return what the daemon may not give to a job, as texts. `most` are the daemon's hard limits."""
    found = [
        f"ulimit {name} {'unlimited' if soft == UNLIMITED else soft}: the daemon's hard limit is {most[name]}"
        for name, soft in wanted.limits.items()
        if not is_root and most.get(name, UNLIMITED) != UNLIMITED and (soft == UNLIMITED or soft > most[name])
    ]
    if not is_root and None not in (wanted.niceness, own.niceness) and (wanted.niceness or 0) < (own.niceness or 0):
        found.append(f"niceness {wanted.niceness}: the daemon's is {own.niceness}, and only root may lower it")
    return found


# TOKENIZERS_PARALLELISM, MAX_TOKENS, KEYMAP, PWD and AWS_REGION are no secrets.
_NAME = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|(TOKEN|KEY|_PWD|_PASS|_PAT)(_|\d*$)", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def secret_variables(environment: Mapping[str, str], patterns: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the variables that look secret, in order. `patterns` are further names, such as LAB_*, or
    with a "!" names that are no secrets; the last that matches counts. One too many costs little: a retry takes it from
    the shell that asks. A secret that is not found stays in the database."""
    found = []
    for name, value in environment.items():
        pattern = next((each for each in reversed(patterns) if fnmatchcase(name, each.removeprefix("!"))), None)
        looks_secret = _has_secret_name(name) or ("://" in value and _URL_WITH_PASSWORD.search(value) is not None)
        if looks_secret if pattern is None else not pattern.startswith("!"):
            found.append(name)
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)  # most submissions have the same names
def _has_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None


CPUS_VARIABLE = "GPUYARD_CPUS"


def thread_variables(cpus: float | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a program with this many declared CPUs, without those that the user has set."""
    if cpus is None:
        return {}
    count = str(max(1, int(cpus)))
    threads = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in environment]
    return dict.fromkeys((CPUS_VARIABLE, *threads), count)
