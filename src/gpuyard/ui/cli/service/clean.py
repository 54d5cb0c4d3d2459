"""`gpuyard clean`: deletes old finished jobs and their logs."""

from gpuyard.connect.fast_http import connect
from gpuyard.core.units import format_bytes, format_count, parse_duration
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import say, say_json
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
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/clean", body={"older_than_s": parse_duration(age)})
    if typed.flag("json"):
        say_json(answer)
    else:
        say(f"deleted {format_count(answer['jobs'], 'job')} and {format_bytes(answer['bytes'])} of logs")
    return 0
