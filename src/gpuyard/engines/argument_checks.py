"""What can be passed to a program: no zero bytes, no half characters, variables with names."""

import os

from gpuyard.errors import UserError
from gpuyard.ports import Launch


def refuse_unpassable(launch: Launch, environment: dict[str, str]) -> None:
    texts = (*launch.command, launch.cwd, launch.stdin or "", *environment, *environment.values())
    try:
        is_passable = b"\0" not in os.fsencode("".join(texts)) and "" not in environment
    except UnicodeEncodeError:
        is_passable = False
    if not is_passable or "=" in "".join(environment):
        raise UserError(
            f"the command of job {launch.job_id} cannot be passed to a program: something in it has a zero byte, half a"
            " character, or is no name for a variable",
            hint="see its arguments and the environment it was submitted with",
        )
