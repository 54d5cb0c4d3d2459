"""The ledger in a directory: leases and tickets as held files, changed under one short mutex.

- `*.lease` is a lease, `*.ticket` somebody who waits; both are LockFiles, so the dead hold nothing.
- The record inside is believed only as far as nobody could gain by forging it: the user is the owner of the file, the
  time is the file's own, and what cannot be read as a record is no lease.
- A claim is granted by asking `decide` under the mutex, with all that is live at that moment.
- Whoever only reads takes the mutex too: a reader that tries a dead file's lock would make it seem held.
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
from gpuyard.leases.ledger_directory import prepare
from gpuyard.leases.ledger_mutex import MUTEX, hold_mutex, unwritable
from gpuyard.leases.lock_file import HeldFile, LockFile, held_files, remove_dead, rewrite
from gpuyard.system.process_identity import tidy_label, user_name

_LEASE, _TICKET = ".lease", ".ticket"
_READING_TIMEOUT_S = 10.0


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
    """A lease of this process's; a child that inherits `descriptor`, or takes over a shared one, keeps it."""

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
        """Lets another process of this user's keep the lease too, with `take_over(path)`."""
        self._file.share()

    def leave(self) -> None:
        """Goes, and leaves the lease to those who inherited it or took it over."""
        self._file.leave()

    def release(self) -> None:
        """Ends the lease for all who keep it."""
        self._file.release()


class HeldTicket:
    """A place in the line, of this process alone."""

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

    def enter_line(self, holder: Holder, need: Need, priority: int, timeout_s: float) -> HeldTicket:
        """A ticket, which keeps its place while this process lives."""
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
        """What `decide` says of the live leases and tickets, granted before anybody else can ask.

        A lease ends its ticket in the same moment, so that nobody sees its holder wait for more.
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
        """As `claim`, for several at once: all that `decide` says is granted, or nothing is."""
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
            dead.insert(0, spare)  # and is removed if it can be
        lease_id = file.name.removesuffix(_LEASE)
        return HeldLease(file, Lease(id=lease_id, holder=holder, shares=claim.shares, since=time.time()))

    def amend(self, lease_id: str, claim: Claim) -> None:
        """What the user's own lease is for from now on; one that has ended is left alone. Only from within `decide`,
        while nobody else looks."""
        path = f"{self.folder}/{lease_id}{_LEASE}"
        try:
            rewrite(
                path,
                lambda content: msgspec.json.encode(
                    msgspec.structs.replace(_LEASES.decode(content), shares=claim.shares)
                ),
            )
        except (FileNotFoundError, msgspec.MsgspecError):
            return
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def end(self, lease_id: str) -> None:
        """Takes the user's own lease out of the ledger, whoever of the user's processes holds it."""
        lease = next((lease for lease in self.leases() if lease.id == lease_id), None)
        if lease is None:
            held = ", ".join(lease.id for lease in self.leases() if lease.holder.uid == os.getuid()) or "none"
            raise UserError(f"there is no lease '{lease_id}'", hint=f"yours are: {held}")
        if lease.holder.uid != os.getuid():
            raise UserError(f"lease {lease_id} is {lease.holder.user}'s", hint="only they can end it")
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
            return (), ()  # nobody has ever claimed anything
        with hold_mutex(self.folder, _READING_TIMEOUT_S):
            return self._live(None)

    def _live(self, dead: list[str] | None) -> _Live:
        """All leases and tickets that are held."""
        leases: list[Lease] = []
        tickets: list[Ticket] = []
        try:
            is_private = os.stat(self.folder).st_mode & 0o077 == 0
            # Where nobody else can reach a file, nobody else can lock it.
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
    """The one that the environment or the configuration names, else this user's own."""
    return Ledger(prepare(lease_dir()))


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


def _owner(found: HeldFile, told: Holder) -> Holder:
    return msgspec.structs.replace(told, uid=found.uid, user=user_name(found.uid), label=tidy_label(told.label))
