"""`gpuyard drain`: lets what runs come to its end, and starts nothing new."""

import time

from gpuyard.connect.fast_http import connect
from gpuyard.connect.retrying import RetryingClient
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.verb_options import JSON, Option, Typed, Verb

VERB = Verb(
    """Let running jobs finish, and start nothing new.

    Before the machine is serviced, say. What waits stays in the queue; `gpuyard unpause` goes on.
    """,
    (Option("wait", None, "Return when nothing runs any more."), JSON),
)
_LOOK_AGAIN_S = 0.5


def run(typed: Typed) -> int:
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/drain")
    if typed.flag("wait"):
        with RetryingClient() as queue:
            while answer["running"]:
                time.sleep(_LOOK_AGAIN_S)
                answer["running"] = queue.get("/status")["under_way"]
    if typed.flag("json"):
        say_json(answer)
    elif answer["running"]:
        say(f"draining; {answer['running']} still running. `gpuyard unpause` goes on")
    else:
        say("drained: nothing runs. `gpuyard unpause` goes on")
    return 0
