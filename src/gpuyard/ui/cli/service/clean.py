"""`gpuyard clean`: deletes old finished jobs and their logs."""

from gpuyard.core.units import format_bytes, format_count, parse_duration
from gpuyard.errors import UserError
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.verb_options import JSON, Option, Typed, Verb

VERB = Verb(
    """Delete old finished jobs and their logs.

    \b
    gpuyard clean --older-than 30d
    """,
    (Option("older-than", "TIME", "Jobs that ended longer ago than this, such as 30d or 12h."), JSON),
)


def run(typed: Typed) -> int:
    age = typed.text("older-than")
    if age is None:
        raise UserError("which jobs should be deleted?", hint="write it as gpuyard clean --older-than 30d")
    answer = request("POST", "/clean", body={"older_than_s": parse_duration(age)})
    jobs, logs = format_count(answer["jobs"], "job"), format_bytes(answer["bytes"])
    return say_answer(typed, answer, f"deleted {jobs} and {logs} of logs")
