"""What attempts teach about memory and time, and what a job is given for it."""

from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Job, Outcome, OutcomeKind, Usage
from gpuyard.core.lease import Need
from gpuyard.core.memory.estimates import Estimate, FinishedRun, Profile, estimate, find_program, fingerprints, learn
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.memory.sizing import DeviceSizes, declaration_advice, lacked_mb, predicted_mb, size_need
from gpuyard.core.snapshot import Device
from gpuyard.store.job_store import JobStore

_LONGEST_LABEL = 200
_REMEMBERED = 65_536
_ENOUGH_LOOKS, _LONG_ENOUGH_S = 3, 0.75


class KnownJob(Struct, frozen=True, kw_only=True):
    """A job, and by what it is known."""

    job: Job
    exact: str
    program: str

    @classmethod
    def of(cls, job: Job) -> "KnownJob":
        exact, program = fingerprints(_words(job), job.spec.cwd, job.spec.configuration)
        return cls(job=job, exact=exact, program=program)


class LearnedEstimates:
    """What was learned is written down only now and then; until then it is here."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._learned: dict[str, Profile] = {}
        self._written: dict[str, Profile | None] = {}
        self._cards = DeviceSizes(())
        self._known = lru_cache(maxsize=_REMEMBERED)(self._look_up)

    def estimate(self, job: Job) -> Estimate:
        return estimate(job.spec, self._best(KnownJob.of(job)))

    def estimate_of(self, job_id: int) -> Estimate:
        known = self._known(job_id)
        return estimate(known.job.spec, self._best(known))

    def need(
        self, job_id: int, devices: Sequence[Device], first_run_part: float, sibling_mb: float | None = None
    ) -> Need:
        """What a job is to be given whose lane leaves that open."""
        known = self._known(job_id)
        if devices is not self._cards.devices:
            self._cards = DeviceSizes(devices)
        exact, program = self._profile(known.exact), self._profile(known.program)
        return size_need(known.job, exact, program, self._cards, first_run_part, sibling_mb=sibling_mb)

    def need_elsewhere(self, job: Job) -> Need:
        """The same for an engine that places it, on cards that nobody here has seen: a whole one where nothing is known
        of what it takes."""
        return size_need(job, *self.profiles(job), DeviceSizes(()), first_run_part=1.0)

    def predicted_mb(self, job: Job) -> float | None:
        return predicted_mb(*self.profiles(job))

    def ram_mb(self, job: Job) -> float | None:
        """What it takes of RAM, as far as its like have shown."""
        return next((each.ram_mb for each in self.profiles(job) if each is not None and each.ram_mb is not None), None)

    def load_percent(self, job: Job) -> float | None:
        """How busy it keeps a device."""
        known = (each.load_percent for each in self.profiles(job) if each is not None)
        return next((percent for percent in known if percent is not None), None)

    def profiles(self, job: Job) -> tuple[Profile | None, Profile | None]:
        """Of the exact command, and of the program."""
        known = KnownJob.of(job)
        return self._profile(known.exact), self._profile(known.program)

    def learn(self, job: Job, attempt: Attempt, outcome: Outcome, now: float) -> None:
        run = _lesson(attempt, outcome, now)
        if run is None:
            return
        known = KnownJob.of(job)
        for fingerprint, is_exact in ((known.exact, True), (known.program, False)):
            before = self._profile(fingerprint) or _blank(job, is_exact=is_exact)
            self._learned[fingerprint] = learn(before, run)
        said = declaration_advice(job.spec.need.required_mb, attempt.usage)
        if said is not None and outcome.kind is OutcomeKind.SUCCEEDED:
            self._store.add_event(job.id, now, "declared", said)

    def write_down(self) -> None:
        for fingerprint, profile in self._learned.items():
            self._store.estimates.set_profile(fingerprint, profile)
        self._written.update(self._learned)
        self._learned.clear()

    def forget_job(self) -> None:
        """What jobs were known as may have changed."""
        self._known.cache_clear()
        self._written.clear()

    def _look_up(self, job_id: int) -> KnownJob:
        job = self._store.job(job_id)
        assert job is not None
        return KnownJob.of(job)

    def _best(self, known: KnownJob) -> Profile | None:
        """The most specific that says how long it takes."""
        profiles = (self._profile(known.exact), self._profile(known.program))
        return next((each for each in profiles if each is not None and each.mean_s is not None), None)

    def _profile(self, fingerprint: str) -> Profile | None:
        learned = self._learned.get(fingerprint)
        if learned is not None:
            return learned
        if fingerprint not in self._written:
            if len(self._written) >= _REMEMBERED:
                self._written.clear()
            self._written[fingerprint] = self._store.estimates.profile(fingerprint)
        return self._written[fingerprint]


def _words(job: Job) -> tuple[str, ...]:
    """By what it is known: the runs of a batch are one command, whatever their seeds."""
    return job.argv if job.spec.pace is None else job.spec.command


def _blank(job: Job, *, is_exact: bool) -> Profile:
    words = _words(job) if is_exact else find_program(_words(job), job.spec.cwd)
    return Profile(label=" ".join(filter(None, words))[:_LONGEST_LABEL], is_exact=is_exact)


def _lesson(attempt: Attempt, outcome: Outcome, now: float) -> FinishedRun | None:
    """What an attempt teaches that has ended so."""
    usage = attempt.usage or Usage()
    run = FinishedRun(
        peak_mb=usage.peak_mb,
        ram_mb=usage.ram_mb,
        load_percent=usage.load_percent,
        predicted_mb=attempt.predicted_mb,
        is_whole=False,
        at=now,
    )
    if outcome.kind is OutcomeKind.SUCCEEDED:
        if usage.peak_mb is None and usage.idle_looks >= _ENOUGH_LOOKS and attempt.ran_s(now) >= _LONG_ENOUGH_S:
            run = replace(run, peak_mb=0.0)  # it has no use for a device
        return replace(run, seconds=attempt.ran_s(now), is_whole=True)
    if attempt.lack is not None and attempt.lack.shortage.where is ShortageKind.DEVICE:
        return replace(run, lacked_mb=lacked_mb(attempt, attempt.lack.shortage))
    return run if usage.peak_mb is not None else None
