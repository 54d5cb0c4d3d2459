"""`gpuyard pause`, `drain` and `unpause`: whether the queue starts jobs."""

import time

from gpuyard.connect.retrying import RetryingClient
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.verb_options import JSON, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_S = 0.5


class PauseVerb:
    """Has `VERB` and `run`, as the module of any other verb has; `done` is printed, with {running} filled in."""

    def __init__(self, name: str, text: str, done: str, options: "Sequence[Option]" = (JSON,)) -> None:
        self.VERB = Verb(text, options)
        self._name, self._done = name, done

    def run(self, typed: Typed) -> int:
        answer = request("POST", f"/{self._name}")
        if typed.flag("wait"):
            with RetryingClient() as queue:
                while answer["running"]:
                    time.sleep(_POLL_S)
                    answer["running"] = queue.get("/status")["under_way"]
        done = self._done.format(running=answer["running"])
        if self._name == "drain" and not answer["running"]:
            done = "drained: no job runs. `gpuyard unpause` starts jobs again"
        return say_answer(typed, answer, done)


COMMANDS = {
    "drain": PauseVerb(
        "drain",
        "Let running jobs finish, and start no new ones.\n\n"
        "For example before the machine is serviced. Waiting jobs stay in the queue; `gpuyard unpause` starts them.",
        "draining: {running} still running. `gpuyard unpause` starts jobs again",
        (Option("wait", None, "Return when no job runs any more."), JSON),
    ),
    "pause": PauseVerb(
        "pause",
        "Start no new jobs; running jobs continue.\n\n"
        "Jobs can still be submitted. The queue stays paused until `gpuyard unpause`, also across restarts of the "
        "daemon and the machine.",
        "paused: {running} still running. `gpuyard unpause` starts jobs again",
    ),
    "unpause": PauseVerb(
        "unpause", "Let jobs start again after `gpuyard pause` or `gpuyard drain`.", "jobs start again"
    ),
}
