"""How a run stands at a moment: put together from its tiers, its workers and its tally."""

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.residency.planning.assets import Budgets, Kind, path_of
from gpuyard.residency.running.label_results import LabelResults
from gpuyard.residency.running.render_worker import Worker
from gpuyard.residency.running.status_file import CountsStatus, MovedStatus, RenderStatus, TierStatus, WorkerStatus
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.transfer_counts import TransferCounts

Part = TypeVar("Part", MovedStatus, CountsStatus)


class RunStatus:
    """A run may have several tiers one after the other: figures add up."""

    def __init__(self, budgets: Budgets, memory: DeviceMemory, tally: LabelResults) -> None:
        self._budgets, self._memory, self._tally = budgets, memory, tally
        self._lock = threading.Lock()
        self._tiers: Tiers | None = None
        self._workers: Sequence[Worker] = ()
        self._figures = TransferCounts()
        self._state = "running"
        self._began, self._began_at = time.monotonic(), _now()
        self._is_stopped = False

    def begin(self, tiers: Tiers, workers: Sequence[Worker]) -> None:
        with self._lock:
            self._tiers, self._workers = tiers, workers
            if self._is_stopped:
                tiers.stop()

    def keep(self) -> None:
        """Those tiers are closed."""
        with self._lock:
            self._figures, self._tiers = self._summed(), None

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._tiers is not None:
                self._tiers.stop()

    def end(self) -> None:
        self._state = "interrupted" if self._is_stopped else "finished"

    def _summed(self) -> TransferCounts:
        return self._figures if self._tiers is None else self._figures.with_more(self._tiers.figures)

    def status(self) -> RenderStatus:
        with self._lock:
            tiers, figures = self._tiers, self._summed()
            in_vram, in_ram = (0, 0) if tiers is None else (tiers.vram_nbytes(), tiers.ram_nbytes())
            workers = tuple(self._worker(worker.status) for worker in self._workers)
        elapsed, tally = time.monotonic() - self._began, self._tally
        return RenderStatus(
            state=self._state,
            started_at=self._began_at,
            now=_now(),
            elapsed_s=round(elapsed, 3),
            left_s=round(tally.left * elapsed / tally.done, 1) if tally.done else None,
            labels=tally.labels,
            rendered=tally.done,
            already=tally.already,
            skipped=len(tally.skips),
            vram=TierStatus(
                budget=self._budgets.vram,
                assets=in_vram,
                peak_assets=max(figures.peak_vram, in_vram),  # looked at a moment later
                allocator=self._memory.used(),
                peak_allocator=self._memory.peak(),
            ),
            ram=TierStatus(
                budget=self._budgets.ram,
                assets=in_ram,
                peak_assets=max(figures.peak_ram, in_ram),
            ),
            scene_slots=self._budgets.scene_slots,
            scenes=() if tiers is None else tiers.paths_in(Kind.SCENE),
            actors=() if tiers is None else tiers.paths_in(Kind.ACTOR),
            scenes_in_ram=() if tiers is None else tiers.paths_in(Kind.SCENE, is_ram=True),
            actors_in_ram=() if tiers is None else tiers.paths_in(Kind.ACTOR, is_ram=True),
            moved=_part(figures, MovedStatus),
            counts=_part(figures, CountsStatus),
            stalls_s={cause: round(seconds, 3) for cause, seconds in figures.stalls_s.items()},
            workers=workers,
            device=self._memory.name,
        )

    def _worker(self, status: WorkerStatus) -> WorkerStatus:
        """With paths for keys, and what it waits for."""
        waits = {} if self._tiers is None else self._tiers.waits
        keys = (status.scene, status.actor) if status.doing == "waiting" else ()
        cause = next((str(waits[key]) for key in keys if key is not None and key in waits), None)
        return msgspec.structs.replace(
            status, scene=path_of(status.scene), actor=path_of(status.actor), waits_for=cause
        )


def _part(figures: TransferCounts, kind: type[Part]) -> Part:
    return kind(**{name: getattr(figures, name) for name in kind.__struct_fields__})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
