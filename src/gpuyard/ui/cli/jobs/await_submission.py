"""`gpuyard submit --wait` and `--follow`: stay until the submitted jobs have finished, and return how they ended."""

import sys

from gpuyard.connect.retrying import RetryingClient
from gpuyard.errors import UserError
from gpuyard.ui.cli import EXIT_JOB_CANCELLED, EXIT_JOB_FAILED
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.verb_options import Answer, Typed

_LONGEST_REQUEST_S = 30.0
_MAKE_MANY = ("array", "sweep", "from")


def check(typed: Typed) -> None:
    given = "--follow" if typed.flag("follow") else "--wait" if typed.flag("wait") else ""
    if given and typed.flag("hold"):
        raise UserError(f"{given} and --hold do not go together", hint="a held job starts after `gpuyard release`")
    if given == "--follow" and typed.flag("json"):
        raise UserError("--follow and --json do not go together", hint="use --wait --json")
    if given == "--follow" and (many := [name for name in _MAKE_MANY if name in typed.options]):
        raise UserError(f"--follow is for one job, and --{many[0]} makes many", hint="use --wait")


def stay(typed: Typed, answer: Answer) -> int:
    """Wait for the submitted jobs, and with --follow print the output. Return the exit status of a single job; of many
    0, 5 if one failed, or 6 if one was cancelled and none failed."""
    ids = answer["ids"]
    try:
        with RetryingClient() as queue:
            if typed.flag("follow"):
                _follow(queue, ids)
            waited = _wait(queue, ids)
            return _status(queue, answer, waited)
    except KeyboardInterrupt:
        note(f"\ngpuyard: {ids} stays in the queue: `gpuyard queue {ids}` shows it, `gpuyard cancel {ids}` stops it")
        raise


def _follow(queue: RetryingClient, ids: str) -> None:
    from gpuyard.ui.cli.jobs.logs import VERB, follow_job

    try:
        follow_job(queue, ids, Typed({"follow": True}, [ids], verbs=(VERB,)))
    except UserError:  # it finished without having run: its state says why
        return


def _wait(queue: RetryingClient, ids: str) -> Answer:
    sys.stdout.flush()
    query = {"ids": ids, "timeout": f"{_LONGEST_REQUEST_S:.3f}"}
    while not (waited := queue.get("/wait", query, _LONGEST_REQUEST_S))["done"]:
        pass  # the daemon answers when they have finished, or after 30 s
    return waited


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
    is_cancelled = all(job["state"] == "cancelled" for job in waited["failed"])
    return EXIT_JOB_CANCELLED if is_cancelled else EXIT_JOB_FAILED
