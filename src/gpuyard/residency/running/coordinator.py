"""`Coordinator`: leases a VRAM budget while it is open, and runs render units within it and a RAM budget."""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from gpuyard.core.units import parse_size
from gpuyard.errors import UserError
from gpuyard.residency.loading.asset_loader import Loader
from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.residency.memory.open_memory import open_device
from gpuyard.residency.memory.page_pool import PagePool, page_size
from gpuyard.residency.planning.assets import WORKING_PART, Budgets
from gpuyard.residency.planning.render_units import Unit
from gpuyard.residency.running.output_folders import Outputs
from gpuyard.residency.running.render_run import RenderRun, RunSettings
from gpuyard.residency.running.render_worker import Render
from gpuyard.residency.running.status_file import RenderReport, RenderStatus

_MB = 1048576


class Coordinator:
    """`vram` and `ram` are sizes such as "44G", or numbers of MB.

    `working` is VRAM reserved for the renderer; without it, the renderer's use is measured. `device` is `cuda`, `host`
    (simulated on the host), or `auto`. `order` is `chosen`, or `manifest` for the given order.
    """

    def __init__(  # noqa: PLR0913 - settings, most with a default
        self,
        *,
        vram: str | float,
        ram: str | float,
        scene_slots: int = 5,
        workers: int = 4,
        device: str = "auto",
        loader: Loader | None = None,
        order: str = "chosen",
        working: str | float | None = None,
    ) -> None:
        budget = _nbytes("vram", vram)
        self._settings = RunSettings(
            budgets=Budgets(
                vram=budget,
                ram=_nbytes("ram", ram),
                scene_slots=_at_least_one("scene_slots", scene_slots),
                working=budget // WORKING_PART if working is None else _nbytes("working", working, least=0),
            ),
            workers=_at_least_one("workers", workers),
            keeps_order=_is_manifest(order),
        )
        self._device, self._loader = device, loader or Loader()
        self._open = contextlib.ExitStack()
        self._memory: DeviceMemory | None = None
        self._pool: PagePool | None = None
        self._run: RenderRun | None = None
        self._is_busy = threading.Lock()

    def __enter__(self) -> Self:
        """Wait until the budget can be leased."""
        if self._memory is not None:
            raise UserError("this coordinator is already open", hint="create another one, with its own budget")
        budgets = self._settings.budgets
        self._memory = self._open.enter_context(open_device(budgets.vram, self._device))
        self._pool = PagePool(self._memory.page, page_size(budgets.ram))
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
            _check_names(units)
            # Absolute, because a renderer may change the working directory.
            with Outputs(Path(out_dir).absolute(), resume=resume) as outputs:
                self._run = RenderRun(self._settings, self._memory, self._pool, outputs)
                return self._run.go(units, render, self._loader)
        finally:
            self._is_busy.release()

    def status(self) -> RenderStatus | None:
        """Return the status of the current or last run, or None before the first."""
        return None if self._run is None else self._run.status()

    def stop(self) -> None:
        """Stop the run after the labels that are being rendered. May be called from any thread."""
        if self._run is not None:
            self._run.stop()


def _check_names(units: Iterable[Unit]) -> None:
    seen = set()
    for label in (label for unit in units for label in unit.labels):
        if label.name in seen:
            raise UserError(f"two labels are named '{label.name}'", hint="give each label its own name")
        seen.add(label.name)


def _nbytes(name: str, size: str | float, least: int = 1) -> int:
    megabytes = parse_size(size) if isinstance(size, str) else float(size)
    if not least <= megabytes * _MB < 1 << 60:
        raise UserError(f"{name} is {size}", hint='write it as "44G", or as a number of MB')
    return int(megabytes * _MB)


def _at_least_one(name: str, number: int) -> int:
    if number < 1:
        raise UserError(f"{name} is {number}", hint="it must be at least 1")
    return number


def _is_manifest(order: str) -> bool:
    if order not in ("chosen", "manifest"):
        raise UserError(f"order is '{order}'", hint="it must be `chosen` or `manifest`")
    return order == "manifest"
