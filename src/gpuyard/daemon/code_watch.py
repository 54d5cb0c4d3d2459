"""Finds out whether Git work trees had changes when jobs were submitted, and whether scripts have changed since.

- The loop never reads the user's files itself: their disk may hang. What cannot be told within a second is unknown.
- All submissions from a work tree that wait for an answer share one call of `git`, which begins after the last of them.
- The script of an attempt is read right after its start was recorded. A job with a snapshot runs the script as it was.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from msgspec import convert

from gpuyard.client.git_tree import has_changes
from gpuyard.client.submitted_code import code_of, script_digest
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.model.job import PublishedEventKind
from gpuyard.model.job_spec import CodeRecord, changed_script_text
from gpuyard.queue.step import Step
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.system.worker_threads import BackgroundThread

_log = logging.getLogger(__name__)
_READ_WITHIN_S = 1.0


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
        try:
            found = await asyncio.wait_for(self._scripts.run(partial(code_of, command, cwd)), _READ_WITHIN_S)
        except TimeoutError:
            return CodeRecord()
        return convert(found, CodeRecord)

    async def is_changed(self, code: CodeRecord) -> bool | None:
        """Return whether the script is another one now than at submission; None if that cannot be told."""
        if code.script is None or code.digest is None:
            return None
        try:
            digest = await asyncio.wait_for(self._scripts.run(partial(script_digest, code.script)), _READ_WITHIN_S)
        except TimeoutError:
            return None
        return None if digest is None else digest != code.digest

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
            paths = {path for _, _, path, _ in started}
            digests = await self._scripts.run(partial(_digests, paths))
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


def _digests(paths: set[str]) -> dict[str, str | None]:
    return {path: script_digest(path) for path in paths}


def _has_changes(root: str) -> bool | None:
    """Return whether a Git work tree has changes that are not committed; None if that cannot be told."""
    try:
        return has_changes(root)
    except (EnvironmentFault, OSError):  # there is no git, or its disk hangs
        return None
