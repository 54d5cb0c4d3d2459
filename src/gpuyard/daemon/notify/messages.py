"""Which events people are notified of, who gets them, the text of the messages, and the limit on their number.

- An `Occurrence` is an event that users may subscribe to; a `Message` is the text that is sent for it. It never
  contains control characters, no matter what a job is called.
- A cancelled job has not failed. A job that ran out of memory for the last time has failed as well: a target that
  gets both events gets one message. A job that a guard suspends or stops is no failure.
- At most N messages per minute go to each target; the rest is combined into one digest. Its counts are complete; ids
  are kept for the first 1000 jobs of each event, and causes for the first 50 different ones. Times are passed in.
"""

import math
import shlex
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job, OutcomeKind, PublishedEvent, PublishedEventKind
from gpuyard.model.lease import Lease
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.model.printable_text import printable
from gpuyard.model.selection import format_ids
from gpuyard.model.subscriptions import JOB_EVENTS, Event
from gpuyard.model.units import format_duration
from gpuyard.policy.foreign_load import may_have_unlisted_processes
from gpuyard.policy.machine import exceeds, tolerated_foreign_mb
from gpuyard.policy.numbers import IDLE_PERCENT
from gpuyard.report.failure_causes import CauseTexts

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
    ends = {OutcomeKind.OUT_OF_MEMORY: Event.OUT_OF_MEMORY, OutcomeKind.HOST_GUARD: Event.HOST_GUARD}
    if published.kind is PublishedEventKind.ENDED and outcome and outcome.kind in ends:
        event = ends[outcome.kind]
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
    name, attempt = f" ({plain(job.spec.name)})" if job.spec.name else "", occurrence.attempt
    where = (attempt.place if attempt is not None else None) or job.spec.engine or host
    what, details = _what_happened(event, job), [plain(shlex.join(job.argv))]
    if event is Event.MEMORY_GUARD:
        details += [plain(occurrence.text), _STARTS_AGAIN if job.state is JobState.STOPPING else _GOES_ON]
    elif job.reason:
        details.append(plain(job.reason))
    if attempt is not None and attempt.started is not None:
        details.append(f"It ran for {format_duration(attempt.ran_s(occurrence.at))}.")
    if occurrence.log and event is not Event.FINISHED:
        details.append(f"Log: {plain(occurrence.log)}")
    return Message(
        events=str(event),
        title=f"Job {job.id}{name} {what}{at_host(where)}",
        body="\n".join(details),
        jobs=str(job.id),
        name=plain(job.spec.name or ""),
        state=str(job.state),
        log=occurrence.log,
    )


def at_host(host: str) -> str:
    return f" on {plain(host)}" if host else ""


def plain(text: str) -> str:
    """Return the text as one printable line of limited length."""
    return printable(text, 500)


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


def queue_summary(ended: Mapping[JobState, int]) -> str:
    """Describe how the jobs ended since the queue was last empty: `37 finished, 2 failed`."""
    counts = [f"{ended[state]} {_STATE_TEXT.get(state, state)}" for state in JobState if ended.get(state)]
    return f"No jobs are left. Since the queue was last empty: {', '.join(counts)}." if counts else ""


class FreedDevices:
    """Devices that were in use and have not been reported as free since."""

    def __init__(self) -> None:
        self._used_at: dict[str, float] = {}

    def note_use(self, device_ids: Iterable[str], now: float) -> None:
        self._used_at |= dict.fromkeys(device_ids, now)

    def update(self, snapshot: Snapshot, leases: Sequence[Lease], now: float, free_s: float) -> list[Device]:
        """Return the devices that have been free for `free_s` seconds; each is reported once."""
        usable = snapshot.usable_devices()
        for device in usable:  # a display on it does not count
            has_processes = bool(device.processes) or may_have_unlisted_processes(device)
            is_busy = has_processes and (device.utilization_percent or 0.0) > IDLE_PERCENT
            is_taken = any(lease.on(device.id) for lease in leases)
            if is_taken or is_busy or exceeds(device.memory_used_mb, tolerated_foreign_mb(device)):
                self._used_at[device.id] = now
        freed = [device for device in usable if now >= self._used_at.get(device.id, now + 1.0) + free_s]
        for device in freed:
            del self._used_at[device.id]
        return freed


MINUTE_S = 60.0
_MAX_IDS = 1000
_EVENT_TEXT = {
    Event.FINISHED: "finished", Event.FAILED: "failed", Event.OUT_OF_MEMORY: "ran out of memory",
    Event.MEMORY_GUARD: "made way on a full GPU",
    Event.HOST_GUARD: "made way on a full machine",
}  # fmt: skip


class Digest:
    """Occurrences that wait to be sent to one target."""

    def __init__(self) -> None:
        self._first: Occurrence | None = None
        self._job: Occurrence | None = None
        self._counts, self._causes = Counter[Event](), Counter[str]()
        self._ids: dict[Event, list[int]] = {event: [] for event in JOB_EVENTS}
        self._devices: dict[str, None] = {}
        self._cause_texts = CauseTexts(_MAX_IDS)
        self.dropped = 0

    def __len__(self) -> int:
        return self._counts.total() + self.dropped

    def add(self, occurrence: Occurrence) -> None:
        self._first = self._first or occurrence
        self._counts[occurrence.event] += 1
        if occurrence.job is not None:
            self._job = occurrence
            if len(self._ids[occurrence.event]) < _MAX_IDS:
                self._ids[occurrence.event].append(occurrence.job.id)
            outcome = occurrence.job.outcome if occurrence.event is Event.FAILED else None
            if outcome and (cause := self._cause_texts.key(outcome.error_line or outcome.reason)) is not None:
                self._causes[cause] += 1
        if occurrence.event is Event.GPU_FREE:
            self._devices[plain(occurrence.text)] = None

    def message(self, host: str) -> Message:
        """Return one message for all occurrences; a single occurrence gets its ordinary message."""
        if self._first is not None and len(self) == 1:
            return message_of(self._first, host)
        events = ",".join(event for event in Event if self._counts[event])
        if self._job is not None and sum(self._counts[event] for event in JOB_EVENTS) == 1:
            message = message_of(self._job, host)
            return replace(message, events=events, body="\n".join([message.body, *self._other_lines()]))
        # Such as `4 x ValueError: loss is NaN at step …`.
        causes = (f"{n} x {plain(self._cause_texts.text(each) or '')}" for each, n in self._causes.most_common(5))
        jobs = sorted({job_id for ids in self._ids.values() for job_id in ids})
        titles = [*self._job_counts(with_ids=False), *self._machine_facts()] or ["some notifications were dropped"]
        title = ", ".join(titles)
        lines = [", ".join(self._job_counts(with_ids=True)), *causes, *self._other_lines()]
        return Message(
            events=events,
            title=f"{title[0].upper()}{title[1:]}{at_host(host)}",
            body="\n".join(filter(None, lines)),
            jobs=format_ids(jobs),
        )

    def _other_lines(self) -> Iterator[str]:
        yield from (f"{fact[0].upper()}{fact[1:]}" for fact in self._machine_facts())
        if self.dropped:
            yield f"{self.dropped} more were dropped: too many at once"

    def _job_counts(self, *, with_ids: bool) -> Iterator[str]:
        """Yield `37 jobs finished`, `2 failed: 12, 19`."""
        noun = True
        for event in JOB_EVENTS:
            count = self._counts[event]
            if count:
                jobs = ("job " if count == 1 else "jobs ") if noun else ""
                shows_ids = with_ids and event is not Event.FINISHED
                ranges = format_ids(self._ids[event]).split()
                is_cut = len(ranges) > 20 or len(self._ids[event]) < count
                ids = f": {', '.join(ranges[:20])}{' and more' if is_cut else ''}" if shows_ids else ""
                yield f"{count} {jobs}{_EVENT_TEXT[event]}{ids}"
                noun = False

    def _machine_facts(self) -> Iterator[str]:
        if self._devices:
            yield f"{', '.join(self._devices)} {'is' if len(self._devices) == 1 else 'are'} free"
        times = self._counts[Event.QUEUE_EMPTY]
        if times:
            yield "the queue is empty" if times == 1 else f"the queue ran empty {times} times"


class Outbox:
    """Messages for one target that wait, and the times of those sent in the last minute."""

    def __init__(self) -> None:
        self._waiting = Digest()
        self._sent: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, occurrence: Occurrence) -> None:
        self._waiting.add(occurrence)

    def add_dropped(self, count: int) -> None:
        self._waiting.dropped += count

    def due_at(self, per_minute: int) -> float | None:
        """Return when the rate limit allows the next message, or None if nothing waits."""
        if not len(self):
            return None
        return self._sent[-per_minute] + MINUTE_S if len(self._sent) >= per_minute else -math.inf

    def take(self, now: float, per_minute: int, host: str) -> Message | None:
        """Return the message to send now, or None if nothing waits or the rate limit is reached."""
        due_at = self.due_at(per_minute)
        if due_at is None or now < due_at:
            return None
        while self._sent and now >= self._sent[0] + MINUTE_S:
            self._sent.popleft()
        self._sent.append(now)
        waiting, self._waiting = self._waiting, Digest()
        return waiting.message(host)

    def is_over(self, now: float) -> bool:
        """Return whether this outbox is empty and no longer needed for the rate limit."""
        return not len(self) and (not self._sent or now >= self._sent[-1] + MINUTE_S)
