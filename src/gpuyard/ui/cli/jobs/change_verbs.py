"""What `cancel`, `hold`, `release`, `suspend` and their kin have in common: some jobs change, and others cannot."""

from gpuyard.connect.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import note, say, say_json
from gpuyard.ui.cli.text_table import count_text
from gpuyard.ui.cli.verb_options import IDS, Typed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TOLD = 20
_FINISHED = {"succeeded", "failed", "cancelled", "rejected"}


def change(typed: Typed, verb: str, done: str, not_done: str | None = None) -> int:
    """`gpuyard verb IDS...`; `done` is what then has been done to them, `not_done` what is said of the others."""
    if not typed.words:
        raise UserError(f"which jobs should `gpuyard {verb}` change?", hint=f"name them: {IDS}")
    ids = " ".join(typed.words)
    with connect(start=True) as daemon:
        answer = daemon.request("POST", f"/jobs/{verb}", body={"ids": ids})
    return tell(typed, ids, answer, done, not_done or f"is not {done}")


def tell(typed: Typed, ids: str, answer: "dict[str, Any]", done: str, not_done: str) -> int:
    """What changed in one line, and what did not on standard error; 1 where nothing did."""
    if typed.flag("json"):
        say_json(answer)
    elif answer["count"]:
        say(f"{done} {answer['changed']}")
    _tell_unchanged(ids, answer, not_done)
    if not answer["count"] and not answer["unchanged"]:
        note("gpuyard: there is nothing to change")
    return 0 if answer["count"] else 1


def _tell_unchanged(ids: str, answer: "dict[str, Any]", not_done: str) -> None:
    """Each by its id; but where nobody named them one by one, those that are long over are only counted."""
    unchanged, total = answer["unchanged"], answer["unchanged_count"]
    finished = sum(map(_was_finished, unchanged)) if _is_wide(ids) else 0
    by_id = [one for one in unchanged if not (finished and _was_finished(one))]
    for one in by_id[:_TOLD]:
        note(f"gpuyard: {one['id']} {not_done}: {one['reason']}")
    others = total - min(len(by_id), _TOLD)
    if not others:
        return
    who = f"and {count_text(others, 'other')}" if answer["count"] or by_id else f"{others}"
    if others == finished:
        note(f"gpuyard: {who} {'was' if others == 1 else 'were'} finished already")
    else:  # the daemon names a hundred of them at most; what the rest is like is not known
        note(f"gpuyard: {who} did not change" + (", finished ones among them" if finished else ""))


def _is_wide(ids: str) -> bool:
    return any(word == "all" or word.startswith(("tag=", "name=")) for word in ids.replace(",", " ").split())


def _was_finished(one: "dict[str, Any]") -> bool:
    return any(word.strip(",:;") in _FINISHED for word in one["reason"].split())
