"""A worker: a thread with its own queue on the device that does one unit of work after the other.

A label is rendered, or reported as skipped, or set aside because memory was short: those are tried once more at the
end, each alone on the device. Nothing that a renderer raises ends the run.
"""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception
from typing import Any

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.residency.loading.named_arrays import Arrays
from gpuyard.residency.memory.device_memory import TransferLane, as_device_full
from gpuyard.residency.memory.page_pool import PagePool
from gpuyard.residency.planning.render_units import Label, Unit
from gpuyard.residency.running.label_results import LabelResults, SkipReason
from gpuyard.residency.running.output_folders import Outputs
from gpuyard.residency.running.status_file import WorkerStatus
from gpuyard.residency.tiers.actor_cache import ActorCache, Frames
from gpuyard.residency.tiers.asset_loans import TiersStopped, TooLarge
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.oom_fallback import climb
from gpuyard.residency.tiers.scene_manager import SceneManager

Render = Callable[[Arrays | None, Frames, Any, Path], object]


class RendererError(Exception):
    """What a renderer raised, without what its traceback would keep alive."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.traceback = "".join(format_exception(error))


class Worker:
    """`status` is read by others while it works."""

    def __init__(  # noqa: PLR0913, PLR0917 - all that a thread needs
        self, number: int, tiers: Tiers, pool: PagePool, render: Render, outputs: Outputs, tally: LabelResults
    ) -> None:
        self._tiers, self._render, self._outputs, self._tally = tiers, render, outputs, tally
        self._scenes, self._actors = SceneManager(tiers), ActorCache(tiers, pool)
        self.status = WorkerStatus(
            worker=number, doing="idle", scene=None, actor=None, label=None, labels_done=0, waits_for=None
        )

    def run(self) -> None:
        """Until there is nothing left to do."""
        with self._tiers.memory.lane() as lane, contextlib.suppress(TiersStopped):
            while (handed := self._tiers.next_work()) is not None:
                self._do(*handed, lane)
        self._says(doing="finished", scene=None, actor=None, label=None)

    def _do(self, number: int, unit: Unit, lane: TransferLane) -> None:
        left = list(unit.labels)
        self._says(doing="waiting", scene=unit.scene, actor=unit.actor)
        try:
            with (
                self._scenes.hold(unit.scene, number) as scene,
                self._actors.hold(unit.actor, number, lane) as frames,
            ):
                while left and not self._tiers.is_stopped:
                    self._do_label(unit, left[0], scene, frames, lane)
                    del left[0]
        except DeviceFull as error:
            self._tally.set_aside(unit, left, self._why(unit, "out-of-memory", error.message))
        except TooLarge as error:
            self._tally.set_aside(unit, left, self._why(unit, "too-large", error.message))
        except AssetError as error:
            self._tally.skipped(unit, left, self._why(unit, "asset", error.message))
        finally:
            self._tiers.give_up(number)
        self._says(doing="idle", scene=None, actor=None, label=None)

    def _do_label(self, unit: Unit, label: Label, scene: Arrays | None, frames: Frames, lane: TransferLane) -> None:
        """AssetError where a frame that is streamed cannot be read."""
        self._says(doing="rendering", label=label.name)
        try:
            climb(self._tiers, lambda: self._render_into(label, scene, frames, lane))
        except DeviceFull as error:
            self._tally.set_aside(unit, [label], self._why(unit, "out-of-memory", error.message))
        except RendererError as error:
            self._tally.skipped(unit, [label], self._why(unit, "renderer", str(error), error.traceback))
        except (AssetError, TooLarge):
            raise
        except EnvironmentFault as error:
            self._tally.skipped(unit, [label], self._why(unit, "output", error.message))
        else:
            self._tally.rendered()
            self._tiers.learn_working()
        self._says(labels_done=self.status.labels_done + 1)

    def _render_into(self, label: Label, scene: Arrays | None, frames: Frames, lane: TransferLane) -> None:
        """All of its output, or nothing of it."""
        folder = self._outputs.open(label)
        # With a copy of the label: it may be called once more with the same one.
        error = self._error_of(lambda: self._render(scene, frames, copy.deepcopy(label.value), folder))
        error = self._error_of(lane.finish) or error
        if error is not None:
            self._outputs.discard(folder)
            raise error
        self._outputs.commit(label, folder)

    @staticmethod
    def _error_of(act: Callable[[], object]) -> Exception | None:
        """What it raised, to be raised again when its frames, and what they have on the device, are gone."""
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - a plugin's; no signal is heard in this thread
            if isinstance(error, AssetError | TooLarge):
                return error
            return as_device_full(error) or RendererError(error)
        return None

    def _why(self, unit: Unit, kind: str, reason: str, traceback: str | None = None) -> SkipReason:
        sizes, state = self._tiers.sizes(unit), self._tiers.memory_state()
        return SkipReason(kind=kind, reason=reason, traceback=traceback, sizes=sizes, state=state)

    def _says(self, **changes: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)
