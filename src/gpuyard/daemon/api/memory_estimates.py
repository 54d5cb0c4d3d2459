"""What is told about memory: what a job's next run is given and why that much, what was learned, and advice."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import WAITING
from gpuyard.core.lease import Need
from gpuyard.core.memory.estimates import Profile, is_consistent, memory_estimate
from gpuyard.core.memory.preallocation import preallocation_advice
from gpuyard.core.scheduling.device_fit import check_suitable
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.schema import job_json
from gpuyard.engines.local.oom_evidence import loaded_libraries, read_tail
from gpuyard.errors import UserError

_MOST = 1_000_000
_SHORTEST_FINGERPRINT = 6
_HEX = frozenset("0123456789abcdef")


# What a job is given


def next_need(scheduler: SchedulerLoop, job: Job) -> Need:
    """What it would be given now, where it waits."""
    is_open = job.spec.learns_memory or job.growth.count
    if job.state not in WAITING or not is_open:
        return job.spec.need
    return _need(scheduler, job)


def memory(scheduler: SchedulerLoop, job: Job) -> dict[str, Any] | None:
    """What its next run is given on each GPU, and why that much; `None` where it needs no GPU."""
    if not job.spec.need.devices:
        return None
    need = _need(scheduler, job)
    known = _evidence(scheduler, job) if job.spec.learns_memory else None
    return {
        "basis": _basis(job, known),
        "given_mb": need.memory_mb,
        "alone": need.is_exclusive,
        "runs": len(known.peaks_mb) if known is not None else None,
        "same_command": known.is_exact if known is not None else None,
    }


def _need(scheduler: SchedulerLoop, job: Job) -> Need:
    if job.spec.engine:
        return scheduler.controller.transitions.estimates.need_elsewhere(job)
    controller, devices = scheduler.controller, scheduler.sampling.latest.snapshot.usable_devices()
    need = controller.transitions.estimates.need(job.id, devices, controller.rules.first_run_part)
    if need.part is None:
        return need
    suiting = [size for each in devices if check_suitable(need, each) is None and (size := capacity(each)) is not None]
    return replace(need, memory_mb=need.part * min(suiting, default=0.0))  # the least that it may be


def _basis(job: Job, known: Profile | None) -> str:
    if job.growth.is_alone or job.growth.memory_mb is not None:
        return "grown"
    if not job.spec.learns_memory:
        return "declared"
    return "learned" if known is not None else "unknown"


def _evidence(scheduler: SchedulerLoop, job: Job) -> Profile | None:
    """What its memory is learned from."""
    profiles = scheduler.controller.transitions.estimates.profiles(job)
    known = (each for each in profiles if each is not None and is_consistent(each))
    return next((each for each in known if memory_estimate(each) is not None), None)


def _write_down(scheduler: SchedulerLoop) -> None:
    """What was learned may not have been written yet."""
    with scheduler.store.transaction():
        scheduler.controller.transitions.estimates.write_down()


# What to tell its user


def advice(scheduler: SchedulerLoop, job: Job, attempts: Sequence[Attempt]) -> list[str]:
    """What would let others share its GPU: a framework that takes all of it, a declaration that is far off."""
    taken = _takes_all(scheduler, job, attempts[-1]) if attempts else None
    declared = [text for _, kind, text in scheduler.queries.events(job.id) if kind == "declared"]
    return [text for text in (taken, *declared[-1:]) if text]


def _takes_all(scheduler: SchedulerLoop, job: Job, attempt: Attempt) -> str | None:
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    devices = filter(None, map(scheduler.sampling.latest.snapshot.device, attempt.devices))
    total = min((device.memory_total_mb for device in devices if device.memory_total_mb), default=None)
    if peak is None or total is None or peak < total / 2:
        return None  # its log need not be read: whoever takes all takes more than that
    return preallocation_advice(job.argv, job.spec.environment, "\n".join(_traces(attempt)), peak, total)


def _traces(attempt: Attempt) -> Iterator[str]:
    """What tells which framework it uses."""
    if attempt.log is not None:
        yield read_tail(Path(attempt.log))
    if attempt.ended_at is None and not attempt.engine:
        yield loaded_libraries(attempt.pid)


# What was learned


def estimates(scheduler: SchedulerLoop, limit: int) -> dict[str, Any]:
    """The last seen first."""
    _write_down(scheduler)
    found = scheduler.queries.profiles(limit + 1)
    return {"estimates": [job_json.estimate(*each) for each in found[:limit]], "more": len(found) > limit}


def forget(scheduler: SchedulerLoop, words: Sequence[str] | None) -> dict[str, Any]:
    """Those that are meant, or all."""
    if words is None:
        return {"forgotten": scheduler.requests.forget_estimates(None)}
    _write_down(scheduler)
    return {"forgotten": scheduler.requests.forget_estimates(_meant(scheduler.queries.profiles(_MOST), words))}


def _meant(profiles: Sequence[tuple[str, Profile]], words: Sequence[str]) -> list[str]:
    """Each word a fingerprint or its beginning, or all of them together a part of the command."""
    begun = [_beginning_with(profiles, word) for word in words]
    if all(begun):
        return sorted({fingerprint for found in begun for fingerprint in found})
    text = " ".join(words).strip()
    if not text:
        raise UserError("nothing is named to be forgotten", hint="name a part of the command, or write --all")
    found = [fingerprint for fingerprint, profile in profiles if text in profile.label]
    if not found:
        raise UserError(f"nothing was learned about '{text}'", hint="`gpuyard estimates` lists what was")
    return found


def _beginning_with(profiles: Sequence[tuple[str, Profile]], word: str) -> list[str]:
    if len(word) < _SHORTEST_FINGERPRINT or not _HEX.issuperset(word):
        return []
    return [fingerprint for fingerprint, _ in profiles if fingerprint.startswith(word)]
