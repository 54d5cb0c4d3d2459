"""Guards act before the memory of a device or the RAM of the machine is full: the youngest job leaves, and is queued
again with more.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Growth
from gpuyard.model.units import format_size
from gpuyard.policy.declared_ram import exceeds_declared, notable_mb
from gpuyard.policy.foreign_load import SteadyGate, judge_steadily
from gpuyard.policy.numbers import (
    CLEARLY_MORE,
    CLEARLY_MORE_MB,
    CRITICAL_PART,
    FASTEST_MB_S,
    HORIZON_S,
    KILL_PART,
    LASTS_ABOVE_S,
    LASTS_S,
    MOST_LOST_S,
    MOST_RERUNS,
    NEARLY_ALL,
    NOISE_MB,
    REOPEN_AFTER_S,
    RESERVE_MB,
    RESERVE_PART,
    STOPS_WITHIN_S,
    YOUNG_S,
)
from gpuyard.policy.wait_reasons import Reason, ReasonKind

# The rate is taken over this time. Less growth than this in it is noise: drivers count in pages.
RATE_OVER_S = 1.2


class MemoryClimb(Struct, frozen=True, kw_only=True):
    """The memory of one job on one device in the last seconds, as pairs of time and MB, the oldest first."""

    points: tuple[tuple[float, float], ...] = ()

    def add(self, at: float, held_mb: float, began_at: float | None = None) -> "MemoryClimb":
        """Return the climb with one more reading. `began_at`: when a program began that held nothing before."""
        points = self.points
        if not points and began_at is not None and at - began_at < YOUNG_S:
            points = ((began_at, 0.0),)
        older, window = 0, at - RATE_OVER_S
        for point in points:
            if point[0] > window:
                break
            older += 1
        # One point before the window, and three in all: where readings are a second apart, two intervals show a climb.
        first = max(0, older - max(1, 2 - (len(points) - older)))
        return MemoryClimb(points=(*points[first:], (at, held_mb)))

    @property
    def held_mb(self) -> float:
        return self.points[-1][1] if self.points else 0.0

    @property
    def rate_mb_s(self) -> float:
        """How fast it has grown of late, in MB per second; 0 while it is flat or shrinks."""
        return _rate(self.points[0], self.points[-1]) if self.points else 0.0

    @property
    def steady_mb_s(self) -> float:
        """How fast it has grown all along: the lower rate of the two halves. A single large allocation is no climb."""
        if len(self.points) < 3:  # two intervals
            return 0.0
        first, last = self.points[0], self.points[-1]
        middle = min(self.points[1:-1], key=lambda point: abs(2 * point[0] - first[0] - last[0]))
        return min(_rate(first, middle), _rate(middle, last))


def _rate(before: tuple[float, float], after: tuple[float, float]) -> float:
    grown, seconds = after[1] - before[1], after[0] - before[0]
    return grown / seconds if grown > NOISE_MB and seconds > 0.0 else 0.0


class GuardedJob(Struct, frozen=True, kw_only=True):
    """A job of this queue on a card: what it holds there, and how fast it grows (`MemoryClimb`). `is_leaving`: it is
    being suspended or stopped, so its memory will be free soon. `is_spared`: it was resumed after the guard had
    suspended it, less than a minute ago. `may_be_moved`: its user allows it. `missing_mb`: how much of what it
    reserves it does not hold yet."""

    job_id: int
    since: float
    held_mb: float
    rate_mb_s: float
    steady_mb_s: float
    is_first_run: bool
    is_leaving: bool = False
    is_spared: bool = False
    may_be_moved: bool = True
    missing_mb: float = 0.0


class Alarm(Struct, frozen=True, kw_only=True):
    """A card whose memory is about to run out: how much is free, and which job grows how fast. `victim` is the job that
    makes way; None if there is no such job. `is_first`: no other job or lease was there before the victim."""

    free_mb: float
    reserve_mb: float
    grower: int
    rate_mb_s: float
    victim: int | None = None
    is_first: bool = False


def reserve_mb(capacity_mb: float) -> float:
    """Return how much memory of a card of this size has to stay free."""
    return max(RESERVE_MB, RESERVE_PART * capacity_mb)


def find_alarm(
    free_mb: float,
    capacity_mb: float,
    jobs: Sequence[GuardedJob],
    *,
    has_other_leases: Callable[[], bool],
) -> Alarm | None:
    """Return the alarm of a card; None if its memory is not about to run out, if no first run grows there and no
    known job that lacks what first runs have taken, or if a job has the card alone. The memory of jobs that leave
    counts as free. `has_other_leases`: whether other leases were on the card before the first job of this queue there;
    called only if that decides."""
    staying = [job for job in jobs if not job.is_leaving]
    expected = free_mb + sum(job.held_mb for job in jobs if job.is_leaving)
    growers = [job for job in staying if job.is_first_run or job.missing_mb > expected]
    rates = {job.job_id: job.rate_mb_s for job in growers}
    grower = max(rates, key=rates.__getitem__, default=None)
    if grower is None or not rates[grower] or not any(job.is_first_run for job in staying):
        return None
    reserve = reserve_mb(capacity_mb)
    soon = HORIZON_S * sum(job.steady_mb_s for job in growers)
    if expected >= max(reserve, soon) or (len(staying) == 1 and not has_other_leases()):
        return None
    alarm = Alarm(free_mb=free_mb, reserve_mb=reserve, grower=grower, rate_mb_s=rates[grower])
    movable = [job for job in staying if job.is_first_run and job.may_be_moved and _may_move_again(job)]
    if not movable:
        return alarm
    victim, first = max(movable, key=_age), min(staying, key=_age)
    return replace(alarm, victim=victim.job_id, is_first=victim is first and not has_other_leases())


def _may_move_again(job: GuardedJob) -> bool:
    return not job.is_spared or job.rate_mb_s > 0.0


def _age(job: GuardedJob) -> tuple[float, int]:
    return job.since, job.job_id


def may_stop(alarm: Alarm, ran_s: float) -> bool:
    """Return whether the victim is stopped and queued again where it cannot be suspended."""
    return not alarm.is_first and ran_s <= MOST_LOST_S


def alarm_text(alarm: Alarm, label: str, victim: int) -> str:
    """Return what happened, for people: on which card, and which job grew."""
    who = "it" if alarm.grower == victim else f"job {alarm.grower}"
    text = f"GPU {label} had {format_size(alarm.free_mb)} left while {who} grew"
    if alarm.free_mb >= alarm.reserve_mb:
        text += f" by {format_size(alarm.rate_mb_s)} a second"
    return text


def stops_soon(stop_at: float | None, kill_at: float | None, now: float) -> bool:
    """Return whether a job that is stopping will soon free its memory. With a long grace period it may keep it for
    minutes, and nothing is freed before it is asked to stop."""
    return any(at is not None and 0.0 <= now - at < STOPS_WITHIN_S for at in (stop_at, kill_at))


def room_to_resume(held_mb: float, expected_mb: float) -> float:
    """Return how much memory has to be free on a shared card before a job goes on that the guard has suspended. It was
    expected to need `expected_mb`."""
    return max(held_mb * CLEARLY_MORE, held_mb + CLEARLY_MORE_MB, expected_mb)


def room_to_restart(held_mb: float, expected_mb: float, capacity_mb: float, foreign_mb: float) -> float:
    """Return what a job that the guard has stopped gets at its next start: no more than it can have alone on the card,
    beside the memory of programs that are no jobs."""
    most = min(NEARLY_ALL * capacity_mb, capacity_mb - foreign_mb - reserve_mb(capacity_mb))
    return max(held_mb, min(room_to_resume(held_mb, expected_mb), most))


def grown_need(growth: Growth, needed_mb: float) -> Growth:
    """Return what a stopped job gets next: at least `needed_mb`. It uses up none of its reruns."""
    return replace(growth, memory_mb=max(needed_mb, growth.memory_mb or 0.0))


def judge_card(gate: SteadyGate, free_mb: float, capacity_mb: float, alarm: Alarm | None, now: float) -> SteadyGate:
    """Close the card to new work at an alarm; reopen it when the reserve has been free for some seconds."""
    if alarm is None and not gate.is_closed:
        return gate
    return judge_steadily(gate, alarm is None and free_mb >= reserve_mb(capacity_mb), now, REOPEN_AFTER_S)


def closed_reason(device_id: str, free_mb: float, capacity_mb: float) -> Reason:
    """Return why nothing new starts on a card for the moment."""
    reserve = reserve_mb(capacity_mb)
    text = f"{format_size(free_mb)} free: jobs grew beside first runs until its memory was nearly gone"
    remedy = f"work starts there again when {format_size(reserve)} have been free for {REOPEN_AFTER_S:.0f} s"
    return Reason(ReasonKind.MEMORY_GUARD, text, device_id, free_mb, reserve, remedy=remedy)


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
