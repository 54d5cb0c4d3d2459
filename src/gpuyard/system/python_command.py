"""Commands that run a module of this package in a new process."""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def python_command(module: str, *arguments: str, options: tuple[str, ...] = ("-I",)) -> tuple[str, ...]:
    """Return a command that calls `main()` of a module of this installation, in any directory and environment.

    The default option isolates Python from both; with "-S" the module gets the standard library and this package only.
    """
    code = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()"
    return sys.executable, *options, "-c", code, _ROOT, *arguments
