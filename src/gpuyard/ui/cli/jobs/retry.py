"""`gpuyard retry`: queues finished jobs once more."""

from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

VERB = Verb(
    """Queue finished jobs once more.

    They keep their ids; what they wrote before stays, one log per attempt.

    IDS are such as 17, 17-20, name=big, tag=night or all. Exit status 1 where nothing changed.
    """,
    (JSON,),
    SEVERAL,
)


def run(typed: Typed) -> int:
    return change(typed, "retry", "queued again")
