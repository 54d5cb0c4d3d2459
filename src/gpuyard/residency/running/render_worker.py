"""A worker: a thread with its own lane on the device that renders one unit after the other.

A label is rendered, reported as skipped, or postponed because the device was out of memory: postponed labels are tried
once more at the end, alone on the device. An exception of a renderer never ends the run. Other threads write outputs to
disk while the worker renders the next label; a label counts as rendered when that is done.
"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.residency.loading.named_arrays import Arrays
from gpuyard.residency.memory.device_memory import TransferLane, as_device_full
from gpuyard.residency.memory.page_pool import PagePool
from gpuyard.residency.planning.render_units import Label, Unit
from gpuyard.residency.running.output_folders import Outputs
from gpuyard.residency.running.output_writers import OutputWriters
from gpuyard.residency.running.run_status import LabelResults
from gpuyard.residency.running.status_file import SkipReason, WorkerStatus
from gpuyard.residency.tiers.asset_copies import TiersStopped, TooLarge
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.hold_assets import ActorCache, Frames, SceneManager, retry_with_less

Render = Callable[[Arrays | None, Frames, Any, Path], object]


class RendererError(Exception):
    """The error of a renderer as text, because its traceback would keep device memory alive."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.traceback = "".join(format_exception(error))


class Worker:
    """`status` may be read by other threads."""

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
        """Render units until none is left, or until the run is stopped."""
        with self._tiers.memory.lane() as lane, contextlib.suppress(TiersStopped):
            while (handed := self._tiers.next_unit()) is not None:
                self._render_unit(*handed, lane)
        self._set_status(doing="finished", scene=None, actor=None, label=None)

    def _render_unit(self, number: int, unit: Unit, lane: TransferLane) -> None:
        left = list(unit.labels)
        self._set_status(doing="waiting", scene=unit.scene, actor=unit.actor)
        try:
            with (
                self._scenes.hold(unit.scene, number) as scene,
                self._actors.hold(unit.actor, number, lane) as frames,
            ):
                while left and not self._tiers.is_stopped:
                    self._render_label(unit, left[0], scene, frames, lane)
                    del left[0]
        except DeviceFull as error:
            self._results.postpone(unit, left, self._reason(unit, "out-of-memory", error.message))
        except TooLarge as error:
            self._results.postpone(unit, left, self._reason(unit, "too-large", error.message))
        except AssetError as error:
            self._results.skip(unit, left, self._reason(unit, "asset", error.message))
        finally:
            self._tiers.withdraw(number)
        self._set_status(doing="idle", scene=None, actor=None, label=None)

    def _render_label(self, unit: Unit, label: Label, scene: Arrays | None, frames: Frames, lane: TransferLane) -> None:
        """Raises AssetError if a streamed frame cannot be read."""
        self._set_status(doing="rendering", label=label.name)
        try:
            folder = retry_with_less(self._tiers, lambda: self._render_output(label, scene, frames, lane))
        except DeviceFull as error:
            self._results.postpone(unit, [label], self._reason(unit, "out-of-memory", error.message))
        except RendererError as error:
            self._results.skip(unit, [label], self._reason(unit, "renderer", str(error), error.traceback))
        except (AssetError, TooLarge):
            raise
        except EnvironmentFault as error:
            self._results.skip(unit, [label], self._reason(unit, "output", error.message))
        else:
            self._tiers.learn_working()
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
            self._results.skip(unit, [label], self._reason(unit, "output", error.message))
        else:
            self._results.count_rendered()

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

    def _reason(self, unit: Unit, kind: str, reason: str, traceback: str | None = None) -> SkipReason:
        sizes, state = self._tiers.sizes(unit), self._tiers.memory_state()
        return SkipReason(kind=kind, reason=reason, traceback=traceback, sizes=sizes, state=state)

    def _set_status(self, **changes: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)
