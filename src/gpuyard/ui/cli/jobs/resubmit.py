"""`gpuyard edit` and `gpuyard resubmit`: jobs with other options: the waiting one itself, or a new one like it."""

import os

from gpuyard.client.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.submit_options import COMMAND_LINE_OPTIONS, NOT_EDITED, SUBMIT_OPTIONS
from gpuyard.system.submitting_shell import starting_processes
from gpuyard.ui.cli.ask_daemon import say_answer, select, selection_text
from gpuyard.ui.cli.command_grammar import IDS, IDS_HELP, SEVERAL, Answer, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.jobs.submit import read_command, sent_options
from gpuyard.ui.cli.terminal import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container


def _options_besides(others: "Container[str]" = ()) -> "tuple[Option, ...]":
    """Return the options of `submit` that one job has, `--in`, `--json` and `--unset`."""
    table = [
        each.but(default=None, note=None)
        for each in COMMAND_LINE_OPTIONS.values()
        if each.name in ("in", "json")
        or (each.is_sent and not each.makes_many and each.name != "stagger" and each.name not in others)
    ]
    return (*table, Option("unset", "texts", "OPTION", "Leave out an option that the job has, such as vram."))


def _changed_options(typed: Typed) -> "dict[str, object]":
    """Return the changes to send; an option that is left out is None."""
    changes: dict[str, object] = dict(sent_options(typed))
    for name in typed.texts("unset"):
        bare = name.lstrip("-")
        if bare not in SUBMIT_OPTIONS:
            raise UserError(f"--unset: there is no option '{name}'", hint="see `gpuyard submit --help`")
        if bare in changes:
            raise UserError(f"--unset {name} and --{bare} do not go together", hint="leave out one of them")
        changes[bare] = None
    return changes


EDIT = Verb(
    "Change options of jobs that are queued, held, delayed or blocked.\n\n"
    "They keep their ids, their commands and all other options, and wait at the place that the new ones give them. A "
    "job that has started is not changed: `gpuyard resubmit` makes a new one.\n\n"
    f"{IDS_HELP} Exit status 1 if no job changed.",
    _options_besides(NOT_EDITED),
    SEVERAL,
    has_headings=True,
)


def _run_edit(typed: Typed) -> int:
    if not typed.arguments:
        raise UserError("which jobs should `gpuyard edit` change?", hint=f"name them: {IDS}")
    options = _changed_options(typed)
    if not options:
        raise UserError("no option is given to change", hint="such as gpuyard edit 17 --vram 16G --priority 5")
    return change(typed, "edit", {"ids": selection_text(typed.arguments), "options": options})


RESUBMIT = Verb(
    """Submit a new job like an earlier one, with changes.

    The new job has the directory, the environment and all options of the earlier one, except for those that are given
    here, and names the job that it came from. Prints its id. With several IDS there is a new job for each.

    After -- comes another command. If that begins with an option or a setting, only these arguments change:

    \b
    gpuyard resubmit 17 --vram 20G
    gpuyard resubmit 17 -- --lr 1e-3
    gpuyard resubmit 17 -- python other.py
    gpuyard resubmit state=failed tag=night --time-limit 8h

    """
    + IDS_HELP,
    (
        *_options_besides(),
        Option("allow-missing", "flag", None, "Submit even if this shell lacks secret variables that were dropped."),
    ),
    Arguments("IDS... [-- CMD...]", is_many=True, takes_program=True),
    has_headings=True,
)


def _run_resubmit(typed: Typed) -> int:
    if not typed.arguments:
        raise UserError("which job should be submitted again?", hint=f"name it, or several: {IDS}")
    options = _changed_options(typed)
    submitters = starting_processes()
    answers: list[Answer] = []
    with connect(start=True) as daemon:
        for job_id in select(daemon.request, typed.arguments):
            job = daemon.request("GET", f"/jobs/{job_id}")
            variables = [*typed.texts("env")]
            known = {text.partition("=")[0] for text in variables}
            # Add the variables whose values were dropped when the job had ended, from this shell.
            variables += [
                f"{name}={os.environ.get(name, '')}"
                for name in job["dropped"]
                if name not in known and (name in os.environ or typed.flag("allow-missing"))
            ]
            changes = {**options, "env": variables} if variables else options
            body: dict[str, object] = {"token": os.urandom(16).hex(), "submitters": submitters, "options": changes}
            if typed.program:
                body["command"] = read_command(typed.program, job["cwd"])
            answer = daemon.request("POST", f"/jobs/{job_id}/resubmit", None, body, is_repeatable=True)
            for line in answer["notes"]:
                note(f"gpuyard: {line}")
            answers.append(answer)
    from gpuyard.model.selection import format_ids  # it takes milliseconds, and `--help` does not need it

    ids = format_ids(answer["first"] for answer in answers)
    return say_answer(typed, answers[0] if len(answers) == 1 else answers, ids)


COMMANDS = {"edit": Command(EDIT, _run_edit), "resubmit": Command(RESUBMIT, _run_resubmit)}
