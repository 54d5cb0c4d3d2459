"""`gpuyard pause`: starts nothing new."""

from gpuyard.daemon.client import connect
from gpuyard.ui.cli.options import JSON, Typed, Verb
from gpuyard.ui.cli.terminal import say, say_json

VERB = Verb(
    """Start nothing new; what runs goes on.

    Jobs can still be submitted. `gpuyard unpause` goes on; the queue stays paused until then, whatever restarts.
    """,
    (JSON,),
)


def run(typed: Typed) -> int:
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/pause")
    if typed.flag("json"):
        say_json(answer)
    else:
        say(f"paused; {answer['running']} still running. `gpuyard unpause` goes on")
    return 0
