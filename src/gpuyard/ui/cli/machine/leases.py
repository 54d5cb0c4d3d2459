"""`gpuyard leases`: who holds what, who waits and why, and who uses a device without a lease."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuyard.errors import UserError
from gpuyard.ui.cli.rich_output import console, deadline_option, json_option, print_json

if TYPE_CHECKING:
    from gpuyard.leases.ledger import Ledger
    from gpuyard.ledger_status import LedgerStatus
    from gpuyard.probes.common.process_info import ProcessInfo


@click.group("leases", invoke_without_command=True)
@json_option
@deadline_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, deadline_s: float) -> None:  # noqa: FBT001
    """Show who holds which GPUs, who waits and why, and who uses them without a lease."""
    if ctx.invoked_subcommand is not None:
        return
    from gpuyard.config import load_config
    from gpuyard.leases.ledger import open_ledger
    from gpuyard.ledger_status import read_ledger_status
    from gpuyard.probes.common.idle_time import idle_seconds
    from gpuyard.probes.common.process_info import describe_processes
    from gpuyard.probes.local_machine import snapshot

    ledger = open_ledger()
    seen = snapshot(deadline_s)
    standing = read_ledger_status(ledger, seen, load_config().queue.max_foreign_load_percent)
    people = describe_processes({stranger.process.pid for stranger in standing.strangers})
    idle = idle_seconds(seen)
    if as_json:
        print_json(_as_dict(ledger, standing, people, idle))
        return
    from gpuyard.ui.views.lease_tables import standing_view

    out = console()
    out.print(standing_view(standing, out, people, idle))


@command.command("release")
@click.argument("lease_id", metavar="ID")
def release_command(lease_id: str) -> None:
    """End a lease of your own, never another user's.

    Its GPUs can be taken by others from then on. A program that still runs is not ended: it goes on without a lease.
    """
    from gpuyard.leases.ledger import open_ledger

    open_ledger().end(lease_id)
    click.echo(f"{lease_id} is released")


@command.command("init-shared")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--group", metavar="NAME", help="Only for the users of this group. [all users]")
def init_shared_command(folder: Path, group: str | None) -> None:
    """Make a lease directory that several users share.

    Everybody sees all leases there, and can remove only their own: the directory is sticky. All of them name it with
    GPUYARD_LOCK_DIR=DIR, or in their config.toml. Its owner could remove the leases of others, so let it be somebody
    whom all trust, or root.
    """
    import grp

    from gpuyard.leases.ledger_directory import find_closed_parent, make_shared_directory

    try:
        number = grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise UserError(f"there is no group '{group}'", hint="see `getent group`") from None
    made = make_shared_directory(folder.absolute(), number)
    shut = find_closed_parent(made)
    if shut is not None:
        click.echo(f"! other users cannot get into {shut}: choose a place such as /var/lib/gpuyard", err=True)
    click.echo(f"{made} is ready. Each user now sets:\n  export GPUYARD_LOCK_DIR={made}")


def _as_dict(
    ledger: "Ledger",
    standing: "LedgerStatus",
    people: "dict[int, ProcessInfo]",
    idle: dict[tuple[str, int], float],
) -> dict[str, Any]:
    from msgspec import to_builtins

    from gpuyard.core.snapshot_json import iso_time
    from gpuyard.probes.common.process_info import ProcessInfo

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
                        "measured_mb": standing.measured.get((lease.id, share.device_id)),
                    }
                    for share in lease.shares
                ],
            }
            for lease in standing.leases
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
            for waiting in standing.waiting
        ],
        "foreign": [
            {
                "device_id": stranger.device_id,
                "pid": stranger.process.pid,
                "memory_mb": stranger.process.memory_mb,
                **to_builtins(people.get(stranger.process.pid, ProcessInfo())),
                "idle_s": idle.get((stranger.device_id, stranger.process.pid)),
            }
            for stranger in standing.strangers
        ],
    }
