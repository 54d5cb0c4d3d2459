"""The commands `setup_workspace.sh` and `scheduler_main.sh`, for users of shell schedulers.

Each is another name for `gpuyard workspace`, with the same errors and exit statuses.
"""

import sys

from gpuyard.ui.cli import main
from gpuyard.ui.cli.verbs import EXIT_USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_SETUP = "usage: setup_workspace.sh DIR [--force]"
_SCHEDULER = "usage: scheduler_main.sh CONFIG_FILE WORKSPACE_DIR COMMAND [ARGS]"
_FORCE = "--force"


def setup_workspace() -> None:
    arguments = sys.argv[1:]
    folders = [argument for argument in arguments if argument != _FORCE]
    if len(folders) != 1 or folders[0].startswith("-"):
        _exit_with_usage(_SETUP, arguments)
    _run("init", *([_FORCE] if _FORCE in arguments else []), *folders)


def scheduler_main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) < len(("CONFIG_FILE", "WORKSPACE_DIR", "COMMAND")):
        _exit_with_usage(_SCHEDULER, arguments)
    config, workspace, *command = arguments
    _run("--config", config, "--workspace", workspace, *command)


def _exit_with_usage(usage: str, arguments: list[str]) -> "NoReturn":
    """Print the usage to standard output if the user asked for help, else to standard error with a failure status."""
    is_asked = arguments in (["-h"], ["--help"], ["help"])
    (sys.stdout if is_asked else sys.stderr).write(f"{usage}\n")
    sys.exit(0 if is_asked else EXIT_USAGE)


def _run(*arguments: str) -> None:
    sys.argv = ["gpuyard", "workspace", *arguments]
    main()
