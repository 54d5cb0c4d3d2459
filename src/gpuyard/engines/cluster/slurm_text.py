"""Slurm's words for how a job stands, why it waits and what went wrong, and ours. Pure."""

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
# By how a reason begins; the first that fits.
_REASONS = {
    "Resources": "what it asks for is in use",
    "Priority": "others are ahead of it",
    "Dependency": "it waits for another job",
    "BeginTime": "its time has not come",
    "JobArrayTaskLimit": "as many of its group run as may at once",
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
    "Prolog": "what the site runs before each job is running, or failed",
}
# The state says as much, or the job's own status does.
_SAID_OTHERWISE = frozenset(("", "None", "(null)", "NonZeroExitCode", "TimeLimit", "OutOfMemory"))
_UNREACHED = re.compile(
    r"unable to contact|connection (?:refused|timed out|reset)|timed out|munge|authentication|zero bytes|no route to"
    r"|configuration source|standby|retrying|temporarily|communication",
    re.IGNORECASE,
)
_NO_LONGER_THERE = re.compile(r"invalid job id|already complet", re.IGNORECASE)
_LIMITED = re.compile(r"policy|limit", re.IGNORECASE)
_PREFIX = re.compile(r"^\w+: (?:error: |fatal: )?(?:Batch job submission failed: )?")
_LONGEST = 500


def at_of(state: str, place: str) -> SiteState:
    """One that nobody knows is not taken for an end: what is over leaves the list."""
    if state in _OVER:
        return _OVER[state]
    known_to_run = state not in _WAITING and bool(place)
    return SiteState.RUNNING if known_to_run else SiteState.PENDING


def reason_of(state: str, reason: str) -> str:
    """Slurm's own word first: its manual and its administrators know it."""
    if reason in _SAID_OTHERWISE:
        return "suspended by Slurm" if state == "SUSPENDED" else ""
    plain = next((words for word, words in _REASONS.items() if reason.startswith(word)), None)
    return reason if plain is None else f"{reason}: {plain}"


def status_of(code: str) -> int | None:
    """Of `EXIT:SIGNAL`, as accounts have it, or of a wait status, as the list has it; the list may also have the number
    of an error of Slurm's own, where a job could not be launched."""
    status, colon, signum = code.partition(":")
    if not status.isdigit() or (colon and not signum.isdigit()):
        return None
    exited, killed = (int(status), int(signum)) if colon else (int(status) >> 8, int(status) & 0x7F)
    if exited and killed:
        return None
    return _BY_SIGNAL + killed if killed else exited


def fault_of(program: str, status: int, said: str) -> SiteUnreachable | SiteRefused | None:
    """Why a command failed; `None` where it only found that there is nothing to do any more."""
    words = _in_one_line(said) or f"{program} ended with status {status}"
    if program == "scancel" and status > 0 and all(map(_NO_LONGER_THERE.search, said.splitlines())):
        return None
    if program != "sbatch" or status < 0 or _UNREACHED.search(said):
        return SiteUnreachable(words, hint=f"`{program}` by hand, or `scontrol ping`, says more")
    hint = "lower `most_jobs` in [slurm], if it is for their number" if _LIMITED.search(said) else None
    return SiteRefused(f"Slurm refused it: {words}", hint=hint)


def unanswered(program: str, limit_s: float, said: str) -> SiteUnreachable:
    told = _in_one_line(said)
    return SiteUnreachable(f"{program} did not answer within {limit_s:.0f} s" + (f": {told}" if told else ""))


def _in_one_line(said: str) -> str:
    lines = (_PREFIX.sub("", line).strip() for line in said.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))[:_LONGEST]
