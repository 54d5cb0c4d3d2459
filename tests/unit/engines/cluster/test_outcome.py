"""The outcome of an element: from its site's report, its supervisor's record, and how long there was no news."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.engines.cluster.site import LATE_REPORTS, OVER, ElementOutcome, Sighting, SiteState, decide, out_of_ram
from gpuyard.engines.cluster.submission_dir import VOID, ElementStart, ElementTrace, Finish
from gpuyard.engines.common.program_outcome import StartContext
from gpuyard.model.job import OutcomeKind
from gpuyard.model.out_of_memory import ShortageKind

NOTHING = ElementTrace()
BEGAN = ElementTrace(started=ElementStart(at=1.0, node="n0", pid=42))
VOIDED = ElementTrace(started=VOID)
NOT_YET = "not yet"
TO_BE_VOIDED = "to be voided"
ENOUGH = LATE_REPORTS


def ended_with(word: str) -> ElementTrace:
    return ElementTrace(started=BEGAN.started, ended=Finish(word=word, at=2.0, pid=43))


def sighted(at: SiteState, **fields: Any) -> Sighting:
    return Sighting(id="7", at=at, **fields)


def outcome_of(sighting: Sighting | None, trace: ElementTrace, waited: int) -> ElementOutcome:
    return decide("cluster1", sighting, trace, StartContext(directory="/here", program="prog"), waited=waited)


def short(decided: ElementOutcome) -> object:
    """Return it as the tables below list it: `not yet`, `to be voided`, or the kind of its end and its status."""
    if decided.outcome is None:
        return TO_BE_VOIDED if decided.is_to_be_voided else NOT_YET
    return decided.outcome.kind if decided.outcome.status is None else (decided.outcome.kind, decided.outcome.status)


FAILED_3 = (OutcomeKind.FAILED, 3)


@pytest.mark.parametrize("waited", [0, 1, ENOUGH])
@pytest.mark.parametrize("sighting", [None, *map(sighted, SiteState)])
def test_a_recorded_success_counts_in_any_state_of_the_site(sighting: Sighting | None, waited: int) -> None:
    assert short(outcome_of(sighting, ended_with("0"), waited)) == (OutcomeKind.SUCCEEDED, 0)


@pytest.mark.parametrize("waited", [0, 1, ENOUGH])
@pytest.mark.parametrize("sighting", [None, *map(sighted, SiteState)])
def test_a_voided_element_never_started_in_any_state_of_the_site(sighting: Sighting | None, waited: int) -> None:
    assert short(outcome_of(sighting, VOIDED, waited)) == OutcomeKind.NEVER_STARTED


@pytest.mark.parametrize("sighting", [None, *map(sighted, SiteState)])
def test_a_failed_start_is_reported_at_once(sighting: Sighting | None) -> None:
    decided = outcome_of(sighting, ended_with("no-program"), 0)
    assert short(decided) == (OutcomeKind.CANNOT_START, 127)
    assert decided.outcome is not None
    assert "prog" in (decided.outcome.reason or "")


@pytest.mark.parametrize(
    ("at", "waited", "expected"),
    [
        (None, 0, NOT_YET),  # the site has not been queried since
        (None, 1, FAILED_3),  # the site was queried and does not list it
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
def test_a_failure_waits_for_the_next_report_of_the_site(at: SiteState | None, waited: int, expected: object) -> None:
    assert short(outcome_of(None if at is None else sighted(at), ended_with("3"), waited)) == expected


@pytest.mark.parametrize(
    ("at", "waited", "expected"),
    [
        (None, 0, NOT_YET), (None, 1, TO_BE_VOIDED), (None, ENOUGH, TO_BE_VOIDED),
        (SiteState.PENDING, ENOUGH, NOT_YET), (SiteState.RUNNING, ENOUGH, NOT_YET),
        (SiteState.SUCCEEDED, 0, NOT_YET), (SiteState.SUCCEEDED, ENOUGH, (OutcomeKind.SUCCEEDED, 0)),
        (SiteState.FAILED, ENOUGH - 1, NOT_YET), (SiteState.FAILED, ENOUGH, OutcomeKind.NEVER_STARTED),
        (SiteState.TIMED_OUT, 0, OutcomeKind.TIMED_OUT), (SiteState.OUT_OF_MEMORY, 0, (OutcomeKind.FAILED, 137)),
        (SiteState.CANCELLED, 0, OutcomeKind.CANCELLED), (SiteState.PREEMPTED, 0, OutcomeKind.PREEMPTED),
        (SiteState.LOST, 0, OutcomeKind.LOST),
    ],
)  # fmt: skip
def test_the_outcome_of_an_element_without_a_trace(at: SiteState | None, waited: int, expected: object) -> None:
    assert short(outcome_of(None if at is None else sighted(at), NOTHING, waited)) == expected


@pytest.mark.parametrize(("waited", "expected"), [(ENOUGH - 1, NOT_YET), (ENOUGH, OutcomeKind.NEVER_STARTED)])
def test_an_element_that_a_limit_of_its_node_kept_from_starting_never_started(waited: int, expected: object) -> None:
    assert short(outcome_of(sighted(SiteState.FAILED, status=75), NOTHING, waited)) == expected


@pytest.mark.parametrize(
    ("sighting", "waited", "expected"),
    [
        (None, 0, NOT_YET),
        (None, ENOUGH - 1, NOT_YET),
        (None, ENOUGH, OutcomeKind.LOST),
        (sighted(SiteState.PENDING), ENOUGH, NOT_YET),
        (sighted(SiteState.RUNNING), ENOUGH, NOT_YET),
        (sighted(SiteState.SUCCEEDED, status=0), ENOUGH - 1, NOT_YET),
        (
            sighted(SiteState.SUCCEEDED, status=0),
            ENOUGH,
            (OutcomeKind.SUCCEEDED, 0),
        ),  # a supervisor that could not record the success
        (sighted(SiteState.FAILED, status=3), ENOUGH - 1, NOT_YET),
        (sighted(SiteState.FAILED, status=3), ENOUGH, FAILED_3),  # a supervisor that could not record the status
        (sighted(SiteState.FAILED, status=137), ENOUGH, OutcomeKind.LOST),  # a supervisor that was killed
        (sighted(SiteState.FAILED, status=-9), ENOUGH, OutcomeKind.LOST),
        (sighted(SiteState.FAILED, status=0), ENOUGH, OutcomeKind.LOST),
        (sighted(SiteState.FAILED), ENOUGH, OutcomeKind.LOST),
        (sighted(SiteState.TIMED_OUT), 0, OutcomeKind.TIMED_OUT),
        (sighted(SiteState.OUT_OF_MEMORY), 0, (OutcomeKind.FAILED, 137)),
        (sighted(SiteState.OUT_OF_MEMORY, status=1), 0, (OutcomeKind.FAILED, 1)),
        (sighted(SiteState.CANCELLED), 0, OutcomeKind.CANCELLED),
        (sighted(SiteState.PREEMPTED), 0, OutcomeKind.PREEMPTED),
        (sighted(SiteState.LOST), 0, OutcomeKind.LOST),
    ],
)
def test_the_outcome_of_an_element_without_an_end(sighting: Sighting | None, waited: int, expected: object) -> None:
    assert short(outcome_of(sighting, BEGAN, waited)) == expected


def test_out_of_memory_is_reported_with_the_reason_of_the_site() -> None:
    decided = outcome_of(sighted(SiteState.OUT_OF_MEMORY, reason="OutOfMemory"), ended_with("137"), 0)
    assert decided.shortage is not None
    assert decided.shortage.where is ShortageKind.HOST
    assert decided.shortage.says == "cluster1 ended it: out of memory (OutOfMemory)"


_TRACES = st.sampled_from(
    [
        NOTHING,
        BEGAN,
        VOIDED,
        ended_with("0"),
        ended_with("3"),
        ended_with("143"),
        ended_with("no-log"),
        ended_with("rubbish"),
    ]
)
_SIGHTINGS = st.none() | st.builds(
    Sighting, id=st.just("7"), at=st.sampled_from(SiteState), reason=st.sampled_from(["", "a reason"]),
    status=st.none() | st.integers(-15, 255),
)  # fmt: skip


@given(sighting=_SIGHTINGS, trace=_TRACES, waited=st.integers(0, 6))
def test_every_combination_has_exactly_one_outcome(sighting: Sighting | None, trace: ElementTrace, waited: int) -> None:
    decided = outcome_of(sighting, trace, waited)
    assert not (decided.is_to_be_voided and decided.outcome is not None)
    assert not decided.is_to_be_voided or trace == NOTHING, "only an element without a trace can be voided"
    if trace.ended is not None and trace.ended.word == "0":
        assert short(decided) == (OutcomeKind.SUCCEEDED, 0)
    elif decided.outcome is not None and trace.started is not VOID:
        by_site = sighting is not None and sighting.at is SiteState.SUCCEEDED and trace.ended is None
        assert by_site or decided.outcome.kind is not OutcomeKind.SUCCEEDED, (
            "only the site reports success without a recorded status"
        )
        assert decided.outcome.kind is not OutcomeKind.NEVER_STARTED or trace == NOTHING, (
            "an element with a trace has started"
        )
        assert not decided.is_fault_of_node or decided.outcome.kind is OutcomeKind.NEVER_STARTED
    if decided.outcome is not None and decided.outcome.kind is not OutcomeKind.SUCCEEDED:
        assert decided.outcome.reason, "every outcome needs a reason"


@given(sighting=_SIGHTINGS, trace=_TRACES)
def test_an_element_that_ended_or_is_unlisted_has_an_outcome(sighting: Sighting | None, trace: ElementTrace) -> None:
    is_over = sighting is None or sighting.at in OVER or trace.ended is not None
    if is_over or trace == VOIDED:
        assert short(outcome_of(sighting, trace, LATE_REPORTS)) != NOT_YET
    else:
        assert short(outcome_of(sighting, trace, 1000)) == NOT_YET


@pytest.mark.parametrize(
    ("sighting", "trace", "used_mb", "is_short"),
    [
        (sighted(SiteState.FAILED, status=137), BEGAN, 900.0, True),  # its supervisor was killed, too
        (sighted(SiteState.FAILED, status=137), BEGAN, 700.0, False),
        (sighted(SiteState.FAILED, status=137), ended_with("137"), 900.0, True),
        (sighted(SiteState.FAILED, status=1), ended_with("1"), 1000.0, False),
        (sighted(SiteState.LOST), BEGAN, 1000.0, False),  # with its node
    ],
)
def test_one_killed_near_its_ram_lacked_it(
    sighting: Sighting, trace: ElementTrace, used_mb: float, *, is_short: bool
) -> None:
    decided = out_of_ram("slurm", outcome_of(sighting, trace, ENOUGH), 1000.0, used_mb)
    assert (decided.shortage is not None) is is_short
    if decided.shortage is not None:
        assert short(decided) == (OutcomeKind.FAILED, 137)
        assert (decided.shortage.held_mb, decided.shortage.total_mb) == (1000.0, 1000.0)


def test_an_element_that_was_killed_lacked_ram_if_the_site_wrote_so() -> None:
    decided = outcome_of(sighted(SiteState.FAILED, status=137), BEGAN, ENOUGH)
    written = b"slurmstepd: error: Exceeded job memory limit\n"
    assert out_of_ram("slurm", decided, 1000.0, 0.0, written).shortage is not None
    assert out_of_ram("slurm", decided, 1000.0, 0.0, b"Killed\n") == decided
