"""`gpuyard hold`: keeps waiting jobs from starting."""

from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

VERB = Verb(
    """Keep waiting jobs from starting.

    They keep their place in the line, and wait for `gpuyard release`.

    IDS are such as 17, 17-20, name=big, tag=night or all. Exit status 1 where nothing changed.
    """,
    (JSON,),
    SEVERAL,
)


def run(typed: Typed) -> int:
    return change(typed, "hold", "held")
