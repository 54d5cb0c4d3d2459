"""`gpuyard wait`, which waits until jobs have finished, across restarts of the daemon; and `submit --wait` and
`--follow`, which stay until the submitted jobs have finished.
"""

import contextlib
import sys
import time

from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_count, parse_duration
from gpuyard.system.submitting_shell import starting_processes
from gpuyard.ui.cli.ask_daemon import request, selection_text
from gpuyard.ui.cli.command_grammar import IDS_HELP, JSON, Answer, Arguments, Typed, Verb
from gpuyard.ui.cli.terminal import is_terminal, note, say_json
from gpuyard.ui.cli.verbs import EXIT_JOB_CANCELLED, EXIT_JOB_FAILED, EXIT_STUCK, EXIT_TIMED_OUT

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
# The daemon answers within this time.
_LONGEST_REQUEST_S = 30.0
_MOST_NAMED = 20


def run(typed: Typed) -> int:
    timeout = typed.text("timeout")
    deadline = float("inf") if timeout is None else time.monotonic() + parse_duration(timeout)
    shell = starting_processes()
    with RetryingClient() as queue:
        # The first answer fixes the selection, so that later requests do not include jobs submitted since.
        answer = _request(queue, selection_text(typed.arguments), 0.0, shell)
        chosen_by = answer["chosen_by"]
        if chosen_by == "all" and answer["selection"]:
            note(f"gpuyard: this shell has submitted no jobs: waiting for all {answer['left']} that are unfinished now")
        elif chosen_by != "ids" and not answer["selection"]:
            whose = "no unfinished jobs" if chosen_by == "all" else "no jobs of this shell since it last waited"
            note(f"gpuyard: nothing to wait for: {whose}")
        total = answer["left"]
        longest_s = 1.0 if is_terminal(sys.stderr) else _LONGEST_REQUEST_S  # a terminal shows progress
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
    return bool(answer["done"] or answer["is_stuck"])


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
    if (more := answer["failed_count"] - _MOST_NAMED) > 0:
        note(f"gpuyard: and {more} more; `gpuyard queue --state failed,cancelled,rejected` lists them")
    if answer["is_stuck"]:
        count = answer["stuck_count"]
        note(f"gpuyard: {format_count(count, 'job')} will not start by {'itself' if count == 1 else 'themselves'}")
        for job in answer["stuck"][:_MOST_NAMED]:
            note(f"  {job['id']} is {job['state']}: {job['reason']}")
        if count > _MOST_NAMED:
            note(f"  and {count - _MOST_NAMED} more; `gpuyard queue --state held,blocked,suspended` lists them")
        return EXIT_STUCK
    return _failed_status(answer["failed"]) if answer["failed_count"] else 0


def _failed_status(jobs: "Sequence[Answer]") -> int:
    return EXIT_JOB_CANCELLED if all(job["state"] == "cancelled" for job in jobs) else EXIT_JOB_FAILED


def check(typed: Typed) -> None:
    given = "--follow" if typed.flag("follow") else "--wait" if typed.flag("wait") else ""
    if given and typed.flag("hold"):
        raise UserError(f"{given} and --hold do not go together", hint="a held job starts after `gpuyard release`")
    if given == "--follow" and typed.flag("json"):
        raise UserError("--follow and --json do not go together", hint="use --wait --json")
    if given == "--follow" and (many := [name for name in ("array", "sweep", "from") if name in typed.options]):
        raise UserError(f"--follow is for one job, and --{many[0]} makes many", hint="use --wait")


def stay(typed: Typed, answer: Answer) -> int:
    """Wait for the submitted jobs, and with --follow print the output. Return the exit status of a single job; of many
    0, 5 if one failed, or 6 if one was cancelled and none failed."""
    ids = answer["ids"]
    try:
        with RetryingClient() as queue:
            if typed.flag("follow"):
                from gpuyard.ui.cli.jobs.logs import VERB as LOGS
                from gpuyard.ui.cli.jobs.logs import follow_job

                with contextlib.suppress(UserError):  # it finished without having run: its state says why
                    follow_job(queue, ids, Typed({"follow": True}, [ids], verbs=(LOGS,)))
            sys.stdout.flush()
            query = {"ids": ids, "timeout": f"{_LONGEST_REQUEST_S:.3f}"}
            while not (waited := queue.get("/wait", query, _LONGEST_REQUEST_S))["done"]:
                pass
            return _status(queue, answer, waited)
    except KeyboardInterrupt:
        note(f"\ngpuyard: {ids} stays in the queue: `gpuyard queue {ids}` shows it, `gpuyard cancel {ids}` stops it")
        raise


def _status(queue: RetryingClient, answer: Answer, waited: Answer) -> int:
    if not waited["failed_count"]:
        return 0
    for job in waited["failed"][:1]:
        note(f"gpuyard: {job['id']} {job['state']}: {job['reason'] or job['outcome']}")
    if waited["failed_count"] > 1:
        note(f"gpuyard: {waited['failed_count']} of {answer['count']} did not succeed: `gpuyard queue {answer['ids']}`")
    if answer["count"] == 1:
        status = queue.get(f"/jobs/{answer['first']}")["status"]
        if status is not None and 0 < status < 256:
            return int(status)
    return _failed_status(waited["failed"])
