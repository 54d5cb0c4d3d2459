"""The command line: a file per verb, each imported only when it is used.

Exit statuses: 0 it worked; 1 something on this machine stands in the way; 2 what was typed cannot be understood;
130 interrupted. Each message on standard error says what to try next.
"""

import difflib
import importlib
import os
import sys
from typing import NoReturn

import click

from gpuyard import __version__
from gpuyard.errors import GpuyardError, UserError

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

VERBS = {
    "completion": "Print the script that completes commands in your shell.",
    "devices": "Show every GPU and the host, and how busy they are.",
    "doctor": "Say which probes work, which do not, and what to do about it.",
    "leases": "Show who holds which GPUs, who waits, and who uses them without a lease.",
    "run": "Run a program on GPUs of its own, as soon as they can be had.",
    "sim-job": "Use a simulated GPU for a while, as a job would.",
    "watch": "Follow the GPUs and the host live, and log them.",
}


class VerbGroup(click.Group):
    """Knows the verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"gpuyard.ui.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            meant = f"did you mean `gpuyard {near[0]}`?" if near else "see `gpuyard --help`"
            raise UserError(f"there is no command '{args[0]}'", hint=meant)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """gpuyard watches the GPUs of this machine.

    Exit status: 0 it worked, 1 something on this machine stands in the way, 2 the command line or its input is wrong.
    """


def main() -> None:
    """The `gpuyard` command."""
    _open_closed_streams()
    try:
        status = cli(standalone_mode=False, prog_name="gpuyard")
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except GpuyardError as error:
        hint = f"\n  {error.hint}" if error.hint else ""
        click.echo(f"gpuyard: {error}{hint}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, UserError) else EXIT_FAULT)
    except OSError as error:
        _give_up(error)
    sys.exit(status if isinstance(status, int) else 0)


def _open_closed_streams() -> None:
    """Somebody may have started us without an output; what we write to it is then lost, and that is all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - it stays open to the end


def _give_up(error: OSError) -> NoReturn:
    """An output that is full or whose reader has gone. Python would complain again when it flushes at exit."""
    if not isinstance(error, BrokenPipeError):
        click.echo(f"gpuyard: {error.strerror or error}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_FAULT)
