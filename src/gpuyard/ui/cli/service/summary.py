"""`gpuyard summary`: what succeeded and failed since last evening, and why."""

from gpuyard.core.option import Option
from gpuyard.ui.cli.ask_daemon import request
from gpuyard.ui.cli.terminal import say_json, say_lines
from gpuyard.ui.cli.verb_options import JSON, Typed, Verb

VERB = Verb(
    """Sum up a night: what succeeded, what failed and why, what runs and waits, and what it cost.

    Failures with the same cause are counted together, with the jobs and the command that retries them. `…` stands for
    figures that differ from job to job.
    """,
    (
        Option(
            "since",
            "text",
            "WHEN",
            "Begin at 22:00, 2026-11-18, 2026-11-18T22:00, or 8h ago. [the last 18:00 that was at least 6 h ago]",
        ),
        JSON,
    ),
)


def run(typed: Typed) -> int:
    since = typed.text("since")
    answer = request("GET", "/summary", None if since is None else {"since": since})
    if typed.flag("json"):
        say_json(answer)
        return 0
    from gpuyard.ui.cli.rich_output import frame
    from gpuyard.ui.views.summary_text import summary_lines

    say_lines(summary_lines(answer, frame()))
    return 0
