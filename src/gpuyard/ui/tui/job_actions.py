"""What can be done to a job with a key, and how it is told when it is done. All pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gpuyard.errors import GpuyardError
from gpuyard.ui.cli.text_table import clean


class JobAction(Struct, frozen=True, kw_only=True):
    """`gpuyard verb`; `done` is what then has been done, `not_done` what is said where it could not be."""

    verb: str
    done: str
    not_done: str
    asks: bool = False


ACTS = {
    act.verb: act
    for act in (
        JobAction(verb="cancel", done="cancelled", not_done="is not cancelled", asks=True),
        JobAction(verb="hold", done="held", not_done="is not held"),
        JobAction(verb="release", done="released", not_done="is not released"),
        JobAction(verb="retry", done="queued again", not_done="is not queued again"),
        JobAction(verb="suspend", done="suspending", not_done="is unchanged"),
        JobAction(verb="resume", done="will resume when memory is free:", not_done="is unchanged"),
    )
}


class ActionNotice(Struct, frozen=True):
    """A line on what has happened."""

    text: str = ""
    is_bad: bool = False


def told(act: JobAction, answer: Mapping[str, Any]) -> ActionNotice:
    if answer["count"]:
        return ActionNotice(f"{act.done} {answer['changed']}")
    if not answer["unchanged"]:
        return ActionNotice("there is nothing to change", is_bad=True)
    first = answer["unchanged"][0]
    return ActionNotice(clean(f"{first['id']} {act.not_done}: {first['reason']}"), is_bad=True)


def priority_act(priority: int) -> JobAction:
    return JobAction(verb="priority", done=f"priority {priority} for", not_done="keeps its priority")


def failed(error: GpuyardError) -> ActionNotice:
    return ActionNotice(clean(f"{error}{f' ({error.hint})' if error.hint else ''}"), is_bad=True)
