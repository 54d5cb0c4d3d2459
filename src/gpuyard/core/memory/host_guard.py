"""The host guard: what happens when the machine itself runs short of RAM.

Without it, the kernel's out-of-memory killer picks a program: mostly the largest, which is often the oldest. The guard
acts before that. It goes by available RAM as it was read, within the limits of a container, not by what was promised:

- Below the floor (`[host] keep_free`) neither jobs nor scripts nor `gpuyard run` start, until the floor has been free
  for some seconds.
- Below the floor a job makes way if a job of this queue grows, if the rest would be gone within 20 s at the present
  rate, or if less than half of the floor is left; above the floor, if all would be gone within a second. RAM that is
  low and steady costs no job its work.
- The youngest job of this queue that holds notable RAM makes way: it is stopped and queued again, with a need of what
  it held and a quarter more above the floor, so that it starts only when that fits.
- Of the programs that hold notable RAM, the one that was there first never makes way: a job of this queue, or the
  program of a script, of `gpuyard run` or of another queue, none of which the guard can stop. A job within its declared
  RAM makes way only if there is no other.
- A stopping program that keeps its RAM while the rest is nearly gone is killed before its grace period is over.
- It ends: a job makes way three times at most. After that it is left to the kernel, as without the guard.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import Growth
from gpuyard.core.memory.declared_ram import exceeds_declared, notable_mb
from gpuyard.core.memory.memory_guard import MemoryClimb
from gpuyard.core.scheduling.numbers import (
    CLEARLY_MORE,
    CRITICAL_PART,
    FASTEST_MB_S,
    KILL_PART,
    LASTS_ABOVE_S,
    LASTS_S,
    MOST_RERUNS,
    NEARLY_ALL,
)
from gpuyard.core.units import format_size

_SELDOM_S, _OFTEN_S = 1.0, 0.1
# The RAM of single jobs costs more to measure: only while a decision may be near.
_MEASURE_JOBS_S = 0.2


class HostJob(Struct, frozen=True, kw_only=True):
    """A job of this queue on this machine: what it holds of the RAM, and how fast it grows (`MemoryClimb`).
    `declared_mb` is None if its user did not say.
    `is_leaving`: it is being stopped, so that its RAM will be free soon. `times`: how often it has made way before.
    `may_be_stopped`: its user allows it."""

    job_id: int
    since: float
    held_mb: float
    rate_mb_s: float = 0.0
    declared_mb: float | None = None
    is_leaving: bool = False
    times: int = 0
    may_be_stopped: bool = True

    @property
    def is_within(self) -> bool:
        """Whether it holds no more than it declared."""
        return self.declared_mb is not None and not exceeds_declared(self.held_mb, self.declared_mb)


class HostProgram(Struct, frozen=True, kw_only=True):
    """A program with a lease that is no job of this queue: since when it has its lease, and the RAM that it holds."""

    since: float
    held_mb: float


class HostAlarm(Struct, frozen=True, kw_only=True):
    """RAM that is about to run out: how much is available, of which floor, and how fast it falls. `victim` is the job
    that makes way; None if there is no such job."""

    available_mb: float
    floor_mb: float
    rate_mb_s: float
    victim: int | None = None


class HostWatch(Struct, frozen=True, kw_only=True):
    """How often the available RAM is read, and whether the RAM of each job is measured along with it."""

    every_s: float
    measures_jobs: bool


def find_host_alarm(
    available_mb: float,
    floor: float,
    fall: MemoryClimb,
    jobs: Sequence[HostJob],
    programs: Sequence[HostProgram] = (),
) -> HostAlarm | None:
    """Return the alarm of the machine; None if its RAM is not about to run out. The RAM of jobs that leave counts as
    available. `fall` is the climb of what is not available, `programs` are those beside the jobs."""
    expected = available_mb + sum(job.held_mb for job in jobs if job.is_leaving)
    staying = [job for job in jobs if not job.is_leaving]
    if not is_short(expected, floor, fall, grows=any(job.rate_mb_s > 0.0 for job in staying)):
        return None
    alarm = HostAlarm(available_mb=available_mb, floor_mb=floor, rate_mb_s=fall.rate_mb_s)
    notable = [job for job in staying if job.held_mb >= notable_mb(floor)]
    first = _first_here(notable, [each for each in programs if each.held_mb >= notable_mb(floor)])
    movable = [job for job in notable if job is not first and job.may_be_stopped and job.times < MOST_RERUNS]
    over = [job for job in movable if not job.is_within]
    victim = max(over or movable, key=_start_order, default=None)
    return alarm if victim is None else replace(alarm, victim=victim.job_id)


def _first_here(jobs: Sequence[HostJob], programs: Sequence[HostProgram]) -> HostJob | None:
    """Return the oldest job; None if a program beside the queue is older."""
    first = min(jobs, key=_start_order, default=None)
    return None if first is None or any(each.since < first.since for each in programs) else first


def is_short(available_mb: float, floor: float, fall: MemoryClimb, *, grows: bool) -> bool:
    """Return whether a job has to make way, if there is one. `grows`: a job of this queue takes more RAM.

    Never true of more available RAM where it is false of less with `grows=True`."""
    if available_mb < CRITICAL_PART * floor:
        return True
    if available_mb < floor:
        return grows or available_mb < LASTS_S * fall.rate_mb_s
    return available_mb < LASTS_ABOVE_S * fall.steady_mb_s


def must_kill(available_mb: float, floor: float, fall: MemoryClimb) -> bool:
    """Return whether a job that is asked to stop is killed before its grace period is over: nearly nothing is left."""
    return available_mb < max(KILL_PART * floor, LASTS_ABOVE_S * fall.steady_mb_s)


def _start_order(job: HostJob) -> tuple[float, int]:
    return job.since, job.job_id


def next_watch(available_mb: float, floor: float) -> HostWatch:
    """Return how often RAM is read while jobs run: the nearer the floor, the more often."""
    left = max(0.0, available_mb - floor)
    every_s = min(_SELDOM_S, max(_OFTEN_S, left / 2 / FASTEST_MB_S))
    return HostWatch(every_s=every_s, measures_jobs=every_s < _MEASURE_JOBS_S)


def host_alarm_text(alarm: HostAlarm, job: HostJob, needed_mb: float) -> str:
    """Return what happened, for people: how much was left, what this job held, and why it makes way. `needed_mb` is
    what it needs above the floor."""
    left = f"the machine had {format_size(alarm.available_mb)} of RAM left of the {format_size(alarm.floor_mb)} to keep"
    if alarm.available_mb >= alarm.floor_mb:
        left = f"the machine had {format_size(alarm.available_mb)} of RAM left, which fell fast"
    who = f"the youngest job with notable RAM, and held {format_size(job.held_mb)}"
    if job.declared_mb is not None and not job.is_within:
        who += f", more than its {format_size(job.declared_mb)} (--ram)"
    return f"{left}; it was {who}; it starts again when {format_size(alarm.floor_mb + needed_mb)} are available"


def ram_to_restart(held_mb: float, floor: float, total_mb: float | None, foreign_mb: float | None) -> float:
    """Return how much RAM the next attempt of a job that was stopped reserves, above the floor: no more than it can
    have without other jobs, beside the RAM of programs that are no jobs."""
    wanted = held_mb * CLEARLY_MORE
    if total_mb is None:
        return wanted
    return min(wanted, NEARLY_ALL * max(0.0, total_mb - (foreign_mb or 0.0) - floor))


def grown_ram(growth: Growth, needed_mb: float) -> Growth:
    """Return what a stopped job gets next. It uses up none of its reruns."""
    return replace(growth, ram_mb=max(needed_mb, growth.ram_mb or 0.0))
