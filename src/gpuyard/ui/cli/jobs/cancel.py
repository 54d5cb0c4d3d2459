"""`gpuyard cancel`: ends jobs, or takes them out of the queue."""

from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

VERB = Verb(
    """End jobs, or take them out of the queue.

    A running one is told to end (SIGTERM), with all it started; what is left of it after its grace time is killed.

    IDS are such as 17, 17-20, name=big, tag=night or all. Exit status 1 where nothing changed.
    """,
    (JSON,),
    SEVERAL,
)


def run(typed: Typed) -> int:
    return change(typed, "cancel", "cancelled")
