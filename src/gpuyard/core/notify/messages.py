"""Which events people are notified of, who gets them, and the text of the messages.

- An `Occurrence` is an event that users may subscribe to; a `Message` is the text that is sent for it.
- A cancelled job has not failed.
- A job that ran out of memory for the last time has failed as well: a target that gets both events gets one message.
- A job that the memory guard suspends or stops is no failure: the message says what happens to it next.
- A message never contains control characters, no matter what a job is called.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job, OutcomeKind, PublishedEvent, PublishedEventKind
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.lease import Lease
from gpuyard.core.notify.subscriptions import Event
from gpuyard.core.printable_text import printable
from gpuyard.core.scheduling.device_fit import exceeds, tolerated_foreign_mb
from gpuyard.core.scheduling.foreign_load import may_have_unlisted_processes
from gpuyard.core.scheduling.numbers import IDLE_PERCENT
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.units import format_duration

_MAX_LENGTH = 500
_EVENT_OF_STATE = {
    JobState.SUCCEEDED: Event.FINISHED, JobState.FAILED: Event.FAILED, JobState.REJECTED: Event.FAILED,
}  # fmt: skip
_GOES_ON = "It goes on from where it was once clearly more memory than it held is free."
_STARTS_AGAIN = "It starts again, from its beginning, once that much memory is free. That uses up no retry."
_STATE_TEXT = {JobState.SUCCEEDED: "finished", JobState.FAILED: "failed", JobState.CANCELLED: "cancelled"}


class Occurrence(Struct, frozen=True, kw_only=True):
    """An event of a job, or of the machine; `text` describes an event of the machine, or what the memory guard saw."""

    event: Event
    at: float
    job: Job | None = None
    attempt: Attempt | None = None
    text: str = ""

    @property
    def log(self) -> str:
        return (self.attempt.log if self.attempt is not None else None) or ""


class Message(Struct, frozen=True, kw_only=True):
    """A notification; the fields besides title and body are the environment variables of a command target."""

    events: str
    title: str
    body: str
    jobs: str = ""
    name: str = ""
    state: str = ""
    log: str = ""


def occurrence_of(published: PublishedEvent) -> Occurrence | None:
    """Return the occurrence that subscribers are notified of, or None: most published events cause no notification."""
    job, outcome = published.job, published.outcome
    if published.kind is PublishedEventKind.ENDED and outcome and outcome.kind is OutcomeKind.OUT_OF_MEMORY:
        event = Event.OUT_OF_MEMORY
    elif published.kind is PublishedEventKind.ENDED and outcome and outcome.kind is OutcomeKind.HOST_GUARD:
        event = Event.HOST_GUARD
    elif published.kind is PublishedEventKind.FINISHED and job.state in _EVENT_OF_STATE:
        event = _EVENT_OF_STATE[job.state]
    elif published.kind is PublishedEventKind.MADE_WAY:
        event = Event.MEMORY_GUARD
    else:
        return None
    return Occurrence(event=event, at=published.at, job=job, attempt=published.attempt, text=published.text)


def targets_of(occurrence: Occurrence, on: Sequence[str], to: Sequence[str]) -> tuple[str, ...]:
    """Return the targets of an occurrence, each once. `on` (events) and `to` (targets) come from the configuration."""
    job = occurrence.job
    targets = _targets(occurrence.event, job, on, to)
    if occurrence.event is Event.OUT_OF_MEMORY and job is not None and job.state in FINISHED:
        notified_of_failure = set(_targets(Event.FAILED, job, on, to))
        return tuple(target for target in targets if target not in notified_of_failure)
    return tuple(targets)


def _targets(event: Event, job: Job | None, on: Sequence[str], to: Sequence[str]) -> Iterable[str]:
    found = dict.fromkeys(to if event in on else ())
    for subscription in job.spec.notify if job is not None else ():
        if event in subscription.events:
            found.update(dict.fromkeys(to if subscription.target is None else (subscription.target,)))
    return found


def message_of(occurrence: Occurrence, host: str) -> Message:
    event, job = occurrence.event, occurrence.job
    if event is Event.GPU_FREE:
        title = f"{plain(occurrence.text)} is free{at_host(host)}"
        return Message(events=str(event), title=title, body="It has no lease and no process.")
    if event is Event.GPU_FAULT:
        title, _, body = occurrence.text.partition("\n")
        return Message(events=str(event), title=f"{plain(title)} is faulty{at_host(host)}", body=plain(body))
    if job is None:
        return Message(events=str(event), title=f"The queue is empty{at_host(host)}", body=plain(occurrence.text))
    name = f" ({plain(job.spec.name)})" if job.spec.name else ""
    where = (occurrence.attempt.place if occurrence.attempt is not None else None) or job.spec.engine or host
    return Message(
        events=str(event),
        title=f"Job {job.id}{name} {_what_happened(event, job)}{at_host(where)}",
        body="\n".join(_details(occurrence, job)),
        jobs=str(job.id),
        name=plain(job.spec.name or ""),
        state=str(job.state),
        log=occurrence.log,
    )


def at_host(host: str) -> str:
    return f" on {plain(host)}" if host else ""


def plain(text: str) -> str:
    """Return the text as one printable line of limited length."""
    return printable(text, _MAX_LENGTH)


def _what_happened(event: Event, job: Job) -> str:
    if event is Event.OUT_OF_MEMORY:
        next_step = "will not run again" if job.state in FINISHED else "will run again with more"
        return f"ran out of memory and {next_step}"
    if event is Event.MEMORY_GUARD:
        is_stopped = job.state is JobState.STOPPING
        return f"is {'stopped and queued again' if is_stopped else 'suspended'} before its GPU runs out of memory"
    if event is Event.HOST_GUARD:
        return "was stopped and queued again before the machine ran out of RAM"
    return "will never start" if job.state is JobState.REJECTED else str(event)


def _details(occurrence: Occurrence, job: Job) -> Iterable[str]:
    is_finished = occurrence.event is Event.FINISHED
    yield plain(shlex.join(job.argv))
    if occurrence.event is Event.MEMORY_GUARD:
        yield plain(occurrence.text)
        yield _STARTS_AGAIN if job.state is JobState.STOPPING else _GOES_ON
    elif job.reason:
        yield plain(job.reason)
    if occurrence.attempt is not None and occurrence.attempt.started is not None:
        yield f"It ran for {format_duration(occurrence.attempt.ran_s(occurrence.at))}."
    if occurrence.log and not is_finished:
        yield f"Log: {plain(occurrence.log)}"


def queue_summary(ended: Mapping[JobState, int]) -> str:
    """Describe how the jobs ended since the queue was last empty: `37 finished, 2 failed`."""
    counts = [f"{ended[state]} {_STATE_TEXT.get(state, state)}" for state in JobState if ended.get(state)]
    return f"No jobs are left. Since the queue was last empty: {', '.join(counts)}." if counts else ""


class FreedDevices:
    """Devices that were in use and have not been reported as free since."""

    def __init__(self) -> None:
        self._used_at: dict[str, float] = {}

    def note_use(self, device_ids: Iterable[str], now: float) -> None:
        for device_id in device_ids:
            self._used_at[device_id] = now

    def update(self, snapshot: Snapshot, leases: Sequence[Lease], now: float, free_s: float) -> list[Device]:
        """Return the devices that have been free for `free_s` seconds; each is reported once."""
        usable = snapshot.usable_devices()
        self.note_use((device.id for device in usable if _is_in_use(device, leases)), now)
        freed = [device for device in usable if now >= self._used_at.get(device.id, now + 1.0) + free_s]
        for device in freed:
            del self._used_at[device.id]
        return freed


def _is_in_use(device: Device, leases: Sequence[Lease]) -> bool:
    """Return whether the device has a lease, a process or load. A display on it does not count."""
    is_taken = any(lease.on(device.id) for lease in leases)
    has_processes = bool(device.processes) or may_have_unlisted_processes(device)
    is_busy = has_processes and (device.utilization_percent or 0.0) > IDLE_PERCENT
    return is_taken or is_busy or exceeds(device.memory_used_mb, tolerated_foreign_mb(device))


def device_title(device: Device, snapshot: Snapshot) -> str:
    label = snapshot.labels.get(device.id)
    number = device.id if label is None else f"GPU {label}"
    return f"{number} ({device.name})" if device.name else number
