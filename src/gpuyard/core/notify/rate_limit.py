"""Rate limit of notifications: at most N messages per minute to each target; the rest is combined into one digest.

Times are passed in, from a monotonic clock. Counts are always complete; ids are kept for the first 1000 jobs of each
event only, and as many different causes of failures, of which a digest names the 5 most frequent.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator

from msgspec.structs import replace

from gpuyard.core.job.job import Outcome
from gpuyard.core.job.selection import format_ids
from gpuyard.core.notify.messages import Message, Occurrence, at_host, message_of, plain
from gpuyard.core.notify.subscriptions import JOB_EVENTS, Event
from gpuyard.core.report.failure_groups import CauseTexts

MINUTE_S = 60.0
_MAX_IDS = 1000
_MAX_RANGES = 20
_SHOWN_CAUSES = 5
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
        self._counts: Counter[Event] = Counter()
        self._ids: dict[Event, list[int]] = {event: [] for event in JOB_EVENTS}
        self._devices: dict[str, None] = {}
        self._causes: Counter[str] = Counter()
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
            if occurrence.event is Event.FAILED and occurrence.job.outcome is not None:
                self._add_cause(occurrence.job.outcome)
        if occurrence.event is Event.GPU_FREE:
            self._devices[plain(occurrence.text)] = None

    def _add_cause(self, outcome: Outcome) -> None:
        cause = self._cause_texts.key(outcome.error_line or outcome.reason)
        if cause is not None:
            self._causes[cause] += 1

    def message(self, host: str) -> Message:
        """Return one message for all occurrences; a single occurrence gets its ordinary message."""
        if self._first is not None and len(self) == 1:
            return message_of(self._first, host)
        if self._job is not None and sum(self._counts[event] for event in JOB_EVENTS) == 1:
            message = message_of(self._job, host)
            return replace(message, events=self._events(), body="\n".join([message.body, *self._other_lines()]))
        jobs = sorted({job_id for ids in self._ids.values() for job_id in ids})
        titles = [*self._job_counts(with_ids=False), *self._machine_facts()] or ["some notifications were dropped"]
        title = ", ".join(titles)
        return Message(
            events=self._events(),
            title=f"{title[0].upper()}{title[1:]}{at_host(host)}",
            body="\n".join(
                filter(None, [", ".join(self._job_counts(with_ids=True)), *self._cause_lines(), *self._other_lines()])
            ),
            jobs=format_ids(jobs),
        )

    def _events(self) -> str:
        return ",".join(event for event in Event if self._counts[event])

    def _cause_lines(self) -> Iterator[str]:
        """Yield `4 x ValueError: loss is NaN at step …`."""
        for cause, count in self._causes.most_common(_SHOWN_CAUSES):
            yield f"{count} x {plain(self._cause_texts.text(cause) or '')}"

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
                ids = _ids_text(self._ids[event], count) if shows_ids else ""
                yield f"{count} {jobs}{_EVENT_TEXT[event]}{ids}"
                noun = False

    def _machine_facts(self) -> Iterator[str]:
        if self._devices:
            yield f"{', '.join(self._devices)} {'is' if len(self._devices) == 1 else 'are'} free"
        times = self._counts[Event.QUEUE_EMPTY]
        if times:
            yield "the queue is empty" if times == 1 else f"the queue ran empty {times} times"


def _ids_text(ids: list[int], count: int) -> str:
    ranges = format_ids(ids).split()
    is_cut = len(ranges) > _MAX_RANGES or len(ids) < count
    return f": {', '.join(ranges[:_MAX_RANGES])}{' and more' if is_cut else ''}"


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
