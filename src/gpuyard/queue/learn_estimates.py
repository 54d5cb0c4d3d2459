"""Estimates of memory and time, learned from finished attempts, and the need of a job that follows from them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from msgspec.structs import replace

from gpuyard.model.container import bare_container_tool
from gpuyard.model.job import Attempt, Growth, Job, Outcome, OutcomeKind, Usage
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.out_of_memory import ShortageKind
from gpuyard.policy import estimates, sizing
from gpuyard.policy.estimates import Estimate, ExpectedPeak, FinishedRun, Profile
from gpuyard.policy.numbers import LEAST_CPUS, LEAST_RAM_MB
from gpuyard.policy.preallocation import frameworks_set_to_grow
from gpuyard.policy.sizing import DeviceSizes, FirstRuns, KnownRuns
from gpuyard.store.job_store import JobStore

_CACHE_SIZE = 65_536
# Set in the store once a job without devices has used enough RAM or CPUs that such jobs reserve them.
_HOST_USE_SETTING = "host-use-learned"

# Running jobs like a new one: the expected peaks of jobs of its program, and of one of its batch.
RunningPeaks = tuple[tuple[float, ...], ExpectedPeak | None]


class LearnedEstimates:
    """Learned profiles. `save` writes new ones to the store from time to time; until then they are kept here.
    `version` changes with each profile that does, and what follows from profiles is kept for as long."""

    def __init__(self, store: JobStore) -> None:
        self.version = 0
        self._kinds: dict[tuple[object, ...], int] = {}
        self._last_kind = 0
        self._estimates: dict[int, Estimate] = {}  # by kind, as the next
        self._needs: dict[int, tuple[object, Need]] = {}
        self._store = store
        self._unsaved: dict[str, Profile] = {}
        self._stored = lru_cache(maxsize=_CACHE_SIZE)(store.learned.profile)
        self._cards = DeviceSizes(())
        self._known = lru_cache(maxsize=_CACHE_SIZE)(self._look_up)
        self._last_look_up: tuple[Job, int] | None = None

    def estimate(self, job: Job) -> Estimate:
        profiles = map(self._profile, fingerprints_of(job))
        return estimates.estimate(job.spec, next((each for each in profiles if each and each.durations_s), None))

    def estimate_of(self, job_id: int) -> Estimate:
        job, kind = self._known(job_id)
        if kind not in self._estimates:
            self._estimates[kind] = self.estimate(job)
        return self._estimates[kind]

    def job(self, job_id: int) -> Job:
        """Return a job as it was when it was last needed here."""
        return self._known(job_id)[0]

    def kind_of(self, job_id: int) -> int:
        """Return a number that jobs have in common whose need and duration are estimated alike."""
        return self._known(job_id)[1]

    def need(
        self,
        job_id: int,
        devices: Sequence[Device],
        first_runs: FirstRuns,
        running_like: Callable[[Job], RunningPeaks] = lambda _: ((), None),
        grantable_mb: float | None = None,
    ) -> Need:
        """Return the need of a job whose lane leaves the memory or the RAM open. `grantable_mb`: this machine's RAM."""
        job, kind = self._known(job_id)
        if devices is not self._cards.devices and not self._cards.update(devices):
            self._cards = DeviceSizes(devices)
            self._needs.clear()
        running = running_like(job)
        found = self._needs.get(kind)
        terms = (running, first_runs, grantable_mb)
        if found is None or found[0] != terms:
            known, need = self.known_runs(job, *running), job.spec.need
            if job.spec.learns_memory or job.growth != Growth():
                need = sizing.size_need(job, known, self._cards, first_runs)
            need = replace(need, host=sizing.size_host(need, known, grantable_mb, job.spec.need.ram_mb))
            found = self._needs[kind] = (terms, need)
        return found[1]

    @property
    def knows_host_use(self) -> bool:
        """Whether a job without devices has ever used enough RAM or CPUs to reserve them."""
        return self._store.setting(_HOST_USE_SETTING) is not None

    def known_runs(self, job: Job, running_mb: tuple[float, ...] = (), batch: ExpectedPeak | None = None) -> KnownRuns:
        exact, program = self.profiles(job)
        machine, *frameworks = (self._profile(fingerprint) for fingerprint, _ in _wider_groups(job))
        framework = frameworks[0] if frameworks else None
        return KnownRuns(
            exact=exact, program=program, framework=framework, machine=machine, running_mb=running_mb, batch=batch
        )

    def need_elsewhere(self, job: Job) -> Need:
        """Return the need for an engine that places the job on GPUs unknown here: a whole GPU without an estimate."""
        exact, program = self.profiles(job)
        return sizing.size_need(job, KnownRuns(exact=exact, program=program), DeviceSizes(()), FirstRuns(share=False))

    def predicted_mb(self, job: Job) -> float | None:
        return sizing.predicted_mb(*self.profiles(job))

    def figure(self, job: Job, name: Literal["ram_mb", "load_percent", "power_w"]) -> float | None:
        """Return the RAM, the load of a device or the power per GPU of earlier runs, or None."""
        known = (getattr(each, name) for each in self.profiles(job) if each is not None)
        return next((figure for figure in known if figure is not None), None)

    def profiles(self, job: Job) -> tuple[Profile | None, Profile | None]:
        """Return the profiles of command and program, but not of runs that preallocated if the job is set not to."""
        exact, program = fingerprints_of(job)
        return self._applicable(job, exact), self._applicable(job, program)

    def _applicable(self, job: Job, fingerprint: str) -> Profile | None:
        profile = self._profile(fingerprint)
        if profile is None or not profile.preallocates:
            return profile
        return None if profile.preallocates in frameworks_set_to_grow(job.argv, job.spec.environment) else profile

    def learn(self, job: Job, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Update the profiles of command and program with an ended attempt, and by a first run the machine's."""
        run = _finished_run(job, attempt, outcome, now)
        if run is None:
            return
        self._forget_derived()
        prints = fingerprints_of(job)
        for fingerprint, is_exact in zip(prints, (True, False), strict=True):
            if (before := self._profile(fingerprint)) is None:
                command, vendor = _command(job), job.spec.need.vendor
                words = command if is_exact else estimates.find_program(command, job.spec.cwd)
                label = " ".join((*filter(None, words), *(() if vendor is None else (f"[{vendor}]",))))
                before = Profile(label=label[:200], is_exact=is_exact)
            self._unsaved[fingerprint] = estimates.learn(before, run)
        # What a program preallocates says nothing about others, nor does a script that uses no GPU.
        is_first = run.predicted_mb is None and run.is_whole and job.spec.learns_memory
        if is_first and run.peak_mb and not run.preallocates:
            taught = replace(run, seconds=None, load_percent=None, power_w=None, cpus_used=None)
            for fingerprint, label in _wider_groups(job):
                wider = self._profile(fingerprint) or Profile(label=label, is_exact=False, is_of_any=True)
                self._unsaved[fingerprint] = estimates.learn(wider, taught)
        is_large = (run.ram_mb or 0.0) >= LEAST_RAM_MB / 2 or (run.cpus_used or 0.0) >= LEAST_CPUS - 0.5
        if is_large and not job.spec.need.devices and not self.knows_host_use:
            self._store.set_setting(_HOST_USE_SETTING, "1")
        advice = sizing.declaration_advice(job.spec.need.required_mb, attempt.usage)
        if advice is not None and outcome.kind is OutcomeKind.SUCCEEDED:
            self._store.add_event(job.id, now, "declared", advice)

    def save(self) -> None:
        for fingerprint, profile in self._unsaved.items():
            self._store.learned.set_profile(fingerprint, profile)
        if self._unsaved:
            self._stored.cache_clear()
        self._unsaved.clear()

    def clear_cache(self) -> None:
        """Forget what was read from the store, as jobs or profiles may have changed there."""
        self._known.cache_clear()
        self._last_look_up = None
        self._kinds.clear()
        self._stored.cache_clear()
        self._forget_derived()

    def _forget_derived(self) -> None:
        """Forget what follows from profiles and jobs that change."""
        self.version += 1
        self._estimates.clear()
        self._needs.clear()

    def _look_up(self, job_id: int) -> tuple[Job, int]:
        job = self._store.job(job_id)
        assert job is not None
        last = self._last_look_up
        if last is not None:  # jobs of an array are alike at a glance
            is_same = job.spec is last[0].spec and job.group == last[0].group and job.growth == last[0].growth
            if is_same and job.argv == last[0].argv:
                return job, last[1]
        spec = job.spec
        batch = None if spec.pace is None else job.group
        times = (spec.duration_s, spec.time_limit_s, spec.grace_s)
        frameworks = (spec.framework, frameworks_set_to_grow(job.argv, spec.environment))
        key = (fingerprints_of(job), spec.need, job.growth, spec.tag_sharing, batch, times, frameworks)
        if len(self._kinds) >= _CACHE_SIZE:
            self._kinds.clear()
            self._last_look_up = None
            self._forget_derived()
        if key not in self._kinds:
            self._last_kind += 1  # never the number of an earlier kind, which a plan may remember
            self._kinds[key] = self._last_kind
        self._last_look_up = found = job, self._kinds[key]
        return found

    def _profile(self, fingerprint: str) -> Profile | None:
        return self._unsaved.get(fingerprint) or self._stored(fingerprint)


def _command(job: Job) -> tuple[str, ...]:
    """Return the command to learn under. All runs of a batch count as one command, no matter which seed they have."""
    return job.argv if job.spec.pace is None else job.spec.command


_fingerprints = lru_cache(maxsize=_CACHE_SIZE)(estimates.fingerprints)


def fingerprints_of(job: Job) -> tuple[str, str]:
    image = "" if job.spec.container is None else job.spec.container.image
    return _fingerprints(_command(job), job.spec.cwd, job.spec.configuration + image, job.spec.need.vendor)


def _wider_groups(job: Job) -> list[tuple[str, str]]:
    """Return fingerprints and labels: of first runs of any program, and of programs with its framework, if known."""
    framework, vendor = job.spec.framework, job.spec.need.vendor
    where = "" if vendor is None else f" [{vendor}]"
    groups = [(estimates.machine_fingerprint(vendor), f"(first runs of any program){where}")]
    if framework:
        groups.append((estimates.machine_fingerprint(vendor, framework), f"(first runs with {framework}){where}"))
    return groups


def _finished_run(job: Job, attempt: Attempt, outcome: Outcome, now: float) -> FinishedRun | None:
    """Return what can be learned from an attempt with this outcome, or None."""
    usage, is_whole = attempt.usage or Usage(), outcome.kind is OutcomeKind.SUCCEEDED
    run = FinishedRun(
        seconds=attempt.ran_s(now) if is_whole else None,
        peak_mb=usage.peak_mb,
        flat_levels_mb=usage.flat_levels_mb,
        preallocates=usage.preallocates,
        ram_mb=usage.ram_mb,
        cpus_used=usage.cpus_used,
        load_percent=usage.load_percent,
        power_w=None if usage.energy is None else usage.energy.peak_w,
        predicted_mb=attempt.predicted_mb,
        is_whole=is_whole,
        at=now,
    )
    if is_whole:
        # An attempt that used no device in three samples does not need one, unless its work may run outside its
        # processes: its command starts a container itself, or foreign memory was seen.
        is_idle = usage.peak_mb is None and not usage.saw_foreign and usage.idle_looks >= 3
        uses_nothing = is_idle and attempt.ran_s(now) >= 0.75 and bare_container_tool(job.argv) is None
        return replace(run, peak_mb=0.0, load_percent=0.0) if uses_nothing else run
    if attempt.lack is not None and attempt.lack.shortage.where is ShortageKind.DEVICE:
        return replace(run, lacked_mb=sizing.lacked_mb(attempt, attempt.lack.shortage))
    return run if usage.peak_mb is not None else None
