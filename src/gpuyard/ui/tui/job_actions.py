"""The actions on a job that have a key, and the notices of their results. All pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gpuyard.errors import GpuyardError
from gpuyard.ui.cli.text_table import clean


class JobAction(Struct, frozen=True, kw_only=True):
    """A verb of `gpuyard`; `done` precedes the ids that changed, `not_done` follows the id of a job that did not."""

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
    """The text of the notice line."""

    text: str = ""
    is_bad: bool = False


def describe_result(act: JobAction, answer: Mapping[str, Any]) -> ActionNotice:
    if answer["count"]:
        return ActionNotice(f"{act.done} {answer['changed']}")
    if not answer["unchanged"]:
        return ActionNotice("no job to change", is_bad=True)
    first = answer["unchanged"][0]
    return ActionNotice(clean(f"{first['id']} {act.not_done}: {first['reason']}"), is_bad=True)


def priority_act(priority: int) -> JobAction:
    return JobAction(verb="priority", done=f"priority {priority} for", not_done="keeps its priority")


def failed(error: GpuyardError) -> ActionNotice:
    return ActionNotice(clean(f"{error}{f' ({error.hint})' if error.hint else ''}"), is_bad=True)
