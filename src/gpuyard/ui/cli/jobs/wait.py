"""`gpuyard wait`: until jobs have finished, across restarts of the daemon."""

import sys
import time

from gpuyard.connect.retrying import RetryingClient
from gpuyard.ui.cli.terminal import is_terminal, note, say_json
from gpuyard.ui.cli.verb_options import JSON, Arguments, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(
    """Wait until jobs have finished; without IDS, until all that is in the queue now has.

    Exit status 0 where all of them succeeded, 1 where some did not, or where the time was up. It goes on waiting while
    the daemon is restarted. IDS are such as 17, 17-20, name=big, tag=night.
    """,
    (Option("timeout", "TIME", "Give up after this long, such as 2h. [wait for ever]"), JSON),
    Arguments("[IDS]...", is_many=True),
)
# The daemon answers after 30 s at the latest; whoever watches wants to see how far it is.
_LONGEST_ASK_S, _ASK_ON_A_TERMINAL_S = 30.0, 1.0
_TOLD = 20


def run(typed: Typed) -> int:
    deadline = _deadline(typed.text("timeout"))
    with RetryingClient() as queue:
        # The first answer names the jobs that are meant, so that later ones are no longer "everything unfinished".
        answer = _ask(queue, " ".join(typed.words), 0.0)
        total = answer["left"]
        ask_s = _ASK_ON_A_TERMINAL_S if is_terminal(sys.stderr) else _LONGEST_ASK_S
        try:
            while not answer["done"] and time.monotonic() < deadline:
                _show_progress(answer, total)
                answer = _ask(queue, answer["selection"], min(ask_s, max(0.0, deadline - time.monotonic())))
        finally:
            _clear_progress()
    if typed.flag("json"):
        say_json(answer)
    return _verdict(answer)


def _deadline(timeout: str | None) -> float:
    if timeout is None:
        return float("inf")
    from gpuyard.core.units import parse_duration

    return time.monotonic() + parse_duration(timeout)


def _ask(queue: RetryingClient, ids: str, timeout_s: float) -> "dict[str, Any]":
    return queue.get("/wait", {"ids": ids, "timeout": f"{timeout_s:.3f}"}, timeout_s)


def _show_progress(answer: "dict[str, Any]", total: int) -> None:
    if not is_terminal(sys.stderr):
        return
    done = max(0, total - answer["left"])
    sys.stderr.write(f"\r{done} of {total} done, {answer['running']} running\x1b[K")
    sys.stderr.flush()


def _clear_progress() -> None:
    if is_terminal(sys.stderr):
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _verdict(answer: "dict[str, Any]") -> int:
    if not answer["done"]:
        note(f"gpuyard: the time is up, {answer['left']} have not finished\n  `gpuyard queue` shows them")
        return 1
    for job in answer["failed"][:_TOLD]:
        why = job["reason"] or job["outcome"]
        note(f"gpuyard: {job['id']} {job['state']}{f': {why}' if why not in (None, job['state']) else ''}")
    if answer["failed_count"] > _TOLD:
        note(f"gpuyard: and {answer['failed_count'] - _TOLD} more; `gpuyard queue --state failed,cancelled,rejected`")
    return 1 if answer["failed_count"] else 0
