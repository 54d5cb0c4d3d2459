"""The click group of all verbs, each imported only when it is used.

It makes click commands of the tables of queue verbs, for `--help`, completion and error messages.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpuyard import __version__
from gpuyard.errors import UserError
from gpuyard.ui.cli import (
    ALIASES,
    EVERYDAY,
    EXIT_INTERRUPTED,
    JOB_VERBS,
    MACHINE_VERBS,
    QUEUE_VERBS,
    RECIPES,
    SERVICE_VERBS,
    VERBS,
    import_verb,
)
from gpuyard.ui.cli.complete import complete_arguments, complete_option
from gpuyard.ui.cli.verb_options import Arguments, Option, Typed, Verb

# What is typed in place of a command of a group.
_SUBCOMMANDS = {"undrain": "devices undrain", "clear": "devices clear"}
# What people know from other programs, and the command that does it here.
_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("status", "ls", "ps", "list", "jobs", "squeue", "qstat", "stat"), "queue"),
    **dict.fromkeys(
        ("kill", "rm", "stop", "delete", "del", "remove", "abort", "scancel", "qdel", "terminate"), "cancel"
    ),
    **dict.fromkeys(("add", "enqueue", "sbatch", "qsub", "new", "push"), "submit"),
    **dict.fromkeys(("log", "cat", "output"), "logs"),
    **dict.fromkeys(("follow", "tail"), "logs -f"),
    **dict.fromkeys(("info", "describe", "inspect", "details", "get"), "show"),
    **dict.fromkeys(("rerun", "restart", "again", "redo"), "retry"),
    **dict.fromkeys(("clone", "copy"), "resubmit"),
    **dict.fromkeys(("change", "modify", "update", "set", "alter"), "edit"),
    **dict.fromkeys(("gpus", "gpu", "smi", "nvidia-smi", "nodes", "sinfo"), "devices"),
    **dict.fromkeys(("htop", "nvtop", "monitor"), "top"),
    **dict.fromkeys(("ui", "dashboard", "page", "browser"), "web"),
    **dict.fromkeys(("continue", "start", "unhold"), "release"),
    **dict.fromkeys(("exec", "srun"), "run"),
    **dict.fromkeys(("help", "man", "commands"), "--help"),
    **dict.fromkeys(("purge", "prune", "gc"), "clean"),
    **dict.fromkeys(("explain",), "why"),
}

_PROGRAM = "gpuyard.program"


class VerbGroup(click.Group):
    """Lists the verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        verb = ALIASES.get(cmd_name, cmd_name)
        if verb not in VERBS:
            return None
        module = import_verb(verb)
        if verb in QUEUE_VERBS:
            return click_command(verb, module.VERB, module.run)
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and args[0] not in ALIASES and not args[0].startswith("-"):
            meant = _suggest(args[0])
            hint = f"did you mean `gpuyard {meant}`?" if meant else "see `gpuyard --help`"
            raise UserError(f"there is no command '{args[0]}'", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Every day"):
            formatter.write_dl([(verb, VERBS[verb]) for verb in EVERYDAY])
        with formatter.section("All others, each with its own --help"):
            formatter.write_dl(
                [
                    (title, ", ".join(verb for verb in sorted(verbs) if verb not in EVERYDAY))
                    for title, verbs in (
                        ("Jobs", JOB_VERBS),
                        ("Queue", SERVICE_VERBS),
                        ("Recipes", RECIPES),
                        ("Machine", MACHINE_VERBS),
                    )
                ]
            )


def _suggest(word: str) -> str | None:
    """Return the command that was probably meant, with its arguments."""
    known = {**dict.fromkeys(VERBS), **_SUBCOMMANDS, **_KNOWN_ELSEWHERE}
    lower = word.lower()
    near = [lower] if lower in known else difflib.get_close_matches(lower, known, n=1, cutoff=0.7)
    return (known[near[0]] or near[0]) if near else None


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """gpuyard watches the GPUs of this machine, and runs a queue of jobs on them.

    Without a command it shows the GPUs and the queue.

    Exit status: 0 success, 1 a problem on this machine, 2 a mistake in the command line or its input, 3 not found, 4
    the job can never run on this machine, 5 a job failed, 6 a job was cancelled, 7 only held jobs are left, 124 not in
    time, 130 interrupted.
    """


def run_group() -> int:
    """Run the command line with click, and return the exit status."""
    try:
        status = cli(standalone_mode=False, prog_name="gpuyard")
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def click_command(name: str, verb: Verb, run: Callable[[Typed], int]) -> click.Command:
    """Make a click command of a verb's table, which accepts the same command lines as `verb_options.parse`."""

    def callback(**values: Any) -> int:
        arguments = values.pop("arguments", ())
        typed = {option.name: values[_parameter_name(option)] for option in verb.options}
        given = {name: value for name, value in typed.items() if value not in (None, False, ())}
        lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
        positional = [arguments] if isinstance(arguments, str) else list(arguments)
        return run(Typed({**given, **lists}, positional, click.get_current_context().meta.get(_PROGRAM, ())))

    parameters: list[click.Parameter] = [_click_option(option) for option in verb.options]
    parameters += [_click_argument(verb.arguments)] if verb.arguments else []
    is_program = verb.arguments is not None and verb.arguments.is_program
    settings = {"allow_interspersed_args": not is_program}
    takes_program = verb.arguments is not None and verb.arguments.takes_program
    kind = CommandWithProgram if takes_program else VerbCommand
    command = kind(name, params=parameters, help=verb.text, callback=callback, context_settings=settings)
    command.headings = verb.headings
    return command


class VerbCommand(click.Command):
    """Lists options under the headings of the verb; those without one come last, as `--help` does."""

    headings: Mapping[str, str] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        records = {(each.name or "").replace("_", "-"): each.get_help_record(ctx) for each in options}
        sections = {
            heading: [records.pop(name, None) for name in names.split()] for heading, names in self.headings.items()
        }
        sections["Other options" if sections else "Options"] = list(records.values())
        for heading, listed in sections.items():
            if shown := list(filter(None, listed)):
                with formatter.section(heading):
                    formatter.write_dl(shown)


class CommandWithProgram(VerbCommand):
    """Keeps what follows `--` apart from the other arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_PROGRAM] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


def _parameter_name(option: Option) -> str:
    return option.name.replace("-", "_")


def _click_option(option: Option) -> click.Option:
    names = [f"--{option.name}", *([f"-{option.short}"] if option.short else []), _parameter_name(option)]
    kind = {"is_flag": True} if option.is_flag else {"metavar": option.metavar, "multiple": option.is_repeatable}

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_option(option, incomplete)

    return click.Option(names, help=option.text, shell_complete=complete, **kind)


def _click_argument(arguments: Arguments) -> click.Argument:
    kind = click.Choice(arguments.choices) if arguments.choices else click.UNPROCESSED
    return click.Argument(
        ["arguments"],
        nargs=-1 if arguments.is_many else 1,
        required=not arguments.is_many,
        type=kind,
        metavar=arguments.metavar,
        shell_complete=None if arguments.choices else complete_arguments(arguments),
    )
