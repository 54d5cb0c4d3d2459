"""`gpuyard run`: runs a program on its own GPUs as soon as they are free."""

import contextlib
import math
import os
import shutil
import signal
import sys
from typing import Any

import click
from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.core.device_names import check_possible, choose_vendor, find_devices, refuse_while_silent
from gpuyard.core.job.submit_options import MAX_PRIORITY, SUBMIT_OPTIONS
from gpuyard.core.job.thread_variables import thread_variables
from gpuyard.core.lease import FixedMemory, HostShare, Lease, Need, WholeDevice, check_several
from gpuyard.core.memory.preallocation import growth_variables
from gpuyard.core.scheduling.host_capacity import check_host
from gpuyard.core.snapshot import Device, Snapshot, Vendor
from gpuyard.core.units import parse_size
from gpuyard.engines import foreground
from gpuyard.engines.common.spawn_program import CANNOT_EXECUTE, NOT_FOUND
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.held_ram import ProgramRamWatch
from gpuyard.leases.ledger import HeldLease, Ledger, open_ledger
from gpuyard.leases.measured_usage import LEASE_VARIABLE
from gpuyard.leases.neighbour_note import due_note
from gpuyard.leases.neighbours import announce
from gpuyard.probes.local_machine import snapshot
from gpuyard.ui.cli.rich_output import seconds
from gpuyard.ui.cli.terminal import is_terminal, note
from gpuyard.visible_devices import visible_devices, visible_variables
from gpuyard.wait_for_devices import Acquisition, WaitMessages, enclosing_lease, print_to_stderr

# Ends of leases are noticed at once; memory and load of other processes only when polled.
_POLL_S = 1.0
_PERCENT = click.FloatRange(0, 100)
_AMOUNT = click.FloatRange(min=0)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--gpus", type=click.IntRange(min=0), default=1, show_default=True, metavar="N",
              help="Number of GPUs; 0 for none, only CPUs and RAM.")  # fmt: skip
@click.option("--vram", "vram_mb", type=parse_size, metavar="SIZE",
              help="Share GPUs, reserving this much memory on each. [an idle GPU alone]")  # fmt: skip
@click.option("--exclusive", is_flag=True, help="With --vram: alone on a GPU with that much free memory.")
@click.option("--ram", "ram_mb", type=parse_size, metavar="SIZE", help=SUBMIT_OPTIONS["ram"].help)
@click.option("--cpus", type=click.IntRange(min=1, max=100_000), metavar="N", help=SUBMIT_OPTIONS["cpus"].help)
@click.option("--device", metavar="LIST", help=SUBMIT_OPTIONS["device"].help)
@click.option("--vendor", type=click.Choice(SUBMIT_OPTIONS["vendor"].choices), metavar="NAME",
              help=SUBMIT_OPTIONS["vendor"].help_with_default)  # fmt: skip
@click.option("--linked", is_flag=True, help=SUBMIT_OPTIONS["linked"].help)
@click.option("--same-node", is_flag=True, help=SUBMIT_OPTIONS["same-node"].help)
@click.option("--max-cpu", type=_PERCENT, metavar="P", help="Start only at up to P percent CPU use.")
@click.option("--min-free-mem-mb", type=_AMOUNT, metavar="M", help="Start only with at least M MB of RAM available.")
@click.option("--max-gpu", type=_PERCENT, metavar="P", help="Only GPUs at up to P percent use.")
@click.option("--max-gpu-mem-mb", type=_AMOUNT, metavar="M", help="Only GPUs with up to M MB of memory used.")
@click.option("--max-power-w", type=_AMOUNT, metavar="W", help="Only GPUs that draw up to W watts.")
@click.option("--priority", type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY), default=0, metavar="N",
              help=SUBMIT_OPTIONS["priority"].help_with_default)  # fmt: skip
@seconds("wait", None, 0.0, "Give up after this time. [no limit]")
@click.option("--image", hidden=True)
@click.option("--mount", hidden=True, multiple=True)
@click.option("--label", metavar="TEXT", help="Label that users see who wait for these GPUs. [the program's name]")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
def command(**typed: Any) -> int:
    """Run a program on its own GPUs as soon as they are free.

    Exits with the program's status (128 plus the signal number if a signal ended it), 124 if the GPUs were not free in
    time, 126 or 127 if the program cannot be executed. The GPUs stay reserved until every process that the program
    started has ended, even if gpuyard itself is killed.
    """
    _check(typed)
    program = typed["program"]
    path, status = _find_program(program[0])
    if status:
        return status
    with foreground.signals_for_the_main_thread():
        seen = snapshot()
    need = _need(typed, seen)
    ledger = open_ledger()
    around = enclosing_lease(ledger, need, seen)
    if around is not None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the program must not inherit that
        os.execve(path, program, _environment(around, seen, typed["cpus"]))  # noqa: S606 - the enclosing command keeps the lease
    if need.devices:
        announce(ledger.folder)
        if (line := due_note(ledger.folder)) is not None:
            note(f"gpuyard: {line}")
    held = _wait(typed, ledger, need, seen)
    started = foreground.ForegroundProgram(
        path=path, arguments=program, environment=_environment(held.lease, seen, typed["cpus"])
    )
    watch = ProgramRamWatch(os.path.basename(program[0]), typed["ram_mb"], print_to_stderr)
    return foreground.run_program(started, held.path, held.detach(), watch.measure_if_due)


def _environment(lease: Lease, seen: Snapshot, cpus: int | None) -> dict[str, str]:
    devices = [device for share in lease.shares if (device := seen.device(share.device_id))]
    config = load_config()
    visible = visible_variables(devices, seen, by_uuid=config.devices.shows_uuids)
    is_shared = any(not share.is_exclusive for share in lease.shares)
    growing = growth_variables(os.environ) if is_shared and config.packing.preallocation == "off" else {}
    own = {**visible, **thread_variables(cpus, os.environ), LEASE_VARIABLE: lease.id}
    return {**growing, **os.environ, **own}


def _check(typed: dict[str, Any]) -> None:
    if not typed["program"]:
        raise UserError("there is no program to run", hint="write it last: gpuyard run --vram 8G -- python train.py")
    if typed["image"] is not None or typed["mount"]:
        raise UserError(
            "gpuyard run starts no containers: only the queue removes one however it ends",
            hint="gpuyard submit --image IMAGE -- CMD runs it, and gpuyard logs -f follows its output",
        )
    if typed["vram_mb"] is not None and typed["vram_mb"] <= 0:
        raise UserError("--vram is 0", hint="give at least 1M, or leave it out for a whole GPU")
    links = {"--linked": typed["linked"], "--same-node": typed["same_node"]}
    check_several(typed["gpus"], "--gpus 2", [name for name, is_given in links.items() if is_given])
    if typed["ram_mb"] is not None and typed["ram_mb"] <= 0:
        raise UserError("--ram is 0", hint="give at least 1M, or leave it out to reserve none")
    for_gpus = (typed["vram_mb"], typed["exclusive"] or None, typed["device"], typed["vendor"])
    if typed["gpus"] == 0 and any(given is not None for given in for_gpus):
        raise UserError("--gpus 0 asks for no GPU, but other options need one", hint="leave out one or the other")


def _find_program(name: str) -> tuple[str, int]:
    """Return the path, or the exit status that shells use. Called before the wait for GPUs, which may be long."""
    found = shutil.which(name)
    if found is not None:
        return found, 0
    places = [name] if os.sep in name else [os.path.join(place, name) for place in os.get_exec_path()]
    is_there = bool(name) and any(os.path.exists(place) for place in places)
    complaint = "it cannot be executed" if is_there else "there is no such program"
    click.echo(f"gpuyard: {name}: {complaint}", err=True)
    return "", CANNOT_EXECUTE if is_there else NOT_FOUND


def _need(typed: dict[str, Any], seen: Snapshot) -> Need:
    config = load_config().devices
    banned = config.banned_ids(seen)
    share = HostShare(ram_mb=typed["ram_mb"], cpus=typed["cpus"])
    vram_mb, vendor = typed["vram_mb"], typed["vendor"] and Vendor(typed["vendor"])
    need = Need(
        devices=typed["gpus"],
        memory=WholeDevice(vram_mb) if typed["exclusive"] or vram_mb is None else FixedMemory(vram_mb),
        vendor=vendor,
        is_linked=typed["linked"],
        is_on_one_node=typed["same_node"],
        max_utilization_percent=typed["max_gpu"],
        max_power_w=typed["max_power_w"],
        max_memory_used_mb=typed["max_gpu_mem_mb"],
        max_cpu_percent=typed["max_cpu"],
        min_host_memory_mb=typed["min_free_mem_mb"],
        host=None if share == HostShare() else share,
    )
    check_host(need, seen.host, load_config().host.limits)
    if not need.devices:
        return replace(need, only=())
    refuse_while_silent(vendor or (config.vendor if typed["device"] is None else None), seen)
    allowed = [device for device in _candidates(typed, seen) if device.id not in banned]
    if not allowed and typed["device"] is None:
        raise EnvironmentFault("no usable GPU", hint="`gpuyard doctor` says why; --gpus 0 runs without a GPU")
    # A program that gpuyard started sees GPUs of one vendor, whatever is configured.
    preferred = None if LEASE_VARIABLE in os.environ else config.vendor
    names = typed["device"] is not None
    need, suitable = choose_vendor(need, allowed, seen, banned=banned, preferred=preferred, names_devices=names)
    check_possible(need, suitable, seen)
    return replace(need, only=tuple(device.id for device in suitable))


def _candidates(typed: dict[str, Any], seen: Snapshot) -> list[Device]:
    """Return the GPUs of --device, or those that CUDA_VISIBLE_DEVICES of the calling shell allows."""
    if typed["device"] is None:
        return visible_devices(seen)
    names = [name.strip() for name in typed["device"].split(",") if name.strip()]
    if not names:
        raise UserError("--device names no GPU", hint="write it as 0,2 or leave it out")
    vendor = typed["vendor"] and Vendor(typed["vendor"])
    return [
        device for device_id in dict.fromkeys(find_devices(names, seen, vendor)) if (device := seen.device(device_id))
    ]


def _wait(typed: dict[str, Any], ledger: Ledger, need: Need, seen: Snapshot) -> HeldLease:
    """Wait for the lease. Standard error shows what is missing: a line updated in place, a new line in a pipe."""
    label = typed["label"] or os.path.basename(typed["program"][0])
    bound = load_config().queue.max_foreign_load_percent
    acquisition = Acquisition(
        ledger, snapshot, need, priority=typed["priority"], label=label, max_foreign_load_percent=bound
    )
    in_place = is_terminal(sys.stderr)
    write = _write_in_place if in_place else print_to_stderr
    messages = WaitMessages(need, seen, write, writes_changes=True, writes_figures=in_place)
    try:
        wait_s = math.inf if typed["wait_s"] is None else typed["wait_s"]
        return acquisition.wait(wait_s, _POLL_S, messages.report_wait)
    finally:
        if in_place and messages.has_written:
            _write_in_place("")


def _write_in_place(line: str) -> None:
    width = max(20, shutil.get_terminal_size().columns)
    with contextlib.suppress(OSError):  # stderr is closed; the program may still be useful
        click.echo(f"\r{line[: width - 1]}\x1b[K", nl=False, err=True)
