"""The commands `setup_workspace.sh` and `scheduler_main.sh`, for users of shell schedulers: other names for `gpuyard
workspace`, with the same errors and exit statuses."""

import sys

from gpuyard.ui.cli import main
from gpuyard.ui.cli.verbs import EXIT_USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def setup_workspace() -> None:
    folders = [argument for argument in sys.argv[1:] if argument != "--force"]
    if len(folders) != 1 or folders[0].startswith("-"):
        _exit_with_usage("usage: setup_workspace.sh DIR [--force]")
    _run("init", *(["--force"] if "--force" in sys.argv[1:] else []), *folders)


def scheduler_main() -> None:
    if len(sys.argv) < 4:
        _exit_with_usage("usage: scheduler_main.sh CONFIG_FILE WORKSPACE_DIR COMMAND [ARGS]")
    _, config, workspace, *command = sys.argv
    _run("--config", config, "--workspace", workspace, *command)


def _exit_with_usage(usage: str) -> "NoReturn":
    """Print the usage to standard output if the user asked for help, else to standard error with a failure status."""
    is_asked = sys.argv[1:] in (["-h"], ["--help"], ["help"])
    (sys.stdout if is_asked else sys.stderr).write(f"{usage}\n")
    sys.exit(0 if is_asked else EXIT_USAGE)


def _run(*arguments: str) -> None:
    sys.argv = ["gpuyard", "workspace", *arguments]
    main()
