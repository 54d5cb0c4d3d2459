"""StoredClock: the queue's clock, with its record in the store, from which the next daemon continues it."""

import contextlib
import logging
import time

import msgspec

from gpuyard.core.queue_time import QueueTime, start_queue_time
from gpuyard.core.units import format_duration
from gpuyard.errors import StoreFault
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.system.clock import QueueClock, boot_name, read_clocks

_log = logging.getLogger("gpuyard")
_SETTING = "clock"


class StoredClock(QueueClock):
    def __init__(self, store: JobStore, queries: QueueQueries) -> None:
        """Continue the times in the store."""
        before, latest = _read(store), queries.latest_time()
        super().__init__(start_queue_time(before, boot_name(), *read_clocks(time.time), latest), _log_step)
        self._store = store
        self._saved = before
        if before is not None and before.boot == self.record.boot and before.shift != self.record.shift:
            _log_step(self.record.shift - before.shift)  # it was set while no daemon ran
        self.save()

    def save(self) -> None:
        """Notice a step of the wall clock, and store the record if it has changed. If the disk is full, the next call
        tries again."""
        self.look()
        if self.record is not self._saved:
            with contextlib.suppress(StoreFault), convert_sqlite_errors():
                with self._store.transaction():
                    self._store.set_setting(_SETTING, msgspec.json.encode(self.record).decode())
                self._saved = self.record


def _read(store: JobStore) -> QueueTime | None:
    text = store.setting(_SETTING)
    try:
        return None if text is None else msgspec.json.decode(text, type=QueueTime)
    except msgspec.MsgspecError:
        return None


def _log_step(seconds: float) -> None:
    way = "forward" if seconds > 0 else "back"
    by = format_duration(round(abs(seconds)))
    _log.info("the system clock was set %s by %s; limits and waits do not change", way, by)
