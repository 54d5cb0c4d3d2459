"""Checks that a command and its environment can be passed to a program."""

import os

from gpuyard.errors import UserError
from gpuyard.ports import Launch


def check_arguments(launch: Launch, environment: dict[str, str]) -> None:
    """Raise UserError for zero bytes, lone UTF-16 surrogates and variables without a proper name."""
    texts = (*launch.command, launch.cwd, launch.stdin or "", *environment, *environment.values())
    try:
        is_passable = b"\0" not in os.fsencode("".join(texts)) and "" not in environment
    except UnicodeEncodeError:
        is_passable = False
    if not is_passable or "=" in "".join(environment):
        raise UserError(
            f"the command of job {launch.job_id} cannot be passed to a program: an argument or variable has a zero byte"
            " or an incomplete character, or the name of a variable is invalid",
            hint="check its arguments, and the environment it was submitted with",
        )
