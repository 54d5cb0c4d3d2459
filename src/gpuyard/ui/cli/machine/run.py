"""`gpuyard run`: runs a program on its own GPUs as soon as they are free."""

import contextlib
import math
import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from gpuyard.core.scheduling.wait_reasons import Reason, describe_wait, relevant_reasons
from gpuyard.core.units import parse_size
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli.rich_output import seconds

if TYPE_CHECKING:
    from gpuyard.core.lease import Lease, Need
    from gpuyard.core.snapshot import Device, Snapshot
    from gpuyard.leases.ledger import HeldLease

# Ends of leases are noticed at once; memory and load of other processes only when polled.
_POLL_S = 1.0
_PERCENT = click.FloatRange(0, 100)
_AMOUNT = click.FloatRange(min=0)


class _RunOptions(Struct, frozen=True, kw_only=True):
    """The options of the command line, and the program."""

    gpus: int
    vram_mb: float | None
    exclusive: bool
    device: str | None
    max_cpu: float | None
    min_free_mem_mb: float | None
    max_gpu: float | None
    max_gpu_mem_mb: float | None
    max_power_w: float | None
    wait_s: float | None
    label: str | None
    program: tuple[str, ...]


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="Number of GPUs; 0 for none, only the limits on CPU and RAM.")  # fmt: skip
@click.option("--vram", "vram_mb", type=parse_size, metavar="SIZE",
              help="Share GPUs, reserving this much memory on each. [an idle GPU alone]")  # fmt: skip
@click.option("--exclusive", is_flag=True, help="With --vram: alone on a GPU with that much free memory.")
@click.option("--device", metavar="LIST", help="Only these GPUs, such as 0,2 or a GPU's id.")
@click.option("--max-cpu", type=_PERCENT, metavar="P", help="Start only at up to P percent CPU use.")
@click.option("--min-free-mem-mb", type=_AMOUNT, metavar="M", help="Start only with at least M MB of RAM available.")
@click.option("--max-gpu", type=_PERCENT, metavar="P", help="Only GPUs at up to P percent use.")
@click.option("--max-gpu-mem-mb", type=_AMOUNT, metavar="M", help="Only GPUs with up to M MB of memory used.")
@click.option("--max-power-w", type=_AMOUNT, metavar="W", help="Only GPUs that draw up to W watts.")
@seconds("wait", None, 0.0, "Give up after this time. [no limit]")
@click.option("--label", metavar="TEXT", help="Label that users see who wait for these GPUs. [the program's name]")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
def command(**typed: Any) -> int:
    """Run a program on its own GPUs as soon as they are free.

    Exits with the program's status (128 plus the signal number if a signal ended it), 124 if the GPUs were not free in
    time, 126 or 127 if the program cannot be executed. The GPUs stay reserved until every process that the program
    started has ended, even if gpuyard itself is killed.
    """
    from gpuyard.engines.foreground import ForegroundProgram, run_program, signals_for_the_main_thread
    from gpuyard.leases.ledger import open_ledger
    from gpuyard.probes.local_machine import snapshot
    from gpuyard.wait_for_devices import enclosing_lease

    options = _RunOptions(**typed)
    _check(options)
    path, status = _find_program(options.program[0])
    if status:
        return status
    with signals_for_the_main_thread():
        seen = snapshot()
    need = _need(options, seen)
    around = enclosing_lease(open_ledger(), need)
    if around is not None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program must not inherit that
        os.execve(path, options.program, _environment(around, seen))  # noqa: S606 - the enclosing command keeps the lease
    held = _wait(options, need, seen)
    program = ForegroundProgram(path=path, arguments=options.program, environment=_environment(held.lease, seen))
    return run_program(program, held.path, held.descriptor)


def _environment(lease: "Lease", seen: "Snapshot") -> dict[str, str]:
    from gpuyard.config import load_config
    from gpuyard.leases.measured_usage import LEASE_VARIABLE
    from gpuyard.visible_devices import visible_variables

    devices = [device for share in lease.shares if (device := seen.device(share.device_id))]
    visible = visible_variables(devices, seen, by_uuid=load_config().devices.shows_uuids)
    return {**os.environ, **visible, LEASE_VARIABLE: lease.id}


def _check(options: _RunOptions) -> None:
    if not options.program:
        raise UserError("there is no program to run", hint="write it last: gpuyard run --vram 8G -- python train.py")
    if options.vram_mb is not None and options.vram_mb <= 0:
        raise UserError("--vram is 0", hint="give at least 1M, or leave it out for a whole GPU")
    if options.gpus == 0 and (options.vram_mb is not None or options.exclusive or options.device is not None):
        raise UserError("--gpus 0 asks for no GPU, but other options need one", hint="leave out one or the other")


def _find_program(name: str) -> tuple[str, int]:
    """Return the path, or the exit status that shells use. Called before the wait for GPUs, which may be long."""
    from gpuyard.engines.foreground import CANNOT_EXECUTE, NOT_FOUND

    found = shutil.which(name)
    if found is not None:
        return found, 0
    places = [name] if os.sep in name else [os.path.join(place, name) for place in os.get_exec_path()]
    is_there = bool(name) and any(os.path.exists(place) for place in places)
    complaint = "it cannot be executed" if is_there else "there is no such program"
    click.echo(f"gpuyard: {name}: {complaint}", err=True)
    return "", CANNOT_EXECUTE if is_there else NOT_FOUND


def _need(options: _RunOptions, seen: "Snapshot") -> "Need":
    from gpuyard.config import load_config
    from gpuyard.core.device_names import check_possible
    from gpuyard.core.lease import FixedMemory, Need, WholeDevice

    banned = load_config().devices.banned_ids(seen)
    only = [device for device in _candidates(options, seen) if device.id not in banned]
    if options.gpus and not only and options.device is None:
        raise EnvironmentFault("no usable GPU", hint="`gpuyard doctor` says why; --gpus 0 runs without a GPU")
    check_possible(options.gpus, options.vram_mb, only)
    vram_mb = options.vram_mb
    return Need(
        devices=options.gpus,
        memory=WholeDevice(vram_mb) if options.exclusive or vram_mb is None else FixedMemory(vram_mb),
        only=tuple(device.id for device in only),
        banned=banned,
        max_utilization_percent=options.max_gpu,
        max_power_w=options.max_power_w,
        max_memory_used_mb=options.max_gpu_mem_mb,
        max_cpu_percent=options.max_cpu,
        min_host_memory_mb=options.min_free_mem_mb,
    )


def _candidates(options: _RunOptions, seen: "Snapshot") -> list["Device"]:
    """Return the GPUs of --device, or those that CUDA_VISIBLE_DEVICES of the calling shell allows."""
    from gpuyard.core.device_names import find_devices
    from gpuyard.visible_devices import visible_devices

    if options.gpus == 0:
        return []
    if options.device is None:
        return visible_devices(seen)
    names = [name.strip() for name in options.device.split(",") if name.strip()]
    if not names:
        raise UserError("--device names no GPU", hint="write it as 0,2 or leave it out")
    return [device for device_id in dict.fromkeys(find_devices(names, seen)) if (device := seen.device(device_id))]


def _wait(options: _RunOptions, need: "Need", seen: "Snapshot") -> "HeldLease":
    from gpuyard.config import load_config
    from gpuyard.leases.ledger import open_ledger
    from gpuyard.probes.local_machine import snapshot
    from gpuyard.wait_for_devices import Acquisition

    label = options.label or os.path.basename(options.program[0])
    bound = load_config().queue.max_foreign_load_percent
    acquisition = Acquisition(open_ledger(), snapshot, need, label=label, max_foreign_load_percent=bound)
    line = _WaitingLine(need, seen)
    try:
        wait_s = math.inf if options.wait_s is None else options.wait_s
        return acquisition.wait(wait_s, _POLL_S, line.show)
    finally:
        line.clear()


class _WaitingLine:
    """One line that says what is missing and who holds it: updated in place on a terminal, a new line in a pipe."""

    def __init__(self, need: "Need", seen: "Snapshot") -> None:
        self._need = need
        self._names = {device.id: str(device.index) for device in seen.devices if device.index is not None}
        self._in_place = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown: object = None

    def show(self, reasons: tuple[Reason, ...]) -> None:
        shown = relevant_reasons(self._need, reasons)
        line = f"gpuyard: {describe_wait(self._need, shown, self._names)}"
        if self._in_place:
            width = max(20, shutil.get_terminal_size().columns)
            self._print(line, f"\r{line[: width - 1]}\x1b[K")
        else:
            # Figures change at each poll; that alone is not worth a new line in a log.
            what = [(reason.kind, reason.device_id, frozenset(reason.holders)) for reason in shown]
            self._print(what, f"{line}\n")

    def clear(self) -> None:
        if self._in_place and self._shown is not None:
            self._print(None, "\r\x1b[K")

    def _print(self, what: object, text: str) -> None:
        if what != self._shown:
            self._shown = what
            with contextlib.suppress(OSError):  # stderr is closed; the program may still be useful
                click.echo(text, nl=False, err=True)
