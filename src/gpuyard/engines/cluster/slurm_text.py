"""Translates Slurm's job states, reasons and error messages. Pure."""

import re

from gpuyard.engines.cluster.site import SiteRefused, SiteState, SiteUnreachable

_BY_SIGNAL = 128
_WAITING = frozenset(
    ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
_OVER = {
    "COMPLETED": SiteState.SUCCEEDED,
    "FAILED": SiteState.FAILED,
    "TIMEOUT": SiteState.TIMED_OUT,
    "DEADLINE": SiteState.TIMED_OUT,
    "OUT_OF_MEMORY": SiteState.OUT_OF_MEMORY,
    "CANCELLED": SiteState.CANCELLED,
    "PREEMPTED": SiteState.PREEMPTED,
    "NODE_FAIL": SiteState.LOST,
    "BOOT_FAIL": SiteState.LOST,
    "LAUNCH_FAILED": SiteState.LOST,
    "RECONFIG_FAIL": SiteState.LOST,
    "REVOKED": SiteState.LOST,
}
# By the start of a reason; the first match counts.
_REASONS = {
    "Resources": "what it asks for is in use",
    "Priority": "others are ahead of it",
    "Dependency": "it waits for another job",
    "BeginTime": "its start time has not come",
    "JobArrayTaskLimit": "its group has reached its limit of running jobs",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "its node went down",
    "PartitionDown": "its partition starts nothing now",
    "PartitionInactive": "its partition starts nothing now",
    "PartitionTimeLimit": "its time limit is above what its partition allows",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionConfig": "its partition cannot give what it asks for",
    "BadConstraints": "no node can ever give what it asks for",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "QOS": "a limit of its QOS is reached",
    "Assoc": "a limit of its account or user is reached",
    "MaxQOS": "a limit of its QOS is reached",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "JobLaunchFailure": "it could not be launched, or its supervisor was killed",
    "Prolog": "the site's prolog is running, or has failed",
}
# The job's state or exit status says the same.
_REDUNDANT_REASONS = frozenset(("", "None", "(null)", "NonZeroExitCode", "TimeLimit", "OutOfMemory"))
_UNREACHED = re.compile(
    r"unable to contact|connection (?:refused|timed out|reset)|timed out|munge|authentication|zero bytes|no route to"
    r"|configuration source|standby|retrying|temporarily|communication",
    re.IGNORECASE,
)
_NO_LONGER_THERE = re.compile(r"invalid job id|already complet", re.IGNORECASE)
_LIMITED = re.compile(r"policy|limit", re.IGNORECASE)
_PREFIX = re.compile(r"^\w+: (?:error: |fatal: )?(?:Batch job submission failed: )?")
_LONGEST = 500


def state_of(state: str, place: str) -> SiteState:
    """Translate a state. An unknown one does not count as an end: jobs that are over leave Slurm's list."""
    if state in _OVER:
        return _OVER[state]
    known_to_run = state not in _WAITING and bool(place)
    return SiteState.RUNNING if known_to_run else SiteState.PENDING


def reason_of(state: str, reason: str) -> str:
    """Return Slurm's own word, which manuals and administrators use, followed by an explanation."""
    if reason in _REDUNDANT_REASONS:
        return "suspended by Slurm" if state == "SUSPENDED" else ""
    explanation = next((text for start, text in _REASONS.items() if reason.startswith(start)), None)
    return reason if explanation is None else f"{reason}: {explanation}"


def status_of(code: str) -> int | None:
    """Parse `EXIT:SIGNAL`, as in `sacct`, or a wait status, as in `squeue`. For a job that could not be launched,
    `squeue` has the number of an error of Slurm's own instead."""
    status, colon, signum = code.partition(":")
    if not status.isdigit() or (colon and not signum.isdigit()):
        return None
    exited, killed = (int(status), int(signum)) if colon else (int(status) >> 8, int(status) & 0x7F)
    if exited and killed:
        return None
    return _BY_SIGNAL + killed if killed else exited


def fault_of(program: str, status: int, errors: str) -> SiteUnreachable | SiteRefused | None:
    """Return why a command failed; None if it only found nothing left to do."""
    message = _in_one_line(errors) or f"{program} exited with status {status}"
    if program == "scancel" and status > 0 and all(map(_NO_LONGER_THERE.search, errors.splitlines())):
        return None
    if program != "sbatch" or status < 0 or _UNREACHED.search(errors):
        return SiteUnreachable(message, hint=f"run `{program}` by hand, or `scontrol ping`")
    hint = "lower `most_jobs` in [slurm], if there are too many jobs" if _LIMITED.search(errors) else None
    return SiteRefused(f"Slurm refused it: {message}", hint=hint)


def unanswered(program: str, limit_s: float, errors: str) -> SiteUnreachable:
    message = _in_one_line(errors)
    return SiteUnreachable(f"{program} did not answer within {limit_s:.0f} s" + (f": {message}" if message else ""))


def _in_one_line(errors: str) -> str:
    lines = (_PREFIX.sub("", line).strip() for line in errors.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))[:_LONGEST]
