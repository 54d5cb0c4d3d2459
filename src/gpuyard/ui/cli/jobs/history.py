"""`gpuyard history`: what happened to a job, step by step."""

from gpuyard.ui.cli.select_jobs import tell_each
from gpuyard.ui.cli.terminal import say, say_table
from gpuyard.ui.cli.text_table import Column, time_text
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(
    """Show what happened to a job, step by step.

    IDS are such as 17, 17-20, name=big, tag=night or all.
    """,
    (JSON,),
    SEVERAL,
)
_COLUMNS = (Column("TIME"), Column("WHAT"), Column("HOW", is_long=True))


def run(typed: Typed) -> int:
    return tell_each(typed, "/history", _tell)


def _tell(answer: "dict[str, Any]") -> None:
    say(f"job {answer['id']}")
    say_table(_COLUMNS, [(time_text(event["at"]), event["kind"], event["text"] or "") for event in answer["events"]])
