"""Make a path from the command line absolute."""

import os

from gpuyard.errors import UserError


def absolute(path: str) -> str:
    if not path:
        raise UserError("a path is empty", hint="name a folder, or leave the option out")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory no longer exists", hint="change to another one") from None
