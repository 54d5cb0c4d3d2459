"""Not too many messages: at most so many a minute to each target, and what is over is told together.

Times are passed in, from a clock that never goes back. Nothing is lost from the counts, however much there is; of the
jobs that failed only the first thousand are known by their ids.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator

from msgspec.structs import replace

from gpuyard.core.job.selection import format_ids
from gpuyard.core.notify.messages import Message, Occurrence, at_host, message_of, plain
from gpuyard.core.notify.subscriptions import JOB_EVENTS, Event

MINUTE_S = 60.0
_MOST_IDS = 1000
_MOST_SPANS = 20
_MOST_DEVICES = 16
_DONE = {Event.FINISHED: "finished", Event.FAILED: "failed", Event.OUT_OF_MEMORY: "ran out of memory"}


class Digest:
    """What waits to be told to one target."""

    def __init__(self) -> None:
        self._first: Occurrence | None = None
        self._job: Occurrence | None = None
        self._counts: Counter[Event] = Counter()
        self._ids: dict[Event, list[int]] = {event: [] for event in JOB_EVENTS}
        self._devices: dict[str, None] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return self._counts.total() + self.dropped

    def add(self, occurrence: Occurrence) -> None:
        self._first = self._first or occurrence
        self._counts[occurrence.event] += 1
        if occurrence.job is not None:
            self._job = occurrence
        if occurrence.job is not None and len(self._ids[occurrence.event]) < _MOST_IDS:
            self._ids[occurrence.event].append(occurrence.job.id)
        if occurrence.event is Event.GPU_FREE and len(self._devices) < _MOST_DEVICES:
            self._devices[plain(occurrence.text)] = None

    def message(self, host: str) -> Message:
        """One that is alone is told as it is."""
        if self._first is not None and len(self) == 1:
            return message_of(self._first, host)
        if self._job is not None and sum(self._counts[event] for event in JOB_EVENTS) == 1:
            return self._about_one(message_of(self._job, host))
        jobs = sorted({job_id for ids in self._ids.values() for job_id in ids})
        titles = [*self._of_jobs(with_ids=False), *self._of_machine()] or ["some notifications were dropped"]
        title = ", ".join(titles)
        return Message(
            events=self._events(),
            title=f"{title[0].upper()}{title[1:]}{at_host(host)}",
            body="\n".join(self._lines()),
            jobs=format_ids(jobs),
        )

    def _about_one(self, message: Message) -> Message:
        """The only job there is news of, and what else there is to say."""
        return replace(message, events=self._events(), body="\n".join([message.body, *self._other_lines()]))

    def _events(self) -> str:
        return ",".join(event for event in Event if self._counts[event])

    def _lines(self) -> Iterator[str]:
        of_jobs = ", ".join(self._of_jobs(with_ids=True))
        yield from [of_jobs] if of_jobs else []
        yield from self._other_lines()

    def _other_lines(self) -> Iterator[str]:
        yield from (f"{words[0].upper()}{words[1:]}" for words in self._of_machine())
        if self.dropped:
            yield f"{self.dropped} more could not be kept: too many at once"

    def _of_jobs(self, *, with_ids: bool) -> Iterator[str]:
        """`37 jobs finished`, `2 failed: 12, 19`."""
        noun = True
        for event in JOB_EVENTS:
            count = self._counts[event]
            if count:
                jobs = ("job " if count == 1 else "jobs ") if noun else ""
                names_them = with_ids and event is not Event.FINISHED
                ids = _ids_in_words(self._ids[event], count) if names_them else ""
                yield f"{count} {jobs}{_DONE[event]}{ids}"
                noun = False

    def _of_machine(self) -> Iterator[str]:
        if self._devices:
            yield f"{', '.join(self._devices)} {'is' if len(self._devices) == 1 else 'are'} free"
        times = self._counts[Event.QUEUE_EMPTY]
        if times:
            yield "the queue is empty" if times == 1 else f"the queue ran empty {times} times"


def _ids_in_words(ids: list[int], count: int) -> str:
    spans = format_ids(ids).split()
    is_cut = len(spans) > _MOST_SPANS or len(ids) < count
    return f": {', '.join(spans[:_MOST_SPANS])}{' and more' if is_cut else ''}"


class Outbox:
    """What one target is to be sent, and when it was sent something of late."""

    def __init__(self) -> None:
        self._waiting = Digest()
        self._sent: deque[float] = deque()
        self._again: tuple[float, Message] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._again is not None)

    def add(self, occurrence: Occurrence) -> None:
        self._waiting.add(occurrence)

    def add_dropped(self, count: int) -> None:
        self._waiting.dropped += count

    def try_again(self, message: Message, at: float) -> None:
        """It goes before all that waits."""
        self._again = (at, message)

    def due_at(self, per_minute: int) -> float | None:
        """When there will be room for what waits; `None` where nothing does."""
        if not len(self):
            return None
        room_at = self._sent[-per_minute] + MINUTE_S if len(self._sent) >= per_minute else -math.inf
        return room_at if self._again is None else max(room_at, self._again[0])

    def take(self, now: float, per_minute: int, host: str) -> Message | None:
        """What is to be sent now, where there is something and room for it."""
        due_at = self.due_at(per_minute)
        if due_at is None or now < due_at:
            return None
        while self._sent and now >= self._sent[0] + MINUTE_S:
            self._sent.popleft()
        self._sent.append(now)
        if self._again is not None:
            message, self._again = self._again[1], None
            return message
        waiting, self._waiting = self._waiting, Digest()
        return waiting.message(host)

    def is_over(self, now: float) -> bool:
        """Whether it may be forgotten."""
        return not len(self) and (not self._sent or now >= self._sent[-1] + MINUTE_S)
