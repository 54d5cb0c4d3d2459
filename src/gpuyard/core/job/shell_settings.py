"""What a job takes from the shell that submitted it, beside its directory and environment: umask, niceness, limits."""

from collections.abc import Mapping
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
        f"ulimit {name} {_text(soft)}: the daemon's hard limit is {most[name]}"
        for name, soft in wanted.limits.items()
        if not is_root and most.get(name, UNLIMITED) != UNLIMITED and (soft == UNLIMITED or soft > most[name])
    ]
    if not is_root and None not in (wanted.niceness, own.niceness) and (wanted.niceness or 0) < (own.niceness or 0):
        found.append(f"niceness {wanted.niceness}: the daemon's is {own.niceness}, and only root may lower it")
    return found


def _text(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)
