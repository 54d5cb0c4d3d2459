"""The results of a run's labels, and its status, from its tiers, its workers and these results."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.residency.planning.assets import Budgets, Kind, parts_of, path_of
from gpuyard.residency.planning.render_units import Label, Unit
from gpuyard.residency.running import status_file
from gpuyard.residency.running.output_folders import Outputs
from gpuyard.residency.running.status_file import RenderStatus, Skip, SkipReason, TransferCounts, WorkerStatus
from gpuyard.residency.tiers.asset_tiers import Tiers

if TYPE_CHECKING:
    from gpuyard.residency.running.render_worker import Worker


class LabelResults:
    """The results of all workers: each label ends once, as rendered or skipped; it may be postponed before."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._lock = threading.Lock()
        self._postponed: list[Unit] = []
        self._is_last_try = False
        self.skips = outputs.skips
        self.labels = self.already = self.rendered = 0

    def count_rendered(self) -> None:
        with self._lock:
            self.rendered += 1

    def skip(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        reason = msgspec.structs.asdict(why)
        for label in labels:
            skip = Skip(label=label.name, scene=path_of(unit.scene), actor=path_of(unit.actor), **reason)
            self._outputs.skip(skip)

    def postpone(self, unit: Unit, labels: Sequence[Label], why: SkipReason) -> None:
        """Postpone the labels, to be tried alone at the end; skip them if this is that last try."""
        if self._is_last_try:
            self.skip(unit, labels, why)
        elif labels:
            with self._lock:
                self._postponed.append(Unit(scene=unit.scene, actor=unit.actor, labels=tuple(labels)))

    def take_postponed(self) -> list[Unit]:
        """Return the postponed labels, grouped by their assets. From now on, labels are skipped, not postponed."""
        self._is_last_try = True
        labels: dict[tuple[str | None, str | None], list[Label]] = {}
        for unit in self._postponed:
            labels.setdefault((unit.scene, unit.actor), []).extend(unit.labels)
        return [Unit(scene=scene, actor=actor, labels=tuple(some)) for (scene, actor), some in labels.items()]


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

    def start(self, tiers: Tiers, workers: "Sequence[Worker]") -> None:
        with self._lock:
            self._tiers, self._workers = tiers, workers
            if self._is_stopped:
                tiers.stop()

    def close_tiers(self) -> None:
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

    def read(self) -> RenderStatus:
        with self._lock:
            tiers, counts = self._tiers, self._sum_counts()
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
            vram=status_file.TierStatus(
                budget=self._budgets.vram,
                left=max(0, self._budgets.vram - max(in_vram, used)),
                assets=in_vram,
                peak_assets=max(counts.peak_vram, in_vram),  # in_vram was read a moment later
                allocator=used,
                peak_allocator=self._memory.peak(),
            ),
            ram=status_file.TierStatus(
                budget=self._budgets.ram,
                left=max(0, self._budgets.ram - in_ram),
                assets=in_ram,
                peak_assets=max(counts.peak_ram, in_ram),
            ),
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
            moved=msgspec.convert(counts, status_file.MovedStatus, from_attributes=True),
            counts=msgspec.convert(counts, status_file.CountsStatus, from_attributes=True),
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
