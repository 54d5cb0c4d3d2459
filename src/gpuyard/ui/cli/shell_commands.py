"""The commands `setup_workspace.sh` and `scheduler_main.sh`, for those who come from shell schedulers.

Each is another name for `gpuyard workspace`; errors and exit statuses are the same.
"""

import sys

from gpuyard.ui.cli import EXIT_USAGE, main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_SETUP = "usage: setup_workspace.sh DIR [--force]"
_SCHEDULER = "usage: scheduler_main.sh CONFIG_FILE WORKSPACE_DIR COMMAND [ARGS]"
_FORCE = "--force"


def setup_workspace() -> None:
    words = sys.argv[1:]
    folders = [word for word in words if word != _FORCE]
    if len(folders) != 1 or folders[0].startswith("-"):
        _tell_usage(_SETUP, words)
    _run("init", *([_FORCE] if _FORCE in words else []), *folders)


def scheduler_main() -> None:
    words = sys.argv[1:]
    if len(words) < len(("CONFIG_FILE", "WORKSPACE_DIR", "COMMAND")):
        _tell_usage(_SCHEDULER, words)
    config, workspace, *command = words
    _run("--config", config, "--workspace", workspace, *command)


def _tell_usage(usage: str, words: list[str]) -> "NoReturn":
    """An answer where it was asked for, else a complaint."""
    is_asked = words in (["-h"], ["--help"], ["help"])
    (sys.stdout if is_asked else sys.stderr).write(f"{usage}\n")
    sys.exit(0 if is_asked else EXIT_USAGE)


def _run(*words: str) -> None:
    sys.argv = ["gpuyard", "workspace", *words]
    main()
