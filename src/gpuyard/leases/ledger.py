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

import msgspec
from msgspec import Struct

from gpuyard.config import lease_dir
from gpuyard.core.lease import Claim, Holder, Lease, Need, Share, Ticket
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.leases.ledger_directory import prepare_directory
from gpuyard.leases.ledger_mutex import MUTEX, hold_mutex, unwritable
from gpuyard.leases.lock_file import HeldFile, LockFile, LockTable, held_files, remove_dead, rewrite
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


_Live = tuple[tuple[Lease, ...], tuple[Ticket, ...]]


class HeldLease(LockFile):
    """A lease that this process holds. A child that inherits `descriptor`, or takes over a shared lease, keeps it."""

    lease: Lease


class Ledger:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leases(self) -> tuple[Lease, ...]:
        return self._read()[0]

    def tickets(self) -> tuple[Ticket, ...]:
        return self._read()[1]

    def take_ticket(self, holder: Holder, need: Need, priority: int, timeout_s: float) -> LockFile:
        """Return a ticket. It keeps its place until it is released or this process ends; children do not inherit it."""
        content = msgspec.json.encode(_TicketRecord(holder=holder, need=need, priority=priority))
        with hold_mutex(self.folder, timeout_s), self._as_fault():
            return LockFile(self._new_path(_TICKET), content, is_inherited=False)

    def claim(
        self,
        holder: Holder,
        decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Claim | None],
        timeout_s: float,
        ticket: LockFile | None = None,
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
        ticket: LockFile | None = None,
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
        content = msgspec.json.encode(_LeaseRecord(holder=holder, shares=claim.shares))
        with self._as_fault():
            held = HeldLease(self._new_path(_LEASE), content, spare=spare)
        if spare is not None and not held.is_used_again:
            dead.insert(0, spare)  # remove_dead tries to remove it
        held.lease = Lease(id=held.id, holder=holder, shares=claim.shares, since=time.time())
        return held

    def amend(self, lease_id: str, claim: Claim) -> None:
        """Replace the shares of a lease of this user, unless it has ended. Call it only from within `decide`, where the
        mutex is held."""

        def replace_shares(content: bytes) -> bytes:
            record = msgspec.json.decode(content, type=_LeaseRecord)
            return msgspec.json.encode(msgspec.structs.replace(record, shares=claim.shares))

        with self._as_fault(), contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            rewrite(f"{self.folder}/{lease_id}{_LEASE}", replace_shares)

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

    def _new_path(self, suffix: str) -> str:
        return f"{self.folder}/{os.getpid()}-{os.urandom(4).hex()}{suffix}"

    @contextlib.contextmanager
    def _as_fault(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _read(self) -> _Live:
        if not (self.folder / MUTEX).exists():
            return (), ()  # no process has claimed anything here yet
        with hold_mutex(self.folder, _READ_TIMEOUT_S):
            return self._live([])

    def _live(self, dead: list[str]) -> _Live:
        """Return all live leases and tickets, and add the names of dead files to `dead`. Needs the mutex."""
        leases: list[Lease] = []
        tickets: list[Ticket] = []
        try:
            is_private = os.stat(self.folder).st_mode & 0o077 == 0
            # In a private directory no other user can lock a file.
            table = None if is_private else LockTable()
            for found in held_files(self.folder, (_LEASE, _TICKET), dead):
                record = _record(found, table)
                if isinstance(record, _TicketRecord):
                    need, priority = record.need, record.priority
                    holder = _owner(found, record.holder)
                    tickets.append(
                        Ticket(id=found.id, holder=holder, need=need, since=found.made_at, priority=priority)
                    )
                elif record is not None and record.shares:
                    holder = _owner(found, record.holder)
                    leases.append(Lease(id=found.id, holder=holder, shares=record.shares, since=found.made_at))
        except OSError as error:
            raise EnvironmentFault(f"the lease directory {self.folder} cannot be read: {error.strerror}") from error
        return tuple(leases), tuple(tickets)


def open_ledger() -> Ledger:
    """Return the ledger in the directory of GPUYARD_LOCK_DIR or of the configuration; default: this user's own."""
    return Ledger(prepare_directory(lease_dir()))


def _record(found: HeldFile, table: LockTable | None) -> _LeaseRecord | _TicketRecord | None:
    kind: type[_LeaseRecord | _TicketRecord] = _LeaseRecord if found.name.endswith(_LEASE) else _TicketRecord
    try:
        record = msgspec.json.decode(found.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_held = table is None or table.is_held_for(found.uid, record.holder.pid, found.device, found.inode)
    return record if is_held else None


def _owner(found: HeldFile, claimed: Holder) -> Holder:
    """Return the holder as recorded, except for the user, who is the owner of the file."""
    return msgspec.structs.replace(claimed, uid=found.uid, user=user_name(found.uid), label=tidy_label(claimed.label))
