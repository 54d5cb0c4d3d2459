"""The workspace of a command, the command line to type for it, and the help text."""

import os
import shlex
from pathlib import Path

from msgspec import Struct

from gpuyard.recipes.workspace.settings import CONFIG_FILE
from gpuyard.ui.cli.terminal import absolute

_SCRIPT = "scheduler.sh"


class WorkspaceLocation(Struct, frozen=True, kw_only=True):
    """A workspace; `config` is None for its own scheduler_config.yml."""

    workspace: Path
    config: Path | None = None

    @classmethod
    def of(cls, workspace: str | None, config: str | None) -> "WorkspaceLocation":
        folder = Path(absolute("." if workspace is None else workspace))
        file = None if config is None else Path(absolute(config))
        return cls(workspace=folder, config=None if file == folder / CONFIG_FILE else file)

    def command(self, *arguments: str) -> str:
        """Return the command line to type in the current directory; the workspace's own script if it is equivalent."""
        script = self.workspace / _SCRIPT
        if self.config is None and os.access(script, os.X_OK):
            path = relative_path(script)
            shown = path if os.path.isabs(path) else min(f"./{path}", str(script), key=len)
            return shlex.join([shown, *arguments])
        folder = [] if str(self.workspace) == _current_directory() else ["--workspace", str(self.workspace)]
        file = [] if self.config is None else ["--config", str(self.config)]
        return shlex.join(["gpuyard", "workspace", *folder, *file, *arguments])


def relative_path(path: Path) -> str:
    inside = os.path.relpath(path, _current_directory())
    return str(path) if inside.startswith(os.pardir) else inside


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed meanwhile
        return os.sep


_HELP = """\
Usage: {me} COMMAND

A workspace is a folder with a YAML file for each experiment in configs/.
Each becomes a job of the queue, on a GPU, in its own tmux session;
out/NAME_completed.txt marks a completed one.

Commands:
  start [CONFIGS] [GPUS]  start every config, or CONFIGS (a list, or words);
                          on free GPUs, or on GPUS, one for each config
        --rerun           run completed configs again
  status                  state of each config, and estimated time left
        --watch           until all have finished; Ctrl-C only stops watching
        --json            for scripts
  stop                    start no new tasks; running tasks finish
  kill-all                kill all tasks, running or waiting; close the sessions
  config [--json]         effective settings, and where each comes from
  help                    this help
  init DIR                create a workspace in DIR; existing files are kept
        --force           replace its scheduler.sh, with a backup, and say
                          whether start would accept the workspace

Options, before the command:
  --workspace DIR         the workspace [the current directory]
  --config FILE           its configuration [scheduler_config.yml in it]

Examples:
  {all}
  {some}
  {watch}
  tmux attach -t TASK_exp1_gpu0     watch exp1, if task_name is TASK

Exit status:
  0  success; start: all requested configs run, wait or are completed
  1  a problem on this machine; status --watch: a task failed;
     kill-all: a task did not end
  2  a mistake in the command line or the configuration;
     start: some configs were refused
"""


def help_text(place: WorkspaceLocation) -> str:
    return _HELP.format(
        me=place.command(),
        all=place.command("start"),
        some=place.command("start") + ' "heavy.yml,light.yml,test.yml" "1,0,0"',
        watch=place.command("status", "--watch"),
    ).rstrip()
