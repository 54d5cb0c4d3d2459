"""Guards act before the memory of a device or the RAM of the machine is full: the youngest job leaves, and is queued
again with more. A program beside the queue that holds more RAM than it declared is warned, and never stopped.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Host
from gpuyard.model.units import format_size
from gpuyard.policy import numbers
from gpuyard.policy.foreign_load import SteadyGate, judge_steadily
from gpuyard.policy.host_room import floor_mb
from gpuyard.policy.wait_reasons import Reason, ReasonKind

if TYPE_CHECKING:  # waiting for devices and `gpuyard leases` use this module, and know no jobs
    from gpuyard.model.job import Growth


class MemoryClimb(Struct, frozen=True, kw_only=True):
    """The memory of one job on one device in the last seconds, as pairs of time and MB, the oldest first."""

    points: tuple[tuple[float, float], ...] = ()

    def add(self, at: float, held_mb: float, began_at: float | None = None) -> "MemoryClimb":
        """Return the climb with one more reading. `began_at`: when a program began that held nothing before."""
        points = self.points
        if not points and began_at is not None and at - began_at < numbers.YOUNG_S:
            points = ((began_at, 0.0),)
        older = bisect_right(points, at - 1.2, key=itemgetter(0))  # the rate is taken over this time
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
    return grown / seconds if grown > numbers.NOISE_MB and seconds > 0.0 else 0.0


class GuardedJob(Struct, frozen=True, kw_only=True):
    """A job of this queue on a card: what it holds there, and how fast it grows (`MemoryClimb`)."""

    job_id: int
    since: float
    held_mb: float
    rate_mb_s: float
    steady_mb_s: float
    is_first_run: bool
    is_leaving: bool = False  # it is being suspended or stopped, so its memory will be free soon
    is_spared: bool = False  # it was resumed less than a minute ago, after the guard had suspended it
    may_be_moved: bool = True  # its user allows it
    missing_mb: float = 0.0  # how much of what it reserves it does not hold yet


class Alarm(Struct, frozen=True, kw_only=True):
    """A card whose memory is about to run out. `victim` makes way; `is_first`: it was there before all others."""

    free_mb: float
    reserve_mb: float
    grower: int
    rate_mb_s: float
    victim: int | None = None
    is_first: bool = False


def reserve_mb(capacity_mb: float) -> float:
    """Return how much memory of a card of this size has to stay free."""
    return max(numbers.RESERVE_MB, numbers.RESERVE_PART * capacity_mb)


def find_alarm(
    free_mb: float, capacity_mb: float, jobs: Sequence[GuardedJob], *, has_other_leases: Callable[[], bool]
) -> Alarm | None:
    """Return the alarm of a card; None if its memory is not about to run out, if no first run grows there and no known
    job lacks what first runs have taken, or if a job has the card alone. The memory of jobs that leave counts as free.
    `has_other_leases` (before the first job of this queue there) is called only if that decides."""
    staying = [job for job in jobs if not job.is_leaving]
    expected = free_mb + sum(job.held_mb for job in jobs if job.is_leaving)
    growers = [job for job in staying if job.is_first_run or job.missing_mb > expected]
    rates = {job.job_id: job.rate_mb_s for job in growers}
    grower = max(rates, key=rates.__getitem__, default=None)
    if grower is None or not rates[grower] or not any(job.is_first_run for job in staying):
        return None
    reserve = reserve_mb(capacity_mb)
    soon = numbers.HORIZON_S * sum(job.steady_mb_s for job in growers)
    if expected >= max(reserve, soon) or (len(staying) == 1 and not has_other_leases()):
        return None
    alarm = Alarm(free_mb=free_mb, reserve_mb=reserve, grower=grower, rate_mb_s=rates[grower])
    first_runs = [job for job in staying if job.is_first_run and job.may_be_moved]
    movable = [job for job in first_runs if not job.is_spared or job.rate_mb_s > 0.0]
    if not movable:
        return alarm
    victim, first = max(movable, key=_start_order), min(staying, key=_start_order)
    return replace(alarm, victim=victim.job_id, is_first=victim is first and not has_other_leases())


def _start_order(job: "GuardedJob | HostJob") -> tuple[float, int]:
    return job.since, job.job_id


def may_stop(alarm: Alarm, ran_s: float) -> bool:
    """Return whether the victim is stopped and queued again where it cannot be suspended."""
    return not alarm.is_first and ran_s <= numbers.MOST_LOST_S


def alarm_text(alarm: Alarm, label: str, victim: int) -> str:
    """Return what happened, for people: on which card, and which job grew."""
    who = "it" if alarm.grower == victim else f"job {alarm.grower}"
    text = f"GPU {label} had {format_size(alarm.free_mb)} left while {who} grew"
    if alarm.free_mb >= alarm.reserve_mb:
        text += f" by {format_size(alarm.rate_mb_s)} a second"
    return text


def stops_soon(stop_at: float | None, kill_at: float | None, now: float) -> bool:
    """Return whether a stopping job will soon free its memory: with a long grace period it may keep it for minutes."""
    return any(at is not None and 0.0 <= now - at < numbers.STOPS_WITHIN_S for at in (stop_at, kill_at))


def room_to_resume(held_mb: float, expected_mb: float) -> float:
    """Return how much memory has to be free on a shared card before a job goes on that the guard has suspended."""
    return max(held_mb * numbers.CLEARLY_MORE, held_mb + numbers.CLEARLY_MORE_MB, expected_mb)


def room_to_restart(held_mb: float, expected_mb: float, capacity_mb: float, foreign_mb: float) -> float:
    """Return what a job that the guard has stopped gets next: no more than it can have alone, beside foreign memory."""
    most = min(numbers.NEARLY_ALL * capacity_mb, capacity_mb - foreign_mb - reserve_mb(capacity_mb))
    return max(held_mb, min(room_to_resume(held_mb, expected_mb), most))


def grown_need(growth: "Growth", needed_mb: float) -> "Growth":
    """Return what a stopped job gets next: at least `needed_mb`. It uses up none of its reruns."""
    return replace(growth, memory_mb=max(needed_mb, growth.memory_mb or 0.0))


def judge_card(gate: SteadyGate, free_mb: float, capacity_mb: float, alarm: Alarm | None, now: float) -> SteadyGate:
    """Close the card to new work at an alarm; reopen it when the reserve has been free for some seconds."""
    if alarm is None and not gate.is_closed:
        return gate
    return judge_steadily(gate, alarm is None and free_mb >= reserve_mb(capacity_mb), now, numbers.REOPEN_AFTER_S)


def closed_reason(device_id: str, free_mb: float, capacity_mb: float) -> Reason:
    """Return why nothing new starts on a card for the moment."""
    reserve = reserve_mb(capacity_mb)
    text = f"{format_size(free_mb)} free: jobs grew beside first runs until its memory was nearly gone"
    remedy = f"work starts there again when {format_size(reserve)} have been free for {numbers.REOPEN_AFTER_S:.0f} s"
    return Reason(ReasonKind.MEMORY_GUARD, text, device_id, free_mb, reserve, remedy=remedy)


def ram_figures(host: Host, keep_free_mb: float | None) -> tuple[float, float] | None:
    """Return the available RAM, and how much of it stays free; None if it is unknown, or nothing stays free."""
    floor = floor_mb(keep_free_mb, host.memory_total_mb)
    return (host.memory_available_mb, floor) if host.memory_available_mb is not None and floor else None


def judge_host(
    gate: SteadyGate, available_mb: float, floor: float, now: float, *, has_alarm: bool = False
) -> SteadyGate:
    """Close the machine to new work below the floor, and at an alarm; reopen it when it was free for some seconds."""
    is_within = not has_alarm and available_mb >= floor
    return gate if is_within and not gate.is_closed else judge_steadily(gate, is_within, now, numbers.REOPEN_AFTER_S)


def host_closed_reason(available_mb: float, floor: float) -> Reason:
    """Return why nothing new starts on this machine for the moment."""
    text = f"{format_size(available_mb)} of RAM available, and {format_size(floor)} stay free"
    remedy = (
        f"programs start again when {format_size(floor)} have been free for {numbers.REOPEN_AFTER_S:.0f} s; "
        "keep_free under [host] in the configuration sets the floor"
    )
    return Reason(ReasonKind.HOST_TOO_FULL, text, had=available_mb, needed=floor, remedy=remedy)


def exceeds_declared(held_mb: float, declared_mb: float) -> bool:
    """Return whether a program holds noticeably more than it declared, or its user measured."""
    return held_mb > declared_mb * 1.05


def notable_mb(floor: float) -> float:
    """Return from where on it helps to stop a job: one that holds less would free too little."""
    return min(256.0, 0.1 * floor)


class HeldRam(Struct, frozen=True, kw_only=True):
    """The RAM that a program holds, and that it declared with `option`, if it did. `figures` are the available RAM of
    the machine and how much of it has to stay free, if known."""

    name: str
    held_mb: float
    declared_mb: float | None
    option: str
    figures: tuple[float, float] | None = None

    @property
    def is_over(self) -> bool:
        return self.declared_mb is not None and exceeds_declared(self.held_mb, self.declared_mb)

    @property
    def is_undeclared(self) -> bool:
        """Whether it holds notable RAM that it has not declared."""
        return self.declared_mb is None and self.figures is not None and self.held_mb >= notable_mb(self.figures[1])

    @property
    def is_short(self) -> bool:
        """Whether the machine has less RAM available than has to stay free."""
        return self.figures is not None and self.figures[0] < self.figures[1]


class RamWarnings(Struct, frozen=True, kw_only=True):
    """What was said so far: the RAM that the program held at its last warning, and whether the machine was short."""

    warned_mb: float = 0.0
    is_short: bool = False


def judge_held_ram(said: RamWarnings, held: HeldRam) -> tuple[RamWarnings, str | None]:
    """Return what has been said from now on, and the warning; None if there is none. A program that holds more than it
    declared is warned once, and again each time it has grown by a quarter. When the machine has less RAM available than
    has to stay free, it is warned once, as is one that has not declared its RAM; again only after there was enough."""
    is_newly_short = held.is_short and not said.is_short and (held.is_over or held.is_undeclared)
    has_grown = held.is_over and held.held_mb >= said.warned_mb * 1.25
    if not is_newly_short and not has_grown:
        return replace(said, is_short=said.is_short and held.is_short), None
    declared = "which was not declared"
    if held.declared_mb is not None:
        declared = f"more than the {format_size(held.declared_mb)} of {held.option}"
    parts = [f"{held.name} holds {format_size(held.held_mb)} of RAM, {declared}"]
    if held.is_short and held.figures is not None:
        available, floor = map(format_size, held.figures)
        left = f"the machine has {available} of RAM left of the {floor} to keep"
        parts.append(f"{left}: nothing starts, and if no job can make way, the kernel may kill this program")
    text = "; ".join([*parts, f"declare {format_size(held.held_mb * 1.1)} next time"])
    return RamWarnings(warned_mb=held.held_mb, is_short=held.is_short), text


class HostJob(Struct, frozen=True, kw_only=True):
    """A job of this queue on this machine: what it holds of the RAM, and how fast it grows (`MemoryClimb`)."""

    job_id: int
    since: float
    held_mb: float
    rate_mb_s: float = 0.0
    declared_mb: float | None = None
    is_leaving: bool = False  # it is being stopped, so that its RAM will be free soon
    times: int = 0  # how often it has made way before
    may_be_stopped: bool = True  # its user allows it

    @property
    def is_within(self) -> bool:
        """Whether it holds no more than it declared."""
        return self.declared_mb is not None and not exceeds_declared(self.held_mb, self.declared_mb)


class HostProgram(Struct, frozen=True, kw_only=True):
    """A program that is no job of this queue, with a lease `since` this time."""

    since: float
    held_mb: float


class HostAlarm(Struct, frozen=True, kw_only=True):
    """RAM that is about to run out, and falls at this rate. `victim` is the job that makes way, if there is one."""

    available_mb: float
    floor_mb: float
    rate_mb_s: float
    victim: int | None = None


def find_host_alarm(
    available_mb: float, floor: float, fall: MemoryClimb, jobs: Sequence[HostJob], programs: Sequence[HostProgram] = ()
) -> HostAlarm | None:
    """Return the alarm of the machine, if its RAM is about to run out. `fall` is the climb of what is not available."""
    expected = available_mb + sum(job.held_mb for job in jobs if job.is_leaving)
    staying = [job for job in jobs if not job.is_leaving]
    if not is_short(expected, floor, fall, grows=any(job.rate_mb_s > 0.0 for job in staying)):
        return None
    alarm = HostAlarm(available_mb=available_mb, floor_mb=floor, rate_mb_s=fall.rate_mb_s)
    notable = [job for job in staying if job.held_mb >= notable_mb(floor)]
    first = min(notable, key=_start_order, default=None)  # of the jobs; None if a program beside the queue is older
    if first is not None and any(each.held_mb >= notable_mb(floor) and each.since < first.since for each in programs):
        first = None
    movable = [job for job in notable if job is not first and job.may_be_stopped and job.times < numbers.MOST_RERUNS]
    over = [job for job in movable if not job.is_within]
    victim = max(over or movable, key=_start_order, default=None)
    return alarm if victim is None else replace(alarm, victim=victim.job_id)


def is_short(available_mb: float, floor: float, fall: MemoryClimb, *, grows: bool) -> bool:
    """Return whether a job has to make way, if there is one. `grows`: a job of this queue takes more RAM.

    Never true of more available RAM where it is false of less with `grows=True`."""
    if available_mb < numbers.CRITICAL_PART * floor:
        return True
    if available_mb < floor:
        return grows or available_mb < numbers.LASTS_S * fall.rate_mb_s
    return available_mb < numbers.LASTS_ABOVE_S * fall.steady_mb_s


def must_kill(available_mb: float, floor: float, fall: MemoryClimb) -> bool:
    """Return whether a job that is asked to stop is killed before its grace period is over: nearly nothing is left."""
    return available_mb < max(numbers.KILL_PART * floor, numbers.LASTS_ABOVE_S * fall.steady_mb_s)


def watch_every_s(available_mb: float, floor: float) -> float:
    """Return how often RAM is read while jobs run."""
    return min(1.0, max(0.1, max(0.0, available_mb - floor) / 2 / numbers.FASTEST_MB_S))


def host_alarm_text(alarm: HostAlarm, job: HostJob, needed_mb: float) -> str:
    """Return what happened, and why this job makes way. `needed_mb` is what it needs above the floor."""
    left = f"the machine had {format_size(alarm.available_mb)} of RAM left of the {format_size(alarm.floor_mb)} to keep"
    if alarm.available_mb >= alarm.floor_mb:
        left = f"the machine had {format_size(alarm.available_mb)} of RAM left, which fell fast"
    who = f"the youngest job with notable RAM, and held {format_size(job.held_mb)}"
    if job.declared_mb is not None and not job.is_within:
        who += f", more than its {format_size(job.declared_mb)} (--ram)"
    return f"{left}; it was {who}; it starts again when {format_size(alarm.floor_mb + needed_mb)} are available"


def ram_to_restart(held_mb: float, floor: float, total_mb: float | None, foreign_mb: float | None) -> float:
    """Return how much RAM above the floor a stopped job reserves next: no more than it can have without other jobs."""
    wanted = held_mb * numbers.CLEARLY_MORE
    if total_mb is None:
        return wanted
    return min(wanted, numbers.NEARLY_ALL * max(0.0, total_mb - (foreign_mb or 0.0) - floor))


def grown_ram(growth: "Growth", needed_mb: float) -> "Growth":
    """Return what a stopped job gets next. It uses up none of its reruns."""
    return replace(growth, ram_mb=max(needed_mb, growth.ram_mb or 0.0))
