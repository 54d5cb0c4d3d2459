"""Submissions in flight: sent to a site, and not recorded as over yet."""

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.engines.cluster import node_supervisor
from gpuyard.engines.cluster.site import (
    OVER,
    ClusterSubmission,
    ElementOutcome,
    ElementRef,
    Sighting,
    Site,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
    decide,
    out_of_ram,
)
from gpuyard.engines.cluster.submission_dir import VOID, ElementTrace, SubmissionDirs
from gpuyard.engines.common import program_outcome as oom_evidence
from gpuyard.engines.common.job_logs import Outputs, name_of, outputs_of
from gpuyard.engines.common.program_outcome import StartContext
from gpuyard.engines.session.task_files import start_command
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import LEAVE_OUT_S, ClusterTerms, most_of, without_learned
from gpuyard.model.job import Attempt, Outcome, OutcomeKind, SiteRequest, Usage
from gpuyard.model.out_of_memory import Shortage
from gpuyard.model.printable_text import LONGEST_MESSAGE, printable
from gpuyard.ports import Ended, Launch, SiteStatus
from gpuyard.system.write_files import UnsafePathError, open_results

_log = logging.getLogger(__name__)
_NOTHING = ElementTrace()
# A site may still start an element for a moment after it gave it up.
_MAY_START_YET = (OutcomeKind.CANCELLED, OutcomeKind.LOST, OutcomeKind.PREEMPTED, OutcomeKind.NEVER_STARTED)


class InFlightElement(Struct, eq=False):
    """One attempt, and its state in the last report. It has been the same for `waited` reports."""

    ref: ElementRef
    key: str
    outputs: Outputs
    context: StartContext
    sighting: Sighting | None = None
    trace: ElementTrace = _NOTHING
    waited: int = 0
    reported: tuple[str, str | None] | None = None
    given_up: ElementOutcome | None = None  # its outcome once its supervisor has stopped
    stops_by: float = math.inf  # by the monotonic clock
    request: SiteRequest | None = None

    def update(self, sighting: Sighting | None) -> None:
        is_same = (sighting and sighting.at) == (self.sighting and self.sighting.at)
        is_awaited = sighting is None or sighting.at in OVER or self.trace.ended is not None
        self.waited = self.waited + 1 if is_same and is_awaited else 0
        self.sighting = sighting

    @property
    def may_have_news(self) -> bool:
        """Whether a supervisor may have written files about it. If not, only the site knows more."""
        is_pending = self.sighting is not None and self.sighting.at is SiteState.PENDING
        return self.trace.started is not None or not is_pending

    def status(self, reason: str, place: str | None, at: float | None) -> SiteStatus:
        job_id, _, attempt = self.key.partition(".")
        return SiteStatus(
            job_id=int(job_id),
            attempt=int(attempt),
            site_id=self.sighting.id if self.sighting is not None else "",
            reason=printable(reason),  # it and the place are the site's, or its nodes'
            place=place and printable(place),
            at=at,
            is_suspended=None if self.sighting is None else self.sighting.at is SiteState.SUSPENDED,
            request=self.request,
        )

    def change(self) -> SiteStatus | None:
        started, sighting = self.trace.started, self.sighting
        place: str | None
        at: float | None
        if started is not None and started is not VOID:
            place, at, reason = (sighting.place if sighting is not None else "") or started.node, started.at, ""
            place += f" GPU {started.gpus}" if started.gpus else ""
        elif sighting is not None and sighting.at in (SiteState.RUNNING, SiteState.SUSPENDED):
            place, at, reason = sighting.place or "?", sighting.started_at, ""
        elif sighting is not None and sighting.at is SiteState.PENDING:
            place, at, reason = None, None, sighting.reason
        else:
            return None
        is_suspended = sighting is not None and sighting.at is SiteState.SUSPENDED
        reported = (f"{sighting.id if sighting is not None else ''} {reason} {at} {is_suspended}", place)
        if self.reported == reported:
            return None
        self.reported = reported
        return self.status(reason, place, at)


class InFlightSubmission(Struct, eq=False):
    """A submission, those of its elements that are not over, and the attempts whose ends are not recorded."""

    submission: ClusterSubmission
    elements: dict[int, InFlightElement]
    unrecorded: set[str]


class InFlightJobs:
    def __init__(self, site: Site, dirs: SubmissionDirs) -> None:
        self._site, self._dirs = site, dirs
        self._submissions: dict[str, InFlightSubmission] = {}
        self.live: dict[str, InFlightElement] = {}  # by key
        self._kept: dict[str, float] = {}
        self.to_cancel: set[str] = set()  # ids at the site, of elements that it may still list and shall end
        self._voided: set[str] = set()  # attempts of an earlier daemon that can no longer start
        # Until when nodes are left out, by the options of the jobs that could not start there (which may be at fault),
        # the node and its place.
        self._left_out: dict[tuple[tuple[str, ...], str, str], float] = {}
        self.wants_report = False

    def send(self, launches: Sequence[tuple[Launch, str]]) -> None:
        """Submit launches with the paths of their logs. After another error than SiteRefused, the next report shows
        all."""
        terms = _terms_of(launches[0][0])
        token = secrets.token_hex(6)
        self._dirs.write(token, [(_on_node(launch), log) for launch, log in launches])
        elements = [
            InFlightElement((token, number), launch.key, outputs_of(log, launch), StartContext.of(launch))
            for number, (launch, log) in enumerate(launches)
        ]
        entry = self._add(token, terms, len(elements), elements)
        now = time.monotonic()
        self._left_out = {key: until for key, until in self._left_out.items() if now < until}
        left_out = {node: place for options, node, place in self._left_out if options == terms.options}
        entry.submission = replace(entry.submission, without=tuple(left_out))
        try:
            self._describe(entry)
            known_as = self._site.submit(entry.submission)
        except SiteRefused as error:
            self._drop(token)
            if left_out:
                why = f"{error}; left out, as jobs could not start there: {', '.join(left_out.values())}"
                raise SiteRefused(why, hint=error.hint) from error
            raise
        with contextlib.suppress(EnvironmentFault):  # the site has it, also if that cannot be noted
            self._dirs.mark_submitted(token, known_as)

    def adopt(self, attempts: Sequence[Attempt]) -> Iterator[SiteStatus | Ended]:
        if not self._dirs.check():
            hint = "is its network file system mounted? If it is gone for good, create it: its jobs are then lost"
            raise EnvironmentFault(f"the folder {self._dirs.path('')} is missing", hint=hint)
        wanted = {attempt.key for attempt in attempts}
        # An attempt that never started may have been submitted again under its key: the last submission counts.
        for token in sorted(self._dirs.all(), key=self._dirs.written_at, reverse=True):
            self._adopt_submission(token, wanted)
        missing = [attempt for attempt in attempts if attempt.key not in self.live]
        for attempt in missing:
            self._refuse_another_folder(attempt)
        for attempt in missing:
            outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason="the daemon was gone before it was submitted")
            if attempt.site_id:
                self._site.cancel([attempt.site_id])  # its end could not be noticed
            if attempt.site_id and attempt.key not in self._voided:
                outcome = Outcome(kind=OutcomeKind.LOST, reason="its files are gone, so its outcome is unknown")
            yield Ended(job_id=attempt.job_id, attempt=attempt.number, outcome=outcome)

    def _refuse_another_folder(self, attempt: Attempt) -> None:
        """Raise if an attempt that the site has reported, and may still run, was submitted from another folder."""
        logs, name = os.path.split(attempt.log or "")
        folder = os.path.dirname(logs)
        is_own = name == name_of(attempt.job_id, attempt.number)  # else the user's file
        if is_own and attempt.site_id and folder and not self._dirs.path("").startswith(f"{folder}/"):
            raise EnvironmentFault(
                f"job {attempt.job_id} was submitted from the folder {folder}, which is no longer configured",
                hint=f"set the folder back to {folder} until the jobs there are over",
            )

    def _adopt_submission(self, token: str, wanted: AbstractSet[str]) -> None:
        if not self._dirs.is_complete(token) and not self._dirs.is_gone(token):
            _log.warning("%s is not a submission, and is left alone", self._dirs.path(token))
            return
        terms, written = self._dirs.read(token)
        traces = self._dirs.traces(token)
        void = {number for number, trace in traces.items() if trace.started is VOID}
        self._voided |= {each.key for number, each in enumerate(written) if number in void} & wanted
        elements = [
            InFlightElement((token, number), each.key, each.outputs, each.context)
            for number, each in enumerate(written)
            if each.key in wanted - {key for key, other in self.live.items() if other.ref[0] != token}
            and number not in void
        ]  # after a fault the same submission is adopted again
        if elements:
            entry = self._add(token, terms, len(written), elements)
            with contextlib.suppress(EnvironmentFault):  # settings may have changed since it was sent
                self._describe(entry)
        else:
            self._remove(token)

    def _add(
        self, token: str, terms: ClusterTerms, count: int, elements: Sequence[InFlightElement]
    ) -> InFlightSubmission:
        folder = self._dirs.path(token)
        submission = ClusterSubmission(
            known_as=self._dirs.known_as(token),
            token=token,
            terms=terms,
            count=count,
            folder=folder,
            supervisor=node_supervisor.command(folder, self._dirs.digest(token)),
        )
        by_key = {element.key: element for element in elements}
        self.live |= by_key
        entry = InFlightSubmission(submission, {element.ref[1]: element for element in elements}, set(by_key))
        self._submissions[token] = entry
        return entry

    def _describe(self, entry: InFlightSubmission) -> None:
        for number, element in entry.elements.items():
            element.request = self._site.request(entry.submission, number)

    def end(self, keys: Mapping[str, bool]) -> tuple[Iterator[Ended], set[str]]:
        """End these elements; those whose value is True only if they wait at the site, where they are voided, so that
        they never start, whatever the site does. `cancel_ended` ends them there. Return the ends of the voided ones,
        and those of `keys` that are done: an element has no id before the site has reported it."""
        known = {key: self.live.get(key) for key in keys}
        seen = [(each, each.sighting) for each in known.values() if each is not None and each.sighting is not None]
        waiting = ((each, seen_as) for each, seen_as in seen if keys[each.key] and seen_as.at is SiteState.PENDING)
        voided = [(each, sighting) for each, sighting in waiting if self._void(each)]
        running = ((each, sighting) for each, sighting in seen if not keys[each.key])
        self.to_cancel |= {sighting.id for _, sighting in (*voided, *running)}
        outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason="it was taken back before it started")
        ended = (self._end(each, outcome, None, None) for each, _ in voided)
        return ended, {key for key, each in known.items() if each is None or each.sighting is not None}

    def cancel_ended(self) -> None:
        if self.to_cancel:
            self._site.cancel(sorted(self.to_cancel))
            self.to_cancel.clear()

    def ask_site(self) -> SiteReport:
        self.wants_report = False
        return self._site.report([entry.submission for entry in self._submissions.values() if entry.elements])

    def collect(self, report: SiteReport | None = None) -> Iterator[SiteStatus | Ended]:
        """Yield what has changed, by supervisors' files and the report, if given. A fault is raised at the end."""
        fault: EnvironmentFault | None = None
        for token, entry in list(self._submissions.items()):
            if not any(report is not None or each.may_have_news for each in entry.elements.values()):
                continue
            try:
                traces = self._dirs.traces(token)
            except EnvironmentFault as error:
                if not self._dirs.is_gone(token):
                    fault = error
                    continue
                traces = {}  # then only the site's report counts
            for number, element in list(entry.elements.items()):
                trace = traces.get(number, element.trace)
                if report is None and trace is element.trace and time.monotonic() < element.stops_by:
                    continue
                element.trace = trace
                if report is not None:
                    element.update(report.sightings.get(element.ref))
                yield from self._collect(element, was_asked=report is not None)
        if fault is not None:
            raise fault

    def _void(self, element: InFlightElement) -> bool:
        """Keep the element from starting; without the submission's folder no supervisor can. Return False if it has."""
        return self._dirs.is_gone(element.ref[0]) or self._dirs.void(*element.ref)

    def _collect(self, element: InFlightElement, *, was_asked: bool) -> Iterator[SiteStatus | Ended]:
        if (change := element.change()) is not None:
            yield change
        is_given_up = element.given_up is not None
        if not was_asked and element.sighting is None and element.trace.ended is None and not is_given_up:
            return
        decided = decide(self._site.name, element.sighting, element.trace, element.context, waited=element.waited)
        decided, usage = self._with_usage(element, decided)
        if decided.may_still_run and not self._has_stopped(element, decided):
            return
        if element.given_up is not None and decided.outcome is not None and decided.outcome.kind is OutcomeKind.LOST:
            decided = element.given_up  # it knows why
        outcome = self._final_outcome(element, decided)
        if outcome is not None and decided.is_fault_of_node:
            sighting, submission = element.sighting, self._submissions[element.ref[0]].submission
            assert sighting is not None
            if node := sighting.node or sighting.place:
                self._left_out[submission.terms.options, node, sighting.place or node] = time.monotonic() + LEAVE_OUT_S
            # The last line that was written instead of the supervisor's start, or what to check.
            lines = (self._output_of(element) or b"").decode("utf-8", "replace").split("\n")
            says = next((line.strip() for line in reversed(lines) if line.strip()), None)
            why = printable(says, LONGEST_MESSAGE) if says else f"it may not see {os.path.dirname(submission.folder)}"
            ended = self._end(element, replace(outcome, reason=f"{outcome.reason}: {why}"), None, usage)
            yield replace(ended, node=sighting.place or node or f"a node of {self._site.name}")
        elif outcome is not None:
            self._keep_output(element)
            yield self._end(element, outcome, decided.shortage, usage)
        elif element.trace.ended is not None:
            self.wants_report = not was_asked

    def _final_outcome(self, element: InFlightElement, decided: ElementOutcome) -> Outcome | None:
        """Return the outcome, once the element cannot start any more if it has not yet. None if it has by now."""
        outcome = decided.outcome
        if decided.is_to_be_voided:
            outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=f"{self._site.name} does not know it")
        elif outcome is None or outcome.kind not in _MAY_START_YET or element.trace.started is not None:
            return outcome
        elif outcome.kind is OutcomeKind.LOST:
            outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=outcome.reason)
        return outcome if self._void(element) else None

    def _has_stopped(self, element: InFlightElement, decided: ElementOutcome) -> bool:
        """Give up the element, and return whether its supervisor has had the time to stop its program."""
        if self._dirs.is_gone(element.ref[0]):
            return True
        if element.given_up is None:
            self._dirs.mark_lost(*element.ref)
            element.given_up, element.stops_by = decided, time.monotonic() + self._dirs.stops_within_s()
        return time.monotonic() >= element.stops_by

    def _with_usage(self, element: InFlightElement, decided: ElementOutcome) -> tuple[ElementOutcome, Usage | None]:
        """Return what the element used, too: as its supervisor says, or the meter if that was killed. An element that
        was killed near its limit of RAM ran out of it, and used at least that."""
        (token, number), ended = element.ref, element.trace.ended
        usage = ended.usage if ended is not None else None
        if not decided.was_killed or self._dirs.is_gone(token):
            return decided, usage
        usage = usage or self._dirs.usage(token, number)
        limit_mb = self._submissions[token].submission.terms.ram_mb
        if limit_mb is not None:
            used_mb = (usage.ram_mb if usage is not None else None) or 0.0
            output = self._dirs.output(token, number) or b""
            decided = out_of_ram(self._site.name, decided, limit_mb, used_mb, output)
        if decided.shortage is not None:
            usage = replace(usage or Usage(), ram_mb=decided.shortage.held_mb)
        return decided, usage

    def _end(self, element: InFlightElement, outcome: Outcome, shortage: Shortage | None, usage: Usage | None) -> Ended:
        (token, number), finish, sighting = element.ref, element.trace.ended, element.sighting
        del self._submissions[token].elements[number]
        del self.live[element.key]
        job_id, _, attempt = element.key.partition(".")
        outcome = replace(outcome, reason=outcome.reason and printable(outcome.reason))
        texts = oom_evidence.read_outputs(outcome, [path for path, _ in element.outputs], element.key)
        evidence = oom_evidence.evidence_of(outcome, texts, None)
        return Ended(
            job_id=int(job_id),
            attempt=int(attempt),
            outcome=evidence.outcome,
            pid=finish.pid if finish is not None else None,
            at=finish.at if finish is not None else sighting.ended_at if sighting is not None else None,
            shortage=shortage or evidence.shortage,
            device_fault=evidence.device_fault,
            usage=usage,
            warned_at=finish.warned_at if finish is not None else None,
        )

    def _output_of(self, element: InFlightElement) -> bytes | None:
        written = None if self._dirs.is_gone(element.ref[0]) else self._dirs.output(*element.ref)
        with contextlib.suppress(SiteUnreachable):
            written = written or (self._site.output(element.sighting) if element.sighting is not None else None)
        return written

    def _keep_output(self, element: InFlightElement) -> None:
        """Use the site's output as the log if no supervisor has opened one; append it to a file of the user."""
        path, cap = element.outputs[0]
        has_log = os.path.exists(path) if cap else element.trace.started is not None
        if has_log or element.sighting is None or element.sighting.at is SiteState.PENDING:
            return
        if written := self._output_of(element):
            with contextlib.suppress(OSError, UnsafePathError):
                if cap:
                    Path(path).touch(0o600)
                with open(path if cap else open_results(path), "ab") as log:
                    log.write(written)

    def report_trouble(self, trouble: str) -> Iterator[SiteStatus]:
        for element in self.live.values():
            has_run = element.reported is not None and element.reported[1] is not None
            if not has_run and element.trace.started is None and element.reported != (trouble, None):
                element.reported = (trouble, None)
                yield element.status(trouble, None, None)

    def forget(self, keys: Collection[str]) -> None:
        for token, entry in list(self._submissions.items()):
            # An attempt that never started may be submitted again under its key: it is live in that submission.
            entry.unrecorded -= set(keys) - {element.key for element in entry.elements.values()}
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
            del self.live[element.key]
        with contextlib.suppress(EnvironmentFault):  # the next daemon does it
            self._remove(token)

    def _remove(self, token: str) -> None:
        """Remove the folder; if it marks a lost element, only after 120 s: network file systems show marks late."""
        if any(Path(self._dirs.path(token)).glob("*.lost")):
            self._kept[token] = time.monotonic() + 120.0
        else:
            self._dirs.forget(token)


def split_launches(
    launches: Sequence[Launch], most: int, *, merges_learned: bool = True
) -> tuple[list[Launch], list[Launch]]:
    """Return the launches that fit into one submission with the first, on the same terms, and the others. With
    `merges_learned`, jobs that differ in learned amounts only are one submission, on the most of their terms."""
    keys = [without_learned(_terms_of(each)) if merges_learned else _terms_of(each) for each in launches]
    same = [launch for launch, key in zip(launches, keys, strict=True) if key == keys[0]][:most]
    shared, taken = most_of([_terms_of(each) for each in same]), {each.key for each in same}
    return [replace(each, terms=shared) for each in same], [each for each in launches if each.key not in taken]


def _terms_of(launch: Launch) -> ClusterTerms:
    assert launch.terms is not None
    return launch.terms


def _on_node(launch: Launch) -> Launch:
    """Replace a task by the command of its runner, without a session: nodes have no terminal to show it in."""
    if launch.task is None:
        return launch
    task = replace(launch.task, session=None)
    return replace(launch, command=start_command(replace(launch, task=task), ""), task=None)
