"""`gpuyard resume`: lets suspended jobs go on."""

from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

VERB = Verb(
    """Let suspended jobs go on.

    Each goes on from where it was as soon as its GPU has room for it again; `gpuyard why` says what is in the way.

    IDS are such as 17, 17-20, name=big, tag=night or all. Exit status 1 where nothing changed.
    """,
    (JSON,),
    SEVERAL,
)


def run(typed: Typed) -> int:
    return change(typed, "resume", "resuming when there is room:", "is left as it is")
