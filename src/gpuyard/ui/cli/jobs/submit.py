"""`gpuyard submit`: submit a program, or many, to the queue."""

import os
import sys

from gpuyard.client.fast_http import connect_early
from gpuyard.client.submitted_code import RemovedIfRefused, command_words, submission_facts
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.ui.cli.command_grammar import Answer, Arguments, Typed, Verb
from gpuyard.ui.cli.verbs import EXIT_USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def _options() -> "Sequence[Option]":
    from gpuyard.model.submit_options import COMMAND_LINE_OPTIONS

    return tuple(COMMAND_LINE_OPTIONS.values())


VERB = Verb(
    """Put a program into the queue; it starts when a GPU has enough free memory.

    Prints the job's id, or the first and the last id of many jobs, such as 18-117; a terminal gets a sentence. The job
    gets this shell's environment, directory, umask, niceness and soft limits, and keeps running when this terminal is
    closed. The daemon is started if none runs.

    \b
    gpuyard submit -- python train.py --lr 3e-4
    gpuyard submit --sweep lr=1e-4..1e-1:log4 --sweep seed=0..4 -- python train.py --lr {lr} --seed {seed}
    gpuyard submit --array 0-99%4 -- python part.py {index}
    gpuyard submit --from runs.csv -- python train.py --lr {lr}
    gpuyard submit --from commands.txt
    gpuyard submit 'python prepare.py && python train.py'
    gpuyard submit --at 22:00 --follow -- python train.py
    """,
    _options,
    Arguments("-- CMD...", is_program=True),
    has_headings=True,
)
# A "program" of this name is probably the unit of the value before it, as in `--time-limit 5 min`.
_UNITS = (
    "ms", "s", "sec", "seconds", "m", "min", "mins", "minutes", "h", "hr", "hour", "hours", "d", "day", "days",
    "k", "kb", "mb", "mib", "g", "gb", "gib", "t", "tb", "tib",
)  # fmt: skip


def run(typed: Typed) -> int:
    source = typed.text("from")
    if not typed.arguments and source is None:
        raise UserError("there is no program to run", hint="write it last: gpuyard submit -- python train.py")
    if typed.text("name") == "":
        raise UserError("--name is empty", hint="give a name, or leave it out")
    stays = typed.flag("wait") or typed.flag("follow")
    if stays:
        from gpuyard.ui.cli.jobs import wait as await_submission

        await_submission.check(typed)
    text = None if source is None else _read(source)
    named = typed.text("cwd")
    directory = _absolute(named or ".")
    if named is not None and not os.path.isdir(directory) and not _has_dependencies(typed):
        raise UserError(f"--cwd: there is no directory '{named}'", hint="create it first, or name another")
    if typed.arguments and typed.arguments[0].lower() in _UNITS:
        from gpuyard.ui.cli.jobs.missing_programs import refuse_unit

        refuse_unit(typed, directory)
    with connect_early() as daemon:
        command, options = read_command(typed.arguments, directory), sent_options(typed)
        snapshot = typed.flag("snapshot")
        if snapshot and typed.flag("no-snapshot"):
            raise UserError("--snapshot and --no-snapshot do not go together", hint="leave out one of them")
        # None: the configuration decides.
        wants = False if typed.flag("dry-run") or typed.flag("no-snapshot") else True if snapshot else None
        facts = submission_facts(command, directory, wants_snapshot=wants)
        body = {**facts, "table": text if command else None, "list": None if command else text, "options": options}
        if typed.flag("dry-run"):
            answer = daemon.request("POST", "/submissions/preview", body=body, is_repeatable=True)
        else:
            with RemovedIfRefused(body["code"]):
                answer = daemon.request("POST", "/submissions", body=body, is_repeatable=True, meanwhile=_import_text)
    from gpuyard.ui.cli.jobs.missing_programs import find_mistake

    mistake = find_mistake(typed, body, directory)
    if typed.flag("dry-run"):
        from gpuyard.ui.cli.jobs.job_text import say_preview

        answer["notes"] += [mistake] if mistake else []
        say_preview(typed, answer)
        return EXIT_USAGE if mistake else 0
    if mistake:
        answer["notes"].append(f"{mistake} (accepted all the same; `gpuyard cancel {answer['ids']}` takes it back)")
    _say_submitted(typed, answer)
    return await_submission.stay(typed, answer) if stays else 0


def _import_text() -> None:
    """Import what prints the answer, while the daemon works on it."""
    import gpuyard.model.printable_text
    import gpuyard.ui.cli.ask_daemon
    import gpuyard.ui.cli.jobs.missing_programs
    import gpuyard.ui.cli.terminal  # noqa: F401


def _say_submitted(typed: Typed, answer: Answer) -> None:
    """Print a sentence on a terminal. Scripts read the ids alone."""
    from gpuyard.ui.cli.ask_daemon import say_answer
    from gpuyard.ui.cli.terminal import note

    ids = answer["ids"]
    for line in answer["notes"]:
        note(f"gpuyard: {line}")
    if typed.flag("follow"):
        note(f"gpuyard: job {ids}")
    elif not sys.stdout.isatty():
        say_answer(typed, answer, ids)
    elif answer["count"] == 1:
        say_answer(typed, answer, f"job {ids} submitted; follow it with: gpuyard logs -f {ids}")
    else:
        say_answer(typed, answer, f"jobs {ids} submitted; watch them with: gpuyard queue {ids}")


def read_command(words: list[str], directory: str) -> list[str]:
    """Return the arguments of the program, and say in a terminal if a shell runs them."""
    command = command_words(words, directory)
    if command != words:
        from gpuyard.model.command_line import SHELL
        from gpuyard.ui.cli.terminal import is_terminal, note

        if command[:2] == [*SHELL] and is_terminal(sys.stderr):
            note(f"gpuyard: {SHELL[0]} runs this line")
    return command


def sent_options(typed: Typed) -> "dict[str, str | bool | list[str]]":
    """Return the options to send. The daemon may have another time zone, and has another working directory: --at gets
    an offset, and --stdin and the sources of --mount become absolute paths."""
    if not typed.options:
        return {}  # the table takes as long as the rest
    from gpuyard.model.submit_options import SUBMIT_OPTIONS

    options = {name: value for name, value in typed.options.items() if name in SUBMIT_OPTIONS}
    if "at" in typed.options or "in" in typed.options:
        from gpuyard.ui.cli.local_time import start_option

        options["at"] = start_option(typed.text("at"), typed.text("in"))
    named = typed.text("stdin")
    if named is not None:
        options["stdin"] = path = _absolute(named)
        if (not os.path.exists(path) or os.path.isdir(path)) and not _has_dependencies(typed):
            raise UserError(f"--stdin: there is no file '{named}'", hint="a relative path starts in this directory")
    if mounts := typed.texts("mount"):
        options["mount"] = [_mount(text, typed) for text in mounts]
    return options


def _mount(text: str, typed: Typed) -> str:
    source, colon, rest = text.partition(":")
    if not source or source.startswith("~"):
        return text  # the daemon says what is wrong with it
    path = _absolute(source)
    if not os.path.exists(path) and not _has_dependencies(typed):
        raise UserError(f"--mount: there is no '{source}'", hint="a relative path starts in this directory")
    return f"{path}{colon}{rest}"


def _has_dependencies(typed: Typed) -> bool:
    """Whether the job waits for others, which may create the files it needs."""
    return any(name in typed.options for name in ("after", "after-any", "after-failed", "after-each"))


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory no longer exists", hint="change to another, or give --cwd DIR") from None


def _read(source: str) -> str:
    try:
        if source == "-":
            return sys.stdin.buffer.read().decode()
        with open(source, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise UserError(f"{source} is not UTF-8 text", hint="save it as UTF-8") from None
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"--from: there is no file '{source}'", hint="- reads standard input") from None
    except OSError as error:
        raise EnvironmentFault(f"--from {source} cannot be read: {error.strerror}") from error
