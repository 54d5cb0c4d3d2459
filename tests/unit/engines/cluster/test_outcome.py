"""What has become of an element: by its site's word, its supervisor's, and how long nobody has said more."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.engines.cluster.outcome import LATE_REPORTS, ElementOutcome, decide
from gpuyard.engines.cluster.site import OVER, Sighting, SiteState
from gpuyard.engines.cluster.submission_dir import VOID, Began, ElementTrace, Finish
from gpuyard.engines.common.program_outcome import StartContext

NOTHING = ElementTrace()
BEGAN = ElementTrace(began=Began(at=1.0, node="n0", pid=42))
VOIDED = ElementTrace(began=VOID)
NOT_YET = "not yet"
TO_BE_VOIDED = "to be voided"
ENOUGH = LATE_REPORTS


def left(word: str) -> ElementTrace:
    return ElementTrace(began=BEGAN.began, ended=Finish(word=word, at=2.0, pid=43))


def seen(at: SiteState, **other: Any) -> Sighting:
    return Sighting(id="7", at=at, **other)


def outcome_of(sighting: Sighting | None, trace: ElementTrace, waited: int) -> ElementOutcome:
    return decide("yonder", sighting, trace, StartContext(directory="/here", program="prog"), waited=waited)


def short(decided: ElementOutcome) -> object:
    """As the tables have it: `not yet`, `to be voided`, or the kind of its end and its status."""
    if decided.outcome is None:
        return TO_BE_VOIDED if decided.is_to_be_voided else NOT_YET
    return decided.outcome.kind if decided.outcome.status is None else (decided.outcome.kind, decided.outcome.status)


FAILED_3 = (OutcomeKind.FAILED, 3)


@pytest.mark.parametrize("waited", [0, 1, ENOUGH])
@pytest.mark.parametrize("sighting", [None, *map(seen, SiteState)])
def test_a_word_of_success_is_believed_whatever_the_site_says(sighting: Sighting | None, waited: int) -> None:
    assert short(outcome_of(sighting, left("0"), waited)) == (OutcomeKind.SUCCEEDED, 0)


@pytest.mark.parametrize("waited", [0, 1, ENOUGH])
@pytest.mark.parametrize("sighting", [None, *map(seen, SiteState)])
def test_what_was_voided_never_began_whatever_the_site_says(sighting: Sighting | None, waited: int) -> None:
    assert short(outcome_of(sighting, VOIDED, waited)) == OutcomeKind.NEVER_STARTED


@pytest.mark.parametrize("sighting", [None, *map(seen, SiteState)])
def test_what_could_not_start_says_so_at_once(sighting: Sighting | None) -> None:
    decided = outcome_of(sighting, left("no-program"), 0)
    assert short(decided) == (OutcomeKind.CANNOT_START, 127)
    assert decided.outcome is not None
    assert "prog" in (decided.outcome.reason or "")


@pytest.mark.parametrize(
    ("at", "waited", "comes_to"),
    [
        (None, 0, NOT_YET),  # the site has not been asked since
        (None, 1, FAILED_3),  # and has no word on it
        (SiteState.PENDING, 0, NOT_YET),
        (SiteState.RUNNING, 0, NOT_YET),
        (SiteState.RUNNING, ENOUGH - 1, NOT_YET),
        (SiteState.RUNNING, ENOUGH, FAILED_3),
        (SiteState.SUCCEEDED, 0, FAILED_3),
        (SiteState.FAILED, 0, FAILED_3),
        (SiteState.TIMED_OUT, 0, (OutcomeKind.TIMED_OUT, 3)),
        (SiteState.OUT_OF_MEMORY, 0, FAILED_3),
        (SiteState.CANCELLED, 0, (OutcomeKind.CANCELLED, 3)),
        (SiteState.PREEMPTED, 0, (OutcomeKind.PREEMPTED, 3)),
        (SiteState.LOST, 0, (OutcomeKind.LOST, 3)),
    ],
)
def test_a_failure_waits_for_what_the_site_knows_of_it(at: SiteState | None, waited: int, comes_to: object) -> None:
    assert short(outcome_of(None if at is None else seen(at), left("3"), waited)) == comes_to


@pytest.mark.parametrize(
    ("at", "waited", "comes_to"),
    [
        (None, 0, NOT_YET),
        (None, 1, TO_BE_VOIDED),
        (None, ENOUGH, TO_BE_VOIDED),
        (SiteState.PENDING, ENOUGH, NOT_YET),
        (SiteState.RUNNING, ENOUGH, NOT_YET),
        (SiteState.SUCCEEDED, 0, NOT_YET),
        (SiteState.SUCCEEDED, ENOUGH, (OutcomeKind.SUCCEEDED, 0)),
        (SiteState.FAILED, ENOUGH - 1, NOT_YET),
        (SiteState.FAILED, ENOUGH, OutcomeKind.CANNOT_START),
        (SiteState.TIMED_OUT, 0, OutcomeKind.TIMED_OUT),
        (SiteState.OUT_OF_MEMORY, 0, (OutcomeKind.FAILED, 137)),
        (SiteState.CANCELLED, 0, OutcomeKind.CANCELLED),
        (SiteState.PREEMPTED, 0, OutcomeKind.PREEMPTED),
        (SiteState.LOST, 0, OutcomeKind.LOST),
    ],
)
def test_of_what_left_no_trace(at: SiteState | None, waited: int, comes_to: object) -> None:
    assert short(outcome_of(None if at is None else seen(at), NOTHING, waited)) == comes_to


@pytest.mark.parametrize(
    ("sighting", "waited", "comes_to"),
    [
        (None, 0, NOT_YET),
        (None, ENOUGH - 1, NOT_YET),
        (None, ENOUGH, OutcomeKind.LOST),
        (seen(SiteState.PENDING), ENOUGH, NOT_YET),
        (seen(SiteState.RUNNING), ENOUGH, NOT_YET),
        (seen(SiteState.SUCCEEDED, status=0), ENOUGH - 1, NOT_YET),
        (
            seen(SiteState.SUCCEEDED, status=0),
            ENOUGH,
            (OutcomeKind.SUCCEEDED, 0),
        ),  # and one that could not write that down
        (seen(SiteState.FAILED, status=3), ENOUGH - 1, NOT_YET),
        (seen(SiteState.FAILED, status=3), ENOUGH, FAILED_3),  # a supervisor that could not write it down
        (seen(SiteState.FAILED, status=137), ENOUGH, OutcomeKind.LOST),  # one that was killed
        (seen(SiteState.FAILED, status=-9), ENOUGH, OutcomeKind.LOST),
        (seen(SiteState.FAILED, status=0), ENOUGH, OutcomeKind.LOST),
        (seen(SiteState.FAILED), ENOUGH, OutcomeKind.LOST),
        (seen(SiteState.TIMED_OUT), 0, OutcomeKind.TIMED_OUT),
        (seen(SiteState.OUT_OF_MEMORY), 0, (OutcomeKind.FAILED, 137)),
        (seen(SiteState.OUT_OF_MEMORY, status=1), 0, (OutcomeKind.FAILED, 1)),
        (seen(SiteState.CANCELLED), 0, OutcomeKind.CANCELLED),
        (seen(SiteState.PREEMPTED), 0, OutcomeKind.PREEMPTED),
        (seen(SiteState.LOST), 0, OutcomeKind.LOST),
    ],
)
def test_of_what_began_and_left_no_word(sighting: Sighting | None, waited: int, comes_to: object) -> None:
    assert short(outcome_of(sighting, BEGAN, waited)) == comes_to


def test_out_of_memory_is_told_with_the_site_s_own_words() -> None:
    decided = outcome_of(seen(SiteState.OUT_OF_MEMORY, reason="OutOfMemory"), left("137"), 0)
    assert decided.shortage is not None
    assert decided.shortage.where is ShortageKind.HOST
    assert decided.shortage.says == "yonder ended it: out of memory (OutOfMemory)"


_TRACES = st.sampled_from([NOTHING, BEGAN, VOIDED, left("0"), left("3"), left("143"), left("no-log"), left("rubbish")])
_SIGHTINGS = st.none() | st.builds(
    Sighting,
    id=st.just("7"),
    at=st.sampled_from(SiteState),
    reason=st.sampled_from(["", "words"]),
    status=st.none() | st.integers(-15, 255),
)


@given(sighting=_SIGHTINGS, trace=_TRACES, waited=st.integers(0, 6))
def test_whatever_is_seen_has_one_meaning(sighting: Sighting | None, trace: ElementTrace, waited: int) -> None:
    decided = outcome_of(sighting, trace, waited)
    assert not (decided.is_to_be_voided and decided.outcome is not None)
    assert not decided.is_to_be_voided or trace == NOTHING, "only what left no trace can be kept from beginning"
    if trace.ended is not None and trace.ended.word == "0":
        assert short(decided) == (OutcomeKind.SUCCEEDED, 0)
    elif decided.outcome is not None and trace.began is not VOID:
        by_site = sighting is not None and sighting.at is SiteState.SUCCEEDED and trace.ended is None
        assert by_site or decided.outcome.kind is not OutcomeKind.SUCCEEDED, "nobody else says that"
        assert decided.outcome.kind is not OutcomeKind.NEVER_STARTED, (
            "and what left a trace, or was seen, may have begun"
        )
    if decided.outcome is not None and decided.outcome.kind is not OutcomeKind.SUCCEEDED:
        assert decided.outcome.reason, "a person would ask why"


@given(sighting=_SIGHTINGS, trace=_TRACES)
def test_nothing_that_is_over_or_gone_is_waited_for_for_ever(sighting: Sighting | None, trace: ElementTrace) -> None:
    is_over = sighting is None or sighting.at in OVER or trace.ended is not None
    if is_over or trace == VOIDED:
        assert short(outcome_of(sighting, trace, LATE_REPORTS)) != NOT_YET
    else:
        assert short(outcome_of(sighting, trace, 1000)) == NOT_YET
