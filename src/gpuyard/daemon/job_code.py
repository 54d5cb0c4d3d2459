"""The code of jobs: whether Git work trees had changes when jobs were submitted, whether scripts have changed since,
and the folder of code snapshots.

- The loop never reads the user's files itself: their disk may hang. What cannot be told within a second is unknown.
- The script of an attempt is read right after its start was recorded. A job with a snapshot runs the script as it was.
- A snapshot with a job that has not ended is never removed. It is removed some time after its last job has ended
  (`[keep] snapshots`), or when all its jobs are deleted; after an hour if its submission never arrived.
- Before that, results in it are brought back to the tree. One with a result that cannot be brought back stays, and a
  file in it says why: it is tried again after the next end of a job, every hour and by `gpuyard clean`.
- What is mounted in a snapshot is never removed, nor what another user owns: it stays, and a notice names it.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, convert

from gpuyard.client.git_tree import has_changes
from gpuyard.client.submitted_code import code_of, script_digest
from gpuyard.config import load_config
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.common.bring_results import Brought, bring_results, unbrought_results
from gpuyard.engines.open_cluster_engine import cluster_folder
from gpuyard.errors import EnvironmentFault, StoreFault, UserError
from gpuyard.model.job import PublishedEventKind
from gpuyard.model.job_spec import CodeRecord, CodeSnapshot, JobSpec, changed_script_text
from gpuyard.queue.add_submission import InPieces
from gpuyard.queue.step import Step
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.system.code_snapshot_listing import FOLDER, NEW, REMOVED, TAKEN, TREE
from gpuyard.system.files_outside_home import SNAPSHOTS, record_outside
from gpuyard.system.folder_tree import remove_tree
from gpuyard.system.worker_threads import BackgroundThread

_log = logging.getLogger(__name__)
T = TypeVar("T")
_NAME = re.compile(r"[0-9a-f]{16}")
Work = Callable[[InPieces[float | None]], Awaitable[float | None]]


class CodeWatch:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._scripts, self._git = BackgroundThread("gpuyard-scripts"), BackgroundThread("gpuyard-git")
        self._submitted: dict[str, set[int]] = {}  # specs that wait for an answer about their work tree
        self._started: list[tuple[int, int, str, str]] = []  # a job, its attempt, the script, and its digest
        self._tasks: dict[str, asyncio.Task[None]] = {}
        scheduler.listeners.append(self._after_step)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._scripts.close()
        self._git.close()

    def note_submission(self, job_id: int, code: CodeRecord) -> None:
        """Find out whether the work tree of a job that was just submitted has changes."""
        spec = self._scheduler.store.specs.code.spec_of(job_id) if code.commit is not None else None
        if spec is not None and code.root is not None:
            self._submitted.setdefault(code.root, set()).add(spec)
            self._start("git", self._ask_git)

    async def _ask_git(self) -> None:
        while self._submitted:
            root = next(iter(self._submitted))
            specs = self._submitted.pop(root)
            is_dirty = await self._git.run(partial(_has_changes, root))
            if is_dirty is not None:
                await self._scheduler.checkpoints.may_write()
                with convert_sqlite_errors():
                    self._scheduler.store.specs.code.set_dirty(specs, is_dirty=is_dirty)

    async def record(self, command: Sequence[str], cwd: str) -> CodeRecord:
        """Return what is to be recorded of the code of a submission that the daemon makes itself."""
        return convert(await self._in_time(partial(code_of, command, cwd)) or {}, CodeRecord)

    async def is_changed(self, code: CodeRecord) -> bool | None:
        """Return whether the script is another one now than at submission; None if that cannot be told."""
        if code.script is None or code.digest is None:
            return None
        digest = await self._in_time(partial(script_digest, code.script))
        return None if digest is None else digest != code.digest

    async def _in_time(self, read: Callable[[], T]) -> T | None:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._scripts.run(read), 1.0)
        return None

    def _after_step(self, step: Step) -> None:
        for event in step.events:
            code, attempt = event.job.spec.code, event.attempt
            if event.kind is not PublishedEventKind.STARTED or code.snapshot is not None or attempt is None:
                continue
            if code.script is not None and code.digest is not None:
                self._started.append((event.job.id, attempt.number, code.script, code.digest))
                self._start("scripts", self._check_started)

    async def _check_started(self) -> None:
        store = self._scheduler.store
        while self._started:
            started, self._started = self._started, []
            digests = {path: await self._scripts.run(partial(script_digest, path)) for _, _, path, _ in started}
            changed = [each for each in started if digests[each[2]] not in (None, each[3])]
            await self._scheduler.checkpoints.may_write()
            if not changed:
                continue
            with convert_sqlite_errors(), store.transaction():
                for job_id, attempt, path, _ in changed:
                    text = changed_script_text(path, is_changed=True, attempts=(attempt,), is_over=False)
                    store.specs.code.add_changed_script(job_id, attempt)
                    store.add_event(job_id, self._scheduler.clock.now(), "script-changed", text)
            self._scheduler.wake()

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._tasks:
            self._tasks[name] = task = asyncio.get_running_loop().create_task(_run(work))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))


async def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await asyncio.sleep(0)  # all submissions and starts of this moment share one call
    try:
        await work()
    except StoreFault as error:
        _log.warning("what code jobs ran could not be recorded: %s", error)


def _has_changes(root: str) -> bool | None:
    """Return whether a Git work tree has changes that are not committed; None if that cannot be told."""
    try:
        return has_changes(root)
    except (EnvironmentFault, OSError):  # there is no git, or its disk hangs
        return None


class FoundFolder(Struct, frozen=True):
    """`is_old`: it has not changed for an hour. `is_taken`: jobs were submitted with it. `unbrought`: the label of a
    job whose results could not be brought back, and why."""

    name: str
    is_old: bool
    is_taken: bool
    unbrought: tuple[str, str] | None


class CodeSnapshots:
    def __init__(self, scheduler: SchedulerLoop, queue: Path) -> None:
        self._scheduler, self._queue = scheduler, queue
        self._thread = BackgroundThread("gpuyard-snapshots")
        self._since = scheduler.clock.now()
        self._ended: dict[str, tuple[str, bool]] = {}  # the label of the last job, and whether the engine brought none
        self._problems: dict[str, str] = {}
        self._staying: dict[str, str] = {}  # folders that could not be removed, and why
        self._sync: asyncio.TimerHandle | None = None
        self.has_ended = False  # an attempt in a snapshot, since the last call of `bring_results`
        self._read_config()
        scheduler.listeners.append(self._after_step)
        scheduler.config_listeners.append(self._read_config)
        scheduler.notice_sources.append(self._notices)

    def _read_config(self) -> None:
        named = load_config().submit.snapshot_folder
        self.folder = os.path.expanduser(named) if named else f"{self._queue}/{FOLDER}"
        if named:
            record_outside(self._queue, SNAPSHOTS, [self.folder])

    def close(self) -> None:
        if self._sync is not None:
            self._sync.cancel()
        self._thread.close()

    def check(self, spec: JobSpec) -> None:
        """Raise UserError if jobs with this spec could not run in their snapshot."""
        snapshot = spec.code.snapshot
        if snapshot is None:
            return
        if not _NAME.fullmatch(snapshot.name) or snapshot.folder != f"{self.folder}/{snapshot.name}/{TREE}":
            raise UserError(
                f"{snapshot.folder} is not a snapshot of this queue, whose snapshots are in {self.folder}",
                hint="`snapshot_folder` under [submit] has to be the same for the command and the daemon",
            )
        if not is_within(snapshot.cwd, snapshot.folder) or not os.path.isdir(snapshot.folder):
            raise UserError(f"the snapshot {snapshot.folder} was removed", hint="submit again from the tree")
        if not spec.engine:
            return
        shared = there = cluster_folder(spec.engine, self._queue)
        while not there.exists():
            there = there.parent
        if os.stat(self.folder).st_dev != there.stat().st_dev:
            raise UserError(
                f"the nodes of {spec.engine} do not see the snapshot in {self.folder}",
                hint="set `snapshot_folder` under [submit] to a folder on the disk that they share, such as one below "
                f"{shared}; or submit with --no-snapshot",
            )

    def note_submission(self, snapshot: CodeSnapshot | None) -> None:
        """Note that jobs use the snapshot. Write all files to the disk once no submission has come for a while: a power
        cut must not leave empty files, and writing holds up the next submission."""
        if snapshot is None:
            return
        self._thread.run(partial(_take, f"{self.folder}/{snapshot.name}"))
        if self._sync is not None:
            self._sync.cancel()
        loop = asyncio.get_running_loop()
        self._sync = loop.call_later(3.0, lambda: self._thread.run(partial(_write_out, self.folder)))

    def _after_step(self, step: Step) -> None:
        for event in step.events:
            snapshot, attempt = event.job.spec.code.snapshot, event.attempt
            if event.kind is PublishedEventKind.ENDED and snapshot is not None:
                self.has_ended = True
                # The engine brings none if the attempt ran elsewhere, or an earlier daemon had started it.
                is_ours = attempt is None or bool(attempt.engine) or attempt.since < self._since
                _, was_ours = self._ended.get(snapshot.name, ("", False))
                self._ended[snapshot.name] = f"job-{event.job.id}", is_ours or was_ours

    async def bring_results(self) -> None:
        """Bring back what the engine did not, or could not."""
        self.has_ended = False
        while self._ended:
            name, (label, is_ours) = self._ended.popitem()
            if is_ours or await self._thread.run(partial(unbrought_results, f"{self.folder}/{name}")) is not None:
                await self._bring(name, label)

    def unbrought(self) -> list[str]:
        """Return a line for each snapshot with results that could not be brought back."""
        return [
            f"results of a job are in {self.folder}/{name}/{TREE}, and cannot be brought back: {problem}"
            for name, problem in self._problems.items()
        ]

    async def _bring(self, name: str, label: str) -> Brought:
        brought = await self._thread.run(partial(bring_results, f"{self.folder}/{name}", label))
        self._problems.pop(name, None)
        if brought.problem is not None:
            self._problems[name] = brought.problem
        return brought

    def _notices(self) -> Iterator[str]:
        yield from self.unbrought()
        for name, problem in self._staying.items():
            yield f"the code snapshot {self.folder}/{name} cannot be removed: {problem}"

    async def read_all(self) -> list[FoundFolder]:
        """List the snapshots, and read which results an earlier daemon could not bring back."""
        found = await self._thread.run(partial(_list_folders, self.folder))
        names = {each.name for each in found}
        self._problems = {name: problem for name, problem in self._problems.items() if name in names}
        self._problems |= {each.name: each.unbrought[1] for each in found if each.unbrought is not None}
        return found

    async def remove_old(self, keep_s: float | None, work: Work) -> int:
        """Remove the snapshots that are no longer needed; return how many. `work` does pieces of work, with pauses."""
        removed = 0
        for found in await self.read_all():
            self._staying.pop(found.name, None)
            try:
                if not found.name.startswith((NEW, REMOVED)):
                    removed += await self._remove_if_old(found, keep_s, work)
                elif found.is_old or found.name.startswith(REMOVED):
                    await self._remove(found.name)
            except OSError as error:
                self._staying[found.name] = f"{error.filename}: {error.strerror}"
        return removed

    async def _remove_if_old(self, found: FoundFolder, keep_s: float | None, work: Work) -> bool:
        code, name = self._scheduler.store.specs.code, found.name
        retries = code.retries
        if found.unbrought is not None and (await self._bring(name, found.unbrought[0])).problem is not None:
            return False
        if code.is_used(name):
            last = await work(code.last_end(name))
            if last is None or keep_s is None or last > self._scheduler.clock.now() - keep_s:
                return False
        elif not found.is_taken and not found.is_old:
            return False
        if (await self._bring(name, f"snapshot-{name[:6]}")).problem is not None:
            return False
        if code.retries != retries:  # a job may be about to run again in it
            return False
        os.rename(f"{self.folder}/{name}", f"{self.folder}/{REMOVED}{name}")
        await self._remove(f"{REMOVED}{name}")
        return True

    async def _remove(self, name: str) -> None:
        """Remove a folder. If something in it stays, it is tried again in the next round."""
        if problems := await self._thread.run(partial(remove_tree, f"{self.folder}/{name}")):
            self._staying[name] = f"{problems[0].filename}: {problems[0].strerror}"


def is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _take(path: str) -> None:
    with contextlib.suppress(OSError):  # then it is removed an hour later than it could be
        os.close(os.open(f"{path}/{TAKEN}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _write_out(path: str) -> None:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _log.warning("%s cannot be written out: %s", path, error.strerror)
        return
    try:
        sync = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if sync is None or sync(folder):  # not Linux
            os.sync()
    finally:
        os.close(folder)


def _list_folders(folder: str) -> list[FoundFolder]:
    try:
        with os.scandir(folder) as entries:
            return [
                FoundFolder(
                    each.name,
                    is_old=each.stat(follow_symlinks=False).st_mtime < time.time() - 3600.0,
                    is_taken=os.path.exists(f"{each.path}/{TAKEN}"),
                    unbrought=unbrought_results(each.path),
                )
                for each in entries
                if _NAME.fullmatch(each.name.removeprefix(NEW).removeprefix(REMOVED)) and each.is_dir()
            ]
    except FileNotFoundError:
        return []
