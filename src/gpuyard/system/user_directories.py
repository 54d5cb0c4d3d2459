"""The directories of a user's files. It imports only `os` and `sys`, because every command imports it."""

import os
import sys


def user_directory(variable: str, default: str) -> str:
    """Return `GPUYARD_HOME`, or gpuyard's directory by the XDG rules, or the usual one of macOS.

    Ignores a relative path in the XDG `variable`.
    """
    home = os.environ.get("GPUYARD_HOME")
    if home:
        home = os.path.expanduser(home)
        return home if os.path.isabs(home) else os.path.join(os.getcwd(), home)
    named = os.environ.get(variable, "").strip()
    if not os.path.isabs(named):
        named = os.path.expanduser("~/Library/Application Support" if sys.platform == "darwin" else default)
    return os.path.join(named, "gpuyard")
