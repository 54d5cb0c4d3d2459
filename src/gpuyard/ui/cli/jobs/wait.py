"""`gpuyard wait`: waits until jobs have finished, across restarts of the daemon."""

import sys
import time

from gpuyard.connect.retrying import RetryingClient
from gpuyard.core.units import parse_duration
from gpuyard.ui.cli import EXIT_JOB_CANCELLED, EXIT_JOB_FAILED, EXIT_TIMED_OUT
from gpuyard.ui.cli.ask_daemon import selection_text
from gpuyard.ui.cli.terminal import is_terminal, note, say_json
from gpuyard.ui.cli.verb_options import IDS_HELP, JSON, Answer, Arguments, Option, Typed, Verb

VERB = Verb(
    """Wait until jobs have finished; without IDS, all that are unfinished now.

    Exit status 0 if all of them succeeded, 5 if one failed, 6 if one was cancelled and none failed, 124 after
    --timeout. Keeps waiting while the daemon restarts.

    """
    + IDS_HELP,
    (Option("timeout", "TIME", "Give up after this time, such as 2h. [no limit]"), JSON),
    Arguments("[IDS]...", is_many=True),
)
# The daemon answers within 30 s; on a terminal, ask each second to show progress.
_LONGEST_REQUEST_S, _REQUEST_ON_A_TERMINAL_S = 30.0, 1.0
_MOST_NAMED = 20


def run(typed: Typed) -> int:
    timeout = typed.text("timeout")
    deadline = float("inf") if timeout is None else time.monotonic() + parse_duration(timeout)
    with RetryingClient() as queue:
        # The first answer fixes the selection, so that later requests do not include jobs submitted since.
        answer = _request(queue, selection_text(typed.arguments), 0.0)
        total = answer["left"]
        longest_s = _REQUEST_ON_A_TERMINAL_S if is_terminal(sys.stderr) else _LONGEST_REQUEST_S
        try:
            while not answer["done"] and time.monotonic() < deadline:
                _write_progress(f"{max(0, total - answer['left'])} of {total} done, {answer['running']} running")
                left_s = max(0.0, deadline - time.monotonic())
                answer = _request(queue, answer["selection"], min(longest_s, left_s))
        finally:
            _write_progress("")
    if typed.flag("json"):
        say_json(answer)
    return _report(answer)


def _request(queue: RetryingClient, ids: str, timeout_s: float) -> Answer:
    return queue.get("/wait", {"ids": ids, "timeout": f"{timeout_s:.3f}"}, timeout_s)


def _write_progress(text: str) -> None:
    if is_terminal(sys.stderr):
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


def _report(answer: Answer) -> int:
    """Print which jobs did not succeed, and return the exit status."""
    if not answer["done"]:
        note(f"gpuyard: timeout: {answer['left']} not finished\n  `gpuyard queue` lists them")
        return EXIT_TIMED_OUT
    for job in answer["failed"][:_MOST_NAMED]:
        why = job["reason"] or job["outcome"]
        note(f"gpuyard: {job['id']} {job['state']}{f': {why}' if why not in (None, job['state']) else ''}")
    if answer["failed_count"] > _MOST_NAMED:
        more = answer["failed_count"] - _MOST_NAMED
        note(f"gpuyard: and {more} more; `gpuyard queue --state failed,cancelled,rejected` lists them")
    if not answer["failed_count"]:
        return 0
    is_cancelled = all(job["state"] == "cancelled" for job in answer["failed"])
    return EXIT_JOB_CANCELLED if is_cancelled else EXIT_JOB_FAILED
