"""`gpuyard run`: runs a program on its own GPUs as soon as they are free."""

import contextlib
import math
import os
import shutil
import signal
import sys

from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.engines import foreground
from gpuyard.engines.common.spawn_program import CANNOT_EXECUTE, NOT_FOUND
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger.ledger import HeldLease, Ledger, open_ledger
from gpuyard.ledger.ledger_status import ProgramRamWatch
from gpuyard.ledger.measured_usage import LEASE_VARIABLE
from gpuyard.ledger.neighbours import announce, due_note
from gpuyard.ledger.wait_for_devices import Acquisition, WaitMessages, enclosing_lease, print_to_stderr
from gpuyard.model.lease import FixedMemory, HostShare, Lease, Need, WholeDevice, check_several
from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.model.option import Option
from gpuyard.model.option_values import Options
from gpuyard.model.shell_environment import thread_variables
from gpuyard.model.submit_options import SUBMIT_OPTIONS
from gpuyard.policy.device_names import check_possible, choose_vendor, find_devices, refuse_while_silent
from gpuyard.policy.host_room import check_host
from gpuyard.policy.preallocation import growth_variables
from gpuyard.probes.local_machine import snapshot
from gpuyard.ui.cli.command_grammar import Arguments, Typed, Verb
from gpuyard.ui.cli.terminal import is_terminal, note
from gpuyard.visible_devices import visible_devices, visible_variables

_GIVEN_TO_SUBMIT = (
    "cpus", "device", "vendor", "linked", "same-node", "max-cpu", "min-free-mem-mb", "max-gpu", "max-gpu-mem-mb",
    "max-power-w",
)  # fmt: skip
VERB = Verb(
    """Run a program on its own GPUs as soon as they are free.

    Exits with the program's status (128 plus the signal number if a signal ended it), 124 if the GPUs were not free in
    time, 126 or 127 if the program cannot be executed. The GPUs stay reserved until every process that the program
    started has ended, even if gpuyard itself is killed.
    """,
    (
        SUBMIT_OPTIONS["gpus"].but(help="Number of GPUs; 0 for none, only CPUs and RAM."),
        SUBMIT_OPTIONS["vram"].but(help="Share GPUs, reserving this much memory on each.", note="an idle GPU alone"),
        SUBMIT_OPTIONS["exclusive"].but(help="With --vram: alone on a GPU with that much free memory."),
        SUBMIT_OPTIONS["ram"].but(note=None),
        *(SUBMIT_OPTIONS[name] for name in _GIVEN_TO_SUBMIT),
        SUBMIT_OPTIONS["priority"].but(default="0"),
        Option("wait", "time", "TIME", "Give up after this time.", note="no limit", least=0),
        SUBMIT_OPTIONS["image"].but(is_hidden=True),
        SUBMIT_OPTIONS["mount"].but(is_hidden=True),
        Option("label", "text", "TEXT", "Label that users see who wait for these GPUs.", note="the program's name"),
    ),
    Arguments("-- CMD...", is_program=True),
)


def run(command: Typed) -> int:
    typed, program = command.values(), command.arguments
    _check(typed, program)
    path = shutil.which(program[0])  # before the wait for GPUs, which may be long
    if path is None:
        name = program[0]
        places = [name] if os.sep in name else [os.path.join(place, name) for place in os.get_exec_path()]
        is_there = bool(name) and any(os.path.exists(place) for place in places)
        note(f"gpuyard: {name}: {'it cannot be executed' if is_there else 'there is no such program'}")
        return CANNOT_EXECUTE if is_there else NOT_FOUND
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
    held = _wait(typed, program[0], ledger, need, seen)
    started = foreground.ForegroundProgram(
        path=path, arguments=tuple(program), environment=_environment(held.lease, seen, typed["cpus"])
    )
    watch = ProgramRamWatch(os.path.basename(program[0]), typed["ram"], print_to_stderr)
    return foreground.run_program(started, held.path, held.detach(), watch.measure_if_due)


def _environment(lease: Lease, seen: Snapshot, cpus: int | None) -> dict[str, str]:
    devices = [device for share in lease.shares if (device := seen.device(share.device_id))]
    config = load_config()
    visible = visible_variables(devices, seen, by_uuid=config.devices.visible == "uuid")
    is_shared = any(not share.is_exclusive for share in lease.shares)
    growing = growth_variables(os.environ) if is_shared and config.packing.preallocation == "off" else {}
    own = {**visible, **thread_variables(cpus, os.environ), LEASE_VARIABLE: lease.id}
    return {**growing, **os.environ, **own}


def _check(typed: Options, program: list[str]) -> None:
    if not program:
        raise UserError("there is no program to run", hint="write it last: gpuyard run --vram 8G -- python train.py")
    if "image" in typed or "mount" in typed:
        raise UserError(
            "gpuyard run starts no containers: only the queue removes one however it ends",
            hint="gpuyard submit --image IMAGE -- CMD runs it, and gpuyard logs -f follows its output",
        )
    links = [f"--{name}" for name in ("linked", "same-node") if typed[name]]
    check_several(typed["gpus"], "--gpus 2", links)
    if typed["gpus"] == 0 and any(name in typed for name in ("vram", "exclusive", "device", "vendor")):
        raise UserError("--gpus 0 asks for no GPU, but other options need one", hint="leave out one or the other")


def _need(typed: Options, seen: Snapshot) -> Need:
    config = load_config().devices
    banned = config.banned_ids(seen)
    share = HostShare(ram_mb=typed["ram"], cpus=typed["cpus"])
    vram_mb, vendor = typed["vram"], typed["vendor"] and Vendor(typed["vendor"])
    need = Need(
        devices=typed["gpus"],
        memory=WholeDevice(vram_mb) if typed["exclusive"] or vram_mb is None else FixedMemory(vram_mb),
        vendor=vendor,
        is_linked=typed["linked"],
        is_on_one_node=typed["same-node"],
        max_utilization_percent=typed["max-gpu"],
        max_power_w=typed["max-power-w"],
        max_memory_used_mb=typed["max-gpu-mem-mb"],
        max_cpu_percent=typed["max-cpu"],
        min_host_memory_mb=typed["min-free-mem-mb"],
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


def _candidates(typed: Options, seen: Snapshot) -> list[Device]:
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


def _wait(typed: Options, program: str, ledger: Ledger, need: Need, seen: Snapshot) -> HeldLease:
    """Wait for the lease. Standard error shows what is missing: a line updated in place, a new line in a pipe."""
    label = typed["label"] or os.path.basename(program)
    acquisition = Acquisition(ledger, snapshot, need, priority=typed["priority"], label=label)
    in_place = is_terminal(sys.stderr)
    write = _write_in_place if in_place else print_to_stderr
    messages = WaitMessages(need, seen, write, writes_changes=True, writes_figures=in_place)
    try:
        wait_s = math.inf if typed["wait"] is None else typed["wait"]
        # Ends of leases are noticed at once; memory and load of other processes only when polled.
        return acquisition.wait(wait_s, 1.0, messages.report_wait)
    finally:
        if in_place and messages.has_written:
            _write_in_place("")


def _write_in_place(line: str) -> None:
    width = max(20, shutil.get_terminal_size().columns)
    with contextlib.suppress(OSError):  # stderr is closed; the program may still be useful
        sys.stderr.write(f"\r{line[: width - 1]}\x1b[K")
        sys.stderr.flush()
