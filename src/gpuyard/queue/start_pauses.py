"""Why no job starts for a while: a full disk, a limit of the system, or a ledger that cannot be used."""

import logging
from collections.abc import Iterator, Mapping

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, WaitedTooLong
from gpuyard.model.lifecycle import JobEvent
from gpuyard.model.retry import Verdict
from gpuyard.policy import disk_and_system_limits as limits
from gpuyard.policy.numbers import LONGEST_DELAY_S
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import StartCap
from gpuyard.ports import DiskSpace
from gpuyard.queue.transitions import JobTransitions


class WatchedDisk(Struct, frozen=True, kw_only=True):
    """A disk of the queue: `what` is "state" or "logs"; or "output", a disk that jobs write to."""

    what: str
    figure: limits.DiskFigure


class DiskGate:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._disks: DiskSpace | None = None
        self._folders: Mapping[str, str] = {}

    def watch(self, disks: DiskSpace, folders: Mapping[str, str]) -> None:
        """Limit starts by these disks. `folders` are the queue's own, by what is in them."""
        self._disks, self._folders = disks, folders

    def closed_reasons(self, least_mb: float) -> Iterator[Reason]:
        """Yield why no job at all may start now."""
        found: dict[object, Reason] = {}
        for what, folder in self._folders.items():
            reason = self._reason(folder, least_mb, f"the disk of the queue's {what}", limits.CONFIGURED)
            if reason is not None:
                found.setdefault(reason.text if reason.had is None else reason.had, reason)  # once if it is one disk
        yield from found.values()

    def notices(self, least_mb: float) -> list[str]:
        """Return what users should know about the disks of the queue."""
        reasons = [reason for reason in self.closed_reasons(least_mb) if reason.remedy]
        return [f"no job starts: {reason.text}; {reason.remedy}" for reason in reasons]

    def job_reasons(self, job_id: int, least_mb: float) -> tuple[Reason, ...]:
        """Return why this job may not start now, by the disks that it writes to. `least_mb` is the configured limit."""
        spec = self._transitions.estimates.job(job_id).spec
        own_mb = spec.disk.min_free_mb
        folders = dict.fromkeys(limits.output_folders(spec), "the disk of its output")
        if own_mb is not None and own_mb > least_mb:
            for what, folder in self._folders.items():
                folders.setdefault(folder, f"the disk of the queue's {what}")
        limit = least_mb if own_mb is None else own_mb
        option = "--min-free-disk, or min_free_disk under [host],"
        return tuple(filter(None, (self._reason(folder, limit, what, option) for folder, what in folders.items())))

    def watched(self) -> list[WatchedDisk]:
        """Return the disks of the queue, and others that jobs write to, with their last figures."""
        if self._disks is None:
            return []
        for folder in self._folders.values():
            self._disks.figure(folder, 0.0)  # reads it again if it is old
        known = self._disks.known()
        own = [(what, folder) for what, folder in self._folders.items() if folder in known]
        theirs = [("output", folder) for folder in sorted(known.keys() - set(self._folders.values()))]
        return [WatchedDisk(what=what, figure=known[folder]) for what, folder in own + theirs]

    def _reason(self, folder: str, least_mb: float, what: str, limit: str) -> Reason | None:
        if self._disks is None or least_mb <= 0:
            return None
        return limits.disk_reason(self._disks.figure(folder, least_mb), least_mb, what, limit)


_log = logging.getLogger(__name__)


class StartPauses:
    def __init__(self) -> None:
        self._backoff = limits.StartBackoff()
        self._ledger_fault: EnvironmentFault | None = None
        self._ledger_retry_at = 0.0
        self.config_fault: str | None = None

    def update(self, now: float, *, has_ready: bool) -> None:
        """Drop the limit if the job that was tried has begun, or if no job is left to try."""
        before, self._backoff = self._backoff, self._backoff.at(now)
        if not has_ready and now >= self._backoff.retry_at:
            self._backoff = limits.StartBackoff()
        if before.limit is not None and self._backoff.limit is None:
            _log.info("jobs start again")

    def note_limit(self, job_id: int, limit: limits.ResourceLimit, now: float) -> Verdict | None:
        """Note that a job did not begin. Return the verdict on a job that is set aside, so that others can be tried."""
        if not limit.is_own:
            before, self._backoff = self._backoff, self._backoff.after_failure(limit, job_id, now)
            if before.limit is None or before.limit.text != limit.text:
                _log.warning("%s", " ".join(self.notices()))
        if not self._backoff.is_set_aside(limit, job_id):
            return None
        text = f"{limit.text}; next try in {LONGEST_DELAY_S:g} s"
        return Verdict(event=JobEvent.RETRY, delay_s=LONGEST_DELAY_S, text=f"{text} ({limit.remedy})")

    def note_start(self, now: float) -> None:
        self._backoff = self._backoff.after_start(now)

    def may_start(self, now: float) -> bool:
        return self._backoff.most_starts(now) != 0

    def note_ledger(self, error: EnvironmentFault | None, now: float) -> None:
        """Note that the ledger could not be used, or with None that it could."""
        before, self._ledger_fault = self._ledger_fault, error
        if error is not None:
            self._ledger_retry_at = now + 1.0
            if before is None or str(before) != str(error):
                _log.warning("%s; jobs that need devices wait", error)

    def note_config(self, fault: str | None) -> None:
        """Start nothing as long as the settings are unknown, such as which devices are banned. None: they are known."""
        if fault != self.config_fault:
            _log.warning("%s", "jobs start again" if fault is None else f"jobs wait: {fault}")
        self.config_fault = fault

    def start_caps(self, now: float) -> Iterator[StartCap]:
        limit, most = self._backoff.limit, self._backoff.most_starts(now)
        if limit is not None and most is not None:
            text = f"{limit.text}; next try within {self._backoff.delay_s:g} s"
            yield StartCap(most=most, reason=Reason(ReasonKind.RESOURCE_LIMIT, text, remedy=limit.remedy))
        if self.config_fault is not None:
            yield StartCap(most=0, reason=Reason(ReasonKind.RESOURCE_LIMIT, self.config_fault))
        fault = self._ledger_fault
        if fault is not None and now < self._ledger_retry_at:
            reason = Reason(ReasonKind.RESOURCE_LIMIT, str(fault), remedy=fault.hint or "")
            yield StartCap(most=0, reason=reason, is_for_devices=True)

    def notices(self) -> list[str]:
        """Return what people should know, with what to do about it."""
        found = [limits.ResourceLimit(text=self.config_fault, remedy="")] if self.config_fault else []
        if self._backoff.limit is not None:
            found.append(self._backoff.limit)
        if self._ledger_fault is not None and not isinstance(self._ledger_fault, WaitedTooLong):  # which passes at once
            found.append(limits.ResourceLimit(text=str(self._ledger_fault), remedy=self._ledger_fault.hint or ""))
        return [f"jobs wait: {each.text}{f' ({each.remedy})' if each.remedy else ''}" for each in found]

    def wake_at(self, now: float) -> Iterator[float | None]:
        yield self._backoff.retry_at if now < self._backoff.retry_at else None
        yield self._ledger_retry_at if now < self._ledger_retry_at else None
