"""Launch jobs: the command, environment and CPUs of an attempt, its hand-over to the engine, and slices: jobs that run
one after the other on one lease (`policy/plan.py`)."""

import os
import stat
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.errors import GpuyardError, UserError
from gpuyard.ledger.measured_usage import LEASE_VARIABLE
from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.container import Container, Mount
from gpuyard.model.job import Attempt, Growth, HandedOver, Job, Started
from gpuyard.model.job_spec import CodeSnapshot, place_of
from gpuyard.model.lease import Need, asks_for_the_same
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.model.placeholders import fill_in, fill_pattern
from gpuyard.model.shell_environment import CPUS_VARIABLE, thread_variables
from gpuyard.model.sweep import SWEEP_PREFIX, variable_of
from gpuyard.output.progress_line import VARIABLE as PROGRESS_VARIABLE
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.policy.host_room import CpuLayout, choose_cpus, owned_cpus
from gpuyard.policy.plan import LONGEST_S, MOST, may_slice, slice_length
from gpuyard.policy.preallocation import growth_variables
from gpuyard.policy.sizing import ram_limit_mb
from gpuyard.policy.world import Plan, Start, World
from gpuyard.ports import HeldClaim, Launch, Prepared, SiteStatus
from gpuyard.probes.kernel_files import node_of, read_cpu_layout
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.step_parts import QueueParts
from gpuyard.queue.transitions import JobTransitions
from gpuyard.visible_devices import visible_variables


class CpuPinning:
    def __init__(
        self,
        transitions: JobTransitions,
        read_layout: Callable[[], CpuLayout] = read_cpu_layout,
        node: Callable[[Device], int | None] = node_of,
    ) -> None:
        self._transitions, self._read_layout, self._node = transitions, read_layout, node

    def cpus_for(self, job: Job, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return the CPUs of the job's next attempt on these devices; empty: it may run on any."""
        live = (each for each in self._transitions.live.values() if not each.attempt.engine)
        taken = owned_cpus((each.job.spec.cpus, each.attempt.cpus) for each in live)
        return choose_cpus(job.spec.cpus, self._read_layout(), taken, set(map(self._node, devices)))


OOM_COUNT_VARIABLE = "GPUYARD_OOM_COUNT"
# A job that was submitted from inside another job must not inherit these.
_OWN_VARIABLES = frozenset((
    "GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_ARRAY_INDEX", OOM_COUNT_VARIABLE, "GPUYARD_QUEUE", LEASE_VARIABLE,
    CPUS_VARIABLE, PROGRESS_VARIABLE, "GPUYARD_SUBMIT_DIR", "GPUYARD_SNAPSHOT", "GPUYARD_COMMIT",
))  # fmt: skip


def launch_of(  # noqa: PLR0913 - everything that an attempt is started with
    job: Job,
    number: int,
    held: HeldClaim | None,
    snapshot: Snapshot,
    rules: Rules,
    *,
    terms: ClusterTerms | None = None,
    pinning: CpuPinning | None = None,
) -> Launch:
    """Return the launch of attempt `number`. `pinning` chooses its CPUs, if the rules say so."""
    if job.is_unreadable:
        raise UserError("its command could not be read from queue.db: submit it again")
    devices = [device for share in held.lease.shares if (device := snapshot.device(share.device_id))] if held else []
    values = job.placeholders
    filled = frozenset(job.spec.filled_variables if values else ())
    submitted = {
        name: fill_in((value,), values)[0] if name in filled else value
        for name, value in job.spec.environment.items()
        if name not in _OWN_VARIABLES and not name.startswith(SWEEP_PREFIX)
    }
    own = {**_own_variables(job, number), "GPUYARD_SUBMIT_DIR": job.spec.cwd}
    if job.spec.code.snapshot is not None:
        own["GPUYARD_SNAPSHOT"] = job.spec.code.snapshot.folder
    if job.spec.code.commit is not None:
        own["GPUYARD_COMMIT"] = job.spec.code.commit
    engine_selects = terms is not None and terms.need.devices > 0
    selects_devices = not (job.spec.sees_all_devices or engine_selects)
    by_uuid = rules.devices.visible == "uuid"
    visible = _visible(devices, snapshot, job.spec.container, by_uuid=by_uuid) if selects_devices else {}
    # Python buffers output that does not go to a terminal: `gpuyard logs -f` would show nothing for a long time.
    unbuffered = {"PYTHONUNBUFFERED": "1"} if rules.unbuffers_python else {}
    growing = growth_variables(submitted) if rules.stops_preallocation and job.spec.need.devices else {}
    threads = thread_variables(job.spec.cpus, submitted) if terms is None else {}
    task = job.spec.task
    # The value of CUDA_VISIBLE_DEVICES only hides CUDA's devices from a program that gets those of another vendor.
    is_for_cuda = "CUDA_DEVICE_ORDER" in visible or not devices
    if task is not None and task.variable is not None and "CUDA_VISIBLE_DEVICES" in visible and is_for_cuda:
        visible[task.variable] = visible.pop("CUDA_VISIBLE_DEVICES")
    if held is not None:
        own[LEASE_VARIABLE] = held.lease.id
    launch = Launch(
        job_id=job.id,
        attempt=number,
        command=job.argv,
        cwd=job.spec.cwd,
        environment={**unbuffered, **growing, **threads, **submitted, **visible, **own},
        shell=job.spec.shell,
        stdin=job.spec.stdin,
        folder=job.values.get("output") if job.spec.pace is not None else None,
        task=task,
        place=job.spec.engine or place_of([snapshot.labels.get(device.id) for device in devices]),
        engine=job.spec.engine,
        terms=terms,
        log_cap_mb=job.spec.log_cap_mb,
        output=_output_path(job, job.spec.output, number),
        error=_output_path(job, job.spec.error, number),
        split_stderr=job.spec.split_stderr,
        timestamps=job.spec.timestamps,
        container=job.spec.container,
        devices=tuple(devices) if job.spec.container is not None else (),
        cpus=pinning.cpus_for(job, devices) if pinning and rules.host.pin_cpus and terms is None else (),
        ram_limit_mb=ram_limit_mb(job) if rules.host.enforce_ram and terms is None else None,
    )
    return launch if job.spec.code.snapshot is None else in_snapshot(launch, job.spec.code.snapshot)


def _launch_after(launch: Launch, job: Job) -> Launch:
    """Return the launch of another job with the same spec, which runs on the same devices."""
    number = job.attempts + 1
    environment = {**launch.environment, **_own_variables(job, number)}
    return replace(launch, job_id=job.id, attempt=number, command=job.argv, environment=environment)


def upcoming(attempt: Attempt, prepared: Prepared) -> Attempt:
    """Return the attempt that follows another one on its lease, as it is recorded until it begins."""
    return replace(
        attempt, job_id=prepared.job_id, number=prepared.attempt, phase=HandedOver(at=attempt.since),
        log=prepared.log, error_log=prepared.error_log, stop_at=None,
    )  # fmt: skip


def _own_variables(job: Job, number: int) -> dict[str, str]:
    """Return the variables in which attempts with the same spec differ, whatever devices they have."""
    own = {
        **{variable_of(name): value for name, value in job.values.items()},
        "GPUYARD_JOB_ID": str(job.id),
        "GPUYARD_ATTEMPT": str(number),
        OOM_COUNT_VARIABLE: str(job.growth.count),
    }
    if job.index is not None:
        own["GPUYARD_ARRAY_INDEX"] = str(job.index)
    return own


def _output_path(job: Job, pattern: str | None, number: int) -> str | None:
    """Return the file for output of attempt `number`; a relative path starts in the job's folder."""
    if pattern is None:
        return None
    own = {
        "job": str(job.id),
        "array": str(job.group or job.id),
        "index": "" if job.index is None else str(job.index),
        "name": job.spec.name or os.path.basename(job.argv[0]),
        "attempt": str(number),
        "user": job.user,
        "host": os.uname().nodename.partition(".")[0],
    }
    return os.path.join(job.spec.cwd, fill_pattern(pattern, own, job.values))


def _visible(
    devices: Sequence[Device], snapshot: Snapshot, container: Container | None, *, by_uuid: bool
) -> dict[str, str]:
    """Return the variables that select the devices: from 0 in a container that has no others, NVIDIA's by UUID."""
    if container is None or not container.maps_devices or any(device.is_simulated for device in devices):
        return visible_variables(devices, snapshot, by_uuid=by_uuid)
    inside = [replace(device, index=index) for index, device in enumerate(devices)]
    visible = visible_variables(inside, replace(snapshot, devices=tuple(inside)), by_uuid=True)
    if "ROCR_VISIBLE_DEVICES" in visible:  # a position in the host's topology
        visible["ROCR_VISIBLE_DEVICES"] = visible["HIP_VISIBLE_DEVICES"]
    return visible


def in_snapshot(launch: Launch, snapshot: CodeSnapshot) -> Launch:
    """Return the launch with its working directory in the snapshot. Whole arguments that are files of the tree, and
    folders of PYTHONPATH, become those of the snapshot. A container gets both the snapshot and the tree, to which links
    of the snapshot lead."""
    environment = {**launch.environment, "PWD": snapshot.cwd}
    if python_path := environment.get("PYTHONPATH"):
        folders = (_copied(each, snapshot, stat.S_IFDIR) for each in python_path.split(":"))
        environment["PYTHONPATH"] = ":".join(folders)
    container = launch.container
    if container is not None:
        given = {mount.target for mount in container.mounts}
        folders = (each for each in (snapshot.folder, snapshot.root) if each not in given)
        mounts = tuple(Mount(source=each, target=each) for each in folders)
        container = replace(container, mounts=(*mounts, *container.mounts))
    return replace(
        launch,
        command=tuple(_copied(word, snapshot, stat.S_IFREG) for word in launch.command),
        cwd=snapshot.cwd,
        environment=environment,
        container=container,
        snapshot=snapshot,
    )


def _copied(path: str, snapshot: CodeSnapshot, kind: int) -> str:
    """Return where an absolute path is in the snapshot, if it was copied there; else the path itself."""
    place = snapshot.inside(path) if path.startswith("/") else None
    try:
        return path if place is None or stat.S_IFMT(os.lstat(place).st_mode) != kind else place
    except (OSError, ValueError):
        return path


class Slices:
    """All jobs of a slice are recorded before the keeper gets them. The first runs; the others are pending, in
    `transitions.upcoming`, until the keeper reports that they have begun. They are taken back, and queued again as they
    were, before a request that may change the queue, when the slice has lasted for a second, and when its job is
    stopped or suspended: its lease may reserve nothing then. What was taken back ends as NEVER_STARTED, as does what
    the keeper did not start because the daemon died."""

    def __init__(self, transitions: JobTransitions, engines: EngineSet, need_of: Callable[[int], Need]) -> None:
        """`need_of` returns the need of a job in a lane that sizes each."""
        self._transitions = transitions
        self._store = transitions.store
        self._engines, self._need_of = engines, need_of
        self._begun: list[SiteStatus] = []  # not recorded yet
        self._slices: list[tuple[tuple[int, ...], float]] = []  # jobs, some of which may not have begun; until when
        self._changes = 0  # requests that may change the queue, and are not answered yet

    @property
    def has_upcoming(self) -> bool:
        return bool(self._transitions.upcoming)

    def begin_change(self) -> None:
        """Take back what has not begun, and let no start take jobs along until `end_change`."""
        self._changes += 1
        for job_ids, _ in self._slices:
            self._take_back(job_ids)
        self._slices.clear()

    def end_change(self) -> None:
        self._changes -= 1

    def taken_along(self, plan: Plan, world: World | None) -> Mapping[int, Sequence[Job]]:
        """Return the jobs that starts take along, by the first job."""
        found: dict[int, Sequence[Job]] = {}
        by_lane: dict[int, list[Start]] = {}
        if world is None or self._changes:
            return found
        for start in plan.starts:
            by_lane.setdefault(start.lane.id, []).append(start)
        for starts in by_lane.values():
            if may_slice(starts[0].lane, plan, world):
                jobs = self._next_jobs(starts, places=len(world.running) + len(plan.starts))
                found |= {start.job_id: jobs[place :: len(starts)] for place, start in enumerate(starts)}
        return found

    def _next_jobs(self, starts: Sequence[Start], places: int) -> list[Job]:
        """Return the next jobs of a lane that need what the starts need."""
        start = starts[0]
        lane, first = start.lane, self._store.job(start.job_id)
        likely_s = self._transitions.estimates.estimate_of(start.job_id).likely_s
        waiting = self._store.count_queued([lane.id], MOST * places + len(starts)) - len(starts)
        length = slice_length(likely_s, waiting, places, len(starts))
        are_alike = all(start.need and each.need and asks_for_the_same(start.need, each.need) for each in starts)
        if length < 1 or first is None or not are_alike or not _may_follow(first):
            return []
        jobs: list[Job] = []
        for job in self._store.next_jobs(lane.id, length * len(starts), after=max(each.job_id for each in starts)):
            needs_same = not lane.sizes_each or job.argv == first.argv
            if not needs_same and start.need is not None:
                needs_same = asks_for_the_same(start.need, self._need_of(job.id))
            if job.spec is not first.spec or not needs_same or not _may_follow(job):
                break
            jobs.append(job)
        return jobs

    def note(self, prepared: Prepared, now: float) -> None:
        """Note that these were recorded, and their keeper gets them now."""
        if prepared.rest:
            job_ids = prepared.job_id, *(each.job_id for each in prepared.rest)
            self._slices.append((job_ids, now + LONGEST_S))

    def collect(self) -> None:
        self._begun += self._engines.begun()

    def record(self, now: float) -> None:
        """Record what has begun. Call it before ends are recorded."""
        for each in self._begun:
            live = self._transitions.upcoming.get(each.job_id)
            if live is not None and live.attempt.number == each.attempt:
                at = now if each.at is None else min(now, max(each.at, live.attempt.since))
                self._transitions.begin(live, at, each.keeper_pid)

    def forget_recorded(self) -> None:
        self._begun.clear()

    def take_back(self, now: float) -> None:
        """Take back what has to start no more. Call it when a step is recorded, and before signals are sent."""
        live, kept = self._transitions.live.apart, []
        for job_ids, until in self._slices:
            here = [live[job_id] for job_id in job_ids if job_id in live]
            is_stopping = any(each.job.state is not JobState.RUNNING for each in here)  # or is being suspended
            is_stopping |= any(each.attempt.stopping is not None or each.attempt.parked is not None for each in here)
            if now >= until or is_stopping:
                self._take_back(job_ids)
            elif not self._transitions.upcoming.keys().isdisjoint(job_ids):
                kept.append((job_ids, until))
        self._slices = kept

    def _take_back(self, job_ids: Sequence[int]) -> None:
        upcoming = self._transitions.upcoming
        self._engines.withdraw([upcoming[job_id].attempt for job_id in job_ids if job_id in upcoming])

    def wake_at(self) -> float | None:
        """Return when the first slice has lasted for too long."""
        return min((until for _, until in self._slices), default=None)


def _may_follow(job: Job) -> bool:
    """Return whether a job can run on the lease of another one with the same spec, its variables but for its number."""
    spec = job.spec
    is_plain = spec.container is None and spec.task is None and spec.code.snapshot is None
    return is_plain and not spec.filled_variables and not job.is_unreadable and job.growth == Growth()


class JobLauncher:
    def __init__(self, parts: QueueParts, slices: Slices) -> None:
        self._parts = parts
        self._transitions = parts.transitions
        self._slices = slices
        self._pinning = CpuPinning(parts.transitions)
        self.has_rejected = False  # a job was rejected, and other jobs waited behind its start

    def launch(
        self, start: Start, held: HeldClaim | None, snapshot: Snapshot, now: float, rest: Sequence[Job] = ()
    ) -> int:
        """Prepare and record the attempt, and the `rest` of its slice; return 1, or 0 if that failed."""
        job = self._transitions.store.job(start.job_id)
        assert job is not None
        try:
            number, rules, pinning = job.attempts + 1, self._parts.rules, self._pinning
            launch = launch_of(job, number, held, snapshot, rules, terms=start.terms, pinning=pinning)
            if job.spec.task is not None and job.attempts:
                launch = replace(launch, retried=self._describe_retry(job))
            if launch.ram_limit_mb is None:
                launch = replace(launch, rest=tuple(_launch_after(launch, each) for each in rest))
            prepared = self._parts.engines.prepare(launch, held.descriptor if held is not None else None)
        except GpuyardError as error:
            if held is not None:
                held.release()
            if isinstance(error, UserError):
                self._transitions.apply(job, JobEvent.REJECT, now, str(error))
                self.has_rejected = True
            elif start.terms is not None:
                self._parts.cluster_dispatch.delay_lane(job, str(error), now)
            else:
                limit = ResourceLimit(text=str(error), remedy=error.hint or "")
                self._parts.start_pauses.note_limit(job.id, limit, now)
            return 0
        attempt = replace(self._attempt(job, prepared, start, held, now), cpus=launch.cpus)
        self._transitions.start(job, attempt)
        for each, ready in zip(rest, prepared.rest, strict=False):
            self._transitions.start(each, upcoming(attempt, ready))
        self._slices.note(prepared, now)
        if start.terms is None:
            self._parts.start_pauses.note_start(now)
        return 1

    def _attempt(self, job: Job, prepared: Prepared, start: Start, held: HeldClaim | None, now: float) -> Attempt:
        """Return the attempt as it is recorded. With `terms` it is handed over to another machine: its time limit
        counts from its start there, and a reboot of this machine does not end it."""
        terms, shares, limit = start.terms, start.claim.shares, job.spec.time_limit_s
        reserved_mb = shares[0].memory_mb if shares else None
        if terms is not None and not terms.need.is_exclusive:
            reserved_mb = terms.need.required_mb
        has_devices = bool(shares) or terms is not None
        return Attempt(
            job_id=job.id,
            number=prepared.attempt,
            phase=Started(at=now, keeper_pid=prepared.keeper_pid) if terms is None else HandedOver(at=now),
            boot_id=self._parts.me.boot_id if terms is None else None,
            lease_id=held.lease.id if held is not None else None,
            devices=tuple(share.device_id for share in shares),
            log=prepared.log,
            error_log=prepared.error_log,
            stop_at=None if limit is None or terms is not None else now + limit,
            reserved_mb=reserved_mb,
            predicted_mb=self._transitions.estimates.predicted_mb(job) if has_devices else None,
            engine=job.spec.engine,
        )

    def _describe_retry(self, job: Job) -> str:
        """Return which attempt of how many comes next, and how the last one ended."""
        most = job.attempts + 1 + max(0, job.spec.retries - job.failures)
        past = self._transitions.store.attempts(job.id)
        ended = past[-1].outcome if past else None  # the job may come from a backup
        why = "" if ended is None else f": {ended.reason or ended.kind}"
        return f"attempt {job.attempts + 1} of {most}{why}"
