"""A site, such as Slurm or Ray: what the cluster engine needs from it, and how the outcome of an element follows
from the site's report and the files of its supervisor.

- The supervisor's files count most. But a program that the site ended has ended by a signal, and only the site knows
  why. So a failure waits for the site's report, for 3 reports at most, or until the site no longer knows the element.
- An element that the site does not know and that has not started is voided. One whose supervisor could not start never
  started either: its node may not see our files, and is left out for a while.
- An element that started and left no status is lost, after 3 reports: network file systems show files late. It is also
  lost if the site saw its supervisor killed, unless it ran out of RAM. Its next attempt waits until its supervisor has
  stopped, which the site may not have ended."""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.engines.cluster.node_supervisor import GIVEN_UP, NOT_BEGUN
from gpuyard.engines.cluster.submission_dir import VOID, ElementTrace
from gpuyard.engines.common.program_outcome import StartContext, outcome_of
from gpuyard.engines.common.spawn_program import BY_SIGNAL
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import ClusterTerms, Offer
from gpuyard.model.job import Outcome, OutcomeKind, SiteRequest
from gpuyard.model.out_of_memory import KILLED, Shortage, ShortageKind
from gpuyard.model.units import format_size

# The submission's token, and the element's number in it.
ElementRef = tuple[str, int]


class SiteUnreachable(EnvironmentFault):
    """The site did not answer, or its answer cannot be understood. The request may have been carried out."""


class SiteRefused(EnvironmentFault):
    """The site refused the request. Nothing was done."""


class SiteState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    LOST = "lost"


OVER = frozenset(SiteState) - {SiteState.PENDING, SiteState.RUNNING, SiteState.SUSPENDED}


class Sighting(Struct, frozen=True, kw_only=True):
    """An element in a report: the site's id, why it waits or how it ended, its place, and the site's name for that
    node."""

    id: str
    at: SiteState
    reason: str = ""
    place: str = ""
    node: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    status: int | None = None


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node: the site's `name` for it, and people's `place`. `trouble` is why no job can run there now."""

    name: str
    place: str
    trouble: str = ""
    has_gpus: bool = False


class ClusterSubmission(Struct, frozen=True, kw_only=True):
    """Elements that are submitted in one call, on the same terms."""

    token: str
    terms: ClusterTerms
    count: int
    folder: str  # the submission's own, which all nodes see
    supervisor: tuple[str, ...]  # the command that runs element N when N is added as its last argument
    known_as: str = ""  # what `submit` returned
    without: tuple[str, ...] = ()  # the site's names of nodes that must not run it


class SiteReport(Struct, frozen=True, kw_only=True):
    """What the site knows about the submissions in question, and what it will take now."""

    sightings: Mapping[ElementRef, Sighting] = {}
    offer: Offer = Offer()


class Site(Protocol):
    """Every call may raise SiteUnreachable, and no other error unless it says so. No call takes over a minute."""

    @property
    def name(self) -> str: ...

    @property
    def most_in_submission(self) -> int:
        """How many elements a submission may have."""

    def submit(self, submission: ClusterSubmission) -> str:
        """Submit all elements. Return the site's name for them if it is needed to find them again. May raise
        SiteRefused."""

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:
        """Return what `submit` sends for this element, as users of the site would read it. May raise SiteRefused."""

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        """Report all elements of these submissions that the site knows, in as few calls as possible."""

    def cancel(self, ids: Sequence[str]) -> None:
        """End waiting and running elements, by the ids of their sightings. Elements that are over are no error."""

    def output(self, sighting: Sighting) -> bytes | None:
        """Return the element's output if the site keeps it, for elements that left no log."""


# For how many reports files may be late that must exist by now.
LATE_REPORTS = 3
# As Slurm writes it where it polls the use itself: it may end a job before the meter has measured it.
_EXCEEDED = re.compile(rb"exceeded (?:job |step )?memory limit", re.IGNORECASE)


class ElementOutcome(Struct, frozen=True, kw_only=True):
    """`outcome` is None until the element is over. `is_to_be_voided`: it never started if it can be kept from that."""

    outcome: Outcome | None = None
    shortage: Shortage | None = None
    is_to_be_voided: bool = False
    was_killed: bool = False  # by SIGKILL, and nothing says why
    is_fault_of_node: bool = False  # it never started, because its supervisor could not
    may_still_run: bool = False  # its supervisor has to be stopped first


_NOT_YET = ElementOutcome()


def decide(
    site: str, sighting: Sighting | None, trace: ElementTrace, context: StartContext, *, waited: int
) -> ElementOutcome:
    """`waited` is for how many reports the element has been as it is now: unknown to the site, or over there."""
    if trace.started is VOID:
        outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason="it was withdrawn before it started")
        return ElementOutcome(outcome=outcome)
    if trace.ended is not None and trace.ended.word == GIVEN_UP:
        outcome = Outcome(kind=OutcomeKind.LOST, reason=f"{site} had lost it, and its supervisor has stopped it")
        return ElementOutcome(outcome=outcome)
    if trace.ended is not None:
        return _by_supervisor(site, sighting, outcome_of(trace.ended.word, context), waited)
    if sighting is None:
        return _unknown(site, trace, waited)
    return _by_site(site, sighting, trace, waited) if sighting.at in OVER else _NOT_YET


def out_of_ram(
    site: str, decided: ElementOutcome, limit_mb: float, used_mb: float, output: bytes = b""
) -> ElementOutcome:
    """Return the outcome of an element that was killed, where its RAM was limited and it was measured to use this much.
    `output` is what its supervisor, or the site, wrote. The meter measures once a second, and sees only what the
    program's own processes use: 80% of the limit count as all of it."""
    if not decided.was_killed or (used_mb < 0.8 * limit_mb and not _EXCEEDED.search(output)):
        return decided
    used = f"{format_size(used_mb)} of RAM measured, " if used_mb else ""
    says = f"{site} ended it: out of memory ({used}{format_size(limit_mb)} requested)"
    return ElementOutcome(
        outcome=Outcome(kind=OutcomeKind.FAILED, status=KILLED, reason=says),
        shortage=Shortage(where=ShortageKind.HOST, says=says, held_mb=max(used_mb, limit_mb), total_mb=limit_mb),
    )


def _by_supervisor(site: str, sighting: Sighting | None, outcome: Outcome, waited: int) -> ElementOutcome:
    decided = ElementOutcome(outcome=outcome, was_killed=outcome.status == KILLED)
    if outcome.kind is not OutcomeKind.FAILED:
        return decided
    if sighting is None:
        return decided if waited else _NOT_YET
    if sighting.at not in OVER:
        return _NOT_YET if waited < LATE_REPORTS else decided
    is_plain = sighting.at in (SiteState.SUCCEEDED, SiteState.FAILED)
    return decided if is_plain else _ended_by_site(site, sighting, outcome.status)


def _unknown(site: str, trace: ElementTrace, waited: int) -> ElementOutcome:
    if trace.started is None:
        return ElementOutcome(is_to_be_voided=waited > 0)
    if waited < LATE_REPORTS:
        return _NOT_YET
    outcome = Outcome(kind=OutcomeKind.LOST, reason=f"{site} no longer knows it, and it left no status")
    return ElementOutcome(outcome=outcome, may_still_run=True)


def _by_site(site: str, sighting: Sighting, trace: ElementTrace, waited: int) -> ElementOutcome:
    if sighting.at not in (SiteState.SUCCEEDED, SiteState.FAILED):
        may_still_run = trace.started is not None and sighting.at in (SiteState.LOST, SiteState.OUT_OF_MEMORY)
        return replace(_ended_by_site(site, sighting, sighting.status), may_still_run=may_still_run)
    if waited < LATE_REPORTS:
        return _NOT_YET
    if sighting.at is SiteState.SUCCEEDED:  # its supervisor could not write the end, but exited with this status
        return ElementOutcome(outcome=Outcome(kind=OutcomeKind.SUCCEEDED, status=0))
    if trace.started is None:
        is_of_node = sighting.status != NOT_BEGUN
        reason = f"its supervisor could not start on {sighting.place or f'a node of {site}'}"
        reason = reason if is_of_node else "a limit of its node kept it from starting: see its log"
        outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=reason)
        return ElementOutcome(outcome=outcome, is_fault_of_node=is_of_node)
    if 0 < (sighting.status or 0) < BY_SIGNAL:
        return ElementOutcome(outcome=outcome_of(str(sighting.status), StartContext()))
    outcome = Outcome(kind=OutcomeKind.LOST, reason=f"over at {site} without a status: its supervisor was killed")
    return ElementOutcome(outcome=outcome, was_killed=True, may_still_run=True)


def _ended_by_site(site: str, sighting: Sighting, status: int | None) -> ElementOutcome:
    why = f" ({sighting.reason})" if sighting.reason and sighting.at is not SiteState.CANCELLED else ""
    if sighting.at is SiteState.OUT_OF_MEMORY:
        says = f"{site} ended it: out of memory{why}"
        outcome = Outcome(kind=OutcomeKind.FAILED, status=status or KILLED, reason=says)
        return ElementOutcome(outcome=outcome, shortage=Shortage(where=ShortageKind.HOST, says=says))
    kind, reason = {
        SiteState.TIMED_OUT: (OutcomeKind.TIMED_OUT, f"over its time limit at {site}"),
        SiteState.CANCELLED: (OutcomeKind.CANCELLED, f"cancelled at {site}"),
        SiteState.PREEMPTED: (OutcomeKind.PREEMPTED, f"preempted at {site}"),
        SiteState.LOST: (OutcomeKind.LOST, f"{site} lost the node it ran on"),
    }[sighting.at]
    return ElementOutcome(outcome=Outcome(kind=kind, status=status, reason=f"{reason}{why}"))
