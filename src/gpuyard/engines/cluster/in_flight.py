"""Submissions in flight: sent to a site, and not recorded as over yet."""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind
from gpuyard.core.memory.out_of_memory import Shortage
from gpuyard.engines.cluster import node_supervisor
from gpuyard.engines.cluster.outcome import decide
from gpuyard.engines.cluster.site import (
    OVER,
    ClusterSubmission,
    Sighting,
    Site,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)
from gpuyard.engines.cluster.submission_dir import VOID, Began, ElementTrace, SubmissionDirs
from gpuyard.engines.common import oom_evidence
from gpuyard.engines.common.program_outcome import StartContext
from gpuyard.engines.session.runner_command import start_command
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Ended, Launch, SiteStatus
from gpuyard.system.atomic_files import write_atomically

_log = logging.getLogger(__name__)
_NOTHING = ElementTrace()
_TERMS = "terms.json"
# A supervisor checks every few seconds whether its element was given up, and network file systems show files late.
_KEEP_LOST_S = 120.0
# A site may still start an element for a moment after it gave it up.
_MAY_START_YET = (OutcomeKind.CANCELLED, OutcomeKind.LOST, OutcomeKind.PREEMPTED)


class InFlightElement:
    """One attempt, and its state in the last report. It has been the same for `waited` reports."""

    def __init__(self, key: str, log: str, context: StartContext) -> None:
        self.key = key
        self.log = log
        self.context = context
        self.sighting: Sighting | None = None
        self.trace = _NOTHING
        self.waited = 0
        self.reported: tuple[str, str | None] | None = None

    @property
    def name(self) -> tuple[int, int]:
        job_id, _, number = self.key.partition(".")
        return int(job_id), int(number)

    def update(self, sighting: Sighting | None) -> None:
        is_same = (sighting and sighting.at) == (self.sighting and self.sighting.at)
        is_awaited = sighting is None or sighting.at in OVER or self.trace.ended is not None
        self.waited = self.waited + 1 if is_same and is_awaited else 0
        self.sighting = sighting


class InFlightSubmission:
    """A submission, and those of its elements that are not over."""

    def __init__(self, submission: ClusterSubmission, elements: dict[int, InFlightElement]) -> None:
        self.submission = submission
        self.elements = elements
        self.unrecorded = {element.key for element in elements.values()}

    @property
    def may_have_news(self) -> bool:
        """Whether a supervisor may have written files about an element. If not, only the site knows more."""
        return any(each.trace.began is not None or _may_run(each.sighting) for each in self.elements.values())

    def record(self, keys: Collection[str]) -> None:
        """Note that the ends of these attempts are recorded. An attempt that never started may be submitted again under
        its key; then it is live in another submission."""
        self.unrecorded.difference_update(set(keys) - {element.key for element in self.elements.values()})


class InFlightJobs:
    """For one thread."""

    def __init__(self, site: Site, dirs: SubmissionDirs) -> None:
        self._site = site
        self._dirs = dirs
        self._submissions: dict[str, InFlightSubmission] = {}
        self._live: dict[str, tuple[str, int]] = {}
        self._kept: dict[str, float] = {}
        self.wants_report = False

    @property
    def has_live(self) -> bool:
        return bool(self._live)

    def has(self, key: str) -> bool:
        return key in self._live

    # To the site

    def send(self, launches: Sequence[Launch], logs: Sequence[str]) -> None:
        """Submit launches on the same terms. Raises SiteRefused if the site refuses.

        After any other error the site may have taken the submission: the next report shows it.
        """
        terms = launches[0].terms
        assert terms is not None
        token = secrets.token_hex(6)
        folder = self._write(token, terms, list(zip(map(_on_node, launches), logs, strict=True)))
        elements = {
            number: InFlightElement(
                launch.key, log, StartContext(directory=launch.cwd, program=launch.command[0], stdin=launch.stdin)
            )
            for number, (launch, log) in enumerate(zip(launches, logs, strict=True))
        }
        entry = self._add(token, folder, terms, elements)
        try:
            known_as = self._site.submit(entry.submission)
        except SiteRefused:
            self._drop(token)
            raise
        with contextlib.suppress(EnvironmentFault):  # the site has it, also if that cannot be noted
            self._dirs.mark_submitted(token, known_as)

    def _write(self, token: str, terms: ClusterTerms, elements: Sequence[tuple[Launch, str]]) -> str:
        """Write a submission and return its folder. If the terms are complete, the site may know the submission."""
        self._dirs.write(token, elements)
        folder = self._dirs.path(token)
        try:
            write_atomically(f"{folder}/{_TERMS}", msgspec.json.encode(terms), mode=0o600)
        except OSError as error:
            self._dirs.forget(token)
            raise EnvironmentFault(f"{folder} cannot be written: {error.strerror}") from error
        return folder

    def adopt(self, attempts: Sequence[Attempt]) -> Iterator[SiteStatus | Ended]:
        """Take over the attempts of an earlier daemon. Attempts that it did not submit never started."""
        if not os.path.isdir(self._dirs.path("")):
            hint = "is its network file system mounted? If it is gone for good, create it: its jobs are then lost"
            raise EnvironmentFault(f"the folder {self._dirs.path('')} is missing", hint=hint)
        wanted = {attempt.key: attempt for attempt in attempts}
        for token in self._dirs.all():
            self._adopt_submission(token, wanted)
        missing = [attempt for key, attempt in wanted.items() if key not in self._live]
        self._refuse_another_folder(missing)
        for attempt in missing:
            yield Ended(job_id=attempt.job_id, attempt=attempt.number, outcome=self._outcome_without_files(attempt))

    def _refuse_another_folder(self, missing: Sequence[Attempt]) -> None:
        """Raise if an attempt that the site has reported was submitted from another folder: it may still run."""
        for attempt in missing:
            folder = os.path.dirname(os.path.dirname(attempt.log or ""))
            if attempt.site_id and folder and not self._dirs.path("").startswith(f"{folder}/"):
                raise EnvironmentFault(
                    f"job {attempt.job_id} was submitted from the folder {folder}, which is no longer configured",
                    hint=f"set the folder back to {folder} until the jobs there are over",
                )

    def _outcome_without_files(self, attempt: Attempt) -> Outcome:
        if not attempt.site_id:
            return Outcome(kind=OutcomeKind.NEVER_STARTED, reason="the daemon was gone before it was submitted")
        self._site.cancel([attempt.site_id])  # its end could not be noticed
        return Outcome(kind=OutcomeKind.LOST, reason="its files are gone, so its outcome is unknown")

    def _adopt_submission(self, token: str, wanted: dict[str, Attempt]) -> None:
        if not self._dirs.is_complete(token) and not self._dirs.is_gone(token):
            _log.warning("%s is not a submission, and is left alone", self._dirs.path(token))
            return
        written = self._dirs.read(token)
        traces = self._dirs.traces(token)
        elements = {
            number: InFlightElement(each.key, each.log, each.context)
            for number, each in enumerate(written)
            if each.key in wanted and traces.get(number, _NOTHING).began is not VOID
        }
        if not elements:
            self._remove(token)
            return
        folder = self._dirs.path(token)
        try:
            terms = msgspec.json.decode(Path(folder, _TERMS).read_bytes(), type=ClusterTerms)
        except (FileNotFoundError, msgspec.DecodeError):  # it was never submitted
            self._dirs.forget(token)
            return
        except OSError as error:
            raise EnvironmentFault(f"{folder}/{_TERMS} cannot be read: {error.strerror}") from error
        self._add(token, folder, terms, elements, count=len(written))

    def _add(
        self,
        token: str,
        folder: str,
        terms: ClusterTerms,
        elements: dict[int, InFlightElement],
        count: int | None = None,
    ) -> InFlightSubmission:
        submission = ClusterSubmission(
            known_as=self._dirs.known_as(token),
            token=token,
            terms=terms,
            count=len(elements) if count is None else count,
            folder=folder,
            supervisor=node_supervisor.command(folder),
        )
        entry = self._submissions[token] = InFlightSubmission(submission, elements)
        self._live |= {element.key: (token, number) for number, element in elements.items()}
        return entry

    def cancel(self, keys: Collection[str]) -> set[str]:
        """Cancel at the site. Return those that need not be cancelled again: the site's id of an element is unknown
        until the site has reported it."""
        known = {key: self._element(key) for key in keys}
        ids = [each.sighting.id for each in known.values() if each is not None and each.sighting is not None]
        if ids:
            self._site.cancel(ids)
        return {key for key, each in known.items() if each is None or each.sighting is not None}

    def _element(self, key: str) -> InFlightElement | None:
        place = self._live.get(key)
        return None if place is None else self._submissions[place[0]].elements.get(place[1])

    # From the site

    def ask_site(self) -> SiteReport:
        self.wants_report = False
        return self._site.report([entry.submission for entry in self._submissions.values() if entry.elements])

    def collect(self, report: SiteReport | None = None) -> Iterator[SiteStatus | Ended]:
        """Yield what has changed, by the supervisors' files and by the site's report, if given.

        A submission that cannot be read does not hide the others: the fault is raised at the end.
        """
        fault: EnvironmentFault | None = None
        for token, entry in list(self._submissions.items()):
            if report is None and not entry.may_have_news:
                continue
            try:
                traces = self._traces(token, entry)
            except EnvironmentFault as error:
                fault = error
                continue
            for number, element in list(entry.elements.items()):
                trace = traces.get(number, element.trace)
                if report is None and trace is element.trace:
                    continue
                element.trace = trace
                if report is not None:
                    element.update(report.sightings.get((token, number)))
                yield from self._collect(entry, number, element, was_asked=report is not None)
        if fault is not None:
            raise fault

    def _traces(self, token: str, entry: InFlightSubmission) -> Mapping[int, ElementTrace]:
        """Return none if the submission's folder was removed: then only the site's report counts."""
        try:
            return self._dirs.traces(token) if entry.elements else {}
        except EnvironmentFault:
            if not self._dirs.is_gone(token):
                raise
            return {}

    def _void(self, token: str, number: int) -> bool:
        """Keep the element from starting; without the submission's folder no supervisor can. Return False if it has."""
        return self._dirs.is_gone(token) or self._dirs.void(token, number)

    def _collect(
        self, entry: InFlightSubmission, number: int, element: InFlightElement, *, was_asked: bool
    ) -> Iterator[SiteStatus | Ended]:
        change = _status_change(element)
        if change is not None:
            yield change
        if not was_asked and element.sighting is None and element.trace.ended is None:
            return
        decided = decide(self._site.name, element.sighting, element.trace, element.context, waited=element.waited)
        outcome = decided.outcome
        if decided.is_to_be_voided and self._void(entry.submission.token, number):
            outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=f"{self._site.name} does not know it")
        if outcome is not None and outcome.kind in _MAY_START_YET and element.trace.began is None:
            if not self._void(entry.submission.token, number):
                return  # it started at the last moment
            if outcome.kind is OutcomeKind.LOST:
                outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=outcome.reason)
        if outcome is not None:
            yield self._end(entry, number, element, outcome, decided.shortage)
        elif element.trace.ended is not None:
            self.wants_report = not was_asked

    def _end(
        self,
        entry: InFlightSubmission,
        number: int,
        element: InFlightElement,
        outcome: Outcome,
        shortage: Shortage | None,
    ) -> Ended:
        token, finish = entry.submission.token, element.trace.ended
        if outcome.kind is OutcomeKind.LOST and not self._dirs.is_gone(token):
            self._dirs.mark_lost(token, number)
        self._keep_output(token, number, element)
        job_id, attempt = element.name
        del entry.elements[number]
        del self._live[element.key]
        sighting = element.sighting
        return Ended(
            job_id=job_id,
            attempt=attempt,
            outcome=outcome,
            pid=finish.pid if finish is not None else None,
            at=finish.at if finish is not None else sighting.ended_at if sighting is not None else None,
            shortage=shortage or oom_evidence.shortage_of(outcome, element.log, None),
            usage=finish.usage if finish is not None else None,
        )

    def _keep_output(self, token: str, number: int, element: InFlightElement) -> None:
        """Use the site's output as the log if no supervisor has opened one."""
        if os.path.exists(element.log) or element.sighting is None:
            return
        written = None if self._dirs.is_gone(token) else self._dirs.output(token, number)
        with contextlib.suppress(SiteUnreachable):
            written = written or self._site.output(element.sighting)
        if written:
            with contextlib.suppress(OSError):
                Path(element.log).touch(0o600)
                Path(element.log).write_bytes(written)

    def report_trouble(self, trouble: str) -> Iterator[SiteStatus]:
        """Yield the trouble as the reason of all elements that have not started."""
        for entry in self._submissions.values():
            for element in entry.elements.values():
                has_run = element.reported is not None and element.reported[1] is not None
                if not has_run and element.trace.began is None and element.reported != (trouble, None):
                    element.reported = (trouble, None)
                    yield _status(element, trouble, None, None)

    def forget(self, keys: Collection[str]) -> None:
        """Forget attempts whose ends are recorded, and remove submissions that are over."""
        for token, entry in list(self._submissions.items()):
            entry.record(keys)
            if not entry.unrecorded:
                self._drop(token)
        for token, until in list(self._kept.items()):
            if time.monotonic() >= until:
                del self._kept[token]
                with contextlib.suppress(EnvironmentFault):
                    self._dirs.forget(token)

    def _drop(self, token: str) -> None:
        entry = self._submissions.pop(token)
        for element in entry.elements.values():
            del self._live[element.key]
        with contextlib.suppress(EnvironmentFault):  # the next daemon does it
            self._remove(token)

    def _remove(self, token: str) -> None:
        """Remove the folder; if it marks an element as lost, only after 120 s, so that its supervisor sees the mark."""
        if any(Path(self._dirs.path(token)).glob("*.lost")):
            self._kept[token] = time.monotonic() + _KEEP_LOST_S
        else:
            self._dirs.forget(token)


def _may_run(sighting: Sighting | None) -> bool:
    return sighting is None or sighting.at is not SiteState.PENDING


def split_launches(launches: Sequence[Launch], most: int) -> tuple[list[Launch], list[Launch]]:
    """Return the launches that fit into one submission with the first, and the others."""
    terms = launches[0].terms
    same = [launch for launch in launches if launch.terms == terms][:most]
    taken = {launch.key for launch in same}
    return same, [launch for launch in launches if launch.key not in taken]


def _on_node(launch: Launch) -> Launch:
    """Replace a task by the command of its runner, without a session: nodes have no terminal to show it in."""
    if launch.task is None:
        return launch
    task = replace(launch.task, session=None)
    return replace(launch, command=start_command(replace(launch, task=task), ""), task=None)


def _status_change(element: InFlightElement) -> SiteStatus | None:
    began, sighting = element.trace.began, element.sighting
    place: str | None
    at: float | None
    if isinstance(began, Began):
        place, at, reason = (sighting.place if sighting is not None else "") or began.node, began.at, ""
    elif sighting is not None and sighting.at is SiteState.RUNNING:
        place, at, reason = sighting.place or "?", sighting.started_at, ""
    elif sighting is not None and sighting.at is SiteState.PENDING:
        place, at, reason = None, None, sighting.reason
    else:
        return None
    reported = (f"{sighting.id if sighting is not None else ''} {reason} {at}", place)
    if element.reported == reported:
        return None
    element.reported = reported
    return _status(element, reason, place, at)


def _status(element: InFlightElement, reason: str, place: str | None, at: float | None) -> SiteStatus:
    job_id, attempt = element.name
    site_id = element.sighting.id if element.sighting is not None else ""
    return SiteStatus(job_id=job_id, attempt=attempt, site_id=site_id, reason=reason, place=place, at=at)
