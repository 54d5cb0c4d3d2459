"""`gpuyard workspace`: runs every config of a folder as a job. `scheduler.sh` in a workspace calls it.

Names of configs and GPUs on the command line are data: they may start with a dash.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import GpuyardError, UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_count
from gpuyard.recipes.workspace.prepare_sweep import split_lists
from gpuyard.recipes.workspace.settings import CONFIG_FILE, LoadedSettings, WorkspaceSettings, keys_in, load
from gpuyard.recipes.workspace.sweep import StartedSweep, check, kill_all, start, stop
from gpuyard.recipes.workspace.sweep_status import SweepStatus, read_sweep_status
from gpuyard.recipes.workspace.workspace_files import init, marker_path
from gpuyard.ui.cli.command_grammar import JSON, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.terminal import absolute, is_terminal, note, paint, say, say_json, say_lines, terminal_size
from gpuyard.ui.cli.text_table import Column, cell_width, clean, join_cells, lay_out, pad
from gpuyard.ui.cli.verbs import EXIT_FAULT, EXIT_USAGE
from gpuyard.ui.views import Frame
from gpuyard.ui.views.workspace_table import changes_of, describe_logs, picture_of, summary_of


class WorkspaceLocation(Struct, frozen=True, kw_only=True):
    """A workspace; `config` is None for its own scheduler_config.yml."""

    workspace: Path
    config: Path | None = None

    @classmethod
    def of(cls, typed: Typed) -> "WorkspaceLocation":
        workspace, config = typed.text("workspace"), typed.text("config")
        folder = Path(absolute("." if workspace is None else workspace))
        file = None if config is None else Path(absolute(config))
        return cls(workspace=folder, config=None if file == folder / CONFIG_FILE else file)

    def command(self, *arguments: str) -> str:
        """Return the command line to type in the current directory; the workspace's own script if it is equivalent."""
        script = self.workspace / "scheduler.sh"
        if self.config is None and os.access(script, os.X_OK):
            path = _relative_path(script)
            shown = path if os.path.isabs(path) else min(f"./{path}", str(script), key=len)
            return shlex.join([shown, *arguments])
        folder = [] if str(self.workspace) == _current_directory() else ["--workspace", str(self.workspace)]
        file = [] if self.config is None else ["--config", str(self.config)]
        return shlex.join(["gpuyard", "workspace", *folder, *file, *arguments])


def _relative_path(path: Path) -> str:
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


def _help(typed: Typed) -> str:
    place = WorkspaceLocation.of(typed)
    return _HELP.format(
        me=place.command(),
        all=place.command("start"),
        some=place.command("start") + ' "heavy.yml,light.yml,test.yml" "1,0,0"',
        watch=place.command("status", "--watch"),
    ).rstrip()


def run(typed: Typed) -> int:
    say(_help(typed))
    return 0


def _init(typed: Typed) -> int:
    folder = Path(absolute(typed.arguments[0]))
    was_workspace = (folder / CONFIG_FILE).exists()
    made = init(folder, force=typed.flag("force"))
    for path in made.created:
        say(f"created  {clean(_relative_path(path))}")
    for path, backup in made.backed_up:
        say(f"replaced {clean(_relative_path(path))}; backup: {clean(backup.name)}")
    for path in made.kept:
        say(f"kept     {clean(_relative_path(path))}")
    to_start = WorkspaceLocation(workspace=made.folder).command("start")
    if was_workspace:
        _show_what_start_would_do(made.folder, to_start)
        return 0
    say("Next: edit scheduler_config.yml, and put a YAML file for each task into configs/.")
    say(f"To start them:  {to_start}")
    return 0


def _show_what_start_would_do(folder: Path, to_start: str) -> None:
    """Show which keys of an earlier configuration are settings, which are unknown, and whether `start` accepts it."""
    try:
        known, unknown = keys_in(folder / CONFIG_FILE)
        say(f"settings {clean(', '.join(known) or 'none: each has its default')}")
        if unknown:
            say(f"unknown  {clean(', '.join(unknown))}")
        loaded = load(folder)
        configs, notes = check(loaded)
    except GpuyardError as error:
        say(f"`{to_start}` would refuse it:")
        for line in [*str(error).splitlines(), *filter(None, [error.hint])]:
            say(f"  {clean(line)}")
        return
    done = sum(os.path.lexists(marker_path(loaded.settings, config)) for config in configs)
    for text in notes:
        note(f"gpuyard: {clean(text)}")
    say(f"`{to_start}` would accept it: {format_count(len(configs), 'config')}, {done} of them completed.")


def _start(typed: Typed) -> int:
    place = WorkspaceLocation.of(typed)
    loaded = load(place.workspace, place.config)
    configs, gpus = split_lists(loaded.settings, tuple(typed.arguments))
    if len(gpus) > 1:
        raise UserError(
            f"after the configs, start takes one list of GPUs, not {len(gpus)}: {' '.join(gpus)}",
            hint=f'separate names with commas: {place.command("start")} "heavy.yml,light.yml" "1,0"',
        )
    started = start(loaded, configs, next(iter(gpus), None), is_rerun=typed.flag("rerun"), engine=typed.text("engine"))
    rows = [
        (each.config, f"job {each.job}" + ("" if each.gpu is None else f", GPU {each.gpu}"), "green")
        for each in started.submitted
    ]
    rows += [(config, f"skipped: {why}", "dim") for config, why in started.skipped]
    rows += [(config, f"refused: {why}", "red") for config, why in started.refused]
    _, *lines = lay_out([Column("")] * 2, [each[:2] for each in rows], None)
    for (_, _, style), (config, what) in zip(rows, lines, strict=True):
        say(join_cells([config, paint(what.rstrip(), style)]))
    for text in started.notes:
        note(f"gpuyard: {clean(text)}")
    say(*_next_steps(started, place))
    return EXIT_USAGE if started.refused else 0


def _next_steps(started: StartedSweep, place: WorkspaceLocation) -> Iterator[str]:
    if not started.submitted and not started.refused:
        yield f"Nothing to do: {format_count(len(started.skipped), 'config')}, all completed, running or waiting."
    if any(why.startswith("completed") for _, why in started.skipped):
        yield f"To run completed configs again:  {place.command('start', '--rerun')}"
    yield from describe_logs([(each.config, each.log) for each in started.submitted if each.log is not None])
    if started.submitted:
        if started.submitted[0].log is None:
            yield "To see their output:  gpuyard logs -f JOB"
        yield f"To see their status:  {place.command('status')}"
    if started.session is not None:
        yield f"To watch them:  tmux attach -t {started.session}"


def _stop(typed: Typed) -> int:
    place = WorkspaceLocation.of(typed)
    cancelled, running = stop(place.workspace, _settings_if_valid(place))
    finish = (
        f"{format_count(running, 'task')} {'finishes' if running == 1 else 'finish'}" if running else "no task runs"
    )
    say(f"Stopped: {finish}; {format_count(cancelled, 'waiting task')} will not start.")
    say(f"To continue:  {place.command('start')}")
    return 0


def _kill_all(typed: Typed) -> int:
    place = WorkspaceLocation.of(typed)
    ended, left, closed = kill_all(place.workspace, _settings_if_valid(place))
    say(f"{format_count(ended, 'task')} ended, {format_count(closed, 'session')} closed.")
    if left:
        note(f"gpuyard: still running after they were killed: {clean(', '.join(left))}")
    return EXIT_FAULT if left else 0


def _status(typed: Typed) -> int:
    as_json, is_watched = typed.flag("json"), typed.flag("watch")
    if as_json and is_watched:
        raise UserError("--json and --watch exclude each other", hint="leave one of them out")
    place = WorkspaceLocation.of(typed)
    loaded = load(place.workspace, place.config)
    if is_watched:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        show_all = _show_in_place if is_terminal(sys.stdout) else _print_changes
        try:
            return EXIT_FAULT if show_all(_statuses(loaded)).counts["failed"] else 0
        except KeyboardInterrupt:  # the normal end; the last status stays on the screen
            return 0
    with RetryingClient() as queue:
        status = read_sweep_status(loaded, queue)
    if not as_json:  # all lines, however many: the most important ones are at the end
        say_lines(picture_of(status, Frame(width=terminal_size()[0], has_symbols=is_terminal(sys.stdout))))
        return 0
    own = {"workspace": status.workspace, "task_name": status.task_name, "tag": status.tag, "counts": status.counts}
    flags = {"over": status.is_over, "stopped": status.is_stopped, "paused": status.is_paused}
    tasks = {"left_s": status.left_s, "why": status.why, "notes": (), "tasks": to_builtins(status.rows)}
    say_json({**own, **flags, **tasks})
    return 0


def _statuses(loaded: LoadedSettings) -> Iterator[SweepStatus]:
    with RetryingClient() as queue:
        while True:
            status = read_sweep_status(loaded, queue)
            yield status
            if status.is_over:
                return
            time.sleep(1)


def _show_in_place(statuses: Iterator[SweepStatus]) -> SweepStatus:
    from gpuyard.ui.views.live_display import LiveDisplay

    with LiveDisplay(sys.stdout) as shown:
        for status in statuses:
            frame = shown.frame()
            # The last status stays on the screen and may be higher than the screen.
            shown.draw(picture_of(status, replace(frame, height=None) if status.is_over else frame))
    return status


def _print_changes(statuses: Iterator[SweepStatus]) -> SweepStatus:
    before: SweepStatus | None = None
    for status in statuses:
        changes = [] if before is None else changes_of(before, status)
        if before is None or changes or (status.is_over and not before.is_over):
            details = f": {', '.join(changes)}" if changes else ""
            say(f"{summary_of(status)}{details}")
            sys.stdout.flush()
        before = status
    assert before is not None
    return before


def _config(typed: Typed) -> int:
    place = WorkspaceLocation.of(typed)
    loaded = load(place.workspace, place.config)
    if typed.flag("json"):
        effective = {**to_builtins(loaded.settings), "env": list(loaded.settings.env)}
        settings = {key: {"value": effective[key], "from": source} for key, source in loaded.sources.items()}
        say_json({"workspace": str(loaded.workspace), "file": loaded.path, "settings": settings})
        return 0
    # People paste this output, and the values of `env` may be tokens.
    shown = {"env": ", ".join(loaded.settings.env)}
    rows = [(key, clean(shown.get(key) or value), source) for key, value, source in loaded.rows()]
    say(paint(f"{clean(str(loaded.workspace))}, from {clean(loaded.path)}", "bold"))
    keys = max(cell_width(key) for key, _, _ in rows)
    values = min(44, max(cell_width(value) for _, value, _ in rows))
    for key, value, source in rows:
        say(join_cells([pad(key, keys), pad(value, values), paint(clean(source), "dim")]))
    return 0


def _settings_if_valid(place: WorkspaceLocation) -> WorkspaceSettings | None:
    """Return the settings, or None if the file has become invalid: tasks can be stopped all the same."""
    try:
        return load(place.workspace, place.config).settings
    except UserError as error:
        if not (place.config or place.workspace / CONFIG_FILE).exists():
            raise
        note(f"gpuyard: {error}")
        return None


VERB = Verb(
    "Run a folder of configs on the GPUs, in tmux sessions.",
    (
        Option("workspace", "text", "DIR", "The workspace.", note="the current directory"),
        Option("config", "text", "FILE", "Its configuration.", note="scheduler_config.yml in it"),
    ),
    commands={
        "start": Command(
            Verb(
                "Start every config, or CONFIGS such as heavy.yml,light.yml, on free GPUs or on GPUS such as 1,0.",
                (
                    Option("rerun", "flag", None, "Run completed configs again."),
                    Option("engine", "text", "NAME", "Engine that runs them: local, slurm or ray.",
                           note="from the configuration"),
                ),
                Arguments("[CONFIGS] [GPUS]", is_many=True, is_data=True),
            ),
            _start,
        ),
        "status": Command(
            Verb(
                """Show the state of each config, the progress of all, and what the next one waits for.

                With --watch, exit status 1 if a task has failed at the end.
                """,
                (
                    JSON,
                    Option("watch", "flag", None, "Update until all tasks have finished; Ctrl-C ends it."),
                ),
            ),
            _status,
        ),
        "stop": Command(Verb("Start no new tasks; running tasks finish."), _stop),
        "kill-all": Command(Verb("Kill running tasks, cancel waiting ones, and close the sessions."), _kill_all),
        "config": Command(
            Verb("Show every effective value and where it comes from. Only the names of `env` are shown.", (JSON,)),
            _config,
        ),
        "help": Command(Verb("Show the help of all workspace commands."), run),
        "init": Command(
            Verb(
                "Make a workspace in DIR: scheduler.sh, scheduler_config.yml, and folders for configs and markers.",
                (
                    Option("force", "flag", None,
                           "Replace its scheduler.sh; values are kept, and the old file is backed up."),
                ),
                Arguments("DIR"),
            ),
            _init,
        ),
    },
    write_help=_help,
)  # fmt: skip
