"""Watches the health of the devices: records new faults in the ledger, and reports them once.

- The step that sees a faulty reading has closed the device already. The mark in the ledger is for scripts of the same
  user and for the next daemon, and says since when.
- A mark of a figure is removed when the figure is normal again. That of an Xid stays until a user clears the device.
- A link that was wider while this daemon ran has lost lanes: a fault. One that was never wider is only an alarm.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.control.step_result import Step
from gpuyard.core.health_figures import HealthMark, IssueKind
from gpuyard.core.notify.messages import device_title
from gpuyard.core.scheduling.device_health import HealthIssue, describe_issue, device_issues
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.leases.health_marks import add_mark, remove_marks

_log = logging.getLogger(__name__)
IssueKey = tuple[str, IssueKind, int | None]


class HealthMonitor:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._snapshot: Snapshot | None = None
        self._marks: tuple[HealthMark, ...] | None = None  # None: not read yet
        self._widest: dict[str, int] = {}
        self._since: dict[IssueKey, float] = {}
        # Called with a title of the device, and what is wrong with it.
        self.on_fault: list[Callable[[str, HealthIssue], None]] = []
        scheduler.listeners.append(self._after_step)
        scheduler.notice_sources.append(self._notices)

    def issues(self, snapshot: Snapshot, marks: Sequence[HealthMark]) -> dict[str, tuple[HealthIssue, ...]]:
        """Return what is wrong with each device, and since when as far as this daemon or the ledger knows."""
        return {
            device_id: tuple(
                issue if issue.since is not None else replace(issue, since=self._since.get(_key(device_id, issue)))
                for issue in issues
            )
            for device_id, issues in device_issues(snapshot, marks).items()
        }

    def _after_step(self, _: Step) -> None:
        snapshot, ledger = self._scheduler.sampling.latest.snapshot, self._scheduler.ledger
        if snapshot is self._snapshot or not any(device.health is not None for device in snapshot.devices):
            return
        self._snapshot = snapshot
        if self._marks is None or self._marks or self._since:  # else no mark matters
            self._marks = ledger.read_health_marks()
        cards = [device for device in snapshot.devices if device.parent is None and device.health is not None]
        changes = [*self._new_marks(cards, snapshot), *self._over(cards, snapshot)]
        if changes:
            self._marks = ledger.read_health_marks()
            self._scheduler.wake()

    def _new_marks(self, cards: Sequence[Device], snapshot: Snapshot) -> Iterator[HealthMark]:
        """Record the faults that are not in the ledger yet, and yield their marks."""
        marks, now = self._marks or (), time.time()
        lost = [mark for card in cards if (mark := self._lost_lanes(card, marks, now)) is not None]
        found = device_issues(snapshot, (*marks, *lost))
        keys = {_key(card.id, issue) for card in cards for issue in found.get(card.id, ())}
        self._since = {key: self._since.get(key, now) for key in keys}
        known = {(mark.device_id, mark.kind, mark.xid) for mark in marks}
        for card in cards:
            for issue in found.get(card.id, ()):
                if issue.is_fault and _key(card.id, issue) not in known:
                    yield self._record(card, issue, snapshot, issue.since or now)

    def _lost_lanes(self, card: Device, marks: Sequence[HealthMark], now: float) -> HealthMark | None:
        width = None if card.health is None else card.health.link_width
        if width is None:
            return None
        widest = self._widest[card.id] = max(width, self._widest.get(card.id, 0))
        is_known = any(mark.device_id == card.id and mark.kind is IssueKind.LINK for mark in marks)
        is_new = width < widest and not is_known
        return HealthMark(device_id=card.id, since=now, kind=IssueKind.LINK) if is_new else None

    def _record(self, card: Device, issue: HealthIssue, snapshot: Snapshot, since: float) -> HealthMark:
        mark = HealthMark(device_id=card.id, since=since, kind=issue.kind, xid=issue.xid)
        title = device_title(card, snapshot)
        _log.warning("%s is %s; %s", title, describe_issue(issue), issue.remedy)
        try:
            add_mark(self._scheduler.ledger.folder, mark)
        except OSError as error:
            _log.warning("the fault of %s cannot be recorded in the lease directory: %s", title, error.strerror)
        for report in self.on_fault:
            report(title, issue)
        return mark

    def _over(self, cards: Sequence[Device], snapshot: Snapshot) -> Iterator[HealthMark]:
        """Remove this user's marks of figures that are normal again, and yield them."""
        marks = self._marks or ()
        kinds = {(card.id, issue.kind) for card in cards for issue in device_issues(snapshot, marks).get(card.id, ())}
        ids = {card.id for card in cards}
        over = {
            mark
            for mark in marks
            if mark.device_id in ids and mark.kind not in (None, IssueKind.XID)
            if (mark.device_id, mark.kind) not in kinds
        }
        if over:
            try:
                remove_marks(self._scheduler.ledger.folder, lambda mark: mark in over)
            except OSError as error:
                _log.warning("the lease directory cannot be changed: %s", error.strerror)
        yield from over

    def _notices(self) -> Iterator[str]:
        snapshot = self._scheduler.sampling.latest.snapshot
        for device_id, issues in self.issues(snapshot, self._marks or ()).items():
            label = snapshot.labels.get(device_id, device_id)
            yield from (f"GPU {label} is {describe_issue(each)}; {each.remedy}" for each in issues if each.is_fault)


def _key(device_id: str, issue: HealthIssue) -> IssueKey:
    return device_id, issue.kind, issue.xid
