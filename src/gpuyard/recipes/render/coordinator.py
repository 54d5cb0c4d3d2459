"""`Coordinator`: leases a VRAM budget while it is open, and runs render units within it and a RAM budget. A unit that
does not fit beside others is postponed, and tried alone at the end: it is skipped only if it does not fit then."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from gpuyard.errors import AssetError, UserError
from gpuyard.model.units import MB, parse_size
from gpuyard.recipes.render.memory.asset_copies import Copies
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.memory.device_memory import DeviceMemory, PagePool, page_size
from gpuyard.recipes.render.memory.leased_memory import open_device
from gpuyard.recipes.render.memory.read_asset_files import Loader, Source
from gpuyard.recipes.render.planning import assets_and_units as assets
from gpuyard.recipes.render.planning.assets_and_units import (
    Asset,
    BudgetLimits,
    Budgets,
    Future,
    Kind,
    Unit,
    cannot_fit,
    keys_of,
    limits_of,
    split,
    with_keys,
)
from gpuyard.recipes.render.planning.unit_order import choose_order
from gpuyard.recipes.render.render_worker import LabelResults, Render, RunStatus, Worker
from gpuyard.recipes.render.status_file import RenderReport, RenderStatus, SkipReason
from gpuyard.recipes.render.write_outputs import Outputs, OutputWriters


class Coordinator:
    """`vram` and `ram` are sizes such as "44G", or numbers of MB. `working` is VRAM reserved for the renderer (default:
    measured). `actor_budget` limits the part of `vram` that actors take (default: what the scenes leave free). `device`
    is `cuda`, `host` (simulated on the host), or `auto`. `order` is `chosen`, or `manifest` for the given order."""

    def __init__(  # noqa: PLR0913 - settings, most with a default
        self,
        *,
        vram: str | float,
        ram: str | float,
        scene_slots: int = 5,
        workers: int = assets.DEFAULT_WORKERS,
        device: str = "auto",
        loader: Loader | None = None,
        order: str = "chosen",
        working: str | float | None = None,
        actor_budget: str | float | None = None,
    ) -> None:
        budget = _nbytes("vram", vram)
        self._budgets = Budgets(
            vram=budget,
            ram=_nbytes("ram", ram),
            scene_slots=_at_least_one("scene_slots", scene_slots),
            working=budget // assets.WORKING_PART if working is None else _nbytes("working", working, least=0),
            actors=None if actor_budget is None else _nbytes("actor_budget", actor_budget),
        )
        self._workers = _at_least_one("workers", workers)
        if order not in ("chosen", "manifest"):
            raise UserError(f"order is '{order}'", hint="it must be `chosen` or `manifest`")
        self._device, self._loader, self._keeps_order = device, loader or Loader(), order == "manifest"
        self._open = contextlib.ExitStack()
        self._memory: DeviceMemory | None = None
        self._pool: PagePool | None = None
        self._run: RenderRun | None = None
        self._is_busy = threading.Lock()

    def __enter__(self) -> Self:
        if self._memory is not None:
            raise UserError("this coordinator is already open", hint="create another one, with its own budget")
        vram, ram = self._budgets.vram, self._budgets.ram
        self._memory = self._open.enter_context(open_device(vram, self._device, ram_nbytes=ram))
        self._pool = PagePool(self._memory.page, page_size(ram))
        return self

    def __exit__(self, *_: object) -> None:
        self._memory = self._pool = None
        self._open.close()

    def run(
        self, units: Iterable[Unit], render: Render, out_dir: str | Path = "out", *, resume: bool = False
    ) -> RenderReport:
        """Render every label into its own folder in `out_dir`, or report it as skipped."""
        if self._memory is None or self._pool is None:
            raise UserError("this coordinator is not open", hint="write `with Coordinator(…) as c:` around it")
        if not self._is_busy.acquire(blocking=False):
            raise UserError("this coordinator is already running", hint="create another one, with its own budget")
        try:
            units = list(units)
            names = Counter(label.name for unit in units for label in unit.labels)
            for name, count in names.items():
                if count > 1:
                    raise UserError(f"two labels are named '{name}'", hint="give each label its own name")
            # Absolute, because a renderer may change the working directory.
            with Outputs(Path(out_dir).absolute(), resume=resume) as outputs:
                self._run = RenderRun(self._budgets, self._memory, self._pool, outputs)
                return self._run.go(units, render, self._loader, self._workers, keeps_order=self._keeps_order)
        finally:
            self._is_busy.release()

    def status(self) -> RenderStatus | None:
        """Return the status of the current or last run, or None before the first."""
        return None if self._run is None else self._run.status.read()

    def stop(self) -> None:
        """Stop the run after the labels that are being rendered. May be called from any thread."""
        if self._run is not None:
            self._run.status.stop()


class RenderRun:
    """One run. While `go` runs, any thread may read its `status`, and stop the run there."""

    def __init__(self, budgets: Budgets, memory: DeviceMemory, pool: PagePool, outputs: Outputs) -> None:
        self._budgets, self._memory, self._pool, self._outputs = budgets, memory, pool, outputs
        self._sources: dict[str, Source] = {}
        self._assets: dict[str, Asset] = {}
        self._results = LabelResults(outputs)
        self.status = RunStatus(budgets, memory, self._results)

    def go(
        self, units: Iterable[Unit], render: Render, loader: Loader, workers: int, *, keeps_order: bool
    ) -> RenderReport:
        todo = []
        for unit in map(with_keys, units):
            labels = tuple(label for label in unit.labels if not self._outputs.is_complete(label))
            self._results.labels += len(unit.labels)
            self._results.already += len(unit.labels) - len(labels)
            if labels:
                todo.append(Unit(scene=unit.scene, actor=unit.actor, labels=labels))
        readable = self._describe_assets(todo, loader)
        limits = limits_of(self._assets.values(), self._budgets)
        fitting = [unit for unit in readable if self._fits(unit, limits)]
        # So small that all workers are busy until the end.
        ordered = split(fitting, sum(len(unit.labels) for unit in fitting) // (4 * workers))
        if not keeps_order:
            ordered = choose_order(ordered, self._assets, self._budgets, workers=workers)
        self._work_on(ordered, render, workers)
        for unit in self._results.take_postponed():
            self._memory.empty_cache()
            if self._fits(unit, limits_of((self._assets[key] for key in keys_of(unit)), self._budgets)):
                self._work_on([unit], render, 1)
        self.status.end()
        return RenderReport(status=self.status.read(), skipped=tuple(self._results.skips))

    def _describe_assets(self, units: Sequence[Unit], loader: Loader) -> list[Unit]:
        """Read the sizes of all assets from their headers. Return the units without broken assets; skip the others."""
        keys = list(dict.fromkeys(key for unit in units for key in keys_of(unit)))
        broken: dict[str, AssetError] = {}

        def describe(key: str) -> None:
            kind, path = assets.parts_of(key)
            try:
                source = loader.scene(path) if kind is Kind.SCENE else loader.actor(path)
            except AssetError as error:
                broken[key] = error
                return
            # The estimate for an empty file is 0, but a loader may return arrays for it.
            nbytes, frame_nbytes = max(1, source.nbytes), max(1, source.frame_nbytes)
            self._sources[key] = source
            self._assets[key] = Asset(key=key, kind=kind, nbytes=nbytes, frame_nbytes=frame_nbytes)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(describe, keys))
        readable = []
        for unit in units:
            errors = [broken[key] for key in keys_of(unit) if key in broken]
            if errors:
                self._results.skip(unit, unit.labels, SkipReason(kind="asset", reason=errors[0].message))
            else:
                readable.append(unit)
        return readable

    def _fits(self, unit: Unit, limits: BudgetLimits) -> bool:
        """Whether the unit fits into the limits. If not, it is postponed, or skipped if it was tried alone."""
        own = [self._assets[key] for key in keys_of(unit)]
        reasons = (cannot_fit(asset, limits, self._pool.rounded) for asset in own)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            sizes = {str(asset.kind): asset.nbytes for asset in own}
            self._results.postpone(unit, unit.labels, SkipReason(kind="too-large", reason=reason, sizes=sizes))
        return reason is None

    def _work_on(self, units: Sequence[Unit], render: Render, workers: int) -> None:
        keys = sorted({key for unit in units for key in keys_of(unit)})
        copies = {key: Copies(self._assets[key], self._sources[key], self._memory, self._pool) for key in keys}
        rounded, counts = self._pool.rounded, self.status.counts
        tiers = Tiers(self._memory, self._budgets, copies, Future(units), rounded=rounded, counts=counts)
        writers = OutputWriters()
        shared = (tiers, self._pool, render, self._outputs, writers, self._results)
        all_workers = [Worker(number, *shared) for number in range(workers)]
        self.status.start(tiers, all_workers)
        try:
            with writers, ThreadPoolExecutor(max(1, workers), "gpuyard-worker") as pool:
                try:
                    for run in [pool.submit(worker.run) for worker in all_workers]:
                        # Python handles a signal that arrives just before a wait only when that wait ends.
                        while not wait((run,), 1.0).done:
                            pass
                        run.result()
                except BaseException:  # of a worker, or Ctrl-C: the others stop after their current labels
                    tiers.stop()
                    raise
        finally:
            tiers.close()
            self._assets.update({key: copy.asset for key, copy in copies.items()})


def _nbytes(name: str, size: str | float, least: int = 1) -> int:
    megabytes = parse_size(size) if isinstance(size, str) else float(size)
    if not least <= megabytes * MB < 1 << 60:
        raise UserError(f"{name} is {size}", hint='write it as "44G", or as a number of MB')
    return int(megabytes * MB)


def _at_least_one(name: str, number: int) -> int:
    if number < 1:
        raise UserError(f"{name} is {number}", hint="it must be at least 1")
    return number
