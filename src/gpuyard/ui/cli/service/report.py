"""`gpuyard report`: totals of the last week, or any other time, with a chart."""

from gpuyard.core.option import Option
from gpuyard.errors import UserError
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.terminal import say_lines
from gpuyard.ui.cli.verb_options import JSON, Answer, Typed, Verb

_BY = ("user", "workspace", "name")

VERB = Verb(
    """Sum up a week, or any other time: GPU-hours, waits, unused memory and failures, with a chart.

    GPU-hours are the time of jobs on each of their GPUs, without suspended time; jobs that share a GPU count each.
    Waste is memory that was reserved and never used.
    """,
    (
        Option("since", "text", "TIME", "Length of the report, such as 24h or 30d. [7d]"),
        Option("by", "text", "WHAT", "Group jobs by user, workspace or name. [user]"),
        Option("html", "text", "FILE", "Write it to one self-contained HTML file."),
        JSON,
    ),
)


def run(typed: Typed) -> int:
    by = typed.text("by") or _BY[0]
    if by not in _BY:
        raise UserError(f"there is no report by '{by}'", hint=f"it can be by {', '.join(_BY)}")
    answer = request("GET", "/report", {"since": typed.text("since") or "7d", "by": by})
    path = typed.text("html")
    if path is not None:
        _write(path, answer)
    if path is not None or typed.flag("json"):
        return say_answer(typed, answer, f"wrote {path}")
    from gpuyard.ui.cli.rich_output import frame
    from gpuyard.ui.views.report_terminal import report_lines

    say_lines(report_lines(answer, frame()))
    return 0


def _write(path: str, answer: Answer) -> None:
    from gpuyard.system.results_file import write_results
    from gpuyard.ui.views.report_html import report_page

    page = report_page(answer).encode("utf-8", "replace")
    write_results(path, page)
