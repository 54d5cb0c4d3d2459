"""The ledger in a directory: leases and tickets as held files, changed under one briefly held mutex; and devices that
users drain and clear by name.

- `*.lease` is a lease and `*.ticket` a waiting process; both are LockFiles, so a dead process holds nothing.
- Records of other users are read as hostile (`records`): what is not accepted is ignored, and named in `contents`.
- `claim` calls `decide` under the mutex with all live leases and tickets, and grants what it returns.
- Readers take no lock: a process that holds the mutex for long, or for ever, does not hide the ledger.
- `QueueLedger` is the ledger of the daemon: many claims in one step, and one ticket for all its waiting jobs."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from gpuyard.config import config_fault, lease_dir
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger import drains_and_marks as owned
from gpuyard.ledger import records
from gpuyard.ledger.directory_in_use import check_directory, recorded_directory, unlink_lease
from gpuyard.ledger.ledger_mutex import MutexTurns, hold_mutex, prepare_directory, unwritable
from gpuyard.ledger.lock_file import (
    DRAIN,
    LEASE,
    MARK,
    MAX_FILES_PER_USER,
    MAX_MB_PER_USER,
    TICKET,
    LedgerScan,
    LockFile,
    rewrite,
)
from gpuyard.ledger.measured_usage import ForeignLoadTracker, HostMeter, measure, measure_loads
from gpuyard.ledger.records import BadRecord, active_tickets, bad_record
from gpuyard.model.lease import Claim, Drain, Holder, Lease, Need, Ticket, asks_for_the_same
from gpuyard.model.machine_snapshot import HealthFigures, HealthMark, Snapshot
from gpuyard.policy.device_health import device_issues
from gpuyard.policy.device_names import find_all_devices
from gpuyard.policy.host_room import HostUse
from gpuyard.system.system_limits import first_reserved_descriptor, passes

if TYPE_CHECKING:
    from gpuyard.ports import WantedClaim

# Below MAX_FILES_PER_USER: there are tickets and dead files, too.
MAX_LEASES_PER_USER = 3840
Mutex: TypeAlias = contextlib.AbstractContextManager[None]  # holds the mutex of the ledger
Decide: TypeAlias = Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[tuple[Holder, Claim]]]


class LedgerContents(NamedTuple):
    """All live leases and tickets, held files that are ignored, and what holds for this user."""

    leases: tuple[Lease, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    bad: tuple[BadRecord, ...] = ()
    drains: tuple[Drain, ...] = ()
    health_marks: tuple[HealthMark, ...] = ()


class HeldLease(LockFile):
    """A lease that this process holds. A child that inherits `descriptor` keeps it."""

    lease: Lease


class Ledger:
    def __init__(self, folder: Path, check: Callable[[Path], None] | None = None) -> None:
        """`check` gets the directory before each claim, under the mutex, and raises if nothing may be claimed there."""
        self.folder, self._check = folder, check
        self._remade: set[str] = set()
        self._scan, self._drains, self._marks = LedgerScan(folder), owned.drain_files(folder), owned.mark_files(folder)
        # As of the last read; `decide` sees those of its own claim.
        self.drains: tuple[Drain, ...] = ()
        self.health_marks: tuple[HealthMark, ...] = ()

    def leases(self) -> tuple[Lease, ...]:
        return self.contents().leases

    def contents(self) -> LedgerContents:
        leases: list[Lease] = []
        tickets: list[Ticket] = []
        bad: list[BadRecord] = []
        try:
            for found in self._scan.held_files():
                record = records.read_record(found)
                if isinstance(record, BadRecord):
                    bad.append(record)
                elif isinstance(record, Ticket):
                    tickets.append(record)
                elif record is not None:
                    leases.append(record)
            self.drains = self._drains.read(self._scan.drains)
            self.health_marks = self._marks.read(self._scan.marks)
        except FileNotFoundError:
            self.drains, self.health_marks = (), ()
            return LedgerContents()  # no process has claimed anything here yet
        except OSError as error:
            raise EnvironmentFault(f"the lease directory {self.folder} cannot be read: {error.strerror}") from error
        counted, uncounted = records.oldest_per_user(tickets)
        most = f"only the newest {MAX_FILES_PER_USER} files and {MAX_MB_PER_USER} MB of a user are read"
        scan = self._scan
        bad += uncounted
        bad += [bad_record(f"a group of {count} files", uid, most) for uid, count in scan.unread.items()]
        bad += [bad_record(name, None, f"it cannot be read: {why}") for name, why in scan.unreadable.items()]
        return LedgerContents(tuple(leases), counted, tuple(bad), self.drains, self.health_marks)

    def take_ticket(self, holder: Holder, need: Need, priority: int, mutex: Mutex) -> LockFile:
        """Return a ticket. It keeps its place until it is released or this process ends; children do not inherit it."""
        with mutex, self._as_fault():
            return LockFile(self._new_path(TICKET), records.encode_ticket(holder, need, priority), is_inherited=False)

    def claim(
        self,
        holder: Holder,
        decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Claim | None],
        timeout_s: float,
        ticket: LockFile | None = None,
    ) -> HeldLease | None:
        """Grant the claim that `decide` returns, and return the lease. No other process can claim in between. The
        `ticket` is released together with the grant, so that no process sees its holder still waiting."""

        def decide_all(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[tuple[Holder, Claim]]:
            claim = decide(leases, tickets)
            return [] if claim is None else [(holder, claim)]

        return next(iter(self.claim_all(decide_all, hold_mutex(self.folder, timeout_s), ticket)), None)

    def claim_all(self, decide: Decide, mutex: Mutex, ticket: LockFile | None = None) -> list[HeldLease]:
        """Grant all claims that `decide` returns, or none of them if one fails. If descriptors or space for lease files
        run out, only the first ones are granted, at least one."""
        granted: list[HeldLease] = []
        try:
            with mutex:
                if self._check is not None:
                    self._check(self.folder)
                live = self.contents()
                wanted = decide(live.leases, live.tickets)
                self._scan.dead = [name for name in self._scan.dead if name not in self._remade]
                self._remade.clear()
                mine = sum(lease.holder.uid == os.geteuid() for lease in live.leases) if wanted else 0
                if mine + len(wanted) > MAX_LEASES_PER_USER:  # others would not read them all
                    raise EnvironmentFault(
                        f"you hold {MAX_LEASES_PER_USER} leases, and others would not see more of them",
                        hint="wait until some of them end, or lease more GPU memory for fewer processes",
                    )
                try:
                    self._grant_all(wanted, granted)
                finally:
                    self._scan.remove_dead()
                if granted and ticket is not None:
                    ticket.release()
        except BaseException:  # also an interrupt that came while the mutex was held
            for held in granted:
                held.release()
            raise
        return granted

    def _grant_all(self, wanted: Sequence[tuple[Holder, Claim]], granted: list[HeldLease]) -> None:
        most = first_reserved_descriptor() if wanted else 0
        try:
            for holder, claim in wanted:
                dead = self._scan.dead
                spare = dead.pop() if dead else ""
                granted.append(self._hold(self._new_path(LEASE), holder, claim, spare))
                if spare and not granted[-1].is_used_again:
                    dead.insert(0, spare)  # the scan tries to remove it
                if granted[-1].descriptor >= most:
                    break
        except EnvironmentFault as error:
            if not (granted and isinstance(error.__cause__, OSError) and passes(error.__cause__)):
                raise

    def _hold(self, path: str, holder: Holder, claim: Claim, spare: str = "") -> HeldLease:
        with self._as_fault():
            held = HeldLease(path, records.encode_lease(holder, claim), spare=spare)
        held.lease = Lease(id=held.id, holder=holder, shares=claim.shares, since=time.time(), host=claim.host)
        return held

    def remake(self, lease_id: str, holder: Holder, claim: Claim) -> HeldLease:
        """Make a lease again whose file was removed or spoiled. Call it only from within `decide`."""
        held = self._hold(f"{self.folder}/{lease_id}{LEASE}", holder, claim)
        self._remade.add(held.name)  # a dead file of this name was read before, but is not dead any more
        return held

    def amend(self, lease_id: str, claim: Claim, label: str = "") -> None:
        """Replace the shares of a lease of this user, unless it has ended; and its share of the host and its label if
        there is another. Call it only from within `decide`, where the mutex is held."""
        with self._as_fault(), contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            rewrite(f"{self.folder}/{lease_id}{LEASE}", lambda content: records.replace_shares(content, claim, label))

    def end(self, lease_id: str) -> None:
        """Remove a lease of this user, also if another process holds it. Raises UserError if it is another user's."""
        lease = next((lease for lease in self.leases() if lease.id == lease_id), None)
        if lease is None:
            held = ", ".join(lease.id for lease in self.leases() if lease.holder.uid == os.getuid()) or "none"
            raise UserError(f"there is no lease '{lease_id}'", hint=f"your leases: {held}")
        if lease.holder.uid != os.getuid():
            raise UserError(f"lease {lease_id} belongs to {lease.holder.user}", hint="only its owner can end it")
        unlink_lease(self.folder, f"{lease_id}{LEASE}")

    def drain(self, device_id: str, reason: str = "") -> Drain:
        """Let nothing new start on the device, for this user, or for all if this user owns the directory or is root.
        A drain that this user made earlier gets the new reason."""
        if len(reason) > owned.LONGEST_REASON:
            raise UserError(f"the reason has {len(reason)} characters", hint=f"write at most {owned.LONGEST_REASON}")
        with hold_mutex(self.folder, 10.0), self._as_fault():
            since = min((drain.since for drain in self._my_drains(device_id)), default=time.time())
            owned.remove_drains(self.folder, device_id)
            owned.add_drain(self.folder, device_id, reason, since)
        return self._my_drains(device_id)[0]

    def _my_drains(self, device_id: str) -> list[Drain]:
        drains = self.contents().drains
        return [drain for drain in drains if drain.device_id == device_id and drain.uid == os.geteuid()]

    def read_drains(self) -> tuple[Drain, ...]:
        """Return the drains that hold for this user, without reading the leases."""
        try:
            return self._drains.read(owned.find_files(self.folder, DRAIN))
        except OSError:
            return self.drains  # the next claim says what is wrong

    def undrain(self, device_id: str) -> None:
        """Remove this user's drain. Raises UserError if there is none, or if another user's still holds."""
        with hold_mutex(self.folder, 10.0), self._as_fault():
            before = [drain for drain in self.contents().drains if drain.device_id == device_id]
            owned.remove_drains(self.folder, device_id)
        others = [drain.user for drain in before if drain.uid != os.geteuid()]
        if others:
            raise UserError(
                f"{device_id} is drained by {others[0]}, for all users", hint=f"ask {others[0]} to undrain it"
            )
        if not before:
            raise UserError(f"{device_id} is not drained", hint="`gpuyard devices` shows which GPUs are")

    def read_health_marks(self) -> tuple[HealthMark, ...]:
        """Return the health marks that hold for this user, without reading the leases."""
        try:
            return self._marks.read(owned.find_files(self.folder, MARK))
        except OSError:
            return self.health_marks  # the next claim says what is wrong

    def clear_health(self, device_id: str, figures: HealthFigures | None) -> None:
        """Let work start on a device that was faulty: its marks go, and its present figures are accepted."""
        accepted = replace(figures or HealthFigures(), xids=(), is_lost=False)
        with self._as_fault():
            owned.remove_marks(self.folder, lambda each: each.device_id == device_id)
            mark = HealthMark(device_id=device_id, since=time.time(), accepted=accepted)
            owned.add_mark(self.folder, mark)

    def _new_path(self, suffix: str) -> str:
        return f"{self.folder}/{os.getpid()}-{os.urandom(4).hex()}{suffix}"

    @contextlib.contextmanager
    def _as_fault(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.folder, error) from error


def open_ledger(*, is_queue: bool = False) -> Ledger:
    """Return the ledger of GPUYARD_LOCK_DIR or of the configuration. Unless `is_queue`, claims are refused while this
    user's queue uses another directory."""
    folder = lease_dir()
    if is_queue and config_fault() is not None:  # the file may name another
        folder = recorded_directory() or folder
    return Ledger(prepare_directory(folder), None if is_queue else check_directory)


def drain_devices(ledger: Ledger, names: Sequence[str | int], reason: str, snapshot: Snapshot) -> list[Drain]:
    """Let nothing new start on these devices. Raises UserError for an unknown name before any is drained."""
    return [ledger.drain(device_id, reason) for device_id in find_all_devices(names, snapshot)]


def undrain_devices(ledger: Ledger, names: Sequence[str | int], snapshot: Snapshot) -> list[str]:
    """Let work start on these devices again, and return their ids. Also finds drained devices that are gone."""
    ids = _find_with_gone(names, snapshot, [drain.device_id for drain in ledger.read_drains()])
    for device_id in ids:
        ledger.undrain(device_id)
    return ids


def _find_with_gone(names: Sequence[str | int], snapshot: Snapshot, known: Sequence[str]) -> list[str]:
    """Return the ids of devices that are there, or are among `known`."""
    gone = {device_id for device_id in known if snapshot.device(device_id) is None}
    return [each for name in names for each in ([str(name)] if name in gone else find_all_devices([name], snapshot))]


def clear_devices(ledger: Ledger, names: Sequence[str | int], snapshot: Snapshot) -> list[str]:
    """Let work start on these cards again although they were faulty, and return their ids. A part of a card stands for
    its card. Raises UserError, before any is cleared, for a device that is not faulty, or that another user marked."""
    marks = ledger.read_health_marks()
    ids = _find_with_gone(names, snapshot, [mark.device_id for mark in marks])
    devices = {device_id: snapshot.device(device_id) for device_id in ids}
    cards = list(dict.fromkeys((device and device.parent) or device_id for device_id, device in devices.items()))
    issues = device_issues(snapshot, marks)
    for card_id in cards:
        if card_id not in issues and snapshot.device(card_id) is not None:
            hint = "`gpuyard devices` shows which GPUs are"
            raise UserError(f"GPU {snapshot.label(card_id)} is not faulty", hint=hint)
    for card_id in cards:
        card = snapshot.device(card_id)
        ledger.clear_health(card_id, None if card is None else card.health)
    return cards


class QueueLedger:
    measure = staticmethod(measure)
    measure_loads = staticmethod(measure_loads)

    def __init__(self, ledger: Ledger, holder: Holder) -> None:
        self.ledger = ledger
        self._holder = holder
        self._ticket: LockFile | None = None
        self._waits_for: tuple[Need, int] | None = None
        self.foreign_loads = ForeignLoadTracker().update
        self._is_private = not ledger.folder.stat().st_mode & 0o077
        self._host_meter = HostMeter()
        # Of the mutex: the queue has requests to answer, so it never waits for others.
        self.turns = MutexTurns(ledger.folder)

    def grant(
        self, decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence["WantedClaim"]]
    ) -> Sequence[HeldLease]:
        def decide_as_us(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[tuple[Holder, Claim]]:
            wanted = decide(leases, tuple(active_tickets(tickets)))
            for each in wanted:
                if each.remakes is not None:
                    holder = replace(self._holder, label=each.label)
                    remade.append(self.ledger.remake(each.remakes, holder, each.claim))
                elif each.amends is not None:
                    self.ledger.amend(each.amends, each.claim, each.label)
            new = (each for each in wanted if each.amends is None and each.remakes is None)
            return [(replace(self._holder, label=each.label), each.claim) for each in new]

        remade: list[HeldLease] = []
        folder = self.ledger.folder
        # A private directory that was removed is made again, unless its parent is gone, too. For each grant: pathlib
        # takes ten times as long.
        if self._is_private and not os.path.isdir(folder) and folder.parent.is_dir():
            prepare_directory(folder)
        try:
            granted = self.ledger.claim_all(decide_as_us, self.turns.hold())
        except BaseException:
            for held in remade:
                held.release()
            raise
        return [*remade, *granted]

    def read(self) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
        """Return all live leases, and the tickets of processes that run. Never waits for another process."""
        contents = self.ledger.contents()
        return contents.leases, tuple(active_tickets(contents.tickets))

    def measure_host(self, leases: Sequence[Lease], *, again: bool) -> Mapping[str, HostUse]:
        if again:
            self._host_meter.forget()
        return self._host_meter.use_of(leases)

    def measure_holders(self, leases: Sequence[Lease]) -> Mapping[str, float]:
        return HostMeter().held_by(leases)

    def drains(self) -> tuple[Drain, ...]:
        return self.ledger.drains

    def health_marks(self) -> tuple[HealthMark, ...]:
        return self.ledger.health_marks

    def take_ticket(self, need: Need, priority: int, label: str) -> None:
        if self._ticket is not None and self._waits_for is not None:
            before, before_priority = self._waits_for
            if priority == before_priority and asks_for_the_same(before, need):
                self._ticket.beat()
                return
        self.return_ticket()
        holder, mutex = replace(self._holder, label=label), self.turns.hold()
        self._ticket = self.ledger.take_ticket(holder, need, priority, mutex)
        self._waits_for = (need, priority)

    def return_ticket(self) -> None:
        if self._ticket is not None:
            self._ticket.release()
        self._ticket = self._waits_for = None

    def my_ticket(self) -> str | None:
        return self._ticket.id if self._ticket is not None else None
