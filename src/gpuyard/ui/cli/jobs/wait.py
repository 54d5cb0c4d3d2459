"""`gpuyard wait`: waits until jobs have finished, across restarts of the daemon."""

import sys
import time

from gpuyard.connect.retrying import RetryingClient
from gpuyard.core.option import Option
from gpuyard.core.units import format_count, parse_duration
from gpuyard.system.submitting_shell import starting_processes
from gpuyard.ui.cli import EXIT_JOB_CANCELLED, EXIT_JOB_FAILED, EXIT_STUCK, EXIT_TIMED_OUT
from gpuyard.ui.cli.ask_daemon import request, selection_text
from gpuyard.ui.cli.terminal import is_terminal, note, say_json
from gpuyard.ui.cli.verb_options import IDS_HELP, JSON, Answer, Arguments, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

VERB = Verb(
    """Wait until jobs have finished; without IDS, those that this shell or script has submitted.

    Without IDS: jobs that finished since the last wait of this shell count too. A shell that has submitted none waits
    for all jobs that are unfinished now.

    Exit status 0 if all of them succeeded, 5 if one failed, 6 if one was cancelled and none failed, 7 if all that are
    left are held or wait for held jobs, 124 after --timeout. Keeps waiting while the daemon restarts.

    """
    + IDS_HELP,
    (Option("timeout", "text", "TIME", "Give up after this time, such as 2h. [no limit]"), JSON),
    Arguments("[IDS]...", is_many=True),
)
# The daemon answers within 30 s; on a terminal, ask each second to show progress.
_LONGEST_REQUEST_S = 30.0
_REQUEST_ON_A_TERMINAL_S = 1.0
_MOST_NAMED = 20


def run(typed: Typed) -> int:
    timeout = typed.text("timeout")
    deadline = float("inf") if timeout is None else time.monotonic() + parse_duration(timeout)
    shell = starting_processes()
    with RetryingClient() as queue:
        # The first answer fixes the selection, so that later requests do not include jobs submitted since.
        answer = _request(queue, selection_text(typed.arguments), 0.0, shell)
        chosen_by = answer.get("chosen_by", "ids")
        _note_choice(chosen_by, answer)
        total = answer["left"]
        longest_s = _REQUEST_ON_A_TERMINAL_S if is_terminal(sys.stderr) else _LONGEST_REQUEST_S
        try:
            while not _is_over(answer) and time.monotonic() < deadline:
                _write_progress(f"{max(0, total - answer['left'])} of {total} done, {answer['running']} running")
                left_s = max(0.0, deadline - time.monotonic())
                answer = _request(queue, answer["selection"], min(longest_s, left_s))
        finally:
            _write_progress("")
    if typed.flag("json"):
        say_json({**answer, "chosen_by": chosen_by})
    status = _report(answer)
    if answer["done"] and answer["selection"] and shell:
        # Only now: if this command is interrupted before, the next wait reports the jobs.
        body = {"ids": answer["selection"], "submitters": shell, "own": chosen_by == "shell"}
        request("POST", "/wait/reported", body=body)
    return status


def _request(queue: RetryingClient, ids: str, timeout_s: float, shell: "Sequence[str]" = ()) -> Answer:
    query = {"ids": ids, "timeout": f"{timeout_s:.3f}", "stuck": "1"}
    return queue.get("/wait", query if ids else {**query, "submitters": " ".join(shell)}, timeout_s)


def _is_over(answer: Answer) -> bool:
    return answer["done"] or bool(answer.get("is_stuck"))


def _note_choice(chosen_by: str, answer: Answer) -> None:
    """Say which jobs are waited for, where the user has not named them and it is not the jobs of this shell."""
    if chosen_by == "all" and answer["selection"]:
        note(f"gpuyard: this shell has submitted no jobs: waiting for all {answer['left']} that are unfinished now")
    elif chosen_by != "ids" and not answer["selection"]:
        whose = "no unfinished jobs" if chosen_by == "all" else "no jobs of this shell since it last waited"
        note(f"gpuyard: nothing to wait for: {whose}")


def _write_progress(text: str) -> None:
    if is_terminal(sys.stderr):
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


def _report(answer: Answer) -> int:
    if not _is_over(answer):
        note(f"gpuyard: timeout: {answer['left']} not finished\n  `gpuyard queue` lists them")
        return EXIT_TIMED_OUT
    for job in answer["failed"][:_MOST_NAMED]:
        why = job["reason"] or job["outcome"]
        note(f"gpuyard: {job['id']} {job['state']}{f': {why}' if why not in (None, job['state']) else ''}")
    if answer["failed_count"] > _MOST_NAMED:
        more = answer["failed_count"] - _MOST_NAMED
        note(f"gpuyard: and {more} more; `gpuyard queue --state failed,cancelled,rejected` lists them")
    if answer.get("is_stuck"):
        _note_stuck(answer)
        return EXIT_STUCK
    if not answer["failed_count"]:
        return 0
    is_cancelled = all(job["state"] == "cancelled" for job in answer["failed"])
    return EXIT_JOB_CANCELLED if is_cancelled else EXIT_JOB_FAILED


def _note_stuck(answer: Answer) -> None:
    count = answer["stuck_count"]
    note(f"gpuyard: {format_count(count, 'job')} will not start by {'itself' if count == 1 else 'themselves'}")
    for job in answer["stuck"][:_MOST_NAMED]:
        note(f"  {job['id']} is {job['state']}: {job['reason']}")
    if count > _MOST_NAMED:
        note(f"  and {count - _MOST_NAMED} more; `gpuyard queue --state held,blocked,suspended` lists them")
