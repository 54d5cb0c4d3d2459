"""`gpuyard priority`: lets waiting jobs start earlier or later."""

from gpuyard.connect.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.jobs.change_verbs import tell
from gpuyard.ui.cli.verb_options import JSON, Arguments, Typed, Verb

VERB = Verb(
    """Let waiting jobs start earlier or later.

    The last word is the priority: 0 is usual, and higher starts earlier. IDS are such as 17, 17-20, name=big,
    tag=night or all. Exit status 1 where nothing changed.
    """,
    (JSON,),
    Arguments("IDS... N", is_many=True),
)


def run(typed: Typed) -> int:
    *ids, number = typed.words or [""]
    if not ids:
        raise UserError("which jobs, and what priority?", hint="write it as gpuyard priority 17 10")
    try:
        priority = int(number)
    except ValueError:
        raise UserError(f"'{number}' is not a priority", hint="write it as gpuyard priority 17 10") from None
    meant = " ".join(ids)
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/jobs/priority", body={"ids": meant, "priority": priority})
    return tell(typed, meant, answer, f"priority {priority} for", "keeps its priority")
