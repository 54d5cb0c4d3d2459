"""`gpuyard pause`: starts nothing new."""

from gpuyard.connect.fast_http import connect
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.verb_options import JSON, Typed, Verb

VERB = Verb(
    """Start nothing new; running jobs go on.

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
