"""Pick the events of the queue and the GPUs that have subscribers, and pass them on.

The publisher runs in the daemon's loop after each step, so it only looks up subscribers. While `gpu-free` or
`gpu-fault` is configured it samples the machine every few seconds, even if nothing else happens. What writes and sends
messages is imported with the first of them.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from gpuyard.config import load_config
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.devices import device_title
from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.model.job import PublishedEventKind
from gpuyard.model.lease import Lease
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.subscriptions import Event
from gpuyard.policy.device_health import HealthIssue
from gpuyard.queue.step import Step
from gpuyard.store.database import convert_sqlite_errors

if TYPE_CHECKING:
    from gpuyard.daemon.notify.delivery import Delivery
    from gpuyard.daemon.notify.messages import FreedDevices, Occurrence

_log = logging.getLogger(__name__)


class EventPublisher:
    def __init__(self, scheduler: SchedulerLoop, leases: Callable[[], Sequence[Lease]]) -> None:
        self._scheduler, self._leases = scheduler, leases
        self._finished_states: Counter[JobState] = Counter()
        self._gpu_watch: asyncio.Task[None] | None = None
        scheduler.listeners.append(self._after_step)
        scheduler.config_listeners.append(self._read_config)
        self._read_config()

    @cached_property
    def _delivery(self) -> "Delivery":
        from gpuyard.daemon.notify.delivery import Delivery

        return Delivery(socket.gethostname(), self._config.per_minute, self._scheduler.notices.append)

    @cached_property
    def _freed(self) -> "FreedDevices":
        from gpuyard.daemon.notify.messages import FreedDevices

        return FreedDevices()

    async def close(self) -> None:
        if self._gpu_watch is not None:
            self._gpu_watch.cancel()
        if "_delivery" in vars(self):
            await self._delivery.close()

    def _read_config(self) -> None:
        self._config = load_config().notify
        if self._config.to or "_delivery" in vars(self):
            self._delivery.per_minute = self._config.per_minute
            self._delivery.check_apprise(self._config.to)
        is_wanted = self._is_configured(Event.GPU_FREE) or self._is_configured(Event.GPU_FAULT)
        if is_wanted and self._gpu_watch is None:
            self._gpu_watch = asyncio.get_running_loop().create_task(self._watch_gpus())
        elif not is_wanted and self._gpu_watch is not None:
            self._gpu_watch.cancel()
            self._gpu_watch = None

    def _is_configured(self, event: Event) -> bool:
        return event in self._config.on and bool(self._config.to)

    def _after_step(self, step: Step) -> None:
        if self._gpu_watch is not None:
            now = asyncio.get_running_loop().time()
            for attempt in (event.attempt for event in step.events):
                if attempt is not None and not attempt.engine:
                    self._freed.note_use(attempt.devices, now)
        wanted = [event for event in step.events if self._config.to or event.job.spec.notify]
        if not wanted:
            return
        from gpuyard.daemon.notify.messages import occurrence_of

        occurrences = [found for event in wanted if (found := occurrence_of(event)) is not None]
        if self._is_configured(Event.QUEUE_EMPTY):
            occurrences += self._queue_emptied(step)
        self._publish(occurrences)

    def publish_fault(self, title: str, issue: HealthIssue) -> None:
        text = f"{title}\n{issue.text}. No new work starts on it. What to do: {issue.remedy}"
        self._publish_text(Event.GPU_FAULT, text)

    def _publish_text(self, event: Event, text: str) -> None:
        if self._is_configured(event):
            from gpuyard.daemon.notify.messages import Occurrence

            self._publish([Occurrence(event=event, at=self._scheduler.sampling.now(), text=text)])

    def _publish(self, occurrences: "Sequence[Occurrence]") -> None:
        from gpuyard.daemon.notify.messages import targets_of

        on, to = self._config.on, self._config.to
        addressed = [(target, each) for each in occurrences for target in targets_of(each, on, to)]
        if addressed:
            self._delivery.put(addressed)

    def _queue_emptied(self, step: Step) -> "Iterator[Occurrence]":
        from gpuyard.daemon.notify.messages import Occurrence, queue_summary

        finished = [event for event in step.events if event.kind is PublishedEventKind.FINISHED]
        for event in finished:
            self._finished_states[event.job.state] += event.jobs
        if step.has_more_events or not finished:
            return
        try:
            with convert_sqlite_errors():
                counts = self._scheduler.store.counts()
        except StoreFault:  # the next step reports it
            return
        if not any(count for state, count in counts.items() if state not in FINISHED):
            text, self._finished_states = queue_summary(self._finished_states), Counter()
            yield Occurrence(event=Event.QUEUE_EMPTY, at=finished[-1].at, text=text)

    async def _watch_gpus(self) -> None:
        problem = ""
        while True:
            await asyncio.sleep(min(10.0, max(0.5, self._config.gpu_free_s / 3)))
            sample = await asyncio.shield(self._scheduler.sampling.request())
            try:
                leases = await asyncio.to_thread(self._leases)
            except EnvironmentFault as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("free GPUs cannot be reported: %s", error)
                continue
            now = asyncio.get_running_loop().time()
            for device in self._freed.update(sample.snapshot, leases, now, self._config.gpu_free_s):
                self._publish_text(Event.GPU_FREE, device_title(device, sample.snapshot))
