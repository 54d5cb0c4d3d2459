"""Run the daemon, one per user: it takes over running jobs, serves until it is stopped, and leaves jobs running. The
queue's clock goes on from its record in the store.
"""

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from gpuyard.client import paths
from gpuyard.client.daemon_liveness import hold_daemon_lock, running_pid
from gpuyard.client.queue_host import hold_queue, refuse_other_machine
from gpuyard.config import LOCK_DIR, config_fault, load_config, tolerate_faults
from gpuyard.daemon.api.routes import RESTART_STATUS, Routes
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.loop_wakeups import HomeWatch
from gpuyard.daemon.monitor.sampling import SamplingThread
from gpuyard.daemon.notify.publish import EventPublisher
from gpuyard.daemon.server.connection import Server, serve
from gpuyard.engines.common.log_cap import cut_if_over
from gpuyard.engines.local.attempt_processes import RamMeter, jobs_of_queue
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.local.keeper_connection import begun_attempts
from gpuyard.engines.open_cluster_engine import Context, log_folders, open_engine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.errors import EnvironmentFault, GpuyardError, StoreFault
from gpuyard.ledger.directory_in_use import move_in
from gpuyard.ledger.ledger import Ledger, QueueLedger, open_ledger
from gpuyard.ledger.neighbours import announce
from gpuyard.model.lifecycle import WAITING, JobEvent, can
from gpuyard.model.printable_text import printable
from gpuyard.model.queue_time import QueueTime, start_queue_time
from gpuyard.model.selection import format_ids
from gpuyard.model.units import format_duration
from gpuyard.probes.disk_watch import DiskWatch
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.sampler import Sampler
from gpuyard.schema.requests import StopRequest
from gpuyard.store.damaged_rows import may_be_a_row, set_aside_in
from gpuyard.store.database import Database, convert_sqlite_errors, open_database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.system.clock import QueueClock, boot_name, read_clocks
from gpuyard.system.file_locks import kept_from_cleaning
from gpuyard.system.private_files import check_entries, make_folder
from gpuyard.system.processes import this_process
from gpuyard.system.system_limits import passing_limit, raise_open_files_limit, remedy_of, spare_address_space
from gpuyard.system.user_directories import find_state_directory
from gpuyard.version import __version__

_log = logging.getLogger("gpuyard")
_MOST_NAMED = 10
_LOG_CAP = 16 << 20


class StoredClock(QueueClock):
    def __init__(self, store: JobStore, queries: QueueQueries) -> None:
        """Continue the times in the store."""
        before: QueueTime | None = None
        with contextlib.suppress(msgspec.MsgspecError):
            before = msgspec.json.decode(store.setting("clock") or "null", type=QueueTime | None)
        clocks = read_clocks(time.time)
        super().__init__(start_queue_time(before, boot_name(), *clocks, queries.latest_time()), _log_step)
        self._store, self._saved = store, before
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
                    self._store.set_setting("clock", msgspec.json.encode(self.record).decode())
                self._saved = self.record


def _log_step(seconds: float) -> None:
    way, by = "forward" if seconds > 0 else "back", format_duration(round(abs(seconds)))
    _log.info("the system clock was set %s by %s; limits and waits do not change", way, by)


class OneLineFormatter(logging.Formatter):
    """Keeps a message on one line: a path or a request that contains line ends must not look like further entries."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - overrides
        record.message = printable(record.message)
        return super().formatMessage(record)


class CappedLogHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error. If that is `daemon.log`, its middle is cut out when it is over 16 MB."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._records = 0

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self._records += 1
        if self._records % 100 == 1:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(sys.stderr.fileno()), os.stat(paths.log_path())):
                    cut_if_over(paths.log_path(), _LOG_CAP)


def run_daemon(*, is_managed: bool = False) -> int:
    """Run until stopped; return the exit status.

    `is_managed`: in the foreground, under a service manager. A restart is then left to the manager: the daemon exits
    with `RESTART_STATUS`.
    """
    handler = CappedLogHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    tolerate_faults(lambda error: _log.error("%s", error))
    spare_address_space()
    try:
        local_machine()  # raises UserError if simulated devices are described in a wrong way
        folder = Path(paths.state_folder())
        paths.check_state_folder()
        try:
            make_folder(str(folder))
            check_entries(str(folder))
        except OSError as error:
            message = f"{folder} cannot be used: {error.strerror}"
            raise EnvironmentFault(message, hint="set GPUYARD_HOME to another directory") from error
        open_files = raise_open_files_limit()
        refuse_other_machine(str(folder))
        is_replacement = find_state_directory().problem is not None
        with (
            kept_from_cleaning(str(folder)) if is_replacement else contextlib.nullcontext(),
            hold_daemon_lock(paths.lock_path()) as has_lock,
            hold_queue(str(folder)) as is_ours,
        ):
            home = HomeWatch(lambda: has_lock() and is_ours(), str(folder))
            try:
                database, notice = open_database(folder / "queue.db")
                with contextlib.closing(database), asyncio.Runner() as runner:
                    return runner.run(_serve(database, notice, home, open_files, is_managed=is_managed))
            except Exception as error:
                if not may_be_a_row(error) or not (notes := set_aside_in(folder / "queue.db")):
                    raise
                for note in notes:
                    _log.error("%s", note)
                return 1  # who started it starts it again
    except GpuyardError as error:
        _log.error("%s%s", error, f" ({error.hint})" if error.hint else "")
        return 1
    except (OSError, MemoryError, RuntimeError) as error:
        limit = passing_limit(error)
        if limit is None:
            raise
        _log.error("the daemon cannot run: %s (%s)", limit.strerror, remedy_of(limit))
        return 1


def _open_loop(
    database: Database, notice: str | None, home: HomeWatch, ledger: Ledger, open_files: int
) -> SchedulerLoop:
    """Return the loop before its start. `open_files` is the limit for jobs."""
    folder, store = Path(home.folder), JobStore(database)
    clock, me = StoredClock(store, QueueQueries(database, store)), this_process("gpuyard queue")
    engine = LocalEngine(folder, open_files=open_files)
    engine.variables[LOCK_DIR] = str(ledger.folder)
    if load_config().host.enforce_ram:
        engine.cgroups.open()  # before the first keeper starts, which is then in the right place
    suspender = LocalSuspender(folder / "suspending", engine.queue, mutexes=[ledger.folder])
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(scheduler.wake)

    scheduler = SchedulerLoop(
        database,
        QueueLedger(ledger, me),
        engine,
        clock,
        me,
        suspender=suspender,
        open_engine=lambda name: open_engine(Context(name=name, folder=folder, on_news=wake)),
        home=home,
    )
    scheduler.listeners.append(lambda _: clock.save())
    scheduler.controller.disk_gate.watch(DiskWatch(wake), {"state": str(folder), "logs": str(folder / "logs")})
    if notice is not None:
        notice += _hold_begun(scheduler, begun_attempts(folder / "journal", log_folders(folder)))
        _log.error(notice)
        scheduler.notices.append(notice)
    scheduler.controller.start_pauses.note_config(config_fault())
    _start_ids_after_earlier_jobs(scheduler, log_folders(folder), engine.queue)
    return scheduler


async def _serve(database: Database, notice: str | None, home: HomeWatch, open_files: int, *, is_managed: bool) -> int:
    """Serve until the daemon is stopped; return the exit status."""
    ledger, loop = open_ledger(is_queue=True), asyncio.get_running_loop()
    directory_record = move_in(ledger.folder)
    announce(ledger.folder)
    scheduler = _open_loop(database, notice, home, ledger, open_files)
    clock = scheduler.clock
    stop: asyncio.Future[StopRequest] = loop.create_future()

    def end(ending: StopRequest) -> None:
        if not stop.done():
            stop.set_result(ending)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end, StopRequest())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that started the daemon may close
    routes = Routes(scheduler, end, clock.now(), is_managed=is_managed)
    server = await serve(paths.socket_path(), routes.handle)
    meter = RamMeter(home.folder)
    sampler, on_memory = Sampler(local_machine(clock=clock), clock), scheduler.on_memory
    scheduler.start(
        SamplingThread(sampler, clock, scheduler.wake, meter.measure, on_memory=on_memory, measure_cpu_s=meter.cpu_s)
    )
    scheduler.fatal_fault.add_done_callback(lambda _: end(StopRequest()))
    publisher = EventPublisher(scheduler, ledger.leases)
    routes.health.on_fault.append(publisher.publish_fault)
    if load_config().page.enabled:
        await routes.web.open_as_configured(scheduler.notices.append)
    scheduler.sampling.request()  # the first sample takes longest: take it before the first submission
    _log.info("the daemon is running, version %s, pid %d, on %s", __version__, os.getpid(), paths.socket_path())
    gc.freeze()  # objects made so far live as long as the daemon: keep the collector from scanning them
    gc.enable()
    tasks = [loop.create_task(each) for each in (_restore_socket(server), routes.retention.run())]
    for task in tasks:
        task.add_done_callback(_log_bug)
    try:
        ending = await stop
        if scheduler.fatal_fault.done():
            _log.error("%s", scheduler.fatal_fault.result())
        elif ending.restart:
            _log.info("the daemon stops for a restart: %s", ending.reason[:300])
        return RESTART_STATUS if is_managed and ending.restart else int(scheduler.fatal_fault.done())
    finally:
        for task in tasks:
            task.cancel()
        server.close()
        routes.close()
        scheduler.close()
        await publisher.close()
        os.close(directory_record)
        _log.info("the daemon stops; running jobs go on")


async def _restore_socket(server: Server) -> None:
    """Make the socket anew if it was removed: no command could reach the daemon, and no other daemon could start."""
    while True:
        await asyncio.sleep(5.0)
        try:
            if not _has_lost_socket():
                continue
            await server.listen_again()
        except EnvironmentFault as error:
            _log.error("%s", error)
        else:
            _log.warning("%s was removed, and is made anew", paths.socket_path())


def _has_lost_socket() -> bool:
    """Whether the socket's file is gone. If the lock is gone, too, another daemon may have taken our place."""
    return not os.path.lexists(paths.socket_path()) and running_pid(paths.lock_path()) == os.getpid()


def _log_bug(task: "asyncio.Task[None]") -> None:
    """Log why a task ended that should run as long as the daemon: the queue goes on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed, which is a bug", task.get_coro(), exc_info=error)


def _hold_begun(scheduler: SchedulerLoop, begun: dict[int, int]) -> str:
    """Hold jobs that wait in an older database although they have begun since: they would run a second time. Later
    attempts get higher numbers than `begun`, and logs of their own. Return a sentence for the notice."""
    store, held = scheduler.store, []
    reason = "it had begun, and the queue's database is older: `gpuyard release` runs it again"
    with store.transaction():
        for job_id, number in sorted(begun.items()):
            job = store.job(job_id)
            if job is not None and job.attempts < number and can(job.state, JobEvent.HOLD) and job.state in WAITING:
                scheduler.controller.transitions.apply(job, JobEvent.HOLD, scheduler.clock.now(), reason)
                held.append(job_id)
            store.skip_attempts(job_id, number)
    return (
        f". Jobs that had begun since are held: {format_ids(held)} (`gpuyard release` runs them again)" if held else ""
    )


def _start_ids_after_earlier_jobs(scheduler: SchedulerLoop, folders: list[Path], queue: str) -> None:
    """Beside a new database, skip the ids of old logs, and of programs of an earlier queue that still run.

    A job must not append to the log of an earlier one, and its processes are found by its id.
    """
    if scheduler.queries.last_id() > 0:
        return
    names = (name for logs in folders if logs.is_dir() for name in os.listdir(logs))
    found = (match for name in names if (match := re.fullmatch(r"(\d+)\.\d+(\.err)?\.log", name)))
    running = jobs_of_queue(queue)
    with scheduler.store.transaction():
        scheduler.store.reserve_ids_up_to(max([*(int(match[1]) for match in found), *running], default=0))
    if running:
        named = ", ".join(f"job {job_id} (process {pid})" for job_id, pid in sorted(running.items())[:_MOST_NAMED])
        notice = (
            f"programs of an earlier queue in this folder still run, which this queue does not know: {named}"
            f"{', …' if len(running) > _MOST_NAMED else ''}; their GPUs are taken while their leases are held"
        )
        _log.warning("%s", notice)
        scheduler.notices.append(notice)
