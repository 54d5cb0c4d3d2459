"""The actions on a job that have a key, and the notices of their results. All pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gpuyard.errors import GpuyardError
from gpuyard.ui.cli.jobs.job_text import revived_text
from gpuyard.ui.cli.text_table import clean

# By verb: what precedes the ids that changed, and what follows the id of a job that did not.
ACTS = {
    "cancel": ("cancelled", "is not cancelled"),
    "hold": ("held", "is not held"),
    "release": ("released", "is not released"),
    "retry": ("queued again", "is not queued again"),
    "suspend": ("suspending", "is unchanged"),
    "resume": ("will resume when memory is free:", "is unchanged"),
    "priority": ("priority {priority} for", "keeps its priority"),
}


class ActionNotice(Struct, frozen=True):
    """The text of the notice line."""

    text: str = ""
    is_bad: bool = False


def describe_result(verb: str, answer: Mapping[str, Any], **more: object) -> ActionNotice:
    """`more` are the other fields of the request."""
    done, not_done = ACTS[verb]
    if answer["count"]:
        return ActionNotice(f"{done.format(**more)} {answer['changed']}{revived_text(answer)}")
    if not answer["unchanged"]:
        return ActionNotice("no job to change", is_bad=True)
    first = answer["unchanged"][0]
    return ActionNotice(clean(f"{first['id']} {not_done}: {first['reason']}"), is_bad=True)


def describe_pause(answer: Mapping[str, Any]) -> ActionNotice:
    return ActionNotice(f"paused: {answer['running']} still running" if answer["paused"] else "jobs start again")


def failed(error: GpuyardError) -> ActionNotice:
    return ActionNotice(clean(f"{error}{f' ({error.hint})' if error.hint else ''}"), is_bad=True)
