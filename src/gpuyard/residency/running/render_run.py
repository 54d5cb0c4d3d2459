"""One run over the units: what is there already, in which order, by whom, and what follows when memory was short.

What does not fit beside others is set aside, and tried alone on the device when all else is done: only what does not
fit then is skipped.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

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
from gpuyard.residency.running.label_results import LabelResults, SkipReason
from gpuyard.residency.running.output_folders import Outputs
from gpuyard.residency.running.render_worker import Render, Worker
from gpuyard.residency.running.run_status import RunStatus
from gpuyard.residency.running.status_file import RenderReport, RenderStatus
from gpuyard.residency.tiers.asset_copies import Copies
from gpuyard.residency.tiers.asset_tiers import Tiers

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
        self._tally = LabelResults(outputs)
        self._standing = RunStatus(settings.budgets, memory, self._tally)

    def go(self, units: Iterable[Unit], render: Render, loader: Loader) -> RenderReport:
        todo = self._without_complete([_keyed(unit) for unit in units])
        whole = self._described(todo, loader)
        self._work_on(self._in_order(self._that_fit(whole)), render, self._settings.workers)
        for unit in self._tally.take_aside():
            self._do_alone(unit, render)
        self._standing.end()
        return RenderReport(status=self.status(), skipped=tuple(self._tally.skips))

    def stop(self) -> None:
        """Labels in hand are finished."""
        self._standing.stop()

    def status(self) -> RenderStatus:
        return self._standing.status()

    # Before the work

    def _without_complete(self, units: Sequence[Unit]) -> list[Unit]:
        left = []
        for unit in units:
            labels = tuple(label for label in unit.labels if not self._outputs.is_complete(label))
            self._tally.expect(len(unit.labels), already=len(unit.labels) - len(labels))
            if labels:
                left.append(Unit(scene=unit.scene, actor=unit.actor, labels=labels))
        return left

    def _described(self, units: Sequence[Unit], loader: Loader) -> list[Unit]:
        """Finds the sizes of all assets, from their headers. Units with a broken one are skipped."""
        keys = list(dict.fromkeys(key for unit in units for key in keys_of(unit)))
        with ThreadPoolExecutor(_DESCRIBERS) as pool:
            found = dict(zip(keys, pool.map(lambda key: _source(key, loader), keys), strict=True))
        for key, source in found.items():
            if not isinstance(source, AssetError):
                self._sources[key], self._assets[key] = source, _asset(key, source)
        whole = []
        for unit in units:
            broken = [error for key in keys_of(unit) if isinstance(error := found[key], AssetError)]
            if broken:
                self._tally.skipped(unit, unit.labels, SkipReason(kind="asset", reason=broken[0].message))
            else:
                whole.append(unit)
        return whole

    def _that_fit(self, units: Sequence[Unit]) -> list[Unit]:
        """The others are set aside."""
        limits = limits_of(self._assets.values(), self._settings.budgets)
        left = []
        for unit in units:
            reason = self._why_not(unit, limits)
            if reason is None:
                left.append(unit)
            else:
                self._tally.set_aside(unit, unit.labels, self._too_large(unit, reason))
        return left

    def _too_large(self, unit: Unit, reason: str) -> SkipReason:
        sizes = {str(self._assets[key].kind): self._assets[key].nbytes for key in keys_of(unit)}
        return SkipReason(kind="too-large", reason=reason, sizes=sizes)

    def _why_not(self, unit: Unit, limits: BudgetLimits) -> str | None:
        reasons = (cannot_fit(self._assets[key], limits, self._pool.rounded) for key in keys_of(unit))
        return next((reason for reason in reasons if reason is not None), None)

    def _in_order(self, units: Sequence[Unit]) -> list[Unit]:
        """In units small enough that all workers have something to do until the end."""
        workers = self._settings.workers
        small = split(units, sum(len(unit.labels) for unit in units) // (_UNITS_PER_WORKER * workers))
        if self._settings.keeps_order:
            return small
        return choose_order(small, self._assets, self._settings.budgets, workers=workers)

    # The work

    def _work_on(self, units: Sequence[Unit], render: Render, workers: int) -> None:
        keys = sorted({key for unit in units for key in keys_of(unit)})
        copies = {key: Copies(self._assets[key], self._sources[key], self._memory, self._pool) for key in keys}
        tiers = Tiers(self._memory, self._settings.budgets, copies, Future(units), rounded=self._pool.rounded)
        crew = [Worker(number, tiers, self._pool, render, self._outputs, self._tally) for number in range(workers)]
        self._standing.begin(tiers, crew)
        try:
            _all_at_once(crew, tiers)
        finally:
            tiers.close()
            self._standing.keep()
            self._assets.update({key: copy.asset for key, copy in copies.items()})

    def _do_alone(self, unit: Unit, render: Render) -> None:
        assets = [self._assets[key] for key in keys_of(unit)]
        reason = self._why_not(unit, limits_of(assets, self._settings.budgets))
        if reason is not None:
            self._tally.skipped(unit, unit.labels, self._too_large(unit, reason))
            return
        self._memory.empty_cache()
        self._work_on([unit], render, 1)


def _all_at_once(workers: Sequence[Worker], tiers: Tiers) -> None:
    """Until each has finished. What one of them fails with, or Ctrl-C, ends the others after the labels in hand."""
    with ThreadPoolExecutor(max(1, len(workers)), "gpuyard-worker") as pool:
        try:
            for done in [pool.submit(worker.run) for worker in workers]:
                done.result()
        except BaseException:
            tiers.stop()
            raise


def _keyed(unit: Unit) -> Unit:
    """With the keys of its assets for their paths."""
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
    # An empty file's estimate is nothing, and what a loader makes of it need not be.
    nbytes, frame_nbytes = max(1, source.nbytes), max(1, source.frame_nbytes)
    return Asset(key=key, kind=parts_of(key)[0], nbytes=nbytes, frame_nbytes=frame_nbytes)
