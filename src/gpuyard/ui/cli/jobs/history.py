"""`gpuyard history`: what happened to a job, event by event."""

from gpuyard.core.units import format_time
from gpuyard.ui.cli.select_jobs import show_each
from gpuyard.ui.cli.terminal import say, say_table
from gpuyard.ui.cli.text_table import Column
from gpuyard.ui.cli.verb_options import IDS, JSON, SEVERAL, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(f"Show what happened to a job, event by event.\n\nIDS are {IDS}.", (JSON,), SEVERAL)
_COLUMNS = (Column("TIME"), Column("EVENT"), Column("DETAILS", is_long=True))


def run(typed: Typed) -> int:
    return show_each(typed, "/history", _show)


def _show(answer: "dict[str, Any]") -> None:
    say(f"job {answer['id']}")
    say_table(_COLUMNS, [(format_time(event["at"]), event["kind"], event["text"] or "") for event in answer["events"]])
