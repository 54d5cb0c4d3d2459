"""The status of a run, its file, and what follows the run: shows its status, writes it to the file each second, and
stops the run on request. The file always holds one complete status. Writing and stopping neither wait for the display
nor end when its terminal goes away. Sizes are in bytes, times in seconds."""

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from enum import IntEnum, auto
from pathlib import Path
from typing import Protocol, Self

import msgspec

from gpuyard.errors import EnvironmentFault, UserError


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`doing` is idle, waiting (for `waits_for`: disk, upload, slot, vram or ram), rendering or finished."""

    worker: int
    doing: str = "idle"
    scene: str | None = None
    actor: str | None = None
    label: str | None = None
    labels_done: int = 0
    waits_for: str | None = None


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`assets` is the memory of copies in this tier; `allocator` the device allocator's own figure, None for RAM;
    `left` is what neither of them takes of the budget."""

    budget: int
    left: int
    assets: int
    peak_assets: int
    allocator: int | None = None
    peak_allocator: int | None = None


class AssetReferences(msgspec.Struct, frozen=True, kw_only=True):
    """An asset in VRAM or RAM: the workers whose unit needs it now, and the coming units that will."""

    kind: str
    path: str
    workers: int
    units: int


class MovedStatus(msgspec.Struct, kw_only=True):
    read_from_disk: int = 0
    uploaded: int = 0
    streamed: int = 0
    downloaded: int = 0


class CountsStatus(msgspec.Struct, kw_only=True):
    """Requested assets found in VRAM, found in RAM, or read from disk; streams; and times that the device was full."""

    vram_hits: int = 0
    ram_hits: int = 0
    misses: int = 0
    streams: int = 0
    out_of_memory: int = 0


class TransferCounts:
    def __init__(self) -> None:
        self.moved, self.counts = MovedStatus(), CountsStatus()
        self.peak_vram = self.peak_ram = 0
        self.stalls_s: dict[str, float] = {}  # by cause


class RenderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`left_s` is the estimated time left, None before the first label; `stalls_s` sums all workers by cause."""

    state: str  # running, finished, interrupted
    started_at: str
    now: str
    elapsed_s: float
    left_s: float | None
    labels: int
    rendered: int
    already: int
    skipped: int
    vram: TierStatus
    ram: TierStatus
    scene_slots: int
    scenes: tuple[str, ...]  # in VRAM
    actors: tuple[str, ...]  # in VRAM
    scenes_in_ram: tuple[str, ...]
    actors_in_ram: tuple[str, ...]
    references: tuple[AssetReferences, ...]
    moved: MovedStatus
    counts: CountsStatus
    stalls_s: dict[str, float]
    workers: tuple[WorkerStatus, ...]
    device: str


class SkipReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kind` is out-of-memory, too-large, asset, renderer or output; `traceback` is the renderer's; sizes are in
    bytes."""

    kind: str
    reason: str
    traceback: str | None = None
    sizes: dict[str, int] = {}
    state: dict[str, int] = {}


class Skip(SkipReason, frozen=True, kw_only=True, omit_defaults=True):
    label: str
    scene: str | None = None
    actor: str | None = None


class RenderReport(msgspec.Struct, frozen=True, kw_only=True):
    status: RenderStatus
    skipped: tuple[Skip, ...]


def as_json(value: msgspec.Struct, indent: int | None = None) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=-1 if indent is None else indent)
    except UnicodeEncodeError:  # it has a file name that is not UTF-8
        return json.dumps(msgspec.to_builtins(value), indent=indent).encode()


INTERVAL_S = 1.0
DEFAULT_NAME, DEFAULT_AFTER_S = "status.json", 60.0


class FollowedRun(Protocol):
    """The run to follow: a coordinator. `status` is None before the run starts, and `stop` does nothing then."""

    def status(self) -> RenderStatus | None: ...
    def stop(self) -> None: ...


class StatusFile:
    """A status file, written once a run has taken `after_s`. Not synced: it is of no use after a power failure."""

    def __init__(self, path: Path, after_s: float = 0.0) -> None:
        if path.is_dir():
            raise UserError(f"{path} is a folder", hint="name a file for the status, such as status.json")
        if not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent}", hint="create it, or name another file for the status")
        self._path = path
        # A name that no other user can guess, and put a link there.
        self._temporary = path.with_name(f".{os.urandom(8).hex()}.{path.name}")
        self._after_s = after_s

    @classmethod
    def default(cls, out: Path) -> "StatusFile":
        """Return the file for a run without --status: written after 60 s, or from the start if an earlier run left
        one."""
        path = out / DEFAULT_NAME
        return cls(path, 0.0 if path.exists() else DEFAULT_AFTER_S)

    def write(self, status: RenderStatus) -> None:
        """Replace the file. Raises EnvironmentFault and keeps the last status if it cannot be written."""
        if status.elapsed_s < self._after_s:
            return
        content = as_json(status, indent=2) + b"\n"
        try:
            self._temporary.write_bytes(content)
            self._temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            raise EnvironmentFault(f"{self._path} cannot be written: {error.strerror}") from error


class _Phase(IntEnum):
    """Phases only advance. ABANDONED: the process is about to exit while the run still goes on."""

    RUNNING = auto()
    STOPPING = auto()
    ABANDONED = auto()
    ENDED = auto()


class Follower:
    """Follows a run inside its `with` block, in two threads. `stop` and `abandon` may be called in signal handlers.
    `show_stop` is called after the run was stopped: no further label starts once its message appears."""

    def __init__(
        self,
        run: FollowedRun,
        show: Callable[[RenderStatus], None],
        file: StatusFile | None,
        show_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._show, self._file, self._show_stop = run, show, file, show_stop
        # SimpleQueue is the only primitive that a signal handler may use while it interrupts its own use.
        self._requests, self._answers = queue.SimpleQueue[_Phase](), queue.SimpleQueue[None]()
        self._phase = _Phase.RUNNING  # set by the status thread only, after it has acted on a request
        self._phase_changed = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_status, name="gpuyard-status", daemon=True),
            threading.Thread(target=self._keep_showing, name="gpuyard-show", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(_Phase.ENDED)
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        self._requests.put(_Phase.STOPPING)

    def abandon(self) -> None:
        """Write "interrupted" to the file, because the process is about to exit. Waits up to 0.5 s for that."""
        if self._file is not None:
            self._requests.put(_Phase.ABANDONED)
            with contextlib.suppress(queue.Empty):
                self._answers.get(timeout=0.5)  # the file may be on a disk that does not respond

    def _keep_status(self) -> None:
        self._write_status()
        while (phase := max(self._phase, self._next_request())) is not _Phase.ENDED:
            if phase is _Phase.STOPPING:  # each time, because the run may not have started before
                self._run.stop()
            is_new = self._enter(phase)
            if phase is not _Phase.ABANDONED:
                self._write_status()
            elif is_new:
                self._write_status(state="interrupted")
                self._answers.put(None)
        self._enter(phase)

    def _next_request(self) -> _Phase:
        try:
            return self._requests.get(timeout=INTERVAL_S)
        except queue.Empty:
            return _Phase.RUNNING

    def _enter(self, phase: _Phase) -> bool:
        is_new = phase is not self._phase
        self._phase = phase
        if is_new:
            self._phase_changed.set()
        return is_new

    def _write_status(self, **changes: str) -> None:
        """Write the status. A failure is ignored: the run goes on, and the next status may be written."""
        if self._file is not None and (status := self._run.status()) is not None:
            with contextlib.suppress(EnvironmentFault):
                self._file.write(msgspec.structs.replace(status, **changes))

    def _keep_showing(self) -> None:
        is_stop_shown = False
        while self._phase is not _Phase.ENDED:
            with contextlib.suppress(OSError):  # the terminal or pipe was closed
                if self._phase is _Phase.STOPPING and not is_stop_shown:
                    is_stop_shown = True
                    self._show_stop()
                if (status := self._run.status()) is not None:
                    self._show(status)
            self._phase_changed.wait(INTERVAL_S)
            self._phase_changed.clear()
