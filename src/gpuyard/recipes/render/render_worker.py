"""The workers of a run: threads with their own lanes on the device that render one unit after the other; the results of
labels, and the status. A label is rendered, skipped, or postponed because the device was out of memory, to be tried
once more at the end, alone on the device. An exception of a renderer never ends the run. Other threads write outputs
while the worker renders the next label; a label counts as rendered when that is done."""

import contextlib
import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.recipes.render import status_file
from gpuyard.recipes.render.memory.asset_copies import TiersStopped, TooLarge
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.memory.assets_in_use import ActorCache, Frames, SceneManager, retry_with_less
from gpuyard.recipes.render.memory.device_memory import DeviceMemory, PagePool, TransferLane, as_device_full
from gpuyard.recipes.render.memory.named_arrays import Arrays
from gpuyard.recipes.render.planning.assets_and_units import Budgets, Kind, Label, Unit, parts_of, path_of
from gpuyard.recipes.render.status_file import RenderStatus, Skip, SkipReason, TransferCounts, WorkerStatus
from gpuyard.recipes.render.write_outputs import Outputs, OutputWriters


class LabelResults:
    """The results of all workers: each label ends once, as rendered or skipped; it may be postponed before."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self.lock = threading.Lock()
        self._postponed: list[Unit] = []
        self._is_last_try = False
        self.skips = outputs.skips
        self.labels = self.already = self.rendered = 0

    def skip(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        own = {"scene": path_of(unit.scene), "actor": path_of(unit.actor), **msgspec.structs.asdict(why)}
        for label in labels:
            self._outputs.skip(Skip(label=label.name, **own))

    def postpone(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        """Postpone the labels, to be tried alone at the end; skip them if this is that last try."""
        if self._is_last_try:
            self.skip(unit, labels, why)
        elif labels:
            with self.lock:
                self._postponed.append(Unit(scene=unit.scene, actor=unit.actor, labels=tuple(labels)))

    def take_postponed(self) -> list[Unit]:
        """Return the postponed labels, grouped by their assets. From now on, labels are skipped, not postponed."""
        self._is_last_try = True
        labels: dict[tuple[str | None, str | None], list[Label]] = {}
        for unit in self._postponed:
            labels.setdefault((unit.scene, unit.actor), []).extend(unit.labels)
        return [Unit(scene=scene, actor=actor, labels=tuple(some)) for (scene, actor), some in labels.items()]


class RunStatus:
    """A run may have several tiers one after the other, which share the counts."""

    def __init__(self, budgets: Budgets, memory: DeviceMemory, results: LabelResults) -> None:
        self._budgets, self._memory, self._results = budgets, memory, results
        self._lock = threading.Lock()
        self._tiers: Tiers | None = None
        self._workers: Sequence[Worker] = ()
        self.counts = TransferCounts()
        self._state = "running"
        self._started, self._started_at = time.monotonic(), _now()
        self._is_stopped = False

    def start(self, tiers: Tiers, workers: "Sequence[Worker]") -> None:
        with self._lock:
            self._tiers, self._workers = tiers, workers
            if self._is_stopped:
                tiers.stop()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._tiers is not None:
                self._tiers.stop()

    def end(self) -> None:
        self._state = "interrupted" if self._is_stopped else "finished"

    def read(self) -> RenderStatus:
        with self._lock:
            tiers, counts = self._tiers, self.counts
            in_vram, in_ram = (0, 0) if tiers is None else (tiers.vram_nbytes(), tiers.ram_nbytes())
            raw = [worker.status for worker in self._workers]
            workers = tuple(map(self._worker, raw))
        users = Counter(key for each in raw for key in (each.scene, each.actor))
        coming = {} if tiers is None else tiers.coming_uses()
        used = self._memory.used()
        elapsed, results = time.monotonic() - self._started, self._results
        left = results.labels - results.already - results.rendered - len(results.skips)
        return RenderStatus(
            state=self._state,
            started_at=self._started_at,
            now=_now(),
            elapsed_s=round(elapsed, 3),
            left_s=round(left * elapsed / results.rendered, 1) if results.rendered else None,
            labels=results.labels,
            rendered=results.rendered,
            already=results.already,
            skipped=len(results.skips),
            vram=msgspec.structs.replace(
                _tier(self._budgets.vram, in_vram, counts.peak_vram, max(in_vram, used)),
                allocator=used,
                peak_allocator=self._memory.peak(),
            ),
            ram=_tier(self._budgets.ram, in_ram, counts.peak_ram, in_ram),
            scene_slots=self._budgets.scene_slots,
            scenes=() if tiers is None else tiers.paths_in(Kind.SCENE),
            actors=() if tiers is None else tiers.paths_in(Kind.ACTOR),
            scenes_in_ram=() if tiers is None else tiers.paths_in(Kind.SCENE, is_ram=True),
            actors_in_ram=() if tiers is None else tiers.paths_in(Kind.ACTOR, is_ram=True),
            references=tuple(
                status_file.AssetReferences(kind=kind, path=path, workers=users[key], units=units)
                for key, units in coming.items()
                for kind, path in (parts_of(key),)
            ),
            moved=copy.copy(counts.moved),
            counts=copy.copy(counts.counts),
            stalls_s={cause: round(seconds, 3) for cause, seconds in counts.stalls_s.copy().items()},
            workers=workers,
            device=self._memory.name,
        )

    def _worker(self, status: WorkerStatus) -> WorkerStatus:
        """Return a worker's status with paths in place of keys, and with what it waits for."""
        waits = {} if self._tiers is None else self._tiers.waits
        keys = (status.scene, status.actor) if status.doing == "waiting" else ()
        cause = next((str(waits[key]) for key in keys if key is not None and key in waits), None)
        return msgspec.structs.replace(
            status, scene=path_of(status.scene), actor=path_of(status.actor), waits_for=cause
        )


def _tier(budget: int, assets: int, peak: int, taken: int) -> status_file.TierStatus:
    # The assets were read a moment after the peak.
    return status_file.TierStatus(
        budget=budget, left=max(0, budget - taken), assets=assets, peak_assets=max(peak, assets)
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Render = Callable[[Arrays | None, Frames, Any, Path], object]


class RendererError(Exception):
    """The error of a renderer as text, because its traceback would keep device memory alive."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.traceback = "".join(format_exception(error))


class Worker:
    def __init__(  # noqa: PLR0913, PLR0917 - what a thread needs
        self,
        number: int,
        tiers: Tiers,
        pool: PagePool,
        render: Render,
        outputs: Outputs,
        writers: OutputWriters,
        results: LabelResults,
    ) -> None:
        self._tiers, self._render, self._outputs, self._results = tiers, render, outputs, results
        self._writers = writers
        self._scenes, self._actors = SceneManager(tiers), ActorCache(tiers, pool)
        self.status = WorkerStatus(worker=number)

    def run(self) -> None:
        with self._tiers.memory.lane() as lane, contextlib.suppress(TiersStopped):
            while (handed := self._tiers.next_unit()) is not None:
                self._render_unit(*handed, lane)
        self._set_status(doing="finished", scene=None, actor=None, label=None)

    def _render_unit(self, number: int, unit: Unit, lane: TransferLane) -> None:
        left = list(unit.labels)
        self._set_status(doing="waiting", scene=unit.scene, actor=unit.actor)
        try:
            with self._scenes.hold(unit.scene, number) as scene, self._actors.hold(unit.actor, number, lane) as frames:
                while left and not self._tiers.is_stopped:
                    self._render_label(unit, left[0], scene, frames, lane)
                    del left[0]
        except (DeviceFull, TooLarge) as error:
            kind = "too-large" if isinstance(error, TooLarge) else "out-of-memory"
            self._results.postpone(unit, left, self._tiers.reason(unit, kind, error.message))
        except AssetError as error:
            self._results.skip(unit, left, self._tiers.reason(unit, "asset", error.message))
        finally:
            self._tiers.withdraw(number)
        self._set_status(doing="idle", scene=None, actor=None, label=None)

    def _render_label(self, unit: Unit, label: Label, scene: Arrays | None, frames: Frames, lane: TransferLane) -> None:
        """Raises AssetError if a streamed frame cannot be read."""
        self._set_status(doing="rendering", label=label.name)
        try:
            folder = retry_with_less(self._tiers, lambda: self._render_output(label, scene, frames, lane))
        except DeviceFull as error:
            self._results.postpone(unit, [label], self._tiers.reason(unit, "out-of-memory", error.message))
        except RendererError as error:
            self._results.skip(unit, [label], self._tiers.reason(unit, "renderer", str(error), error.traceback))
        except (AssetError, TooLarge):
            raise
        except EnvironmentFault as error:
            self._results.skip(unit, [label], self._tiers.reason(unit, "output", error.message))
        else:
            self._tiers.reserve_working()
            self._writers.write(partial(self._commit, unit, label, folder))
        self._set_status(labels_done=self.status.labels_done + 1)

    def _render_output(self, label: Label, scene: Arrays | None, frames: Frames, lane: TransferLane) -> Path:
        """Return the folder of the complete output, without its name yet. Leaves no folder if that fails."""
        folder = self._outputs.open(label)
        # With a copy of the label's value, because the renderer may be called again with the same label.
        error = self._catch_error(lambda: self._render(scene, frames, copy.deepcopy(label.value), folder))
        error = self._catch_error(lane.finish) or error
        if error is not None:
            self._outputs.discard(folder)
            raise error
        return folder

    def _commit(self, unit: Unit, label: Label, folder: Path) -> None:
        try:
            self._outputs.commit(label, folder)
        except EnvironmentFault as error:
            self._results.skip(unit, [label], self._tiers.reason(unit, "output", error.message))
        else:
            with self._results.lock:
                self._results.rendered += 1

    @staticmethod
    def _catch_error(act: Callable[[], object]) -> Exception | None:
        """Return the error, to be raised again when its frames have freed their device memory."""
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the user's renderer; this thread handles no signals
            if isinstance(error, AssetError | TooLarge):
                return error
            return as_device_full(error) or RendererError(error)
        return None

    def _set_status(self, **changes: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)
