"""`gpuyard report` and `gpuyard summary`: totals of a week with a chart, and what a night has brought."""

from gpuyard.model.option import Option
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Command, Typed, Verb
from gpuyard.ui.cli.terminal import say_lines

REPORT = Verb(
    """Sum up a week, or any other time: GPU-hours, waits, unused memory and failures, with a chart.

    GPU-hours are the time of jobs on each of their GPUs, without suspended time; jobs that share a GPU count each.
    Waste is memory that was reserved and never used.
    """,
    (
        Option("since", "text", "TIME", "Length of the report, such as 24h or 30d. [7d]"),
        Option("by", "choice", "WHAT", "Group jobs by user, workspace or name.",
               choices=("user", "workspace", "name"), default="user"),
        Option("html", "text", "FILE", "Write it to one self-contained HTML file."),
        JSON,
    ),
)  # fmt: skip


def _run_report(typed: Typed) -> int:
    answer = request("GET", "/report", {"since": typed.text("since") or "7d", "by": typed.values()["by"]})
    path = typed.text("html")
    if path is not None:
        from gpuyard.system.write_files import write_results
        from gpuyard.ui.views.report_html import report_page

        write_results(path, report_page(answer).encode("utf-8", "replace"))
    if path is not None or typed.flag("json"):
        return say_answer(typed, answer, f"wrote {path}")
    from gpuyard.ui.cli.terminal import frame
    from gpuyard.ui.views.report_text import report_lines

    say_lines(report_lines(answer, frame()))
    return 0


SUMMARY = Verb(
    """Sum up a night: what succeeded, what failed and why, what runs and waits, and what it cost.

    Failures with the same cause are counted together, with the jobs and the command that retries them. `…` stands for
    figures that differ from job to job.
    """,
    (
        Option("since", "text", "WHEN", "Begin at 22:00, 2026-11-18, 2026-11-18T22:00, or 8h ago.",
               note="the last 18:00 that was at least 6 h ago"),
        JSON,
    ),
)  # fmt: skip


def _run_summary(typed: Typed) -> int:
    since = typed.text("since")
    answer = request("GET", "/summary", None if since is None else {"since": since})
    if typed.flag("json"):
        return say_answer(typed, answer)
    from gpuyard.ui.cli.terminal import frame
    from gpuyard.ui.views.report_text import summary_lines

    say_lines(summary_lines(answer, frame()))
    return 0


COMMANDS = {"report": Command(REPORT, _run_report), "summary": Command(SUMMARY, _run_summary)}
