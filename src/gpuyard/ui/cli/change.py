"""What `cancel`, `hold`, `release`, `retry` and `priority` have in common: some jobs change, and others cannot."""

from gpuyard.daemon.client import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.options import IDS, Typed
from gpuyard.ui.cli.terminal import note, say, say_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TOLD = 20


def change(typed: Typed, verb: str, done: str) -> int:
    """`gpuyard verb IDS...`; `done` is what then has been done to them."""
    if not typed.words:
        raise UserError(f"which jobs should `gpuyard {verb}` change?", hint=f"name them: {IDS}")
    body = {"ids": " ".join(typed.words)}
    return tell(connect(start=True).request("POST", f"/jobs/{verb}", body=body), done, typed)


def tell(answer: "dict[str, Any]", done: str, typed: Typed) -> int:
    """What changed in one line, and what did not on standard error; 1 where nothing did."""
    if typed.flag("json"):
        say_json(answer)
    elif answer["count"]:
        say(f"{done} {answer['changed']}")
    unchanged = answer["unchanged"]
    for one in unchanged[:_TOLD]:
        note(f"gpuyard: {one['id']} is not {done}: {one['reason']}")
    if len(unchanged) > _TOLD:
        note(f"gpuyard: and {len(unchanged) - _TOLD} more are not")
    if not answer["count"] and not unchanged:
        note("gpuyard: there is nothing to change")
    return 0 if answer["count"] else 1
