"""How `supervisor.sh` is called so that a shell between us and the program changes nothing of the job's environment.

A shell sets some variables for itself, forgets or stumbles over others. Those it is not given; the script puts them
back, or takes them away, just before the program runs. Names that no shell variable can have, such as those in which
bash keeps exported functions, are dropped by most shells; for them bash takes the place of sh and passes them on. The
one thing it changes is `_`, as it does for whatever it runs.
"""

import os
import shlex
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from gpuyard.ports import Launch

GATE_AT, LEASE_AT, JOURNAL_AT = 0, 8, 9
_SCRIPT = str(Path(__file__).with_name("supervisor.sh"))
# The last three are the script's own.
_KEPT_FROM_SHELL = (
    "PWD", "OLDPWD", "SHLVL", "IFS", "OPTIND", "PS4", "gpuyard_word", "gpuyard_place", "gpuyard_rest",
)  # fmt: skip
# A shell exports the first three by itself. The next three it has of its own and exports only where they were given.
_UNSET = "unset " + " ".join(name for name in _KEPT_FROM_SHELL if name not in ("IFS", "OPTIND", "PS4"))


class Command(Struct, frozen=True, kw_only=True):
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def __repr__(self) -> str:
        return f"Command({self.arguments[0]!r})"


def command(launch: Launch, log: str, umask: int) -> Command:
    passed, restore = _for_shell(launch.environment)
    arguments = (
        *_shell_for(launch.environment), _SCRIPT, f"{launch.job_id}.{launch.attempt}", f"{umask:03o}", log, launch.cwd,
        os.devnull if launch.stdin is None else launch.stdin, restore,
        _places(launch.environment.get("PATH")), *launch.command,
    )  # fmt: skip
    return Command(arguments=arguments, environment=passed)


def _for_shell(environment: dict[str, str]) -> tuple[dict[str, str], str]:
    """What the shell itself is given, and the commands that make it the job's environment again."""
    passed = environment.copy()
    kept = [(name, passed.pop(name)) for name in _KEPT_FROM_SHELL if name in passed]
    return passed, _UNSET + "".join([f"; unset {name}; export {name}={shlex.quote(value)}" for name, value in kept])


def _shell_for(environment: dict[str, str]) -> tuple[str, ...]:
    # dash ends where OPTIND is not a number, bash takes it for one until it is unset.
    is_plain = (
        "".join(environment).isascii() and all(map(str.isidentifier, environment)) and "OPTIND" not in environment
    )
    return _shells()[0 if is_plain else 1]


@lru_cache(maxsize=1)
def _shells() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The quick one, and the one that passes on everything; where there is no bash, odd names are lost."""
    bash = next((path for path in ("/bin/bash", "/usr/bin/bash") if os.access(path, os.X_OK)), None)
    if bash is None:
        return ("/bin/sh",), ("/bin/sh",)
    # -p keeps it from taking functions out of the environment, which could be named like what the script uses.
    careful = (bash, "--posix", "-p")
    is_sh = os.path.basename(os.path.realpath("/bin/sh")) == "bash"
    return careful if is_sh else ("/bin/sh",), careful


def _places(path: str | None) -> str:
    """Nothing where the shell can go by PATH itself; an empty entry there is the job's own directory."""
    places = (os.defpath if path is None else path).split(":")
    if path is not None and "" not in places:
        return ""
    return ":".join([place or "." for place in places]) + ":"
