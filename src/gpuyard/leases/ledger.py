"""The ledger in a directory: leases and tickets as held files, changed under one briefly held mutex.

- `*.lease` is a lease and `*.ticket` a waiting process; both are LockFiles, so a dead process holds nothing.
- Records are not trusted where forging them would pay: the user is the file's owner, the time is the file's, and a file
  that cannot be decoded is not a lease.
- `claim` calls `decide` under the mutex with all live leases and tickets, and grants what it returns.
- Readers take the mutex too: while a reader tries the lock of a dead file, the file seems held.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from gpuyard.config import lease_dir
from gpuyard.core.lease import Claim, Holder, Lease, Need, Share, Ticket
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.leases import kernel_locks
from gpuyard.leases.ledger_directory import prepare_directory
from gpuyard.leases.ledger_mutex import MUTEX, hold_mutex, unwritable
from gpuyard.leases.lock_file import HeldFile, LockFile, held_files, remove_dead, rewrite
from gpuyard.system.process_identity import tidy_label, user_name

_LEASE, _TICKET = ".lease", ".ticket"
_READ_TIMEOUT_S = 10.0


class _LeaseRecord(Struct, frozen=True, kw_only=True):
    holder: Holder
    shares: tuple[Share, ...]


class _TicketRecord(Struct, frozen=True, kw_only=True):
    holder: Holder
    need: Need
    priority: int


K = TypeVar("K", _LeaseRecord, _TicketRecord)
_LEASES, _TICKETS = msgspec.json.Decoder(_LeaseRecord), msgspec.json.Decoder(_TicketRecord)
_Live = tuple[tuple[Lease, ...], tuple[Ticket, ...]]


class HeldLease:
    """A lease that this process holds. A child that inherits `descriptor`, or takes over a shared lease, keeps it."""

    def __init__(self, file: LockFile, lease: Lease) -> None:
        self._file = file
        self.lease = lease

    @property
    def descriptor(self) -> int:
        return self._file.descriptor

    @property
    def path(self) -> Path:
        return self._file.path

    def share(self) -> None:
        """Let another process of this user keep the lease too, with `take_over(path)`."""
        self._file.share()

    def leave(self) -> None:
        """Close this process's copy; the lease stays with the processes that inherited it or took it over."""
        self._file.leave()

    def release(self) -> None:
        """End the lease for all processes that keep it."""
        self._file.release()


class HeldTicket:
    """The place of this process among those that wait; child processes do not inherit it."""

    def __init__(self, file: LockFile) -> None:
        self._file = file
        self.id = file.name.removesuffix(_TICKET)

    def release(self) -> None:
        self._file.release()


class Ledger:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leases(self) -> tuple[Lease, ...]:
        return self._read()[0]

    def tickets(self) -> tuple[Ticket, ...]:
        return self._read()[1]

    def take_ticket(self, holder: Holder, need: Need, priority: int, timeout_s: float) -> HeldTicket:
        """Return a ticket. It keeps its place until it is released or this process ends."""
        record = _TicketRecord(holder=holder, need=need, priority=priority)
        with hold_mutex(self.folder, timeout_s):
            return HeldTicket(self._make(_TICKET, record))

    def claim(
        self,
        holder: Holder,
        decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Claim | None],
        timeout_s: float,
        ticket: HeldTicket | None = None,
    ) -> HeldLease | None:
        """Grant the claim that `decide` returns for the live leases and tickets, and return the lease.

        No other process can claim in between. `ticket` is released together with the grant, so that no process sees
        its holder still waiting.
        """

        def decide_one(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[tuple[Holder, Claim]]:
            claim = decide(leases, tickets)
            return [] if claim is None else [(holder, claim)]

        return next(iter(self.claim_all(decide_one, timeout_s, ticket)), None)

    def claim_all(
        self,
        decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[tuple[Holder, Claim]]],
        timeout_s: float,
        ticket: HeldTicket | None = None,
    ) -> list[HeldLease]:
        """Grant all claims that `decide` returns, or none of them if one fails."""
        granted: list[HeldLease] = []
        with hold_mutex(self.folder, timeout_s):
            dead: list[str] = []
            wanted = decide(*self._live(dead))
            try:
                for holder, claim in wanted:
                    granted.append(self._grant(holder, claim, dead))
            except BaseException:
                for held in granted:
                    held.release()
                raise
            finally:
                remove_dead(self.folder, dead)
            if granted and ticket is not None:
                ticket.release()
        return granted

    def _grant(self, holder: Holder, claim: Claim, dead: list[str]) -> HeldLease:
        spare = dead.pop() if dead else None
        file = self._make(_LEASE, _LeaseRecord(holder=holder, shares=claim.shares), spare)
        if spare is not None and not file.is_used_again:
            dead.insert(0, spare)  # remove_dead tries to remove it
        lease_id = file.name.removesuffix(_LEASE)
        return HeldLease(file, Lease(id=lease_id, holder=holder, shares=claim.shares, since=time.time()))

    def amend(self, lease_id: str, claim: Claim) -> None:
        """Replace the shares of a lease of this user, unless it has ended. Call it only from within `decide`, where the
        mutex is held."""

        def replace_shares(content: bytes) -> bytes:
            return msgspec.json.encode(msgspec.structs.replace(_LEASES.decode(content), shares=claim.shares))

        try:
            rewrite(f"{self.folder}/{lease_id}{_LEASE}", replace_shares)
        except (FileNotFoundError, msgspec.MsgspecError):
            return
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def end(self, lease_id: str) -> None:
        """Remove a lease of this user from the ledger, also if another process of the user holds it.

        Raises UserError if there is no such lease, or if it is another user's.
        """
        lease = next((lease for lease in self.leases() if lease.id == lease_id), None)
        if lease is None:
            held = ", ".join(lease.id for lease in self.leases() if lease.holder.uid == os.getuid()) or "none"
            raise UserError(f"there is no lease '{lease_id}'", hint=f"your leases: {held}")
        if lease.holder.uid != os.getuid():
            raise UserError(f"lease {lease_id} belongs to {lease.holder.user}", hint="only its owner can end it")
        with contextlib.suppress(FileNotFoundError):
            (self.folder / f"{lease_id}{_LEASE}").unlink()

    def _make(self, suffix: str, record: Struct, spare: str | None = None) -> LockFile:
        name = f"{os.getpid()}-{os.urandom(4).hex()}{suffix}"
        try:
            return LockFile(
                f"{self.folder}/{name}", msgspec.json.encode(record), is_inherited=suffix == _LEASE, spare=spare
            )
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _read(self) -> _Live:
        if not (self.folder / MUTEX).exists():
            return (), ()  # no process has claimed anything here yet
        with hold_mutex(self.folder, _READ_TIMEOUT_S):
            return self._live(None)

    def _live(self, dead: list[str] | None) -> _Live:
        """Return all live leases and tickets, and add the names of dead files to `dead`. Needs the mutex."""
        leases: list[Lease] = []
        tickets: list[Ticket] = []
        try:
            is_private = os.stat(self.folder).st_mode & 0o077 == 0
            # In a private directory no other user can lock a file.
            table = None if is_private else kernel_locks.LockTable()
            for found in held_files(self.folder, (_LEASE, _TICKET), dead=dead):
                if found.name.endswith(_LEASE):
                    leases += _lease(found, table)
                else:
                    tickets += _ticket(found, table)
        except OSError as error:
            raise EnvironmentFault(f"the lease directory {self.folder} cannot be read: {error.strerror}") from error
        return tuple(leases), tuple(tickets)


def open_ledger() -> Ledger:
    """Return the ledger in the directory of GPUYARD_LOCK_DIR or of the configuration; default: this user's own."""
    return Ledger(prepare_directory(lease_dir()))


def _lease(found: HeldFile, table: kernel_locks.LockTable | None) -> Iterator[Lease]:
    record = _record(found, _LEASES, table)
    if record is not None and record.shares:
        holder, lease_id = _owner(found, record.holder), found.name.removesuffix(_LEASE)
        yield Lease(id=lease_id, holder=holder, shares=record.shares, since=found.made_at)


def _ticket(found: HeldFile, table: kernel_locks.LockTable | None) -> Iterator[Ticket]:
    record = _record(found, _TICKETS, table)
    if record is not None:
        holder, ticket_id = _owner(found, record.holder), found.name.removesuffix(_TICKET)
        yield Ticket(id=ticket_id, holder=holder, need=record.need, since=found.made_at, priority=record.priority)


def _record(found: HeldFile, kind: msgspec.json.Decoder[K], table: kernel_locks.LockTable | None) -> K | None:
    try:
        record = kind.decode(found.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_held = table is None or table.is_held_for(found.uid, record.holder.pid, found.device, found.inode)
    return record if is_held else None


def _owner(found: HeldFile, claimed: Holder) -> Holder:
    """Return the holder as recorded, except for the user, who is the owner of the file."""
    return msgspec.structs.replace(claimed, uid=found.uid, user=user_name(found.uid), label=tidy_label(claimed.label))
