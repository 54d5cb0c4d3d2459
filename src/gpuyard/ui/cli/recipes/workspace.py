"""`gpuyard workspace`: a folder of configs becomes a finished sweep. `scheduler.sh` in a workspace forwards to it.

What is named on the command line, configs and GPUs included, is data: it may begin with a dash.
"""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuyard.core.units import format_count
from gpuyard.errors import UserError
from gpuyard.ui.cli import EXIT_FAULT, EXIT_USAGE
from gpuyard.ui.cli.recipes.batch_options import absolute
from gpuyard.ui.cli.recipes.workspace_help import WorkspaceLocation, help_text, seen_from_here
from gpuyard.ui.cli.rich_output import json_option
from gpuyard.ui.cli.terminal import note, paint, say, say_json
from gpuyard.ui.cli.text_table import Column, cell_width, clean, join_cells, lay_out

if TYPE_CHECKING:
    from gpuyard.recipes.workspace.create_workspace import CreatedWorkspace
    from gpuyard.recipes.workspace.settings import LoadedSettings, WorkspaceSettings
    from gpuyard.recipes.workspace.start_sweep import StartedSweep

_LONGEST_VALUE = 44
_NAMES_ONLY = "env"


class _Commands(click.Group):
    """With help for people who come from shell schedulers."""

    def get_help(self, ctx: click.Context) -> str:
        return help_text(WorkspaceLocation.of(ctx.params.get("workspace"), ctx.params.get("config")))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            raise UserError(
                f"workspace has no command '{clean(args[0])}'",
                hint=f"did you mean `{near[0]}`?" if near else f"there are {', '.join(self.commands)}",
            )
        return super().resolve_command(ctx, args)


class _DataCommand(click.Command):
    """Only what is exactly one of its options is one, with the word after it where it takes one; all else is data."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {form: each for each in self.get_params(ctx) if isinstance(each, click.Option) for form in each.opts}
        at = args.index("--") if "--" in args else len(args)
        options: list[str] = []
        data: list[str] = []
        words = iter(args[:at])
        for word in words:
            (options if word in known else data).append(word)
            if word in known and not known[word].is_flag and not known[word].count:
                value = next(words, None)
                if value is None:
                    raise UserError(f"{word} takes a value", hint=known[word].help)
                options.append(value)
        return super().parse_args(ctx, [*options, "--", *data, *args[at + 1 :]])


# Both are eager so that --help, which is met before what is not, speaks of the workspace that is meant.
@click.group("workspace", cls=_Commands, invoke_without_command=True)
@click.option("--workspace", metavar="DIR", is_eager=True, help="The workspace. [the current directory]")
@click.option("--config", metavar="FILE", is_eager=True, help="Its configuration. [scheduler_config.yml in it]")
@click.pass_context
def command(ctx: click.Context, workspace: str | None, config: str | None) -> None:
    """Run a folder of configs over the GPUs, in tmux sessions."""
    ctx.obj = WorkspaceLocation.of(workspace, config)
    if ctx.invoked_subcommand is None:
        say(help_text(ctx.obj))


@command.command("help")
@click.pass_obj
def help_command(place: WorkspaceLocation) -> None:
    """Say how all this is used."""
    say(help_text(place))


# Making one


@command.command("init")
@click.argument("folder", metavar="DIR")
@click.option(
    "--force", is_flag=True, help="Make its scheduler.sh anew; values are kept, and a copy of what is replaced."
)
def init_command(folder: str, force: bool) -> None:  # noqa: FBT001
    """Make a workspace in DIR: scheduler.sh, scheduler_config.yml, and folders for configs and markers."""
    from gpuyard.recipes.workspace.create_workspace import init

    made = init(Path(absolute(folder)), force=force)
    _tell_made(made)


def _tell_made(made: "CreatedWorkspace") -> None:
    for path in made.created:
        say(f"made     {clean(seen_from_here(path))}")
    for path, backup in made.backed_up:
        say(f"renewed  {clean(seen_from_here(path))}; as it was: {clean(backup.name)}")
    for path in made.kept:
        say(f"kept     {clean(seen_from_here(path))}")
    place = WorkspaceLocation(workspace=made.folder)
    say("Next: look through scheduler_config.yml, and put a YAML file for each task into configs/.")
    say(f"To start them:  {place.command('start')}")


# Running it


@command.command("start", cls=_DataCommand)
@click.argument("words", metavar="[CONFIGS] [GPUS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--rerun", "is_rerun", is_flag=True, help="Run completed ones again.")
@click.option("--engine", metavar="NAME", help="What runs them: local, slurm or ray. [as the configuration says]")
@click.pass_obj
def start_command(place: WorkspaceLocation, words: tuple[str, ...], is_rerun: bool, engine: str | None) -> int:  # noqa: FBT001
    """Start every config, or CONFIGS, such as heavy.yml,light.yml; GPUs are chosen, or GPUS, such as 1,0."""
    from gpuyard.recipes.workspace.start_sweep import start

    if len(words) > 2:
        raise UserError(
            f"start takes configs and GPUs, not {len(words)} words",
            hint=f'each is one list: {place.command("start")} "heavy.yml,light.yml" "1,0"',
        )
    configs, gpus = (*words, None, None)[:2]
    started = start(_load(place), configs, gpus, is_rerun=is_rerun, engine=engine)
    _tell_started(started, place)
    return EXIT_USAGE if started.refused else 0


def _tell_started(started: "StartedSweep", place: WorkspaceLocation) -> None:
    told = [
        (each.config, f"job {each.job}" + ("" if each.gpu is None else f", GPU {each.gpu}"), "green")
        for each in started.submitted
    ]
    told += [(each.config, f"skipped: {each.why}", "dim") for each in started.skipped]
    told += [(each.config, f"refused: {each.why}", "red") for each in started.refused]
    _, *lines = lay_out([Column("")] * 2, [each[:2] for each in told], None)
    for (_, _, style), (config, what) in zip(told, lines, strict=True):
        say(join_cells([config, paint(what.rstrip(), style)]))
    for text in started.notes:
        note(f"gpuyard: {clean(text)}")
    _tell_ways(started, place)


def _tell_ways(started: "StartedSweep", place: WorkspaceLocation) -> None:
    """How to look at it, and what may be typed next."""
    if not started.submitted and not started.refused:
        say(f"Nothing to do: {format_count(len(started.skipped), 'config')}, all completed or under way.")
    if any(each.why.startswith("completed") for each in started.skipped):
        say(f"To run completed ones again:  {place.command('start', '--rerun')}")
    if started.submitted:
        say(f"To see how they stand:  {place.command('status')}")
    if started.session is not None:
        say(f"To watch them:  tmux attach -t {started.session}")


@command.command("stop")
@click.pass_obj
def stop_command(place: WorkspaceLocation) -> None:
    """Start nothing new; what runs comes to its end."""
    from gpuyard.recipes.workspace.stop_sweep import stop

    stopped = stop(place.workspace, _settings_if_sound(place))
    running = f"{format_count(stopped.running, 'task')} still {'runs' if stopped.running == 1 else 'run'}, to the end"
    waiting = f"{format_count(stopped.cancelled, 'waiting task')} will not start"
    say(f"Stopped: {running if stopped.running else 'nothing runs'}; {waiting}.")
    say(f"To go on:  {place.command('start')}")


@command.command("kill-all")
@click.pass_obj
def kill_all_command(place: WorkspaceLocation) -> int:
    """End all that runs or waits, and close the sessions."""
    from gpuyard.recipes.workspace.stop_sweep import kill_all

    killed = kill_all(place.workspace, _settings_if_sound(place))
    say(f"{format_count(killed.ended, 'task')} ended, {format_count(len(killed.sessions), 'session')} closed.")
    if killed.left:
        note(f"gpuyard: still there, though they were killed: {clean(', '.join(killed.left))}")
    return EXIT_FAULT if killed.left else 0


# Looking at it


@command.command("status")
@json_option
@click.option("--watch", "is_watched", is_flag=True, help="Until all is over; Ctrl-C ends it.")
@click.pass_obj
def status_command(place: WorkspaceLocation, as_json: bool, is_watched: bool) -> int:  # noqa: FBT001
    """Show how each config stands, how far all are, and what the next one waits for.

    With --watch, exit status 1 where some have failed when all is over.
    """
    from gpuyard.ui.cli.recipes.workspace_status import show, shown_as_json, watch

    if as_json and is_watched:
        raise UserError("--json says once how it stands, and --watch goes on", hint="leave one of them out")
    loaded = _load(place)
    if is_watched:
        return watch(loaded)
    if as_json:
        say_json(shown_as_json(loaded))
    else:
        show(loaded)
    return 0


@command.command("config")
@json_option
@click.pass_obj
def config_command(place: WorkspaceLocation, as_json: bool) -> None:  # noqa: FBT001
    """Show every value that is in force, and where it comes from. Of `env`, only the names."""
    loaded = _load(place)
    if as_json:
        say_json(_config_as_json(loaded))
        return
    rows = [(row.key, _shown(row.key, row.value, loaded), row.source) for row in loaded.rows()]
    say(paint(f"{clean(str(loaded.workspace))}, by {clean(loaded.path)}", "bold"))
    keys = max(cell_width(key) for key, _, _ in rows)
    values = min(_LONGEST_VALUE, max(cell_width(value) for _, value, _ in rows))
    for key, value, source in rows:
        padding = " " * max(0, values - cell_width(value))
        say(f"{key:<{keys}}  {value}{padding}  {paint(clean(source), 'dim')}")


def _shown(key: str, value: str, loaded: "LoadedSettings") -> str:
    """People paste what they are shown, and put tokens into `env`."""
    return clean(", ".join(loaded.settings.env) or value if key == _NAMES_ONLY else value)


def _config_as_json(loaded: "LoadedSettings") -> dict[str, Any]:
    from msgspec import to_builtins

    from gpuyard.recipes.workspace.settings import field_name

    values = to_builtins(loaded.settings)
    values[_NAMES_ONLY] = list(loaded.settings.env)
    settings = {key: {"value": values[field_name(key)], "from": source} for key, source in loaded.sources.items()}
    return {"workspace": str(loaded.workspace), "file": loaded.path, "settings": settings}


def _settings_if_sound(place: WorkspaceLocation) -> "WorkspaceSettings | None":
    """What runs can be stopped also where somebody has made a mistake in the file since."""
    from gpuyard.recipes.workspace.settings import CONFIG_FILE

    try:
        return _load(place).settings
    except UserError as error:
        if not (place.config or place.workspace / CONFIG_FILE).exists():
            raise
        note(f"gpuyard: {error}")
        return None


def _load(place: WorkspaceLocation) -> "LoadedSettings":
    from gpuyard.recipes.workspace.settings import load

    return load(place.workspace, place.config)
