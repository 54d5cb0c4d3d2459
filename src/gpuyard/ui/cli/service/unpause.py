"""`gpuyard unpause`: goes on after `pause` or `drain`."""

from gpuyard.connect.fast_http import connect
from gpuyard.ui.cli.terminal import say, say_json
from gpuyard.ui.cli.verb_options import JSON, Typed, Verb

VERB = Verb("""Go on after `gpuyard pause` or `gpuyard drain`: waiting jobs start again.""", (JSON,))


def run(typed: Typed) -> int:
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/unpause")
    if typed.flag("json"):
        say_json(answer)
    else:
        say("jobs start again")
    return 0
