"""Hears what happens in the queue and on the GPUs, and gives the worker what somebody wants to be told of.

It is called in the daemon's loop, after each step, so it only looks up who wants what. While somebody wants to hear of
free GPUs, the machine is looked at every few seconds, though nothing else may happen.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpuyard.config import load_config
from gpuyard.control.step import Step
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.job.published_events import PublishedEvent, PublishedEventKind
from gpuyard.core.lease import Lease
from gpuyard.core.notify.messages import FreedDevices, Occurrence, label_of, occurrence_of, queue_summary, targets_of
from gpuyard.core.notify.subscriptions import Event
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.notify.delivery_thread import DeliveryThread
from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.store.database import convert_sqlite_errors

_log = logging.getLogger(__name__)
_LOOK_EVERY_S, _LOOK_SOONEST_S = 10.0, 0.5


class EventPublisher:
    def __init__(self, scheduler: SchedulerLoop, leases: Callable[[], Sequence[Lease]]) -> None:
        self._scheduler = scheduler
        self._leases = leases
        self._notify = load_config().notify
        self._worker = DeliveryThread(socket.gethostname(), self._notify.per_minute, scheduler.notices.append)
        self._ended: Counter[JobState] = Counter()
        self._freed = FreedDevices()
        self._watch: asyncio.Task[None] | None = None
        scheduler.listeners.append(self._hear)
        scheduler.config_listeners.append(self._follow)
        self._heed()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._worker.close()

    def _follow(self) -> None:
        self._notify = load_config().notify
        self._heed()

    def _heed(self) -> None:
        self._worker.per_minute = self._notify.per_minute
        self._worker.check_apprise(self._notify.to)
        is_wanted = self._is_configured(Event.GPU_FREE)
        if is_wanted and self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._look_for_free())
        elif not is_wanted and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _is_configured(self, event: Event) -> bool:
        return event in self._notify.on and bool(self._notify.to)

    def _hear(self, step: Step) -> None:
        if not step.events:
            return
        if self._watch is not None:
            self._note_use(step.events)
        heeded = (news for news in step.events if self._notify.to or news.job.spec.notify)
        occurrences = [found for news in heeded if (found := occurrence_of(news)) is not None]
        if self._is_configured(Event.QUEUE_EMPTY):
            occurrences += self._emptied(step.events)
        self._announce(occurrences)

    def _announce(self, occurrences: Iterable[Occurrence]) -> None:
        on, to = self._notify.on, self._notify.to
        addressed = [(target, each) for each in occurrences for target in targets_of(each, on, to)]
        if addressed:
            self._worker.put(addressed)

    def _emptied(self, step: Iterable[PublishedEvent]) -> Iterator[Occurrence]:
        ended = [news for news in step if news.kind is PublishedEventKind.FINISHED]
        self._ended.update(news.job.state for news in ended)
        if ended and self._is_empty():
            text, self._ended = queue_summary(self._ended), Counter()
            yield Occurrence(event=Event.QUEUE_EMPTY, at=ended[-1].at, text=text)

    def _is_empty(self) -> bool:
        try:
            with convert_sqlite_errors():
                return not any(
                    count for state, count in self._scheduler.store.counts().items() if state not in FINISHED
                )
        except StoreFault:  # the next step tells of it
            return False

    # GPUs

    def _note_use(self, step: Iterable[PublishedEvent]) -> None:
        now = asyncio.get_running_loop().time()
        for news in step:
            if news.attempt is not None and not news.attempt.engine:
                self._freed.note_use(news.attempt.devices, now)

    async def _look_for_free(self) -> None:
        trouble = ""
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, max(_LOOK_SOONEST_S, self._notify.gpu_free_s / 3)))
            look = await asyncio.shield(self._scheduler.sampling.request())
            try:
                leases = await asyncio.to_thread(self._leases)
            except EnvironmentFault as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("which GPUs are free cannot be told: %s", error)
                continue
            now, at = asyncio.get_running_loop().time(), self._scheduler.sampling.now()
            freed = self._freed.update(look.snapshot, leases, now, self._notify.gpu_free_s)
            self._announce(Occurrence(event=Event.GPU_FREE, at=at, text=label_of(device)) for device in freed)
