"""What has become of an element, from what its site says and what its supervisor left. Pure.

- The supervisor's word counts most: it was there. But a program that its site ended has ended by a signal, and only the
  site knows why; so a failure waits for the site's word, a few looks long, or until the site has no word on it.
- What the site does not know any more and what never began will never run: it is voided, and was never begun.
- What began and left no word is lost. Its files may be late, as on network file systems, so that takes a few looks too.
  So it is where the site saw the supervisor killed: what the program came to nobody knows.
"""

from msgspec import Struct

from gpuyard.core.job.job import Outcome, OutcomeKind
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.engines.cluster.site import OVER, Sighting, SiteState
from gpuyard.engines.cluster.submission_dir import VOID, ElementTrace
from gpuyard.engines.local.keeper_journal import StartContext, outcome_of

# So many looks at a site may pass until files that it must have made by now are to be seen.
PATIENCE = 3
_BY_SIGNAL = 128
_KILLED = 137


class ElementOutcome(Struct, frozen=True, kw_only=True):
    """`outcome` where it is over. Where it `is_to_be_voided`, it was never begun, if it can still be kept from it."""

    outcome: Outcome | None = None
    shortage: Shortage | None = None
    is_to_be_voided: bool = False


_NOT_YET = ElementOutcome()


def judge(
    site: str, sighting: Sighting | None, trace: ElementTrace, things: StartContext, *, waited: int
) -> ElementOutcome:
    """`waited` is how many looks have found it as it is now: gone from the site, or over there."""
    if trace.began is VOID:
        return ElementOutcome(
            outcome=Outcome(kind=OutcomeKind.NEVER_STARTED, reason="it was taken back before it began")
        )
    if trace.ended is not None:
        return _by_word(site, sighting, outcome_of(trace.ended.word, things), waited)
    if sighting is None:
        return _unknown(site, trace, waited)
    if sighting.at not in OVER:
        return _NOT_YET
    return _by_site(site, sighting, trace, waited)


def _by_word(site: str, sighting: Sighting | None, outcome: Outcome, waited: int) -> ElementOutcome:
    if outcome.kind is not OutcomeKind.FAILED:
        return ElementOutcome(outcome=outcome)
    if sighting is None:
        return ElementOutcome(outcome=outcome) if waited else _NOT_YET
    if sighting.at not in OVER:
        return _NOT_YET if waited < PATIENCE else ElementOutcome(outcome=outcome)
    if sighting.at in (SiteState.SUCCEEDED, SiteState.FAILED):
        return ElementOutcome(outcome=outcome)
    return _ended_by_site(site, sighting, outcome.status)


def _unknown(site: str, trace: ElementTrace, waited: int) -> ElementOutcome:
    if trace.began is None:
        return ElementOutcome(is_to_be_voided=waited > 0)
    if waited < PATIENCE:
        return _NOT_YET
    reason = f"{site} no longer knows of it, and it left no status"
    return ElementOutcome(outcome=Outcome(kind=OutcomeKind.LOST, reason=reason))


def _by_site(site: str, sighting: Sighting, trace: ElementTrace, waited: int) -> ElementOutcome:
    if sighting.at not in (SiteState.SUCCEEDED, SiteState.FAILED):
        return _ended_by_site(site, sighting, sighting.status)
    if waited < PATIENCE:
        return _NOT_YET
    if (
        sighting.at is SiteState.SUCCEEDED
    ):  # its supervisor could not write that down, but left with the program's status
        return ElementOutcome(outcome=Outcome(kind=OutcomeKind.SUCCEEDED, status=0))
    if trace.began is None:
        reason = f"{site} ran it, but what was to start it could not: see its log, and whether the nodes see its folder"
        return ElementOutcome(outcome=Outcome(kind=OutcomeKind.CANNOT_START, status=sighting.status, reason=reason))
    if 0 < (sighting.status or 0) < _BY_SIGNAL:
        return ElementOutcome(outcome=outcome_of(str(sighting.status), StartContext()))
    reason = f"{site} says it is over, and it left no status: its supervisor was killed"
    return ElementOutcome(outcome=Outcome(kind=OutcomeKind.LOST, reason=reason))


def _ended_by_site(site: str, sighting: Sighting, status: int | None) -> ElementOutcome:
    told = f" ({sighting.reason})" if sighting.reason and sighting.at is not SiteState.CANCELLED else ""
    if sighting.at is SiteState.OUT_OF_MEMORY:
        says = f"{site} ended it: out of memory{told}"
        outcome = Outcome(kind=OutcomeKind.FAILED, status=status or _KILLED, reason=says)
        return ElementOutcome(outcome=outcome, shortage=Shortage(where=ShortageKind.HOST, says=says))
    kind, reason = {
        SiteState.TIMED_OUT: (OutcomeKind.TIMED_OUT, f"over the time that {site} gave it"),
        SiteState.CANCELLED: (OutcomeKind.CANCELLED, f"cancelled at {site}"),
        SiteState.PREEMPTED: (OutcomeKind.PREEMPTED, f"{site} gave its place to another"),
        SiteState.LOST: (OutcomeKind.LOST, f"{site} lost the node it ran on"),
    }[sighting.at]
    return ElementOutcome(outcome=Outcome(kind=kind, status=status, reason=f"{reason}{told}"))
