"""The command line: a module per verb, each imported only when it is used.

`command_grammar` parses all command lines by the tables of the verbs. `gpuyard --help` lists the exit statuses. Each
message on standard error says what to try next. With `--json`, standard output has {"error": {"code", "message",
"hint"}}, too.
"""

import gc
import os
import sys

from gpuyard.errors import GpuyardError, UserError
from gpuyard.ui.cli.verbs import (
    EXIT_FAULT,
    EXIT_IMPOSSIBLE,
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    JOB_VERBS,
    VERBS,
    import_verb,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.ui.cli.command_grammar import Typed, Verb

# The exit status of an error with this code; others have EXIT_USAGE or EXIT_FAULT.
_EXIT_STATUSES = {"not_found": EXIT_NOT_FOUND, "impossible": EXIT_IMPOSSIBLE, "timeout": EXIT_TIMED_OUT}


def main() -> None:
    arguments = sys.argv[1:]
    for name in ("stdout", "stderr"):  # send output to /dev/null where the process was started without them
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(null, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - open until exit
    try:
        status = _run_where_queue_is(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except GpuyardError as error:
        hint = f"\n  {error.hint}" if error.hint else ""
        _print_error(f"{error}{hint}")
        # `--json` of the command line, and not of the program behind `--`.
        if "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments):
            from gpuyard.ui.cli.terminal import say_json

            say_json({"error": {"code": error.code, "message": str(error), "hint": error.hint}})
        default = EXIT_USAGE if isinstance(error, UserError) else EXIT_FAULT
        sys.exit(_EXIT_STATUSES.get(error.code, default))
    except OSError as error:  # a failed write: disk full, reader gone
        if not isinstance(error, BrokenPipeError):
            _print_error(error.strerror or str(error))
        # Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAULT)
    # Exit without taking the interpreter down, which takes a fifth of a short command's time. If a module may have
    # threads, or functions that are to be called at the exit, then exit as usual.
    if {"atexit", "threading"}.isdisjoint(sys.modules):
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _run_where_queue_is(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except GpuyardError as error:
        if error.code == "elsewhere":
            from gpuyard.ui.cli.run_over_ssh import pass_on

            pass_on(error, arguments)
        raise


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in VERBS:
        if name in JOB_VERBS:
            gc.set_threshold(20_000)  # new objects; most commands make fewer, and end
        from gpuyard.ui.cli.command_grammar import run_verb

        return run_verb(name, import_verb(name), arguments[1:], say_help)
    if not arguments and "_GPUYARD_COMPLETE" in os.environ:
        from gpuyard.ui.cli.complete import answer_shell

        sys.stdout.write(answer_shell(os.environ["_GPUYARD_COMPLETE"]))
        return 0
    if not arguments and sys.stdout.isatty():
        from gpuyard.ui.cli.help_and_overview import show_overview

        return show_overview()
    from gpuyard.ui.cli.help_and_overview import run_without_verb

    return run_without_verb(arguments)


def say_help(name: str, verb: "Verb", typed: "Typed") -> int:
    from gpuyard.ui.cli.help_and_overview import verb_help

    sys.stdout.write(verb_help(name, verb) if verb.write_help is None else f"{verb.write_help(typed)}\n")
    return 0


def _print_error(text: str) -> None:
    from gpuyard.model.printable_text import printable_lines

    sys.stderr.write(f"gpuyard: {printable_lines(text)}\n")
    sys.stderr.flush()
