"""Which workspace a command is about, what a person types for it there, and the help that says so."""

import os
import shlex
from pathlib import Path

from msgspec import Struct

from gpuyard.recipes.workspace.settings import CONFIG_FILE
from gpuyard.ui.cli.recipes.batch_options import absolute

_SCRIPT = "scheduler.sh"


class WorkspaceLocation(Struct, frozen=True, kw_only=True):
    """`config` is `None` where it is the workspace's own."""

    workspace: Path
    config: Path | None = None

    @classmethod
    def of(cls, workspace: str | None, config: str | None) -> "WorkspaceLocation":
        folder = Path(absolute("." if workspace is None else workspace))
        file = None if config is None else Path(absolute(config))
        return cls(workspace=folder, config=None if file == folder / CONFIG_FILE else file)

    def command(self, *words: str) -> str:
        """As it is typed from here: by the workspace's own script, where that means the same."""
        script = self.workspace / _SCRIPT
        if self.config is None and os.access(script, os.X_OK):
            return shlex.join([_typed_from_here(script), *words])
        folder = [] if str(self.workspace) == _here() else ["--workspace", str(self.workspace)]
        file = [] if self.config is None else ["--config", str(self.config)]
        return shlex.join(["gpuyard", "workspace", *folder, *file, *words])


def seen_from_here(path: Path) -> str:
    """From the current directory, where it is in there."""
    inside = os.path.relpath(path, _here())
    return str(path) if inside.startswith(os.pardir) else inside


def _typed_from_here(script: Path) -> str:
    seen = seen_from_here(script)
    return seen if os.path.isabs(seen) else min(f"./{seen}", str(script), key=len)


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it under our feet
        return os.sep


_HELP = """\
Usage: {me} COMMAND

A workspace is a folder with a YAML file for each experiment in configs/.
Each becomes a job of the queue, on a GPU, in a tmux session of its own;
out/NAME_completed.txt says that one is done.

Commands:
  start [CONFIGS] [GPUS]  start every config, or those named; on GPUs that are
                          chosen for them, or on those named, one for each
        --rerun           run completed ones again
  status                  how each one stands, and when all may be done
        --watch           until all is over; Ctrl-C only ends the watching
        --json            for scripts
  stop                    start nothing new; what runs comes to its end
  kill-all                end all that runs or waits, and close the sessions
  config [--json]         what is set, and where each value comes from
  help                    this
  init DIR                make a workspace in DIR; what is there is kept
        --force           make its scheduler.sh anew, and keep a copy

Options, before the command:
  --workspace DIR         the workspace [the current directory]
  --config FILE           its configuration [scheduler_config.yml in it]

Examples:
  {all}
  {some}
  {watch}
  tmux attach -t TASK_exp1_gpu0     exp1 at work, where task_name is TASK

Exit status:
  0  it worked; start: all that was asked for is under way or done
  1  something on this machine stands in the way; status --watch: some failed;
     kill-all: some have not ended
  2  what was typed or configured is wrong, and the message says where;
     start: some configs were refused
"""


def help_text(place: WorkspaceLocation) -> str:
    return _HELP.format(
        me=place.command(),
        all=place.command("start"),
        some=place.command("start") + ' "heavy.yml,light.yml,test.yml" "1,0,0"',
        watch=place.command("status", "--watch"),
    ).rstrip()
