"""Jobs of a staggered array start one after the other, without delaying others. A card has 24 GB."""

from gpuyard.policy.plan import decide
from gpuyard.policy.wait_reasons import ReasonKind
from tests.unit.policy.test_placement import GB, shared
from tests.unit.policy.test_planner import NOW, queue, started, view, waiting_job

STAGGERED = {"stagger_s": 5.0, "group": 10}


def test_one_job_of_the_array_starts_and_the_next_waits_for_its_turn() -> None:
    made = decide(view(queue(1, shared(GB), 10, 11, **STAGGERED), queue(2, shared(GB), 20, 21), on=2))
    assert sorted(started(made)) == [10, 20, 21]
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (
        ReasonKind.STAGGERED, "jobs of its array start 5 s apart, the next one in 5.0 s",
    )  # fmt: skip


def test_the_last_start_counts_across_plans() -> None:
    staggered = queue(1, shared(GB), 10, 11, **STAGGERED)
    early = decide(view(staggered, on=2, array_starts={10: NOW - 2.0}))
    assert started(early) == {}
    assert "the next one in 3.0 s" in waiting_job(early, 1).reasons[0].text
    in_time = decide(view(queue(1, shared(GB), 10, 11, **STAGGERED), on=2, array_starts={10: NOW - 5.0}))
    assert list(started(in_time)) == [10]


def test_a_last_start_in_the_future_is_ignored() -> None:
    made = decide(view(queue(1, shared(GB), 10, **STAGGERED), on=1, array_starts={10: NOW + 3600.0}))
    assert list(started(made)) == [10]
