"""One run over render units: skip complete outputs, choose the order, run the workers, retry what ran out of memory.

A unit that does not fit beside others is postponed, and tried alone on the device at the end: it is skipped only if it
does not fit then.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import msgspec

from gpuyard.errors import AssetError
from gpuyard.residency.loading.asset_loader import Loader, Source
from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.residency.memory.page_pool import PagePool
from gpuyard.residency.planning.assets import Asset, Budgets, Kind, key_of, parts_of
from gpuyard.residency.planning.budget_limits import BudgetLimits, cannot_fit, limits_of
from gpuyard.residency.planning.render_units import Unit, split
from gpuyard.residency.planning.unit_order import choose_order
from gpuyard.residency.planning.upcoming_use import Future, keys_of
from gpuyard.residency.running.label_results import LabelResults
from gpuyard.residency.running.output_folders import Outputs
from gpuyard.residency.running.render_worker import Render, Worker
from gpuyard.residency.running.run_status import RunStatus
from gpuyard.residency.running.status_file import RenderReport, RenderStatus, SkipReason
from gpuyard.residency.tiers.asset_copies import Copies
from gpuyard.residency.tiers.asset_tiers import Tiers

# Python handles a signal that arrives just before a wait only when that wait ends.
_HANDLE_SIGNALS_EVERY_S = 1.0
_DESCRIBERS = 8
_UNITS_PER_WORKER = 4


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    budgets: Budgets
    workers: int = 4
    keeps_order: bool = False


class RenderRun:
    """`status` and `stop` may be called by any thread while `go` runs."""

    def __init__(self, settings: RunSettings, memory: DeviceMemory, pool: PagePool, outputs: Outputs) -> None:
        self._settings, self._memory, self._pool = settings, memory, pool
        self._outputs = outputs
        self._sources: dict[str, Source] = {}
        self._assets: dict[str, Asset] = {}
        self._results = LabelResults(outputs)
        self._status = RunStatus(settings.budgets, memory, self._results)

    def go(self, units: Iterable[Unit], render: Render, loader: Loader) -> RenderReport:
        todo = self._without_complete([_with_keys(unit) for unit in units])
        readable = self._describe_assets(todo, loader)
        self._work_on(self._in_order(self._without_too_large(readable)), render, self._settings.workers)
        for unit in self._results.take_postponed():
            self._work_alone(unit, render)
        self._status.end()
        return RenderReport(status=self.status(), skipped=tuple(self._results.skips))

    def stop(self) -> None:
        """Stop after the labels that are being rendered."""
        self._status.stop()

    def status(self) -> RenderStatus:
        return self._status.status()

    def _without_complete(self, units: Sequence[Unit]) -> list[Unit]:
        left = []
        for unit in units:
            labels = tuple(label for label in unit.labels if not self._outputs.is_complete(label))
            self._results.expect(len(unit.labels), already=len(unit.labels) - len(labels))
            if labels:
                left.append(Unit(scene=unit.scene, actor=unit.actor, labels=labels))
        return left

    def _describe_assets(self, units: Sequence[Unit], loader: Loader) -> list[Unit]:
        """Read the sizes of all assets from their headers. Return the units without broken assets; skip the others."""
        keys = list(dict.fromkeys(key for unit in units for key in keys_of(unit)))
        with ThreadPoolExecutor(_DESCRIBERS) as pool:
            found = dict(zip(keys, pool.map(lambda key: _source(key, loader), keys), strict=True))
        for key, source in found.items():
            if not isinstance(source, AssetError):
                self._sources[key], self._assets[key] = source, _asset(key, source)
        readable = []
        for unit in units:
            broken = [error for key in keys_of(unit) if isinstance(error := found[key], AssetError)]
            if broken:
                self._results.skip(unit, unit.labels, SkipReason(kind="asset", reason=broken[0].message))
            else:
                readable.append(unit)
        return readable

    def _without_too_large(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units that fit; postpone the others."""
        limits = limits_of(self._assets.values(), self._settings.budgets)
        left = []
        for unit in units:
            reason = self._why_not(unit, limits)
            if reason is None:
                left.append(unit)
            else:
                self._results.postpone(unit, unit.labels, self._too_large(unit, reason))
        return left

    def _too_large(self, unit: Unit, reason: str) -> SkipReason:
        sizes = {str(self._assets[key].kind): self._assets[key].nbytes for key in keys_of(unit)}
        return SkipReason(kind="too-large", reason=reason, sizes=sizes)

    def _why_not(self, unit: Unit, limits: BudgetLimits) -> str | None:
        reasons = (cannot_fit(self._assets[key], limits, self._pool.rounded) for key in keys_of(unit))
        return next((reason for reason in reasons if reason is not None), None)

    def _in_order(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units in the order of work, split so small that all workers are busy until the end."""
        workers = self._settings.workers
        small = split(units, sum(len(unit.labels) for unit in units) // (_UNITS_PER_WORKER * workers))
        if self._settings.keeps_order:
            return small
        return choose_order(small, self._assets, self._settings.budgets, workers=workers)

    def _work_on(self, units: Sequence[Unit], render: Render, workers: int) -> None:
        keys = sorted({key for unit in units for key in keys_of(unit)})
        copies = {key: Copies(self._assets[key], self._sources[key], self._memory, self._pool) for key in keys}
        tiers = Tiers(self._memory, self._settings.budgets, copies, Future(units), rounded=self._pool.rounded)
        all_workers = [
            Worker(number, tiers, self._pool, render, self._outputs, self._results) for number in range(workers)
        ]
        self._status.start(tiers, all_workers)
        try:
            _run_all(all_workers, tiers)
        finally:
            tiers.close()
            self._status.keep_counts()
            self._assets.update({key: copy.asset for key, copy in copies.items()})

    def _work_alone(self, unit: Unit, render: Render) -> None:
        assets = [self._assets[key] for key in keys_of(unit)]
        reason = self._why_not(unit, limits_of(assets, self._settings.budgets))
        if reason is not None:
            self._results.skip(unit, unit.labels, self._too_large(unit, reason))
            return
        self._memory.empty_cache()
        self._work_on([unit], render, 1)


def _run_all(workers: Sequence[Worker], tiers: Tiers) -> None:
    """Run all workers to their end. An error of one, or Ctrl-C, stops the others after their current labels."""
    with ThreadPoolExecutor(max(1, len(workers)), "gpuyard-worker") as pool:
        try:
            for run in [pool.submit(worker.run) for worker in workers]:
                while not wait((run,), _HANDLE_SIGNALS_EVERY_S).done:
                    pass
                run.result()
        except BaseException:
            tiers.stop()
            raise


def _with_keys(unit: Unit) -> Unit:
    """Return the unit with the keys of its assets in place of their paths."""
    scene = None if unit.scene is None else key_of(Kind.SCENE, unit.scene)
    actor = None if unit.actor is None else key_of(Kind.ACTOR, unit.actor)
    return Unit(scene=scene, actor=actor, labels=unit.labels)


def _source(key: str, loader: Loader) -> Source | AssetError:
    kind, path = parts_of(key)
    try:
        return loader.scene(path) if kind is Kind.SCENE else loader.actor(path)
    except AssetError as error:
        return error


def _asset(key: str, source: Source) -> Asset:
    # The estimate for an empty file is 0, but a loader may return arrays for it.
    nbytes, frame_nbytes = max(1, source.nbytes), max(1, source.frame_nbytes)
    return Asset(key=key, kind=parts_of(key)[0], nbytes=nbytes, frame_nbytes=frame_nbytes)
