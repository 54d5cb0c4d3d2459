"""`gpuyard suspend`: moves the memory of running jobs out of the way."""

from gpuyard.ui.cli.jobs.change_verbs import change
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Typed, Verb

VERB = Verb(
    """Move the GPU memory of running jobs to RAM, and stop them until `resume`.

    Their GPUs are free for others meanwhile. After `gpuyard resume` they go on from where they were; their programs
    need not know. It takes a driver that can do it, and enough free RAM.

    IDS are such as 17, 17-20, name=big, tag=night or all. Exit status 1 where nothing changed.
    """,
    (JSON,),
    SEVERAL,
)


def run(typed: Typed) -> int:
    return change(typed, "suspend", "suspending", "is left as it is")
