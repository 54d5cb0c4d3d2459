"""The cargo: parcels that are with a site, or on their way, and have not been recorded as over."""

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
from gpuyard.engines.cluster import node_supervisor
from gpuyard.engines.cluster.outcome import ElementOutcome, judge
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
from gpuyard.engines.local import oom_evidence
from gpuyard.engines.local.keeper_journal import StartContext
from gpuyard.engines.session.runner_command import start_command
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Ended, Launch, SiteStatus

_log = logging.getLogger(__name__)
_NOTHING = ElementTrace()
_TERMS = "terms.json"
# A supervisor whose element was given up looks for the mark every few seconds, and networks show it late.
_KEEP_LOST_S = 120.0
# What a site gave up before it began may be started all the same, for a moment.
_MAY_START_YET = (OutcomeKind.CANCELLED, OutcomeKind.LOST, OutcomeKind.PREEMPTED)


class InFlightElement:
    """One attempt, and how it was last seen. It has been so for `waited` looks."""

    def __init__(self, key: str, log: str, things: StartContext) -> None:
        self.key = key
        self.log = log
        self.things = things
        self.sighting: Sighting | None = None
        self.trace = _NOTHING
        self.waited = 0
        self.told: tuple[str, str | None] | None = None

    @property
    def name(self) -> tuple[int, int]:
        job_id, _, number = self.key.partition(".")
        return int(job_id), int(number)

    def look(self, sighting: Sighting | None) -> None:
        is_same = (sighting and sighting.at) == (self.sighting and self.sighting.at)
        is_awaited = sighting is None or sighting.at in OVER or self.trace.ended is not None
        self.waited = self.waited + 1 if is_same and is_awaited else 0
        self.sighting = sighting


class InFlightSubmission:
    """A parcel, and those of its elements that are not over."""

    def __init__(self, parcel: ClusterSubmission, elements: dict[int, InFlightElement]) -> None:
        self.parcel = parcel
        self.elements = elements
        self.unrecorded = {element.key for element in elements.values()}

    @property
    def may_have_news(self) -> bool:
        """Whether a supervisor may be at work on one of them: else only the site can tell."""
        return any(each.trace.began is not None or _runs(each.sighting) for each in self.elements.values())

    def record(self, keys: Collection[str]) -> None:
        """One that never began is handed over anew under its key, and lives again in another parcel."""
        self.unrecorded.difference_update(set(keys) - {element.key for element in self.elements.values()})


class InFlightJobs:
    """For one thread."""

    def __init__(self, site: Site, parcels: SubmissionDirs) -> None:
        self._site = site
        self._parcels = parcels
        self._loads: dict[str, InFlightSubmission] = {}
        self._ours: dict[str, tuple[str, int]] = {}
        self._kept: dict[str, float] = {}
        self.wants_sample = False

    @property
    def has_live(self) -> bool:
        return bool(self._ours)

    def has(self, key: str) -> bool:
        return key in self._ours

    # To the site

    def send(self, launches: Sequence[Launch], logs: Sequence[str]) -> None:
        """Refused where the site will not have it. After anything else that goes wrong in between, nobody knows whether
        it has: then it is looked for."""
        terms = launches[0].terms
        assert terms is not None
        token = secrets.token_hex(6)
        folder = self._write(token, terms, list(zip(map(_on_node, launches), logs, strict=True)))
        elements = {
            number: InFlightElement(
                key_of(launch), log, StartContext(directory=launch.cwd, program=launch.command[0], stdin=launch.stdin)
            )
            for number, (launch, log) in enumerate(zip(launches, logs, strict=True))
        }
        load = self._load(token, folder, terms, elements)
        try:
            known_as = self._site.submit(load.parcel)
        except SiteRefused:
            self._drop(token)
            raise
        with contextlib.suppress(EnvironmentFault):  # the site has it, whatever can be noted of that
            self._parcels.mark_submitted(token, known_as)

    def _write(self, token: str, terms: ClusterTerms, elements: Sequence[tuple[Launch, str]]) -> str:
        """Its folder. Where the terms are there and whole, the site may know of it."""
        self._parcels.write(token, elements)
        folder = self._parcels.path(token)
        try:
            with open(f"{folder}/{_TERMS}", "xb", opener=_private) as file:
                file.write(msgspec.json.encode(terms))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._parcels.forget(token)
            raise EnvironmentFault(f"{folder} cannot be written: {error.strerror}") from error
        return folder

    def adopt(self, attempts: Sequence[Attempt]) -> Iterator[SiteStatus | Ended]:
        """Those that an earlier daemon handed over; what it never came to hand over was never begun."""
        if not os.path.isdir(self._parcels.path("")):
            hint = "is its network there? Where it is gone for good, an empty one says that nothing was handed over"
            raise EnvironmentFault(f"the folder {self._parcels.path('')} is not there", hint=hint)
        wanted = {attempt.key: attempt for attempt in attempts}
        for token in self._parcels.all():
            self._find(token, wanted)
        missing = [attempt for key, attempt in wanted.items() if key not in self._ours]
        self._refuse_another_folder(missing)
        for attempt in missing:
            yield Ended(job_id=attempt.job_id, attempt=attempt.number, outcome=self._without_parcel(attempt))

    def _refuse_another_folder(self, missing: Sequence[Attempt]) -> None:
        """What the site was seen to have was handed over: where it is not here it is elsewhere, and may run."""
        for attempt in missing:
            folder = os.path.dirname(os.path.dirname(attempt.log or ""))
            if attempt.site_id and folder and not self._parcels.path("").startswith(f"{folder}/"):
                raise EnvironmentFault(
                    f"job {attempt.job_id} was handed over by way of {folder}, which is not the folder any more",
                    hint="set it back until what is out there is over",
                )

    def _without_parcel(self, attempt: Attempt) -> Outcome:
        if not attempt.site_id:
            return Outcome(kind=OutcomeKind.NEVER_STARTED, reason="the daemon was gone before it was handed over")
        self._site.cancel([attempt.site_id])  # nobody would hear of its end
        return Outcome(kind=OutcomeKind.LOST, reason="its files are gone, so nobody can tell what became of it")

    def _find(self, token: str, wanted: dict[str, Attempt]) -> None:
        if not os.path.lexists(f"{self._parcels.path(token)}/parcel.json") and not self._parcels.is_gone(token):
            _log.warning("%s is no parcel, and is left alone", self._parcels.path(token))
            return
        written = self._parcels.read(token)
        traces = self._parcels.traces(token)
        elements = {
            number: InFlightElement(each.key, each.log, each.things)
            for number, each in enumerate(written)
            if each.key in wanted and traces.get(number, _NOTHING).began is not VOID
        }
        if not elements:
            self._remove(token)
            return
        folder = self._parcels.path(token)
        try:
            terms = msgspec.json.decode(Path(folder, _TERMS).read_bytes(), type=ClusterTerms)
        except (FileNotFoundError, msgspec.DecodeError):  # it was never handed over
            self._parcels.forget(token)
            return
        except OSError as error:
            raise EnvironmentFault(f"{folder}/{_TERMS} cannot be read: {error.strerror}") from error
        self._load(token, folder, terms, elements, count=len(written))

    def _load(
        self,
        token: str,
        folder: str,
        terms: ClusterTerms,
        elements: dict[int, InFlightElement],
        count: int | None = None,
    ) -> InFlightSubmission:
        parcel = ClusterSubmission(
            known_as=self._parcels.known_as(token),
            token=token,
            terms=terms,
            count=len(elements) if count is None else count,
            folder=folder,
            supervisor=node_supervisor.command(folder),
        )
        load = self._loads[token] = InFlightSubmission(parcel, elements)
        self._ours |= {element.key: (token, number) for number, element in elements.items()}
        return load

    def cancel(self, keys: Collection[str]) -> set[str]:
        """Those of them that need not be asked for again: what the site has not shown yet has no name there."""
        known = {key: self._element(key) for key in keys}
        ids = [each.sighting.id for each in known.values() if each is not None and each.sighting is not None]
        if ids:
            self._site.cancel(ids)
        return {key for key, each in known.items() if each is None or each.sighting is not None}

    def _element(self, key: str) -> InFlightElement | None:
        place = self._ours.get(key)
        return None if place is None else self._loads[place[0]].elements.get(place[1])

    # From the site

    def look(self) -> SiteReport:
        self.wants_sample = False
        return self._site.look([load.parcel for load in self._loads.values() if load.elements])

    def settle(self, report: SiteReport | None = None) -> Iterator[SiteStatus | Ended]:
        """What is new by the files that are there, and by what the site has just said, where it was asked. One parcel
        that cannot be read keeps nobody from hearing of the others."""
        fault: EnvironmentFault | None = None
        for token, load in list(self._loads.items()):
            if report is None and not load.may_have_news:
                continue
            try:
                traces = self._traces(token, load)
            except EnvironmentFault as error:
                fault = error
                continue
            for number, element in list(load.elements.items()):
                trace = traces.get(number, element.trace)
                if report is None and trace is element.trace:
                    continue
                element.trace = trace
                if report is not None:
                    element.look(report.sightings.get((token, number)))
                yield from self._settle(load, number, element, was_asked=report is not None)
        if fault is not None:
            raise fault

    def _traces(self, token: str, load: InFlightSubmission) -> Mapping[int, ElementTrace]:
        """Where somebody has removed the parcel the site's word is all there is."""
        try:
            return self._parcels.traces(token) if load.elements else {}
        except EnvironmentFault:
            if not self._parcels.is_gone(token):
                raise
            return {}

    def _void(self, token: str, number: int) -> bool:
        """No supervisor begins without its parcel."""
        return self._parcels.is_gone(token) or self._parcels.void(token, number)

    def _settle(
        self, load: InFlightSubmission, number: int, element: InFlightElement, *, was_asked: bool
    ) -> Iterator[SiteStatus | Ended]:
        seen = _seen(element)
        if seen is not None:
            yield seen
        if not was_asked and element.sighting is None and element.trace.ended is None:
            return
        fate = judge(self._site.name, element.sighting, element.trace, element.things, waited=element.waited)
        if fate.is_to_be_voided and self._void(load.parcel.token, number):
            reason = f"{self._site.name} does not know of it"
            fate = ElementOutcome(outcome=Outcome(kind=OutcomeKind.NEVER_STARTED, reason=reason))
        if fate.outcome is not None and fate.outcome.kind in _MAY_START_YET and element.trace.began is None:
            if not self._void(load.parcel.token, number):
                return  # it began at the last moment
            if fate.outcome.kind is OutcomeKind.LOST:
                fate = ElementOutcome(outcome=Outcome(kind=OutcomeKind.NEVER_STARTED, reason=fate.outcome.reason))
        if fate.outcome is not None:
            yield self._end(load, number, element, fate.outcome, fate)
        elif element.trace.ended is not None:
            self.wants_sample = not was_asked

    def _end(
        self, load: InFlightSubmission, number: int, element: InFlightElement, outcome: Outcome, fate: ElementOutcome
    ) -> Ended:
        token, finish = load.parcel.token, element.trace.ended
        if outcome.kind is OutcomeKind.LOST and not self._parcels.is_gone(token):
            self._parcels.mark_lost(token, number)
        self._keep_output(token, number, element)
        job_id, attempt = element.name
        del load.elements[number]
        del self._ours[element.key]
        sighting = element.sighting
        return Ended(
            job_id=job_id,
            attempt=attempt,
            outcome=outcome,
            pid=finish.pid if finish is not None else None,
            at=finish.at if finish is not None else sighting.ended_at if sighting is not None else None,
            shortage=fate.shortage or oom_evidence.shortage_of(outcome, element.log, None),
            usage=finish.usage if finish is not None else None,
        )

    def _keep_output(self, token: str, number: int, element: InFlightElement) -> None:
        """Where no supervisor came to open its log, what the site has is better than nothing."""
        if os.path.exists(element.log) or element.sighting is None:
            return
        written = None if self._parcels.is_gone(token) else self._parcels.output(token, number)
        with contextlib.suppress(SiteUnreachable):
            written = written or self._site.output(element.sighting)
        if written:
            with contextlib.suppress(OSError):
                Path(element.log).touch(0o600)
                Path(element.log).write_bytes(written)

    def excuse(self, trouble: str) -> Iterator[SiteStatus]:
        """Why nothing is heard of those that wait there."""
        for load in self._loads.values():
            for element in load.elements.values():
                has_run = element.told is not None and element.told[1] is not None
                if not has_run and element.trace.began is None and element.told != (trouble, None):
                    element.told = (trouble, None)
                    yield _seen_as(element, trouble, None, None)

    def forget(self, keys: Collection[str]) -> None:
        """They are recorded."""
        for token, load in list(self._loads.items()):
            load.record(keys)
            if not load.unrecorded:
                self._drop(token)
        for token, until in list(self._kept.items()):
            if time.monotonic() >= until:
                del self._kept[token]
                with contextlib.suppress(EnvironmentFault):
                    self._parcels.forget(token)

    def _drop(self, token: str) -> None:
        load = self._loads.pop(token)
        for element in load.elements.values():
            del self._ours[element.key]
        with contextlib.suppress(EnvironmentFault):  # the next daemon does it
            self._remove(token)

    def _remove(self, token: str) -> None:
        """In which one was lost is kept for a while: who still runs that is to see it."""
        if any(Path(self._parcels.path(token)).glob("*.lost")):
            self._kept[token] = time.monotonic() + _KEEP_LOST_S
        else:
            self._parcels.forget(token)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _runs(sighting: Sighting | None) -> bool:
    """As far as is known."""
    return sighting is None or sighting.at is not SiteState.PENDING


def fill(launches: Sequence[Launch], most: int) -> tuple[list[Launch], list[Launch]]:
    """Those that go into one parcel with the first, and the others."""
    terms = launches[0].terms
    same = [launch for launch in launches if launch.terms == terms][:most]
    taken = {key_of(launch) for launch in same}
    return same, [launch for launch in launches if key_of(launch) not in taken]


def key_of(launch: Launch) -> str:
    return f"{launch.job_id}.{launch.attempt}"


def _on_node(launch: Launch) -> Launch:
    """A task runs without a session there: whose terminal would that be."""
    if launch.task is None:
        return launch
    task = replace(launch.task, session=None)
    return replace(launch, command=start_command(replace(launch, task=task), ""), task=None)


def _seen(element: InFlightElement) -> SiteStatus | None:
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
    told = (f"{sighting.id if sighting is not None else ''} {reason} {at}", place)
    if element.told == told:
        return None
    element.told = told
    return _seen_as(element, reason, place, at)


def _seen_as(element: InFlightElement, reason: str, place: str | None, at: float | None) -> SiteStatus:
    job_id, attempt = element.name
    site_id = element.sighting.id if element.sighting is not None else ""
    return SiteStatus(job_id=job_id, attempt=attempt, site_id=site_id, reason=reason, place=place, at=at)
