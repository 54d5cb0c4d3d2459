"""The rules that decide whether a job starts, in the order in which `gpuyard why` gives their reasons.

The first rules are about the job and the machine (`JobRule`): a job that waits for one of these delays no other. The
others are about each device (`DeviceRule`), about the host, the set of devices and their power: a job that waits for
one of these may become the head of the queue, for which devices are reserved (`reserve`).

`docs/reference/rules.md` is made from this list. A change of a rule is a change of its class and of its test.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.lease import Claim, FixedMemory, Need, UncertainMemory
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.printable_text import printable
from gpuyard.model.units import format_size
from gpuyard.policy.batch_pacing import (
    PaceState,
    device_refusal,
    load_refusals,
    stagger_refusal,
    waits_for_a_sample,
    watched_device_refusals,
)
from gpuyard.policy.device_state import DeviceState, describe_memory
from gpuyard.policy.foreign_load import ForeignLoad
from gpuyard.policy.host_room import HostPlacement
from gpuyard.policy.linked_sets import DeviceChoice
from gpuyard.policy.machine import Machine, Packing, check_suitable, exceeds, tiny_mb, tolerated_foreign_mb
from gpuyard.policy.sharing import durations_with, gains, is_too_deep, throughputs
from gpuyard.policy.wait_reasons import (
    REMEDIES,
    START_WITH,
    VRAM_OPTION,
    Reason,
    ReasonKind,
    awaited,
    first_runs_brief,
    limit_reached,
    list_holders,
    over,
)

if TYPE_CHECKING:  # scripts place their work by the rules about devices, and know no jobs
    from gpuyard.policy.queue_order import Candidate, Lane
    from gpuyard.policy.running_counts import StartedSoFar
    from gpuyard.policy.world import JobFacts, World


class StartRequest(Struct, frozen=True, kw_only=True):
    """Work that asks to start: a job with its lane, or without one a request of a script or of another queue. `claim`:
    the devices that were chosen for it."""

    need: Need
    lane: "Lane | None" = None
    job: "Candidate | None" = None
    facts: "JobFacts | None" = None
    claim: Claim | None = None


class SoFar(Protocol):
    """The world with what the plan has decided so far (`placement.PlacementState`)."""

    @property
    def machine(self) -> Machine: ...
    @property
    def started(self) -> "StartedSoFar": ...
    @property
    def host(self) -> HostPlacement: ...
    @property
    def links(self) -> DeviceChoice: ...
    def packing(self, need: Need) -> Packing: ...
    def closed(self, need: Need, device: Device) -> Reason | None: ...
    def fits(self, need: Need, state: DeviceState) -> bool: ...
    def available(self, need: Need) -> Sequence[str]: ...


class Rule(ABC):
    """`kinds` are the reasons that it gives, `remedies` name what changes it (`wait_reasons.REMEDIES`)."""

    kinds: ClassVar[tuple[ReasonKind, ...]]
    remedies: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        """Return why the job may not start now (on this device), or None."""


class JobRule(Rule):
    """Without a device, it decides about the job anywhere. A job that waits for it delays no other."""


class DeviceRule(Rule):
    """Decides about one device. `blocks` is asked for every waiting job and device, `describe` only for the reason."""

    @abstractmethod
    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool: ...

    @abstractmethod
    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason: ...

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        if device is None or not self.blocks(job.need, device, world):
            return None
        return self.describe(job.need.on(device.device.id), device, world)


class Paused(JobRule):
    """Nothing starts while the queue is paused or shuts down, while the workspace of the job is stopped, or while the
    system keeps programs from starting: a limit of processes was reached, the configuration or the ledger cannot be
    read. After such a limit one job is tried first. A job that was suspended goes on."""

    kinds = (ReasonKind.PAUSED, ReasonKind.RESOURCE_LIMIT)

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        lane = job.lane
        if lane is None or device is not None or lane.resumes:
            return None
        started, seen = world.started, world.started.world
        if (closed := _closed(seen, ReasonKind.PAUSED)) is not None:
            return closed
        for cap in seen.start_caps:
            starts = started.starts_with_devices if cap.is_for_devices else started.starts
            if (lane.need.devices or not cap.is_for_devices) and starts >= cap.most:
                return cap.reason
        stopped = "its workspace is stopped; `gpuyard workspace start` continues it"
        return Reason(ReasonKind.PAUSED, stopped) if lane.tag in seen.stopped_tags else None


class RunningLimit(JobRule):
    """At most so many jobs of a tag, of an array or a batch, and of jobs without a GPU run at once, and so many tasks
    of a workspace on one GPU. Runs of a batch take none of the slots for jobs without a GPU."""

    kinds = (ReasonKind.LIMIT,)
    remedies = ("tag-limit", "array-limit", "cpu-limit")

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        lane = job.lane
        if lane is None or lane.resumes:  # a suspended job counts as running already
            return None
        counts, limits, sharing = world.started.counts, world.started.world.limits, lane.tag_sharing
        if device is not None:
            if sharing is None or counts.by_tag_and_device[lane.tag][device.device.id] < sharing.most_per_device:
                return None
            return limit_reached("tasks of its workspace on one GPU", sharing.most_per_device, "tag-limit")
        reason = counts.tag_refusal(lane, limits.tags) or counts.group_refusal(lane)
        if reason is None and lane.pace is None and not lane.need.devices and counts.without_devices >= limits.cpu_jobs:
            return limit_reached("jobs without a GPU", limits.cpu_jobs, "cpu-limit")
        return reason


class Stagger(JobRule):
    """Jobs of an array, tasks of a workspace and runs of a batch start one after the other, as far apart as was asked
    for. Runs of all batches start one at a time, each by a sample that was taken after the one before had started."""

    kinds = (ReasonKind.STAGGERED,)

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        lane = job.lane
        if lane is None or device is not None or lane.resumes:
            return None
        started, now = world.started, world.machine.now
        if lane.pace is None:
            tasks = None
            if lane.tag_sharing is not None:
                last = started.last_starts.get(lane.tag)
                tasks = stagger_refusal("tasks of its workspace", lane.tag_sharing.stagger_s, last, now)
            last = started.array_starts.get(lane.group or 0)
            return tasks or stagger_refusal("jobs of its array", lane.stagger_s, last, now)
        if started.has_started_run:
            return Reason(ReasonKind.STAGGERED, "another run is starting now")
        state = _pace_state(lane, started.world)
        reason = stagger_refusal("runs", lane.pace.stagger_s, state.launched_at, now)
        if reason is None and waits_for_a_sample(state, now):
            return Reason(ReasonKind.STAGGERED, "a run has just started; waiting for the next sample")
        return reason


class HostLoad(JobRule):
    """No job starts while the CPU load of the machine is above the limit of the configuration, too little RAM is free,
    or the guard of the host acts; no run of a batch while a gate of its batch is closed. A closed gate opens again once
    its figure is better than the limit, by a margin or for a while."""

    kinds = (ReasonKind.HOST_TOO_BUSY, ReasonKind.HOST_TOO_FULL)
    remedies = ("host-too-busy", "host-too-full")

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        lane = job.lane
        if lane is None or device is not None:
            return None
        seen = world.started.world
        closed = _closed(seen, *self.kinds)
        if closed is not None or lane.pace is None:
            return closed
        state = _pace_state(lane, seen)
        # A run without devices of its own may use any device that it finds.
        watched = () if lane.need.devices else watched_device_refusals(lane.pace, state, lane.need, seen.now)
        return next(chain(load_refusals(lane.pace, state, seen.now), watched), None)


class FreeDisk(JobRule):
    """No job starts while too little space is free on a disk of the queue, or on one that the job writes to. A disk
    that does not answer counts as full: a program that writes to it would hang."""

    kinds = (ReasonKind.DISK_FULL,)

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        if job.lane is None or device is not None or job.lane.resumes:
            return None
        own = next(iter(job.job.full_disks), None) if job.job is not None else None
        return _closed(world.started.world, ReasonKind.DISK_FULL) or own


class HostRoom(Rule):
    """RAM and CPUs that a job reserves must be free: neither reserved nor used by others, nor kept for the first job
    that waits for RAM or CPUs. And the limits of the job itself hold, such as `--max-cpu` and `--min-free-mem-mb`."""

    kinds = (ReasonKind.HOST_ROOM, ReasonKind.HOST_TOO_BUSY, ReasonKind.HOST_TOO_FULL, ReasonKind.AWAITED)
    remedies = ("host-memory", "host-cpus")

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        return next(world.host.explain(job.need), None) if device is None else None

    def blocks(self, need: Need, world: SoFar) -> bool:
        return world.host.refuses(need)


class UsableDevice(DeviceRule):
    """A job gets only devices that it asked for, of the vendor and model that it named. Devices that are banned,
    drained or faulty, or on which the memory guard acts, get no new work. A job that was suspended goes on where it was
    despite a drain or a ban."""

    kinds = (ReasonKind.NOT_ASKED_FOR, ReasonKind.CLOSED, ReasonKind.UNHEALTHY, ReasonKind.MEMORY_GUARD)
    remedies = ("banned", "drained", "unhealthy")

    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool:
        if check_suitable(need, device.device) is not None or world.closed(need, device.device) is not None:
            return True
        return not device.device.healthy and not need.ignores_health

    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason:
        unsuitable, device_id = check_suitable(need, device.device), device.device.id
        if unsuitable is ReasonKind.CLOSED:
            return Reason(ReasonKind.CLOSED, "banned", device_id, remedy=REMEDIES["banned"])
        if unsuitable is not None:
            text = "another model than requested"
            if need.only is not None and device_id not in need.only:
                text = "not among the requested GPUs"
            elif need.vendor not in (None, device.device.vendor):
                text = f"of another vendor: this job gets {need.vendor} GPUs"
            elif need.only_discrete and device.device.is_integrated:
                text = "integrated graphics, which a job gets only if it names them"
            return Reason(unsuitable, text, device_id)
        unhealthy = f"unhealthy: {device.device.fault}"
        return world.closed(need, device.device) or Reason(
            ReasonKind.UNHEALTHY, unhealthy, device_id, remedy=REMEDIES["unhealthy"]
        )


class Leased(DeviceRule):
    """A job that gets a whole device shares it with no other: not with a lease, and not with what is reserved for the
    head of the queue or for a request ahead in the ledger."""

    kinds = (ReasonKind.LEASED, ReasonKind.AWAITED)

    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool:  # noqa: ARG002 - the same for all
        return bool(device.promises) and (need.is_exclusive or device.is_exclusive)

    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason:  # noqa: ARG002
        conflicts = [each for each in device.promises if need.is_exclusive or each.share.is_exclusive]
        if all(each.is_reservation for each in conflicts):
            return awaited(device.device.id, tuple(each.holder for each in conflicts))
        holders = tuple(each.holder for each in conflicts if not each.is_reservation)
        held = f"held by {list_holders(holders)}"
        return Reason(ReasonKind.LEASED, held, device.device.id, holders=holders, is_leased=True)


class DeviceLoad(DeviceRule):
    """The job's own limits of how busy a device is, how much power it draws and how much memory is used hold before the
    job starts (`--max-gpu`, `--max-power-w`, `--max-gpu-mem-mb`). For a run of a batch they are the gates of its batch,
    which count runs that have just started."""

    kinds = (ReasonKind.TOO_BUSY, ReasonKind.POWER_LIMIT, ReasonKind.TOO_FULL)
    remedies = ("too-busy", "too-hungry", "too-full")

    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool:  # noqa: ARG002
        return need.limits_device_load and not need.ignores_health and self._exceeded(need, device.device) is not None

    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason:  # noqa: ARG002
        found = self._exceeded(need, device.device)
        assert found is not None
        kind, figure, limit, remedy = found
        return replace(over(kind, figure, limit, device.device.id), remedy=REMEDIES[remedy])

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        lane = job.lane
        if device is not None and lane is not None and lane.pace is not None:
            state = _pace_state(lane, world.started.world)
            if (reason := device_refusal(lane.pace, state, device, job.need, world.machine.now)) is not None:
                return reason
        return super().refuse(job, device, world)

    def _exceeded(self, need: Need, device: Device) -> tuple[ReasonKind, float | None, float | None, str] | None:
        is_busy = (
            device.utilization_percent != 0.0 or device.processes or exceeds(device.memory_used_mb, tiny_mb(device))
        )
        max_power_w = need.max_power_w if is_busy or not need.ignores_idle_power else None
        limits = (
            (ReasonKind.TOO_BUSY, device.utilization_percent, need.max_utilization_percent, "too-busy"),
            (ReasonKind.POWER_LIMIT, device.power_draw_w, max_power_w, "too-hungry"),
            (ReasonKind.TOO_FULL, device.known_used_mb, need.max_memory_used_mb, "too-full"),
        )
        return next((each for each in limits if exceeds(each[1], each[2])), None)


class FreeMemory(DeviceRule):
    """The memory that a job declared, or is expected to need, must be free: neither reserved nor used by others. Beside
    first runs a margin stays free. A device of unknown size is not shared."""

    kinds = (ReasonKind.NO_ROOM,)

    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool:  # noqa: ARG002
        if need.is_exclusive and need.ignores_health:
            return False
        if device.free_mb is None:
            return not need.is_exclusive
        needed_mb = device.needed_mb(need)
        return needed_mb is not None and device.free_mb < needed_mb

    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason:
        device_id, free_mb = device.device.id, device.free_mb
        if free_mb is None:
            text, remedy = "its memory is unknown, so it cannot be shared", "without --vram it gets the whole GPU"
            return Reason(ReasonKind.NO_ROOM, text, device_id, remedy=remedy)
        needed_mb, where = device.needed_mb(need) or 0.0, describe_memory(device)
        text = f"{format_size(max(0.0, free_mb))} free, {format_size(needed_mb)} needed{': ' if where else ''}{where}"
        holders, remedy = tuple(each.holder for each in device.promises), self._remedy(need, device, free_mb, world)
        is_leased, brief = device.unreserved_mb < needed_mb, "too little free memory{beside}"
        first_runs = [each.holder for each in device.promises if each.share.spread_mb and not each.is_reservation]
        asked_mb = need.required_mb if need.reserved_mb is None else need.reserved_mb
        if first_runs and asked_mb is not None and free_mb + device.margin_mb >= asked_mb:
            brief = first_runs_brief(first_runs)  # without what is kept for them it would fit
        return Reason(ReasonKind.NO_ROOM, text, device_id, free_mb, needed_mb, holders, remedy, is_leased, brief)

    def _remedy(self, need: Need, device: DeviceState, free_mb: float, world: SoFar) -> str:
        once_leases_end = device.without().free_mb or 0.0
        if need.required_mb is None or once_leases_end >= need.required_mb:
            gigabytes = int(free_mb // 1024)
            smaller = replace(need, memory=FixedMemory(gigabytes * 1024.0))
            would_fit = gigabytes > 0 and need.devices == 1 and isinstance(need.memory, UncertainMemory)
            return START_WITH.format(gigabytes) if would_fit and world.fits(smaller, device) else ""
        left = f"programs outside gpuyard leave {format_size(max(0.0, once_leases_end))}"
        if isinstance(need.memory, UncertainMemory):
            left += f", and a job without an estimate asks for {format_size(need.required_mb)}"
        return f"{left}: with {VRAM_OPTION} it asks for less"


class OtherPrograms(DeviceRule):
    """A device that processes without a lease keep busier than `max_foreign_load_percent` gets no job. A job that has
    not said how much memory it needs gets a device on which such processes hold next to none."""

    kinds = (ReasonKind.OCCUPIED,)
    remedies = ("foreign-load", "occupied")

    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool:  # noqa: ARG002
        if need.is_exclusive and need.ignores_health:
            return False
        has_own_limit = need.max_utilization_percent is not None or need.ignores_foreign_load
        return (device.foreign.is_over and not has_own_limit) or self._is_full(need, device)

    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason:
        device_id, most = device.device.id, world.packing(need).max_foreign_load_percent or 0.0
        if device.foreign.is_over and need.max_utilization_percent is None and not need.ignores_foreign_load:
            text, remedy = (
                f"{_describe_foreign_load(device.foreign)}; the limit is {most:.0f}%",
                REMEDIES["foreign-load"],
            )
            return Reason(ReasonKind.OCCUPIED, text, device_id, device.foreign.percent, most, remedy=remedy)
        used, allowed = device.device.memory_used_mb or 0.0, tolerated_foreign_mb(device.device)
        text = f"processes outside gpuyard hold {format_size(used)} of it, over {format_size(allowed)}"
        brief, remedy = "programs outside gpuyard use its memory", REMEDIES["occupied"]
        return Reason(ReasonKind.OCCUPIED, text, device_id, used, allowed, remedy=remedy, brief=brief)

    def _is_full(self, need: Need, device: DeviceState) -> bool:
        is_open = need.is_exclusive and need.required_mb is None
        return is_open and exceeds(device.device.memory_used_mb, tolerated_foreign_mb(device.device))


class SharedDevice(DeviceRule):
    """A job joins others on a device only up to the configured number of jobs and load, if that raises the work that is
    done there by `min_gain_percent`, and if no free device is expected sooner. Where a request ahead has
    reserved a part of the device, no job joins whose need is unknown."""

    kinds = (ReasonKind.AWAITED, ReasonKind.LIMIT, ReasonKind.NO_GAIN)
    remedies = ("too-many", "loaded", "no-gain", "too-deep")

    def blocks(self, need: Need, device: DeviceState, world: SoFar) -> bool:
        return not need.is_exclusive and self._why(need, device, world) is not None

    def _why(self, need: Need, device: DeviceState, world: SoFar) -> str | None:  # noqa: PLR0911 - one for each reason
        # What it may yet take is not known, so it could delay the request that has reserved a share of this device.
        if not need.is_memory_known and device.is_awaited:
            return "awaited"
        packing = world.packing(need)
        if packing.max_jobs_per_device is not None and device.lease_count >= packing.max_jobs_per_device:
            return "too-many"
        if need.ignores_load:
            return None
        # The only job on a device may exceed the limit by itself: it would do so on any device.
        added = need.load_percent or 0.0 if device.lease_count else 0.0
        if exceeds(device.load_percent + added, packing.max_load_percent):
            return "loaded"
        if need.is_resumed or not device.lease_count:
            return None
        if packing.min_gain_percent is not None and not gains(need, device, packing.depth, packing.min_gain_percent):
            return "no-gain"
        return "too-deep" if packing.depth is not None and is_too_deep(need, device, packing.depth) else None

    def describe(self, need: Need, device: DeviceState, world: SoFar) -> Reason:
        why, packing, device_id = self._why(need, device, world), world.packing(need), device.device.id
        holders = tuple(each.holder for each in device.promises)
        if why == "awaited":
            ahead = tuple(each.holder for each in device.promises if each.is_reservation)
            return awaited(device_id, ahead, "; how much memory this job needs is not known yet")
        remedy, depth = REMEDIES[why or ""], packing.depth
        if why == "too-many":
            limit = packing.max_jobs_per_device or 0
            text = f"limit reached: {limit} jobs may share it (max_jobs_per_device)"
            return Reason(ReasonKind.LIMIT, text, device_id, limit, limit, holders, remedy=remedy, is_leased=True)
        if why == "loaded":
            more = f"; this job would add about {need.load_percent:.0f}%" if need.load_percent else ""
            text = f"{device.load_percent:.0f}% busy, load limit {packing.max_load_percent or 0.0:.0f}%{more}"
            had, needed, brief = device.load_percent, need.load_percent, "too busy for another job"
        elif why == "too-deep" and depth is not None:
            needed, had, brief = durations_with(need, device, depth), depth.durations, "a free GPU is expected sooner"
            text = (
                f"{brief}: {device.lease_count + 1} jobs on this one would take about {needed:.2f} times as long as "
                f"one alone, all jobs on {depth.devices} GPUs {had:.2f} times"
            )
        else:
            (before, had), least = throughputs(need, device, depth), packing.min_gain_percent or 0.0
            needed, brief = before * (1.0 + least / 100.0), "sharing it would not get more work done"
            jobs = "1 job does" if device.lease_count == 1 else f"{device.lease_count} jobs share it and do"
            gain = f"; at least {least:g}% more is needed" if least and had > before else ""
            text = f"{jobs} {before:.2f} times the work of one; this job would make it {had:.2f} times{gain}"
        return Reason(ReasonKind.NO_GAIN, text, device_id, had, needed, holders, remedy=remedy, brief=brief)


class Together(Rule):
    """A job gets all of its devices at once: as many as it asked for, all of one vendor, and joined by NVLink or on one
    NUMA node if it asked for that."""

    kinds = (ReasonKind.TOO_FEW, ReasonKind.NOT_LINKED)
    remedies = ("not-linked",)

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        if device is not None or not job.need.devices:
            return None
        labels = world.machine.snapshot.labels
        return next(world.links.refusals(job.need, world.available(job.need), labels), None)


class Power(Rule):
    """All GPUs together draw no more than `max_gpu_power_w`: each what its jobs are known to draw, or its own power
    limit, and never less than it draws now. While no job uses a GPU any job may start. Another job that waits for power
    is not delayed."""

    kinds = (ReasonKind.POWER_LIMIT,)
    remedies = ("power",)

    def refuse(self, job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
        if device is not None or job.claim is None or job.facts is None:
            return None
        power = world.started.power
        return None if power is None else power.refusal(job.claim, job.facts.power_w, job.facts.estimate.most_s)


RULES: tuple[Rule, ...] = (
    Paused(),
    RunningLimit(),
    Stagger(),
    HostLoad(),
    FreeDisk(),
    HostRoom(),
    UsableDevice(),
    Leased(),
    DeviceLoad(),
    FreeMemory(),
    OtherPrograms(),
    SharedDevice(),
    Together(),
    Power(),
)


def first_refusal(rules: Sequence[Rule], job: StartRequest, device: DeviceState | None, world: SoFar) -> Reason | None:
    return next((reason for each in rules if (reason := each.refuse(job, device, world)) is not None), None)


def _closed(world: "World", *kinds: ReasonKind) -> Reason | None:
    return next((reason for reason in world.closed_reasons if reason.kind in kinds), None)


def _pace_state(lane: "Lane", world: "World") -> PaceState:
    return world.pace_states.get(lane.group or 0, PaceState())


def _describe_foreign_load(load: ForeignLoad) -> str:
    names = []
    for foreign in load.processes[:3]:
        user = f", user {foreign.user}" if foreign.user else ""
        name = printable(foreign.process.name or "process", longest=60)
        names.append(f"{name} (pid {foreign.process.pid}{user})")
    if len(load.processes) > len(names):
        names.append(f"{len(load.processes) - len(names)} more")
    who = ", ".join(names) or "processes outside gpuyard"
    return f"{who} keep{'s' if len(load.processes) == 1 else ''} it {load.percent:.0f}% busy without a lease"
