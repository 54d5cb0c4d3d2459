"""`gpuyard leases`: who holds GPUs, who waits and why, and which processes use them without a lease."""

import grp
from pathlib import Path
from typing import Any

import click
from msgspec import to_builtins

from gpuyard.config import load_config
from gpuyard.core.lease import Lease
from gpuyard.core.scheduling.host_capacity import HostUse
from gpuyard.core.snapshot_json import iso_time
from gpuyard.errors import UserError
from gpuyard.leases.ledger import Ledger, open_ledger
from gpuyard.leases.ledger_directory import find_closed_parent, make_shared_directory
from gpuyard.ledger_status import LedgerStatus, read_ledger_status
from gpuyard.probes.common.idle_time import idle_seconds
from gpuyard.probes.common.process_info import ProcessInfo, describe_processes
from gpuyard.probes.local_machine import snapshot
from gpuyard.ui.cli.rich_output import deadline_option, frame, json_option
from gpuyard.ui.cli.terminal import note, say, say_json, say_lines
from gpuyard.ui.views.lease_tables import lease_lines


@click.group("leases", invoke_without_command=True)
@json_option
@deadline_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, deadline_s: float) -> None:  # noqa: FBT001
    """Show who holds GPUs, who waits and why, and which processes use them without a lease."""
    if ctx.invoked_subcommand is not None:
        return
    ledger = open_ledger()
    machine = snapshot(deadline_s)
    status = read_ledger_status(ledger, machine, load_config().queue.max_foreign_load_percent)
    processes = describe_processes({use.process.pid for use in status.foreign_uses})
    idle_s = idle_seconds(machine)
    if as_json:
        say_json(_as_dict(ledger, status, processes, idle_s))
        return
    say_lines(lease_lines(status, frame(), processes, idle_s))


@command.command("release")
@click.argument("lease_id", metavar="ID")
def release_command(lease_id: str) -> None:
    """Release a lease of your own, never another user's.

    Others can use its GPUs from then on. A program that still runs is not stopped: it continues without a lease.
    """
    open_ledger().end(lease_id)
    say(f"released {lease_id}")


@command.command("init-shared")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--group", metavar="NAME", help="Only for users of this group. [all users]")
def init_shared_command(folder: Path, group: str | None) -> None:
    """Make a lease directory that several users share.

    All users see all leases in it, and can remove only their own: the directory is sticky. Each user sets
    GPUYARD_LOCK_DIR=DIR, or names it in config.toml. The owner of the directory can remove leases of other users, so
    it should be root or a trusted user.
    """
    try:
        number = grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise UserError(f"there is no group '{group}'", hint="see `getent group`") from None
    made = make_shared_directory(folder.absolute(), number)
    shut = find_closed_parent(made)
    if shut is not None:
        note(f"! other users cannot enter {shut}: choose another place, such as /var/lib/gpuyard-leases")
    say(f"Made {made}. Each user now sets:\n  export GPUYARD_LOCK_DIR={made}")


def _host_as_dict(lease: Lease, status: LedgerStatus) -> dict[str, Any] | None:
    """Return the RAM and CPUs of a lease, and what its processes use; None if it reserves neither."""
    share = lease.host
    if share is None:
        return None
    used = status.host_used.get(lease.id, HostUse(ram_mb=share.used_mb, cpus=share.used_cpus))
    return {
        "ram_mb": share.ram_mb,
        "cpus": share.cpus,
        "is_ram_expected": share.is_ram_expected,
        "are_cpus_learned": share.are_cpus_learned,
        "used_mb": used.ram_mb,
        "used_cpus": used.cpus,
    }


def _as_dict(
    ledger: Ledger, status: LedgerStatus, processes: dict[int, ProcessInfo], idle_s: dict[tuple[str, int], float]
) -> dict[str, Any]:
    return {
        "directory": str(ledger.folder),
        "leases": [
            {
                "id": lease.id,
                **to_builtins(lease.holder),
                "since": iso_time(lease.since),
                "shares": [
                    {
                        "device_id": share.device_id,
                        "reserved_mb": share.memory_mb,
                        "exclusive": share.is_exclusive,
                        "measured_mb": status.measured.get((lease.id, share.device_id)),
                    }
                    for share in lease.shares
                ],
                "host": _host_as_dict(lease, status),
            }
            for lease in status.leases
        ],
        "waiting": [
            {
                "id": waiting.ticket.id,
                **to_builtins(waiting.ticket.holder),
                "since": iso_time(waiting.ticket.since),
                "priority": waiting.ticket.priority,
                "need": to_builtins(waiting.ticket.need),
                "reasons": [to_builtins(reason) for reason in waiting.reasons],
            }
            for waiting in status.waiting
        ],
        "foreign": [
            {
                "device_id": use.device_id,
                "pid": use.process.pid,
                "memory_mb": use.process.memory_mb,
                **to_builtins(processes.get(use.process.pid, ProcessInfo())),
                "idle_s": idle_s.get((use.device_id, use.process.pid)),
            }
            for use in status.foreign_uses
        ],
        "ignored": to_builtins(status.bad),
    }
