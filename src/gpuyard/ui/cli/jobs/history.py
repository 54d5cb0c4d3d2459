"""`gpuyard history`: what happened to a job, event by event."""

from gpuyard.core.units import format_time
from gpuyard.ui.cli.ask_daemon import show_each
from gpuyard.ui.cli.terminal import table_lines
from gpuyard.ui.cli.text_table import Column
from gpuyard.ui.cli.verb_options import IDS_HELP, JSON, SEVERAL, Answer, Typed, Verb

VERB = Verb(f"Show what happened to a job, event by event.\n\n{IDS_HELP}", (JSON,), SEVERAL)
_COLUMNS = (Column("TIME"), Column("EVENT"), Column("DETAILS", is_long=True))


def run(typed: Typed) -> int:
    return show_each(typed, "/history", _lines)


def _lines(answer: Answer) -> list[str]:
    rows = [(format_time(event["at"]), event["kind"], event["text"] or "") for event in answer["events"]]
    return [f"job {answer['id']}", *table_lines(_COLUMNS, rows)]
