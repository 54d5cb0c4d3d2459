"""`gpuyard leases`: who holds GPUs, who waits and why, and which processes use them without a lease."""

import grp
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gpuyard.errors import UserError
from gpuyard.ledger.ledger import Ledger, open_ledger
from gpuyard.ledger.ledger_mutex import find_closed_parent, make_shared_directory
from gpuyard.ledger.ledger_status import LedgerStatus, read_ledger_status
from gpuyard.model.lease import Lease
from gpuyard.model.machine_snapshot import iso_time
from gpuyard.model.option import Option
from gpuyard.policy.host_room import HostUse
from gpuyard.probes.devices_and_processes import ProcessInfo, describe_processes, idle_seconds
from gpuyard.probes.local_machine import snapshot
from gpuyard.ui.cli.command_grammar import DEADLINE, JSON, Arguments, Command, Typed, Verb
from gpuyard.ui.cli.terminal import frame, note, say, say_json, say_lines
from gpuyard.ui.views.machine_tables import lease_lines


def run(typed: Typed) -> int:
    ledger = open_ledger()
    machine = snapshot(typed.values()["deadline"])
    status = read_ledger_status(ledger, machine)
    processes = describe_processes({use.process.pid for use in status.foreign_uses})
    idle_s = idle_seconds(machine)
    if typed.flag("json"):
        say_json(_as_dict(ledger, status, processes, idle_s))
    else:
        say_lines(lease_lines(status, frame(), processes, idle_s))
    return 0


def _run_release(typed: Typed) -> int:
    open_ledger().end(typed.arguments[0])
    say(f"released {typed.arguments[0]}")
    return 0


def _run_init_shared(typed: Typed) -> int:
    group = typed.text("group")
    try:
        number = grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        raise UserError(f"there is no group '{group}'", hint="see `getent group`") from None
    made = make_shared_directory(Path(typed.arguments[0]).absolute(), number)
    shut = find_closed_parent(made)
    if shut is not None:
        note(f"! other users cannot enter {shut}: choose another place, such as /var/lib/gpuyard-leases")
    say(f"Made {made}. Each user now sets:\n  export GPUYARD_LOCK_DIR={made}")
    return 0


def _as_dict(
    ledger: Ledger, status: LedgerStatus, processes: dict[int, ProcessInfo], idle_s: dict[tuple[str, int], float]
) -> dict[str, Any]:
    def host_of(lease: Lease) -> dict[str, Any] | None:
        share = lease.host
        if share is None:
            return None
        used = status.host_used.get(lease.id, HostUse(ram_mb=share.used_mb, cpus=share.used_cpus))
        kept = {name: getattr(share, name) for name in ("ram_mb", "cpus", "is_ram_expected", "are_cpus_learned")}
        return {**kept, "used_mb": used.ram_mb, "used_cpus": used.cpus}

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
                "host": host_of(lease),
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


VERB = Verb(
    "Show who holds GPUs, who waits and why, and which processes use them without a lease.",
    (JSON, DEADLINE),
    commands={
        "release": Command(
            Verb(
                """Release a lease of your own, never another user's.

                Others can use its GPUs from then on. A program that still runs is not stopped: it continues without a
                lease.
                """,
                arguments=Arguments("ID"),
            ),
            _run_release,
        ),
        "init-shared": Command(
            Verb(
                """Make a lease directory that several users share.

                All users see all leases in it, and can remove only their own: the directory is sticky. Each user sets
                GPUYARD_LOCK_DIR=DIR, or names it in config.toml. The owner of the directory can remove leases of other
                users, so it should be root or a trusted user.
                """,
                (Option("group", "text", "NAME", "Only for users of this group.", note="all users"),),
                Arguments("DIR"),
            ),
            _run_init_shared,
        ),
    },
)
