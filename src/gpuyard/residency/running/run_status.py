"""Build the status of a run from its tiers, its workers and its results."""

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.residency.planning.assets import Budgets, Kind, path_of
from gpuyard.residency.running.label_results import LabelResults
from gpuyard.residency.running.render_worker import Worker
from gpuyard.residency.running.status_file import CountsStatus, MovedStatus, RenderStatus, TierStatus, WorkerStatus
from gpuyard.residency.tiers.asset_tiers import Tiers
from gpuyard.residency.tiers.transfer_counts import TransferCounts


class RunStatus:
    """A run may have several tiers one after the other: their counts are added up."""

    def __init__(self, budgets: Budgets, memory: DeviceMemory, results: LabelResults) -> None:
        self._budgets, self._memory, self._results = budgets, memory, results
        self._lock = threading.Lock()
        self._tiers: Tiers | None = None
        self._workers: Sequence[Worker] = ()
        self._earlier_counts = TransferCounts()
        self._state = "running"
        self._started, self._started_at = time.monotonic(), _now()
        self._is_stopped = False

    def start(self, tiers: Tiers, workers: Sequence[Worker]) -> None:
        with self._lock:
            self._tiers, self._workers = tiers, workers
            if self._is_stopped:
                tiers.stop()

    def keep_counts(self) -> None:
        """Keep the counts of tiers that were closed."""
        with self._lock:
            self._earlier_counts, self._tiers = self._sum_counts(), None

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._tiers is not None:
                self._tiers.stop()

    def end(self) -> None:
        self._state = "interrupted" if self._is_stopped else "finished"

    def _sum_counts(self) -> TransferCounts:
        return self._earlier_counts if self._tiers is None else self._earlier_counts.with_more(self._tiers.counts)

    def status(self) -> RenderStatus:
        with self._lock:
            tiers, counts = self._tiers, self._sum_counts()
            in_vram, in_ram = (0, 0) if tiers is None else (tiers.vram_nbytes(), tiers.ram_nbytes())
            workers = tuple(self._worker(worker.status) for worker in self._workers)
        elapsed, results = time.monotonic() - self._started, self._results
        return RenderStatus(
            state=self._state,
            started_at=self._started_at,
            now=_now(),
            elapsed_s=round(elapsed, 3),
            left_s=round(results.left * elapsed / results.rendered, 1) if results.rendered else None,
            labels=results.labels,
            rendered=results.rendered,
            already=results.already,
            skipped=len(results.skips),
            vram=TierStatus(
                budget=self._budgets.vram,
                assets=in_vram,
                peak_assets=max(counts.peak_vram, in_vram),  # in_vram was read a moment later
                allocator=self._memory.used(),
                peak_allocator=self._memory.peak(),
            ),
            ram=TierStatus(
                budget=self._budgets.ram,
                assets=in_ram,
                peak_assets=max(counts.peak_ram, in_ram),
            ),
            scene_slots=self._budgets.scene_slots,
            scenes=() if tiers is None else tiers.paths_in(Kind.SCENE),
            actors=() if tiers is None else tiers.paths_in(Kind.ACTOR),
            scenes_in_ram=() if tiers is None else tiers.paths_in(Kind.SCENE, is_ram=True),
            actors_in_ram=() if tiers is None else tiers.paths_in(Kind.ACTOR, is_ram=True),
            moved=msgspec.convert(counts, MovedStatus, from_attributes=True),
            counts=msgspec.convert(counts, CountsStatus, from_attributes=True),
            stalls_s={cause: round(seconds, 3) for cause, seconds in counts.stalls_s.items()},
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
