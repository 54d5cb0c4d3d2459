"""The content of lease and ticket files: how it is written, and what is accepted of it. Each file may be another
user's, and is read as hostile:

- The user is the owner of the file, whatever its content says. So is the time of a ticket, which decides its place
(`_since`). The time of a lease decides nothing.
- A record is accepted only if every field is within the bounds below; placement and every face can rely on them. Any
other is ignored and named: `read_record` returns a BadRecord, and never raises.
- At most MAX_TICKETS_PER_USER tickets of one user count, the oldest. A priority beyond the limit counts as the limit.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.config import simulated_host
from gpuyard.ledger.lock_file import LEASE, TICKET, HeldFile
from gpuyard.model.lease import Claim, Holder, HostShare, Lease, Need, PartOfDevice, Share, Ticket
from gpuyard.model.printable_text import printable
from gpuyard.model.submit_options import MAX_PRIORITY
from gpuyard.system.clock import since_boot, wall_time_of
from gpuyard.system.processes import is_stopped, tidy_label, user_name

MAX_TICKETS_PER_USER = 128
MAX_DEVICES = 4096
_MAX_MB = 1e9
_MAX_TEXT = 200
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)


class LeaseRecord(Struct, frozen=True, kw_only=True):
    """`made` is when it was granted, in seconds since the machine booted."""

    holder: Holder
    shares: tuple[Share, ...]
    made: float | None = None
    host: HostShare | None = None


class TicketRecord(Struct, frozen=True, kw_only=True):
    """`made` is when it was taken, in seconds since the machine booted."""

    holder: Holder
    need: Need
    priority: int
    made: float | None = None


class BadRecord(Struct, frozen=True, kw_only=True):
    """A held file that is ignored. `name` is the file's name, made printable; `user` is the file's owner, if known."""

    name: str
    uid: int | None
    user: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name} of {self.user} is ignored: {self.problem}"


def encode_lease(holder: Holder, claim: Claim) -> bytes:
    return msgspec.json.encode(LeaseRecord(holder=holder, shares=claim.shares, made=since_boot(), host=claim.host))


def encode_ticket(holder: Holder, need: Need, priority: int) -> bytes:
    return msgspec.json.encode(TicketRecord(holder=holder, need=need, priority=priority, made=since_boot()))


def replace_shares(content: bytes, claim: Claim, label: str = "") -> bytes:
    """Return a lease with other shares, and another host share or label, if there is one."""
    record = msgspec.json.decode(content, type=LeaseRecord)
    holder = replace(record.holder, label=label or record.holder.label)
    return msgspec.json.encode(replace(record, holder=holder, shares=claim.shares, host=claim.host or record.host))


def read_record(found: HeldFile) -> Lease | Ticket | BadRecord | None:
    """Return the lease or ticket of a held file, or None for a lease that reserves nothing (a suspended job's)."""
    try:
        return _read_lease(found) if found.name.endswith(LEASE) else _read_ticket(found)
    except _RefusedError as error:
        problem = str(error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"it cannot be decoded: {error}"
    return bad_record(found.name, found.uid, problem)


def bad_record(name: str, uid: int | None, problem: str) -> BadRecord:
    user = "an unknown user" if uid is None else user_name(uid)
    return BadRecord(name=printable(name, 100), uid=uid, user=user, problem=printable(problem, _MAX_TEXT))


def oldest_per_user(tickets: Iterable[Ticket]) -> tuple[tuple[Ticket, ...], list[BadRecord]]:
    """Return the tickets that count, and those of users who have too many: they must not make placement slow."""
    counts: Counter[int] = Counter()
    kept, bad = [], []
    problem = f"only the oldest {MAX_TICKETS_PER_USER} tickets of a user count"
    for ticket in sorted(tickets, key=lambda ticket: (ticket.since, ticket.id)):
        uid = ticket.holder.uid
        counts[uid] += 1
        if counts[uid] <= MAX_TICKETS_PER_USER:
            kept.append(ticket)
        else:
            bad.append(bad_record(ticket.id + TICKET, uid, problem))
    return tuple(kept), bad


class _RefusedError(ValueError):
    """A field is out of bounds. The text names the field."""


def _read_lease(found: HeldFile) -> Lease | None:
    record = msgspec.json.decode(found.content, type=LeaseRecord)
    holder = _check_holder(found, record.holder)
    shares = record.shares
    if len({share.device_id for share in shares}) < len(shares) or len(shares) > MAX_DEVICES:
        raise _RefusedError(f"it lists a device twice, or more than {MAX_DEVICES} devices")
    for share in shares:
        _check_device_id(share.device_id)
        _check_figures(share, ("memory_mb", "foreign_mb", "spread_mb"), _MAX_MB)
        _check_figures(share, ("load_percent",))
    ram_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    # More than the machine has is never granted, and a promise of more would block all users.
    _check_host(record.host, ram_mb if simulated_host() is None else _MAX_MB)
    _check_figures(record, ("made",))
    since = found.made_at if record.made is None else min(time.time(), wall_time_of(record.made))
    since = math.floor(since * 10) / 10  # the difference of two clocks is slightly another one each time
    if not shares and record.host is None:
        return None
    return Lease(id=found.id, holder=holder, shares=shares, since=since, host=record.host)


def _since(found: HeldFile, made: float | None) -> float:
    """Return since when the file is held, by the wall clock as it is set now. The file's own time, which no user can
    set, becomes wrong when the wall clock is set. The record's time is believed where lying does not pay: if it makes
    the file younger (the clock was set forward), or if the file is from the future (the clock was set back)."""
    now = time.time()
    claimed = found.made_at if made is None else min(now, wall_time_of(made))
    # The file's time may be some milliseconds older than the time of the record in it.
    return claimed if claimed > found.made_at + 1.0 or found.made_at > now + 1.0 else found.made_at


def _read_ticket(found: HeldFile) -> Ticket:
    record = msgspec.json.decode(found.content, type=TicketRecord)
    holder = _check_holder(found, record.holder)
    _check_need(record.need)
    _check_figures(record, ("made",))
    priority, since = max(-MAX_PRIORITY, min(MAX_PRIORITY, record.priority)), _since(found, record.made)
    return Ticket(id=found.id, holder=holder, need=record.need, since=since, priority=priority, is_idle=found.is_idle)


def _check_holder(found: HeldFile, holder: Holder) -> Holder:
    """Return the holder with the user that owns the file, and with a label that can be shown."""
    if not _NAME.fullmatch(found.id):
        raise _RefusedError("the file's name is not one that gpuyard gives")
    _check_count("pid", holder.pid, 1, 1 << 22)  # the largest value of the kernel's pid_max
    _check_figures(holder, ("pid_started",))
    _check_text("boot_id", holder.boot_id)
    _check_text("machine", holder.machine)
    return replace(holder, uid=found.uid, user=user_name(found.uid), label=tidy_label(holder.label))


def _check_need(need: Need) -> None:
    _check_count("devices", need.devices, 0, MAX_DEVICES)
    _check_count("the number of devices with memory", len(need.memory_on), 0, MAX_DEVICES)
    for each in (need, *(replace(need, memory=memory) for _, memory in need.memory_on)):
        _check_figures(each, ("required_mb", "least_mb", "spread_mb"), _MAX_MB, name="the memory")
        if isinstance(each.memory, PartOfDevice):
            _check_figures(each.memory, ("part",), 1.0)
    limits = ("load_percent", "max_utilization_percent", "max_power_w", "max_memory_used_mb", "max_cpu_percent")
    _check_figures(need, (*limits, "min_host_memory_mb"))
    ids = (*(need.only or ()), *need.banned)
    _check_count("the number of device ids", len(ids), 0, 2 * MAX_DEVICES)
    for device_id in (*ids, *(device_id for device_id, _ in need.memory_on)):
        _check_device_id(device_id)
    _check_text("model", need.model)
    _check_host(need.host, _MAX_MB)


def _check_host(share: HostShare | None, most_mb: float) -> None:
    if share is not None:
        _check_figures(share, ("ram_mb", "used_mb"), most_mb)
        _check_figures(share, ("cpus", "used_cpus"), 1e6)


def _check_count(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise _RefusedError(f"{name} is {value if abs(value) < 1e20 else 'huge'}, not {least} to {most}")


def _check_figures(record: object, fields: Iterable[str], most: float = 1e12, *, name: str = "") -> None:
    """JSON has no NaN and no infinity, and the decoder refuses numbers that are too large for a float."""
    for field in fields:
        value: float | None = getattr(record, field)
        if value is not None and not 0.0 <= value <= most:
            raise _RefusedError(f"{name or field} is {value:g}, not 0 to {most:g}")


def _check_device_id(device_id: str) -> None:
    if not device_id:
        raise _RefusedError("a device id is empty")
    _check_text("a device id", device_id)


def _check_text(name: str, text: str | None) -> None:
    if text is not None and (len(text) > _MAX_TEXT or not text.isprintable()):
        raise _RefusedError(f"{name} is too long or not printable")


def active_tickets(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets of processes that run: for one that is stopped, as by Ctrl-Z, no device is kept free. One
    of this system is noticed at once; one in another container, or that hangs, when its ticket is idle."""
    return [ticket for ticket in tickets if not ticket.is_idle and not is_stopped(ticket.holder)]
