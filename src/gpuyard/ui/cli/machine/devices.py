"""`gpuyard devices`: every GPU and the host, and their load; `drain` and `undrain`: whether work starts on a GPU;
`clear`: after a repair."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from msgspec import to_builtins

from gpuyard.config import load_config
from gpuyard.core.device_names import choose_vendor
from gpuyard.core.lease import Drain, Need
from gpuyard.core.scheduling.closed_devices import closed_devices, describe_drain, drain_of
from gpuyard.core.scheduling.device_health import HealthIssue, describe_issue, device_issues
from gpuyard.core.scheduling.host_capacity import describe_reserved
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.snapshot_json import device_as_dict, snapshot_as_dict
from gpuyard.core.topology import topology_as_dict
from gpuyard.core.units import format_count
from gpuyard.leases.clear_devices import clear_devices
from gpuyard.leases.drain_devices import drain_devices, undrain_devices
from gpuyard.leases.ledger import open_ledger
from gpuyard.ledger_status import read_host_reserved
from gpuyard.probes.common.kernel_files import vendors_on_pci
from gpuyard.probes.common.process_info import describe_processes
from gpuyard.probes.local_machine import snapshot as take_snapshot
from gpuyard.schema.machine import drain_row, issue_row
from gpuyard.ui.cli.rich_output import deadline_option, frame, json_option, pids_of
from gpuyard.ui.cli.terminal import paint, say, say_json, say_lines, tolerate_config_faults
from gpuyard.ui.views.device_tables import snapshot_lines
from gpuyard.ui.views.topology_table import topology_lines


@click.group("devices", invoke_without_command=True)
@click.option("--topology", is_flag=True, help="Show how the GPUs are linked, and their NUMA nodes.")
@json_option
@deadline_option
@click.pass_context
def command(ctx: click.Context, topology: bool, as_json: bool, deadline_s: float) -> None:  # noqa: FBT001
    """Show every GPU and the host, their load, and whether work starts there."""
    if ctx.invoked_subcommand is not None:
        return
    tolerate_config_faults()
    snapshot = take_snapshot(deadline_s)
    if topology:
        _show_topology(snapshot, as_json=as_json)
        return
    ledger, banned = open_ledger(), load_config().devices.banned_ids(snapshot)
    drains, issues = ledger.read_drains(), device_issues(snapshot, ledger.read_health_marks())
    reserved = read_host_reserved(ledger, snapshot)
    if as_json:
        devices = [
            {**_as_json(device, snapshot, drains, banned), "issues": _issue_rows(issues.get(device.id, ()))}
            for device in snapshot.devices
        ]
        say_json({**snapshot_as_dict(snapshot), "host_reserved": to_builtins(reserved), "devices": devices})
        return
    processes = describe_processes(pids_of(snapshot))
    say_lines(snapshot_lines(snapshot, frame(), expected=vendors_on_pci(), processes=processes))
    if reserved.leases:
        say(describe_reserved(reserved))
    if snapshot.is_mixed:
        say(_vendor_text(snapshot, banned))
    for device_id, reason in closed_devices(snapshot, drains, banned).items():
        if reason.kind is ReasonKind.UNHEALTHY:
            continue  # its line is below
        say(f"{paint('!', 'yellow')} GPU {_label(device_id, snapshot)} is {reason.text}")
    say(*(f"{paint('!', 'yellow')} {line}" for line in health_lines(issues, snapshot)))


@command.command("drain")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@click.option("--reason", default="", metavar="TEXT", help="Why; everyone who waits for the GPU sees it.")
@json_option
def drain_command(names: tuple[str, ...], reason: str, as_json: bool) -> None:  # noqa: FBT001
    """Start nothing new on these GPUs; what runs there continues.

    It holds at once and until `gpuyard devices undrain`, also across restarts: for your queue, `gpuyard run` and your
    scripts, and for work that already waits. If users share the lease directory, a drain by its owner or by root holds
    for all of them. ID is a number or an id as in `gpuyard devices`.
    """
    drain(names, reason, as_json=as_json)


@command.command("undrain")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@json_option
def undrain_command(names: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001
    """Let work start on these GPUs again."""
    undrain(names, as_json=as_json)


@command.command("clear")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@json_option
def clear_command(names: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001
    """Let work start on GPUs that were faulty, after a repair.

    What is wrong with a GPU at this moment is accepted: it counts as faulty again when that gets worse. Faults that
    the driver no longer reports end by themselves.
    """
    snapshot = take_snapshot()
    ids = clear_devices(open_ledger(), names, snapshot)
    if as_json:
        say_json({"cleared": ids})
    else:
        say(*(f"GPU {_label(device_id, snapshot)} is cleared: work starts there again" for device_id in ids))


def health_lines(issues: Mapping[str, Sequence[HealthIssue]], snapshot: Snapshot) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a card, with what to do."""
    for device in snapshot.devices:
        if device.parent is None:
            for issue in issues.get(device.id, ()):
                yield f"GPU {_label(device.id, snapshot)} is {describe_issue(issue)}; {issue.remedy}"


def _issue_rows(issues: Sequence[HealthIssue]) -> list[Any]:
    return [to_builtins(issue_row(issue)) for issue in issues]


def drain(names: Sequence[str], reason: str, *, as_json: bool) -> None:
    snapshot, ledger = take_snapshot(), open_ledger()
    drains = drain_devices(ledger, names, reason, snapshot)
    if as_json:
        say_json({"drained": [to_builtins(drain_row(drain)) for drain in drains]})
        return
    held = ledger.leases()
    for each in drains:
        parts = (each.device_id, *(device.id for device in snapshot.devices if device.parent == each.device_id))
        left = sum(any(lease.on(part) is not None for part in parts) for lease in held)
        label = _label(each.device_id, snapshot)
        continues = f"{format_count(left, 'lease')} on it continue{'s' if left == 1 else ''}"
        still = continues if left else "it has no leases"
        say(f"GPU {label} is {describe_drain(each)}; {still}. `gpuyard devices undrain {label}` ends it")


def undrain(names: Sequence[str], *, as_json: bool) -> None:
    snapshot = take_snapshot()
    ids = undrain_devices(open_ledger(), names, snapshot)
    if as_json:
        say_json({"undrained": ids})
    else:
        say(*(f"GPU {_label(device_id, snapshot)}: work starts there again" for device_id in ids))


def _show_topology(snapshot: Snapshot, *, as_json: bool) -> None:
    if as_json:
        found = topology_as_dict(snapshot.topology, [device.id for device in snapshot.unsplit_devices()])
        say_json({**found, "labels": dict(snapshot.labels)})
    else:
        say(*topology_lines(snapshot))


def _vendor_text(snapshot: Snapshot, banned: Sequence[str]) -> str:
    preferred = load_config().devices.vendor
    need, _ = choose_vendor(Need(), snapshot.usable_devices(), snapshot, banned=banned, preferred=preferred)
    own = [snapshot.labels.get(each.id, each.id) for each in snapshot.unsplit_devices() if each.is_integrated]
    note = f"; integrated graphics: {', '.join(own)}" if own else ""
    return f"Programs get {need.vendor} GPUs unless they name others, with --vendor or --device{note}"


def _label(device_id: str, snapshot: Snapshot) -> str:
    return snapshot.labels.get(device_id, device_id)


def _as_json(device: Device, snapshot: Snapshot, drains: Sequence[Drain], banned: Sequence[str]) -> dict[str, Any]:
    found = drain_of(device, drains)
    row = None if found is None else to_builtins(drain_row(found))
    label = snapshot.labels.get(device.id)
    return {**device_as_dict(device), "label": label, "drain": row, "banned": device.id in banned}
