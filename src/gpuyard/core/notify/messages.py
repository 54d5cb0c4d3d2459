"""What people are told of, whom, and in which words.

An `Occurrence` is what has happened, a `Message` what is sent of it. A job that its user cancelled has not failed; one
that ran out of memory for good has failed, too, and whoever hears of that hears of it once. Whatever a job is called,
the words have no control characters in them.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job, OutcomeKind
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.job.published_events import PublishedEvent, PublishedEventKind
from gpuyard.core.lease import Lease, Need
from gpuyard.core.notify.subscriptions import Event
from gpuyard.core.scheduling.device_fit import Packing, check_capacity
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.foreign_load import IDLE_PERCENT, may_have_foreign_processes
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.units import format_duration

_LONGEST = 500
_WORDS = {JobState.SUCCEEDED: "finished", JobState.FAILED: "failed", JobState.CANCELLED: "cancelled"}


class Occurrence(Struct, frozen=True, kw_only=True):
    """`text` is what there is to say of one that is no job's."""

    event: Event
    at: float
    job: Job | None = None
    attempt: Attempt | None = None
    text: str = ""


class Message(Struct, frozen=True, kw_only=True):
    """`events` and `jobs` are as a command finds them in its environment."""

    events: str
    title: str
    body: str
    jobs: str = ""
    name: str = ""
    state: str = ""
    log: str = ""


def occurrence_of(news: PublishedEvent) -> Occurrence | None:
    """What it is to those who want to be told; most news is nothing to them."""
    event = _event_of(news)
    return None if event is None else Occurrence(event=event, at=news.at, job=news.job, attempt=news.attempt)


def _event_of(news: PublishedEvent) -> Event | None:
    state = news.job.state
    if (
        news.kind is PublishedEventKind.ENDED
        and news.outcome is not None
        and news.outcome.kind is OutcomeKind.OUT_OF_MEMORY
    ):
        return Event.OUT_OF_MEMORY
    if news.kind is not PublishedEventKind.FINISHED:
        return None
    if state is JobState.SUCCEEDED:
        return Event.FINISHED
    return Event.FAILED if state in (JobState.FAILED, JobState.REJECTED) else None


def targets_of(occurrence: Occurrence, on: Sequence[str], to: Sequence[str]) -> tuple[str, ...]:
    """Each once; `on` and `to` are the configuration's."""
    job = occurrence.job
    targets = _targets(occurrence.event, job, on, to)
    if occurrence.event is Event.OUT_OF_MEMORY and job is not None and job.state in FINISHED:
        told_anyway = set(_targets(Event.FAILED, job, on, to))
        return tuple(target for target in targets if target not in told_anyway)
    return tuple(targets)


def _targets(event: Event, job: Job | None, on: Sequence[str], to: Sequence[str]) -> Iterable[str]:
    found = dict.fromkeys(to if event in on else ())
    for wish in job.spec.notify if job is not None else ():
        if event in wish.events:
            found.update(dict.fromkeys(to if wish.target is None else (wish.target,)))
    return found


# In words


def message_of(occurrence: Occurrence, host: str) -> Message:
    job = occurrence.job
    if job is None:
        return _of_machine(occurrence, host)
    name = f" ({plain(job.spec.name)})" if job.spec.name else ""
    return Message(
        events=str(occurrence.event),
        title=f"Job {job.id}{name} {_what_happened(occurrence.event, job)}{at_host(host)}",
        body="\n".join(_details(occurrence, job)),
        jobs=str(job.id),
        name=plain(job.spec.name or ""),
        state=str(job.state),
        log=_log(occurrence),
    )


def at_host(host: str) -> str:
    return f" on {plain(host)}" if host else ""


def plain(text: str) -> str:
    """In one line that anybody can print, and not too long."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def _of_machine(occurrence: Occurrence, host: str) -> Message:
    what = plain(occurrence.text) if occurrence.event is Event.GPU_FREE else "The queue"
    title = f"{what} is {'free' if occurrence.event is Event.GPU_FREE else 'empty'}{at_host(host)}"
    body = "Nobody holds or uses it." if occurrence.event is Event.GPU_FREE else plain(occurrence.text)
    return Message(events=str(occurrence.event), title=title, body=body)


def _what_happened(event: Event, job: Job) -> str:
    if event is Event.OUT_OF_MEMORY:
        again = "is not tried again" if job.state in FINISHED else "is tried again with more"
        return f"ran out of memory, and {again}"
    return "will never start" if job.state is JobState.REJECTED else str(event)


def _details(occurrence: Occurrence, job: Job) -> Iterable[str]:
    yield plain(shlex.join(job.words))
    if occurrence.event is not Event.FINISHED and job.reason:
        yield plain(job.reason)
    if occurrence.attempt is not None and occurrence.attempt.has_started:
        yield f"It ran for {format_duration(occurrence.attempt.ran_s(occurrence.at))}."
    if occurrence.event is not Event.FINISHED and _log(occurrence):
        yield f"Its log is {plain(_log(occurrence))}"


def _log(occurrence: Occurrence) -> str:
    return (occurrence.attempt.log if occurrence.attempt is not None else None) or ""


def in_sum(ended: Mapping[JobState, int]) -> str:
    """How a queue's jobs ended, now that none is left: `37 finished, 2 failed`."""
    words = [f"{ended[state]} {_WORDS.get(state, state)}" for state in JobState if ended.get(state)]
    return f"Nothing is left to run. Since it was last empty: {', '.join(words)}." if words else ""


# GPUs that nobody uses


class Freed:
    """Devices that were in use, and nobody has been told since that they are free."""

    def __init__(self) -> None:
        self._used_at: dict[str, float] = {}

    def note_use(self, device_ids: Iterable[str], now: float) -> None:
        for device_id in device_ids:
            self._used_at[device_id] = now

    def look(self, snapshot: Snapshot, leases: Sequence[Lease], now: float, free_s: float) -> list[Device]:
        """Those that have been free for so long; each is told once."""
        usable = snapshot.usable_devices()
        self.note_use((device.id for device in usable if _is_in_use(device, leases)), now)
        freed = [device for device in usable if now >= self._used_at.get(device.id, now + 1.0) + free_s]
        for device in freed:
            del self._used_at[device.id]
        return freed


def _is_in_use(device: Device, leases: Sequence[Lease]) -> bool:
    """Return whether somebody uses the device. A screen on it does not count."""
    is_taken = any(lease.on(device.id) for lease in leases)
    is_empty = device.processes == () and not may_have_foreign_processes(device)
    is_busy = not is_empty and (device.utilization_percent or 0.0) > IDLE_PERCENT
    return is_taken or is_busy or check_capacity(Need(), DeviceState(device, (), None), Packing()) is not None


def label_of(device: Device) -> str:
    number = device.id if device.index is None else f"GPU {device.index}"
    return f"{number} ({device.name})" if device.name else number
