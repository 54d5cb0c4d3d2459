"""Shared by the tests of recipes: roots with a run to prune, and a kill at any call."""

import contextlib
import os
import shutil
import signal
import stat
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpuyard.recipes.batch.prune_empty_runs import PrunedRun, prune

RUN, WHY, AT = "run-000017", "no frame", "2025-01-01T00:00:00Z"
OTHER_UID = 65534
CHANGES = ("rename", "mkdir", "rmdir", "unlink", "symlink", "chmod", "utime")


class Roots(Struct, frozen=True, kw_only=True):
    """An output root with a run to prune and a run to keep, and a prune root that is not empty."""

    output: Path
    pruned: Path

    @property
    def run(self) -> Path:
        return self.output / RUN

    @property
    def record(self) -> Path:
        return self.output / "pruned.jsonl"

    def fill(self) -> None:
        for root in (self.output, self.pruned):
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
        self.pruned.chmod(0o2755)  # like a folder shared by a group
        write(self.output / "run-000018" / "0.png", b"kept")
        write(self.pruned / "run-000016" / "log.txt", b"pruned before")
        make_run(self.run)

    def prune(self) -> PrunedRun:
        return prune(self.run, self.pruned, self.record, why=WHY, at=AT)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_run(run: Path) -> None:
    write(run / "log.txt", b"scene loaded\n" * 100)
    write(run / "0.png", b"")
    write(run / "deep" / "er" / "notes.txt", b"no frame")
    (run / "deep" / "none").mkdir()
    (run / "deep" / "latest").symlink_to("../log.txt")
    (run / "deep" / "scene").symlink_to(run.parent / "run-000018")
    (run / "gone").symlink_to("/nowhere")
    (run / "log.txt").chmod(0o640)
    (run / "deep").chmod(0o750)
    for path in (run / "log.txt", run / "deep"):
        os.utime(path, (1_000_000_000, 1_000_000_000))


def tree_of(folder: Path) -> dict[str, Any]:
    """Return the kind, mode, content and (except for links) time of everything in the folder."""
    return {str(path.relative_to(folder)): _entry(path) for path in [folder, *sorted(folder.rglob("*"))]}


def _entry(path: Path) -> tuple[Any, ...]:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return ("link", os.readlink(path))
    content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
    return (stat.filemode(status.st_mode), status.st_mtime_ns, content)


def die_at(point: int) -> None:
    """Kill this process before its n-th call that changes something, or in the middle of that call if it writes."""
    left = iter(range(point - 1, -1, -1))

    def tick(last_action: Callable[[], Any] = lambda: None) -> None:
        if next(left) == 0:
            last_action()
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tick()
            return function(*arguments, **options)

        return call

    write_all = os.write

    def write_some(descriptor: int, content: bytes) -> int:
        tick()
        tick(lambda: write_all(descriptor, content[: len(content) // 2]))
        return write_all(descriptor, content)

    open_any = os.open

    def open_some(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            tick()
        return open_any(path, flags, *arguments, **options)

    os.open = open_some
    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))
    # The kernel keeps the writes of a killed process; only a power failure loses them.
    os.fsync = deadly(lambda descriptor: None)
    os.write = write_some  # type: ignore[assignment]


def prune_and_die(connection: Connection) -> None:
    """In a process without threads: prune in a fork that is killed at the requested point. Answer whether it was."""
    for name in [name for name in os.environ if name.startswith("COV")]:
        del os.environ[name]  # coverage of a killed process is lost, and measuring it is slow
    while True:
        point, roots = connection.recv()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                die_at(point)
                roots.prune()
                os._exit(0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send(status)
