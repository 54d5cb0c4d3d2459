"""The checks of a torture run: pure functions over the evidence of the jobs and the records of the queue.

Each returns violations as texts, with what is needed to find the cause. `check_all` is all of them.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuyard.model.lifecycle import FINISHED
from tests.torture.evidence import Run
from tests.torture.records import AttemptRecord, Happened, Records, Submission

RECOVERY_S = 60.0
_ROUNDING_MB = 1.0
# How late a time limit may fire: the grace, a stopped daemon, a busy machine.
_LATE_S = 90.0
# The program notices its start after the daemon, and its last sign of life is a while before it was killed.
_EARLY_S = 2.0
_TERMINATED = 143
_KILLED = 137
_LINE = re.compile(rb"line (\d+\.\d+) (\d+) \.\n")


def check_all(
    runs: Sequence[Run],
    records: Records,
    submissions: Sequence[Submission],
    happened: Happened,
    *,
    logs: Mapping[str, bytes | None],
    capacity_mb: Mapping[str, float],
    recovery_s: float = RECOVERY_S,
) -> list[str]:
    plans = plans_of(records, submissions)
    return [
        *records.problems,
        *happened.observed,
        *check_submissions(records, submissions),
        *check_states(records),
        *check_attempts(runs, records, happened),
        *check_outcomes(runs, records, plans, happened),
        *check_limits(runs, records, plans, happened),
        *check_overlap(runs),
        *check_capacity(runs, records, capacity_mb, happened),
        *check_logs(runs, plans, happened, logs),
        *check_recoveries(happened, recovery_s),
    ]


def plans_of(records: Records, submissions: Iterable[Submission]) -> dict[int, Submission]:
    """Return the submission of each job, by the job's id."""
    by_name = {each.name: each for each in submissions}
    return {job.id: by_name[job.name] for job in records.jobs.values() if job.name in by_name}


def by_attempt(runs: Iterable[Run]) -> dict[tuple[int, int], list[Run]]:
    found: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in runs:
        if run.attempt is not None:
            found[run.attempt].append(run)
    return found


# Jobs


def check_submissions(records: Records, submissions: Sequence[Submission]) -> Iterator[str]:
    """No accepted job vanished, nothing refused appears, and nothing was submitted twice or in part."""
    ids: dict[str, list[int]] = defaultdict(list)
    for job in records.jobs.values():
        ids[job.name].append(job.id)
    for each in submissions:
        found = sorted(ids.pop(each.name, []))
        if each.answer == "accepted" and tuple(found) != each.ids:
            yield f"{each.name} was accepted as {list(each.ids)}, and the queue has {found}"
        if each.answer == "accepted" and not each.is_valid:
            yield f"{each.name} was to be refused, and was accepted as {list(each.ids)}"
        if each.answer == "refused" and found:
            yield f"{each.name} was refused, and the queue has {found}: {each.text}"
        if each.answer == "refused" and each.is_valid:
            yield f"{each.name} was refused without a cause: {each.text}"
        if each.answer == "unknown" and len(found) not in (0, each.count):
            yield f"{each.name} was sent as {each.count} jobs, and the queue has {found}"
    for name, found in ids.items():
        yield f"jobs {found} of the name '{name}' were never submitted"


def check_states(records: Records) -> Iterator[str]:
    for job in records.jobs.values():
        if job.state not in FINISHED:
            yield f"job {job.id} ({job.name}) is {job.state} at the end: {job.reason}"


# Attempts


def check_attempts(runs: Sequence[Run], records: Records, happened: Happened) -> Iterator[str]:
    """Each attempt ran exactly as often as its record says. A job may be killed before it has written its start."""
    ran = by_attempt(runs)
    for (job, number), found in ran.items():
        if len(found) > 1:
            when = ", ".join(f"pid {run.pid} at {run.start:.2f}" for run in found)
            yield f"attempt {job}.{number} ran {len(found)} times: {when}"
        if (job, number) not in records.attempts:
            who = f"pid {found[0].pid} at {found[0].start:.2f}"
            yield f"attempt {job}.{number} ran ({who}), and there is no record of it"
    for key, record in records.attempts.items():
        if record.kind is None:
            yield f"attempt {record.name} has no outcome"
        has_run = key in ran or record.pid in happened.killed_jobs
        if record.kind in ("succeeded", "failed", "out-of-memory") and not has_run:
            yield f"attempt {record.name} is recorded as {record.kind} ({record.reason}), and it never ran"


def check_outcomes(
    runs: Sequence[Run], records: Records, plans: Mapping[int, Submission], happened: Happened
) -> Iterator[str]:
    """The recorded outcome is what the program itself saw, or the consequence of a fault or a request."""
    ran = by_attempt(runs)
    for key, record in records.attempts.items():
        wrong = _wrong_outcome(record, ran.get(key, []), plans.get(record.job), happened)
        if wrong:
            said = f"{record.kind} {record.status if record.status is not None else ''} ({record.reason})"
            yield f"attempt {record.name} is recorded as {said}, {wrong}"


def _wrong_outcome(
    record: AttemptRecord, ran: Sequence[Run], plan: Submission | None, happened: Happened
) -> str | None:
    status = ran[0].status if ran else None
    if record.kind == "lost":
        return None if record.keeper_pid in happened.killed_keepers else "and its keeper was not killed"
    if record.kind == "cannot-start":
        return "although its program can be started"
    if record.kind == "cancelled":
        return None if record.job in happened.cancelled else "and it was not cancelled"
    if record.kind == "timed-out":
        return None if plan is not None and plan.limit_s is not None else "and it has no time limit"
    return _wrong_status(record, status, ran, happened)


def _wrong_status(record: AttemptRecord, status: int | None, ran: Sequence[Run], happened: Happened) -> str | None:
    """Compare the exit status. A program that was killed has written no end."""
    if not ran:
        return None  # check_attempts says so
    if status is None:
        is_known = record.status == _KILLED and ran[0].pid in happened.killed_jobs
        return None if is_known else "and the program was killed, by none of the faults"
    if status == _TERMINATED:
        return "and the program was terminated, by none of the faults"
    if record.kind == "succeeded":
        return None if status == 0 else f"and the program exited with {status}"
    if record.status != status:
        return f"and the program exited with {status}"
    return None


def check_limits(
    runs: Sequence[Run], records: Records, plans: Mapping[int, Submission], happened: Happened
) -> Iterator[str]:
    """Time limits fire neither early nor not at all, whatever the wall clock does. Time in suspension may count."""
    for key, found in by_attempt(runs).items():
        record, plan = records.attempts.get(key), plans.get(key[0])
        if record is None or plan is None or plan.limit_s is None:
            continue
        lasted = found[0].last - found[0].start
        has_slept = any(found[0].start < at < found[0].last for at in happened.suspended)
        is_early = lasted < plan.limit_s - _EARLY_S and not has_slept
        if record.kind == "timed-out" and is_early:
            yield f"attempt {record.name} was stopped after {lasted:.1f} s, and its limit is {plan.limit_s:g} s"
        if lasted > plan.limit_s + _LATE_S:
            yield f"attempt {record.name} ran for {lasted:.1f} s, and its limit is {plan.limit_s:g} s"


def check_overlap(runs: Sequence[Run]) -> Iterator[str]:
    """A job has one live attempt at a time."""
    last: dict[int, Run] = {}
    for run in runs:
        if run.attempt is None:
            continue
        earlier = last.get(run.attempt[0])
        if earlier is not None and earlier.last > run.start:
            still = f"{earlier.run} (pid {earlier.pid}) lived until {earlier.last:.2f}"
            yield f"{run.run} started at {run.start:.2f} while {still}"
        last[run.attempt[0]] = run


# Devices


def check_capacity(
    runs: Sequence[Run], records: Records, capacity_mb: Mapping[str, float], happened: Happened
) -> Iterator[str]:
    """No device was promised to more than it has, at any start.

    When a fault removed the lease of a job, scripts may get its device until the queue has made the lease anew: only
    the jobs of the queue are added up then.
    """
    active: dict[str, list[Run]] = defaultdict(list)
    for run in runs:  # in the order of their starts
        for device in run.devices:
            beside = active[device] = [other for other in active[device] if other.last > run.start]
            beside.append(run)
            lost_at = [at for at in happened.removed_leases if beside[0].start < at < run.start]
            counted = [other for other in beside if other.attempt is not None] if lost_at else beside
            held = {other.run: _held_mb(other, records, capacity_mb[device]) for other in counted}
            if sum(held.values()) > capacity_mb[device] + _ROUNDING_MB:
                who = ", ".join(f"{name} ({mb:g} MB)" for name, mb in held.items())
                yield f"GPU {device} ({capacity_mb[device]:g} MB) was over capacity at {run.start:.2f}: {who}"


def _held_mb(run: Run, records: Records, whole_mb: float) -> float:
    if run.mb is None:
        return whole_mb
    record = records.attempts.get(run.attempt) if run.attempt is not None else None
    return max(run.mb, record.reserved_mb or 0.0) if record is not None else run.mb


# Logs


def check_logs(
    runs: Sequence[Run], plans: Mapping[int, Submission], happened: Happened, logs: Mapping[str, bytes | None]
) -> Iterator[str]:
    """Each log has every line that its program printed, in order. A log with a cap may lack lines."""
    for (job, number), found in by_attempt(runs).items():
        run = found[0]
        if f"{run.run}.log" in happened.removed_logs or len(found) > 1:
            continue
        text = logs.get(run.run)
        if text is None:
            yield f"attempt {job}.{number} has no log"
            continue
        lines = [int(line[2]) for line in _LINE.finditer(text) if line[1].decode() == run.run]
        is_capped = job in plans and plans[job].is_capped
        wrong = _wrong_order(lines) or (None if is_capped else _missing(run, lines))
        if wrong:
            yield f"the log of attempt {job}.{number}: {wrong}"


def _wrong_order(lines: Sequence[int]) -> str | None:
    for before, after in itertools.pairwise(lines):
        if after <= before:
            return f"line {after} comes after line {before}"
    return None


def _missing(run: Run, lines: Sequence[int]) -> str | None:
    printed = [line for line in range(1, run.printed + 1) if line not in run.missed]
    lacking = sorted(set(printed) - set(lines))
    return f"{len(lacking)} of {len(printed)} lines are missing, first {lacking[0]}" if lacking else None


def check_recoveries(happened: Happened, recovery_s: float = RECOVERY_S) -> Iterator[str]:
    for fault, seconds in happened.recoveries:
        if seconds > recovery_s:
            yield f"{seconds:.1f} s passed from the end of the fault '{fault}' to the next start of a job"
