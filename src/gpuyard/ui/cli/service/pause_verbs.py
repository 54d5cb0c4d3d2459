"""`gpuyard pause`, `drain` and `unpause`: whether the queue starts jobs; with --device, whether a GPU gets work."""

import time

from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Command, Typed, Verb

_DEVICE = Option("device", "text", "LIST", "Only on these GPUs, such as 0,2: as `gpuyard devices drain`.")
_REASON = Option("reason", "text", "TEXT", "With --device: why.")


def _verb(name: str, text: str, done: str, *options: Option) -> Command:
    """`done` is printed, with {running} filled in."""

    def run(typed: Typed) -> int:
        device = typed.text("device")
        if device is not None:
            return _run_for_device(name, device, typed)
        if typed.text("reason") is not None:
            raise UserError("--reason is for --device ID", hint="the pause of the whole queue has no reason")
        answer = request("POST", f"/{name}")
        if typed.flag("wait"):
            with RetryingClient() as queue:
                while answer["running"] or answer["counts"].get("pending"):
                    time.sleep(0.5)
                    status = queue.get("/status")
                    answer["running"], answer["counts"] = status["under_way"], status["counts"]
        line = done.format(running=answer["running"])
        if name == "drain" and not answer["running"]:
            line = "drained: no job runs. `gpuyard unpause` starts jobs again"
        return say_answer(typed, answer, line)

    return Command(Verb(text, (*options, JSON)), run)


def _run_for_device(name: str, names: str, typed: Typed) -> int:
    from gpuyard.ui.cli.machine.devices import drain, undrain

    if typed.flag("wait"):
        raise UserError("--wait and --device do not go together", hint="`gpuyard leases` shows what is left on it")
    ids = [each.strip() for each in names.split(",") if each.strip()]
    if not ids:
        raise UserError("--device names no GPU", hint="write it as 0,2 or leave it out")
    return undrain(ids, typed) if name == "unpause" else drain(ids, typed)


COMMANDS = {
    "drain": _verb(
        "drain",
        "Let running jobs finish, and start no new ones.\n\n"
        "For example before the machine is serviced. Waiting jobs stay in the queue; `gpuyard unpause` starts them.",
        "draining: {running} still running. `gpuyard unpause` starts jobs again",
        Option("wait", "flag", None, "Return when no job runs any more."),
        _DEVICE,
        _REASON,
    ),
    "pause": _verb(
        "pause",
        "Start no new jobs; running jobs continue.\n\n"
        "Jobs can still be submitted. The queue stays paused until `gpuyard unpause`, also across restarts of the "
        "daemon and the machine.",
        "paused: {running} still running. `gpuyard unpause` starts jobs again",
        _DEVICE,
        _REASON,
    ),
    "unpause": _verb(
        "unpause",
        "Let jobs start again after `gpuyard pause` or `gpuyard drain`.",
        "jobs start again",
        Option("device", "text", "LIST", "On these GPUs: as `gpuyard devices undrain`."),
    ),
}
