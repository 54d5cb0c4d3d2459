"""`gpuyard why`: the scheduler's own words on why a job does not run yet."""

from gpuyard.ui.cli.select_jobs import tell_each
from gpuyard.ui.cli.terminal import say
from gpuyard.ui.cli.text_table import clean, time_text
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERB = Verb(
    """Say why a job does not run yet: what is missing on which GPU, who is in the way, and when it may start.

    IDS are such as 17, 17-20, name=big, tag=night or all.
    """,
    (JSON,),
    SEVERAL,
)


def run(typed: Typed) -> int:
    return tell_each(typed, "/why", _tell)


def _tell(answer: "dict[str, Any]") -> None:
    for line in why_lines(answer):
        say(line)


def why_lines(answer: "dict[str, Any]") -> "Iterator[str]":
    yield clean(answer["summary"])
    for reason in answer["reasons"]:
        place = f"{reason['device_id']}: " if reason["device_id"] else ""
        yield f"  {place}{clean(reason['text'])}"
    for remedy in filter(None, dict.fromkeys(reason.get("remedy") for reason in answer["reasons"])):
        yield f"  to change that: {clean(remedy)}"
    for holder in _holders(answer["reasons"]):
        yield f"  in the way: {clean(holder)}"
    if answer["ahead"]:
        yield f"  ahead of it in the line: {answer['ahead']}"
    if answer["estimated_start"] is not None:
        begin = "go on" if answer["state"] == "suspended" else "start"
        yield f"  may {begin} {time_text(answer['estimated_start'])}: {clean(answer['estimate'])}"
    elif answer["estimate"]:
        yield f"  {clean(answer['estimate'])}"


def _holders(reasons: "list[dict[str, Any]]") -> list[str]:
    """Each once; a reason's text names those on its own GPU."""
    told = " ".join(reason["text"] for reason in reasons)
    lines: dict[str, None] = {}
    for holder in (holder for reason in reasons for holder in reason["holders"]):
        label = f" ({holder['label']})" if holder.get("label") else ""
        line = f"{holder['user']}, pid {holder['pid']}{label}"
        if line not in told:
            lines[line] = None
    return list(lines)
