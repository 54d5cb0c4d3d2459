"""`gpuyard resubmit`: submit a new job like an earlier one, with changes."""

import os

from gpuyard.connect.fast_http import connect
from gpuyard.core.option import Option
from gpuyard.errors import UserError
from gpuyard.system.submitting_shell import starting_processes
from gpuyard.ui.cli.ask_daemon import say_answer, select
from gpuyard.ui.cli.jobs.changed_options import changed_options, options_besides
from gpuyard.ui.cli.jobs.submit import HEADINGS, read_command
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.verb_options import IDS, IDS_HELP, JSON, Answer, Arguments, Typed, Verb

VERB = Verb(
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
        *options_besides(),
        Option("allow-missing", "flag", None, "Submit even if this shell lacks secret variables that were dropped."),
        JSON,
    ),
    Arguments("IDS... [-- CMD...]", is_many=True, takes_program=True),
    HEADINGS,
)


def run(typed: Typed) -> int:
    if not typed.arguments:
        raise UserError("which job should be submitted again?", hint=f"name it, or several: {IDS}")
    options = changed_options(typed)
    submitters = starting_processes()
    answers: list[Answer] = []
    with connect(start=True) as daemon:
        for job_id in select(daemon.request, typed.arguments):
            job = daemon.request("GET", f"/jobs/{job_id}")
            body: dict[str, object] = {
                "token": os.urandom(16).hex(),
                "submitters": submitters,
                "options": _with_secrets(options, job["dropped"], allow_missing=typed.flag("allow-missing")),
            }
            if typed.program:
                body["command"] = read_command(typed.program, job["cwd"])
            answer = daemon.request("POST", f"/jobs/{job_id}/resubmit", None, body, is_repeatable=True)
            for line in answer["notes"]:
                note(f"gpuyard: {line}")
            answers.append(answer)
    from gpuyard.core.job.selection import format_ids  # it takes milliseconds, and `--help` does not need it

    ids = format_ids(answer["first"] for answer in answers)
    return say_answer(typed, answers[0] if len(answers) == 1 else answers, ids)


def _with_secrets(options: "dict[str, object]", dropped: list[str], *, allow_missing: bool) -> "dict[str, object]":
    """Add the variables whose values were dropped when the job had ended, from this shell."""
    given = options.get("env")
    texts = list(given) if isinstance(given, list) else []
    known = {str(text).partition("=")[0] for text in texts}
    for name in dropped:
        if name not in known and (name in os.environ or allow_missing):
            texts.append(f"{name}={os.environ.get(name, '')}")
    return {**options, "env": texts} if texts else options
