"""Invariants of batches: when their runs begin, after which sample, and what that sample contained.

All of it is computed again here, from the samples that daemons got and from what programs did, across restarts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpuyard.model.job import Job
from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lease import Lease
from gpuyard.model.machine_snapshot import Sample, Snapshot
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import Plan
from gpuyard.queue.step import Controller
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from tests.simulation.behaviors import MEMORY_MB
from tests.simulation.programs import Program
from tests.simulation.world import World

_ROUNDING = 1e-6
_OF_GATES = {
    ReasonKind.STAGGERED, ReasonKind.HOST_TOO_BUSY, ReasonKind.HOST_TOO_FULL, ReasonKind.TOO_BUSY, ReasonKind.TOO_FULL,
}  # fmt: skip


@dataclass
class Average:
    """An average of readings that weighs each by its age."""

    last: float | None = None
    value: float | None = None
    at: float = 0.0

    def add(self, reading: float | None, now: float, half_life_s: float) -> None:
        self.last = reading
        if reading is None:
            is_long_ago = now - self.at > 4.0 * half_life_s
            self.value = None if is_long_ago else self.value
            return
        if self.value is None or half_life_s <= 0:
            self.value = reading
        else:
            self.value += (reading - self.value) * (1.0 - 2.0 ** ((self.at - now) / half_life_s))
        self.at = now

    def known(self) -> list[float]:
        return [each for each in (self.last, self.value) if each is not None]


@dataclass
class BatchSamples:
    """The samples that a daemon got for a batch since the batch had runs to start."""

    pace: BatchPace
    taken_at: float | None = None
    ram_mb: dict[tuple[int, int], float] = field(default_factory=dict)
    figures: dict[str, Average] = field(default_factory=dict)

    def figure(self, name: str) -> Average:
        return self.figures.get(name, Average())

    def add(self, sample: Sample, now: float) -> None:
        snapshot = sample.snapshot
        if snapshot.taken_at == self.taken_at:
            return
        self.taken_at, self.ram_mb = snapshot.taken_at, dict(sample.ram_mb)
        usable = snapshot.usable_devices()
        readings = {"cpu": snapshot.host.cpu_percent, "ram": snapshot.host.memory_available_mb}
        readings |= {f"load {device.id}": device.utilization_percent for device in usable}
        readings |= {f"used {device.id}": device.memory_used_mb for device in usable}
        self.figures = {name: self.figures.get(name, Average()) for name in readings}
        for name, reading in readings.items():
            self.figures[name].add(reading, now, self.pace.smoothing_s)


class PaceWatch:
    """Checks the batches of the current daemon; it survives the daemon."""

    def __init__(self, world: World, database: Database) -> None:
        self._world = world
        self._store = JobStore(database)
        self._seen: dict[int, BatchSamples] = {}
        self._last: dict[int, float] = {}
        self._checked_entries = 0
        self.launches = 0
        world.on_grant.append(self._check_granted)

    def watch(self, controller: Controller) -> None:
        """Record each sample before the controller gets it."""
        self.check_begun()
        self._seen.clear()
        batch_gates = controller.batch_gates
        update, forget = batch_gates.update, batch_gates.forget

        def check_and_update(lanes: Iterable[Lane], sample: Sample, now: float) -> None:
            kept = list(lanes)
            self.check_begun()
            self._note(kept, sample, now)
            update(kept, sample, now)

        def forget_all() -> None:
            self._seen.clear()
            forget()

        batch_gates.update, batch_gates.forget = check_and_update, forget_all  # type: ignore[method-assign]

    def _note(self, lanes: Sequence[Lane], sample: Sample, now: float) -> None:
        waiting = {lane.group: lane.pace for lane in lanes if lane.pace is not None and lane.group is not None}
        self._seen = {
            group: self._seen.get(group) or BatchSamples(pace=pace)
            for group, pace in waiting.items()
            if pace is not None
        }
        for seen in self._seen.values():
            seen.add(sample, now)

    # After a step

    def check_plan(self, plan: Plan) -> None:
        """Assert that a job that waits for a gate does not keep other jobs waiting. One that made way for want of RAM
        has a need of its own, as any other job."""
        gated = [hold for hold in plan.waiting if hold.lane.pace is not None and hold.need.min_host_memory_mb is None]
        held = {hold.job_id for hold in gated if _are_of_gates(hold.reasons)}
        assert plan.head is None or plan.head.job_id not in held, (
            f"job {plan.head.job_id} waits at its gate, and all others wait for it"
        )

    # When a run begins

    def check_begun(self) -> None:
        """Check the runs that began since the last check; called before the next sample and before the next daemon."""
        new = [what for _, kind, what in self._world.log[self._checked_entries :] if kind == "begins"]
        self._checked_entries = len(self._world.log)
        for name in new:
            job = self._store.job(name[0])
            if job is not None and job.spec.pace is not None:
                self._check_run(job, next(one for one in reversed(self._world.programs) if one.name == name))

    def _check_run(self, job: Job, program: Program) -> None:
        pace, group = job.spec.pace, job.group
        assert pace is not None
        assert group is not None
        assert program.began_at is not None
        seen, last = self._seen.get(group), self._last.get(group)
        assert seen is not None, f"job {job.id} began without a sample for its batch"
        if last is not None:
            apart = program.began_at - last
            assert apart >= pace.stagger_s - _ROUNDING, f"job {job.id} began {apart} s after another of its batch"
            assert seen.taken_at is not None
            assert seen.taken_at > last, f"job {job.id} began after a sample that is older than the last launch"
        for other, attempt in self._store.live_attempts():
            is_later = other.spec.pace is not None and attempt.since >= (seen.taken_at or 0.0)
            assert other.id == job.id or not is_later, (
                f"job {job.id} and {other.id}, of any batch, began after one sample"
            )
        self._check_host(job, pace, seen)
        for device_id in program.devices:
            self._check_device(job, pace, seen, device_id)
        self._last[group] = program.began_at
        self.launches += 1

    def _check_host(self, job: Job, pace: BatchPace, seen: BatchSamples) -> None:
        cpu = seen.figure("cpu").value
        if cpu is not None and pace.max_cpu_percent is not None:
            assert cpu <= pace.max_cpu_percent + _ROUNDING, f"job {job.id} began while the CPU was at {cpu}%"
        if seen.figure("ram").known() and pace.min_free_memory_mb is not None:
            left = min(seen.figure("ram").known()) - self._reserved_ram_mb(job, seen)
            assert left >= pace.min_free_memory_mb - _ROUNDING, f"job {job.id} began while {left} MB of RAM were left"

    def _reserved_ram_mb(self, job: Job, seen: BatchSamples) -> float:
        """Return the declared RAM that earlier runs had not taken at the sample, and that of this run.

        The first run of a batch does not count its own."""
        reserved_mb, is_first = 0.0, True
        for other, attempt in self._store.live_attempts():
            pace, name = other.spec.pace, (other.id, attempt.number)
            if pace is None or other.id == job.id:
                continue
            reserved_mb += max(0.0, (pace.run_ram_mb or 0.0) - seen.ram_mb.get(name, 0.0))
            is_first = is_first and other.group != job.group
        own = job.spec.pace.run_ram_mb if job.spec.pace is not None and not is_first else None
        return reserved_mb + (own or 0.0)

    def _check_device(self, job: Job, pace: BatchPace, seen: BatchSamples, device_id: str) -> None:
        load, used = seen.figure(f"load {device_id}").value, seen.figure(f"used {device_id}").known()
        if load is not None and pace.max_gpu_percent is not None:
            assert load <= pace.max_gpu_percent + _ROUNDING, f"job {job.id} began while {device_id} was at {load}%"
        if used and pace.max_gpu_memory_mb is not None:
            most = max(used)
            assert most <= pace.max_gpu_memory_mb + _ROUNDING, f"job {job.id} began while {device_id} held {most} MB"

    # When a run is granted its devices

    def _check_granted(self, lease: Lease, seen: Snapshot) -> None:
        kind, _, number = (lease.holder.label or "").partition(" ")
        job = self._store.job(int(number)) if kind == "job" else None
        if job is None or job.spec.pace is None or job.spec.pace.max_gpu_memory_mb is None:
            return
        for share in lease.shares:
            others = [other for other in self._world.leases() if other.on(share.device_id) and other.id != lease.id]
            takes_rest = job.spec.learns_memory and share.memory_mb is not None
            if others and not share.is_exclusive and not takes_rest:
                charged = self._charged_mb(share.device_id, [*others, lease], seen)
                most = job.spec.pace.max_gpu_memory_mb
                assert charged <= most + _ROUNDING, f"job {job.id} has {share.device_id} charged {charged} MB of {most}"

    def _charged_mb(self, device_id: str, leases: Sequence[Lease], seen: Snapshot) -> float:
        measured = self._world.measure(seen, leases)
        device = next(device for device in seen.devices if device.id == device_id)
        foreign = max(0.0, (device.memory_used_mb or 0.0) - sum(measured[each.id, device_id] or 0.0 for each in leases))
        charged = 0.0
        for lease in leases:
            share = lease.on(device_id)
            assert share is not None
            reserved = MEMORY_MB if share.is_exclusive or share.memory_mb is None else share.memory_mb
            charged += max(reserved, measured[lease.id, device_id] or 0.0)
        return foreign + charged


def _are_of_gates(reasons: Sequence[Reason]) -> bool:
    """Return whether all reasons are gates. A job that waits for memory also has a reason with a number of devices."""
    return bool(reasons) and all(reason.kind in _OF_GATES for reason in reasons)
