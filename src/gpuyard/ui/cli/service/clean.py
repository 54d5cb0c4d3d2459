"""`gpuyard clean`: deletes old finished jobs, and logs beyond the limits."""

from gpuyard.core.option import Option
from gpuyard.core.units import format_bytes, format_count, parse_duration
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.verb_options import JSON, Typed, Verb

VERB = Verb(
    """Delete old finished jobs, and logs beyond the limits of [keep] in config.toml.

    The daemon does so by itself once an hour. A job that another job depends on is kept as long as the other job.

    \b
    gpuyard clean                    what [keep] says: jobs after 90 days, logs beyond 20 GB
    gpuyard clean --older-than 30d   jobs after 30 days, in place of [keep] jobs
    """,
    (
        Option(
            "older-than", "text", "TIME", "Jobs that ended longer ago than this, such as 30d or 12h. [`jobs` of [keep]]"
        ),
        JSON,
    ),
)


def run(typed: Typed) -> int:
    age = typed.text("older-than")
    answer = request("POST", "/clean", body={} if age is None else {"older_than_s": parse_duration(age)})
    jobs, logs = format_count(answer["jobs"], "job"), format_count(answer["logs"], "log")
    return say_answer(typed, answer, f"deleted {jobs} and {logs} ({format_bytes(answer['bytes'])})")
