"""`gpuyard pause`, `drain` and `unpause`: whether the queue starts jobs; with --device, whether a GPU gets work."""

import time

from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_S = 0.5
_DEVICE = Option("device", "text", "LIST", "Only on these GPUs, such as 0,2: as `gpuyard devices drain`.")
_REASON = Option("reason", "text", "TEXT", "With --device: why.")


class PauseVerb:
    """Has `VERB` and `run`, as the module of any other verb has; `done` is printed, with {running} filled in."""

    def __init__(self, name: str, text: str, done: str, options: "Sequence[Option]" = (JSON,)) -> None:
        self.VERB = Verb(text, options)
        self._name, self._done = name, done

    def run(self, typed: Typed) -> int:
        device = typed.text("device")
        if device is not None:
            return self._run_for_device(device, typed)
        if typed.text("reason") is not None:
            raise UserError("--reason is for --device ID", hint="the pause of the whole queue has no reason")
        answer = request("POST", f"/{self._name}")
        if typed.flag("wait"):
            with RetryingClient() as queue:
                while answer["running"] or answer["counts"].get("pending"):
                    time.sleep(_POLL_S)
                    status = queue.get("/status")
                    answer["running"], answer["counts"] = status["under_way"], status["counts"]
        done = self._done.format(running=answer["running"])
        if self._name == "drain" and not answer["running"]:
            done = "drained: no job runs. `gpuyard unpause` starts jobs again"
        return say_answer(typed, answer, done)

    def _run_for_device(self, names: str, typed: Typed) -> int:
        from gpuyard.ui.cli.machine.devices import drain, undrain

        if typed.flag("wait"):
            raise UserError("--wait and --device do not go together", hint="`gpuyard leases` shows what is left on it")
        ids = [name.strip() for name in names.split(",") if name.strip()]
        if not ids:
            raise UserError("--device names no GPU", hint="write it as 0,2 or leave it out")
        return undrain(ids, typed) if self._name == "unpause" else drain(ids, typed)


COMMANDS = {
    "drain": PauseVerb(
        "drain",
        "Let running jobs finish, and start no new ones.\n\n"
        "For example before the machine is serviced. Waiting jobs stay in the queue; `gpuyard unpause` starts them.",
        "draining: {running} still running. `gpuyard unpause` starts jobs again",
        (Option("wait", "flag", None, "Return when no job runs any more."), _DEVICE, _REASON, JSON),
    ),
    "pause": PauseVerb(
        "pause",
        "Start no new jobs; running jobs continue.\n\n"
        "Jobs can still be submitted. The queue stays paused until `gpuyard unpause`, also across restarts of the "
        "daemon and the machine.",
        "paused: {running} still running. `gpuyard unpause` starts jobs again",
        (_DEVICE, _REASON, JSON),
    ),
    "unpause": PauseVerb(
        "unpause",
        "Let jobs start again after `gpuyard pause` or `gpuyard drain`.",
        "jobs start again",
        (Option("device", "text", "LIST", "On these GPUs: as `gpuyard devices undrain`."), JSON),
    ),
}
