"""Which jobs go to cluster engines: in which order, how many, and why the others wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.cluster_terms import Amount, Basis, ClusterTerms, Offer, amount_needed
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice
from gpuyard.policy import cluster_dispatch as dispatch
from gpuyard.policy.cluster_dispatch import DispatchView, plan_dispatch
from gpuyard.policy.numbers import AGEING_S, MOST_LANES
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, current_priority
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import Plan, RunningJob

NOW = 1_000_000.0
GPU = ClusterTerms(need=Need(devices=1), name="job")


class Queue:
    """Lanes of jobs with their terms; jobs with lower ids have waited a little longer."""

    def __init__(self) -> None:
        self.lanes: list[tuple[Lane, list[Candidate]]] = []
        self.terms: dict[int, ClusterTerms] = {}

    def add(self, *job_ids: int, terms: ClusterTerms = GPU, waited_s: float = 100.0, **lane: Any) -> Lane:
        terms = replace(terms, group=lane.get("group", terms.group))
        fields = {"id": len(self.lanes) + 1, "priority": 0, "user": "me", "tag": "", "engine": "yonder", **lane}
        made = Lane(need=terms.need, **fields)
        self.lanes.append((made, [Candidate(job_id=each, queued_at=NOW - waited_s + each / 10) for each in job_ids]))
        self.terms.update(dict.fromkeys(job_ids, terms))
        return made

    def plan(self, offers: Mapping[str, Offer] | None = None, **view: Any) -> Plan:
        about = view.pop("about", None)
        fields = {"now": NOW, "live": {}, "terms": self.terms.__getitem__, **view}
        offers = offers if offers is not None else {"yonder": Offer()}
        queues = [LaneQueue(lane=lane, jobs=iter(jobs)) for lane, jobs in self.lanes]
        return plan_dispatch(DispatchView(queues=queues, offers=offers, **fields), about=about)


@pytest.fixture
def queue() -> Queue:
    return Queue()


def submitted(plan: Plan) -> list[int]:
    return [start.job_id for start in plan.starts]


def why(plan: Plan) -> dict[int, ReasonKind]:
    """Return the first reason of the first waiting job of each lane."""
    return {hold.job_id: hold.reasons[0].kind for hold in plan.waiting}


def text_of(plan: Plan, job_id: int) -> str:
    return next(hold.reasons[0].text for hold in plan.waiting if hold.job_id == job_id)


def running(job_id: int, tag: str = "", group: int | None = None) -> RunningJob:
    return RunningJob(
        job_id=job_id, user="me", tag=tag, devices=0, started_at=NOW, group=group, lease_id=None, takes_slot=False
    )


# Order


def test_an_engine_without_limits_gets_all_jobs_with_their_terms(queue: Queue) -> None:
    queue.add(1, 2, 3)
    plan = queue.plan()
    assert [(start.job_id, start.terms, start.claim.shares) for start in plan.starts] == [
        (1, GPU, ()), (2, GPU, ()), (3, GPU, ()),
    ]  # fmt: skip
    assert plan.waiting == ()


def test_jobs_go_by_priority_and_then_by_least_usage(queue: Queue) -> None:
    queue.add(1, tag="busy")
    queue.add(2, tag="idle")
    queue.add(3, tag="busy", priority=5)
    assert submitted(queue.plan(used={("me", "busy"): 50.0})) == [3, 2, 1]


def test_the_priority_of_a_waiting_job_rises_with_time(queue: Queue) -> None:
    queue.add(1, priority=1)
    queue.add(2, waited_s=AGEING_S / 2)
    queue.add(3, waited_s=2 * AGEING_S + 10)
    assert submitted(queue.plan()) == [3, 1, 2]


def test_two_tags_take_turns(queue: Queue) -> None:
    queue.add(1, 2, 3, tag="a")
    queue.add(11, 12, 13, tag="b")
    assert submitted(queue.plan({"yonder": Offer(most_jobs=4)})) == [1, 11, 2, 12]


def test_terms_are_computed_only_for_jobs_that_may_go(queue: Queue) -> None:
    queue.add(1, 2)
    queue.terms = {}
    plan = queue.plan({"yonder": Offer(trouble="connection refused")})
    assert submitted(plan) == []


def test_a_step_submits_a_limited_number_and_the_next_step_the_rest(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_STARTS_PER_STEP", 10)
    queue.add(*range(1, 26))
    assert submitted(queue.plan()) == list(range(1, 11))


# Reasons to wait


def test_an_unreachable_engine_gets_no_jobs_and_gives_the_reason(queue: Queue) -> None:
    queue.add(1, 2)
    plan = queue.plan({"yonder": Offer(trouble="yonder cannot be reached: connection refused")})
    assert (submitted(plan), why(plan)) == ([], {1: ReasonKind.ENGINE})
    assert text_of(plan, 1) == "yonder cannot be reached: connection refused"


def test_a_paused_queue_submits_nothing_and_gives_that_reason_first(queue: Queue) -> None:
    queue.add(1)
    queue.add(2, engine="down")
    offers = {"yonder": Offer(), "down": Offer(trouble="it is down")}
    plan = queue.plan(offers, shut=(Reason(ReasonKind.PAUSED, "paused"),))
    assert (submitted(plan), why(plan)) == ([], {1: ReasonKind.PAUSED, 2: ReasonKind.PAUSED})


def test_a_stopped_workspace_submits_nothing_and_others_do(queue: Queue) -> None:
    queue.add(1, tag="sweep")
    queue.add(2, tag="other")
    plan = queue.plan(stopped=frozenset({"sweep"}))
    assert (submitted(plan), why(plan)) == ([2], {1: ReasonKind.PAUSED})


def test_a_refused_job_waits_and_jobs_of_other_lanes_do_not(queue: Queue) -> None:
    refused = queue.add(1, 2)
    queue.add(3)
    plan = queue.plan(refused={refused.id: Reason(ReasonKind.ENGINE, "no such partition")})
    assert (submitted(plan), text_of(plan, 1)) == ([3], "no such partition")


def test_the_job_limit_of_an_engine_counts_the_jobs_it_already_has(queue: Queue) -> None:
    queue.add(1, 2, 3)
    plan = queue.plan({"yonder": Offer(most_jobs=5)}, live={"yonder": 3, "": 50})
    assert (submitted(plan), why(plan)) == ([1, 2], {3: ReasonKind.LIMIT})
    assert text_of(plan, 3) == "limit reached: at most 5 jobs on yonder (most_jobs) at a time"


def test_an_engine_with_a_queue_gets_a_buffer(queue: Queue) -> None:
    queue.add(*range(1, 31))
    plan = queue.plan(buffered={"yonder": [0] * 6})
    assert (submitted(plan), why(plan)) == (list(range(1, 11)), {11: ReasonKind.LIMIT})
    assert text_of(plan, 11) == "enough jobs wait at yonder: others follow as they start"


def test_the_buffer_is_twice_what_runs_there(queue: Queue) -> None:
    queue.add(*range(1, 101))
    assert len(submitted(queue.plan(buffered={"yonder": [0] * 30}, started={"yonder": 40}))) == 50


def test_an_array_is_handed_over_whole_and_counts_as_one(queue: Queue) -> None:
    queue.add(*range(1, 101), terms=replace(GPU, group=1))
    queue.add(*range(201, 231), waited_s=50.0)
    plan = queue.plan(buffered={"yonder": [0] * 6})
    assert len([each for each in submitted(plan) if each <= 100]) == 100
    assert len([each for each in submitted(plan) if each > 200]) == 9


def test_the_rest_of_an_array_follows_though_the_buffer_is_full(queue: Queue) -> None:
    queue.add(1, 2, 3, terms=replace(GPU, group=9))
    plan = queue.plan(buffered={"yonder": [0] * 16}, running=[running(90, group=9)])
    assert submitted(plan) == [1, 2, 3]


def test_less_urgent_jobs_that_wait_there_do_not_keep_a_job_back(queue: Queue) -> None:
    queue.add(*range(1, 31), priority=3)
    queue.add(31)
    plan = queue.plan(buffered={"yonder": [2] * 20 + [3] * 6})
    assert submitted(plan) == list(range(1, 11))


def test_an_engine_that_reports_what_is_free_has_no_buffer(queue: Queue) -> None:
    queue.add(*range(1, 31))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=30.0))}, buffered={"yonder": [0] * 40})
    assert len(submitted(plan)) == 30


def test_the_limit_of_a_tag_counts_local_and_cluster_jobs(queue: Queue) -> None:
    queue.add(1, 2, 3, tag="night")
    queue.add(4)
    plan = queue.plan(tags={"night": 3}, running=[running(90, "night"), running(91, "day")])
    assert (submitted(plan), why(plan)) == ([1, 4, 2], {3: ReasonKind.LIMIT})


def test_gpuyard_keeps_the_limit_of_an_array_for_an_engine_without_a_queue(queue: Queue) -> None:
    queue.add(2, 3, 4, group=1, group_limit=3)
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=50.0))}, running=[running(1, group=1)])
    assert (submitted(plan), why(plan)) == ([2, 3], {4: ReasonKind.LIMIT})


ARRAY = replace(GPU, group=1, at_most=2)
WHOLE = {"yonder": Offer(most_in_array=1000)}


def test_an_engine_that_keeps_the_limit_of_an_array_gets_it_whole(queue: Queue) -> None:
    learned = [replace(ARRAY, ram_mb=1024.0 * each, ram_basis=Basis.LEARNED) for each in range(1, 5)]
    queue.add(2, 3, 4, 5, group=1, group_limit=2)
    queue.terms.update(zip((2, 3, 4, 5), learned, strict=True))
    assert submitted(queue.plan(WHOLE)) == [2, 3, 4, 5]


def test_jobs_of_an_array_that_has_others_at_the_engine_keep_its_limit_here(queue: Queue) -> None:
    queue.add(2, 3, 4, group=1, group_limit=2, terms=ARRAY)
    plan = queue.plan(WHOLE, running=[running(1, group=1)])
    assert (submitted(plan), why(plan)) == ([2], {3: ReasonKind.LIMIT})


def test_an_array_is_one_submission_at_a_time(queue: Queue) -> None:
    queue.add(2, 3, 4, 5, 6, group=1, group_limit=2, terms=ARRAY)
    plan = queue.plan({"yonder": Offer(most_in_array=3)})
    assert (submitted(plan), why(plan)) == ([2, 3, 4], {5: ReasonKind.LIMIT})
    queue.terms[4] = replace(ARRAY, cpus=4)
    plan = queue.plan(WHOLE)
    assert (submitted(plan), why(plan)) == ([2, 3], {4: ReasonKind.LIMIT})


def test_gpuyard_keeps_the_limit_of_an_array_that_is_several_submissions_at_the_site(queue: Queue) -> None:
    queue.add(2, 3, 4, group=1, group_limit=2, terms=replace(GPU, group=1, at_most=2))
    plan = queue.plan(running=[running(1, group=1)])
    assert (submitted(plan), why(plan)) == ([2], {3: ReasonKind.LIMIT})


# Free resources


def test_only_jobs_that_fit_are_submitted_and_the_first_that_does_not_fit_says_what_is_missing(queue: Queue) -> None:
    queue.add(1, 2, 3)
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=2.0))})
    assert (submitted(plan), why(plan)) == ([1, 2], {3: ReasonKind.NO_ROOM})
    assert text_of(plan, 3) == "yonder has 0 GPUs free, 1 needed"


def test_no_job_overtakes_a_job_that_waits_for_free_gpus(queue: Queue) -> None:
    queue.add(1, terms=ClusterTerms(need=Need(devices=4), name="wide"))
    queue.add(2, terms=ClusterTerms(need=Need(devices=0), name="small"))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=3.0))})
    assert (submitted(plan), why(plan)) == ([], {1: ReasonKind.NO_ROOM, 2: ReasonKind.AWAITED})
    assert text_of(plan, 2) == "job 1 is ahead and does not fit on yonder yet"


def test_a_job_at_a_limit_of_its_own_does_not_hold_up_others(queue: Queue) -> None:
    queue.add(1, tag="night")
    queue.add(2)
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=1.0))}, tags={"night": 0})
    assert (submitted(plan), why(plan)) == ([2], {1: ReasonKind.LIMIT})


@pytest.mark.parametrize(
    ("free", "terms", "missing"),
    [
        (Amount(cpus=3.0), replace(GPU, cpus=4), "yonder has 3 CPUs free, 4 needed"),
        (Amount(ram_mb=1024.0), replace(GPU, ram_mb=2048.0), "yonder has 1 GB RAM free, 2 GB needed"),
        (Amount(gpus=0.5, cpus=9.0), GPU, "yonder has 0.5 GPUs free, 1 needed"),
    ],
)
def test_each_counted_resource_must_be_free(queue: Queue, free: Amount, terms: ClusterTerms, missing: str) -> None:
    queue.add(1, terms=terms)
    plan = queue.plan({"yonder": Offer(free=free)})
    assert (submitted(plan), text_of(plan, 1)) == ([], missing)


def test_a_resource_that_is_not_counted_holds_up_no_job(queue: Queue) -> None:
    queue.add(1, terms=replace(GPU, cpus=400, ram_mb=1e9))
    assert submitted(queue.plan({"yonder": Offer(free=Amount(gpus=1.0))})) == [1]


def test_shares_of_a_gpu_add_up(queue: Queue) -> None:
    third = ClusterTerms(need=Need(devices=1, memory=FixedMemory(8192.0)), name="third")
    queue.add(*range(1, 9), terms=third)
    free = Offer(free=Amount(gpus=2.0), card_mb=24_576.0)
    assert submitted(queue.plan({"yonder": free})) == [1, 2, 3, 4, 5, 6]
    assert submitted(queue.plan({"yonder": replace(free, card_mb=None)})) == [1, 2]


# Several engines


def test_engines_do_not_hold_up_each_other(queue: Queue) -> None:
    queue.add(1, engine="full")
    queue.add(2, engine="down")
    queue.add(3, engine="most")
    queue.add(4, 5, engine="yonder")
    offers = {
        "full": Offer(free=Amount(gpus=0.0)),
        "down": Offer(trouble="it is down"),
        "most": Offer(most_jobs=0),
        "yonder": Offer(free=Amount(gpus=2.0)),
    }
    plan = queue.plan(offers)
    assert submitted(plan) == [4, 5]
    assert why(plan) == {1: ReasonKind.NO_ROOM, 2: ReasonKind.ENGINE, 3: ReasonKind.LIMIT}


def test_many_lanes_of_an_unreachable_engine_do_not_hide_lanes_of_another(queue: Queue) -> None:
    for job_id in range(MOST_LANES + 20):
        queue.add(job_id, engine="down", priority=9)
    queue.add(999)
    plan = queue.plan({"yonder": Offer(), "down": Offer(trouble="it is down")})
    assert submitted(plan) == [999]
    assert len(plan.waiting) == MOST_LANES + 20


def test_a_lane_that_a_user_asks_about_is_explained_among_many(queue: Queue) -> None:
    full = {"yonder": Offer(free=Amount(gpus=0.0))}
    lanes = [queue.add(job_id) for job_id in range(1, MOST_LANES + 20)]
    assert lanes[-1].id not in {hold.lane.id for hold in queue.plan(full).waiting}
    assert lanes[-1].id in {hold.lane.id for hold in queue.plan(full, about=lanes[-1].id).waiting}


# Properties

_TERMS = st.builds(
    ClusterTerms,
    need=st.one_of(
        st.builds(Need, devices=st.integers(0, 3)),
        st.builds(Need, memory=st.sampled_from([PartOfDevice(part) for part in (0.1, 0.25, 1 / 3, 0.5)])),
    ),
    name=st.just("x"),
    cpus=st.none() | st.integers(1, 4),
    ram_mb=st.none() | st.floats(1.0, 500.0),
)
_JOBS = st.lists(
    st.tuples(_TERMS, st.integers(0, 2), st.sampled_from("ab"), st.sampled_from(["yonder", "beyond"])), max_size=14
)
_FREE = st.builds(
    Amount,
    gpus=st.none() | st.floats(0.0, 5.0),
    cpus=st.none() | st.floats(0.0, 8.0),
    ram_mb=st.none() | st.floats(0.0, 1000.0),
)


@given(jobs=_JOBS, free=st.fixed_dictionaries({"yonder": _FREE, "beyond": _FREE}), limit=st.none() | st.integers(0, 4))
def test_no_more_than_is_free_is_submitted_and_no_job_overtakes_a_waiting_job(
    jobs: Sequence[tuple[ClusterTerms, int, str, str]], free: Mapping[str, Amount], limit: int | None
) -> None:
    queue = Queue()
    for job_id, (terms, priority, tag, engine) in enumerate(jobs, 1):
        queue.add(job_id, terms=terms, priority=priority, tag=tag, engine=engine)
    tags = {} if limit is None else {"a": limit}
    plan = queue.plan({name: Offer(free=amount) for name, amount in free.items()}, tags=tags)
    gone, held = set(submitted(plan)), why(plan)
    assert gone | held.keys() == set(range(1, len(jobs) + 1)), "each job is submitted or has a reason"
    assert not gone & held.keys()
    assert limit is None or sum(jobs[job_id - 1][2] == "a" for job_id in gone) <= limit
    for name, amount in free.items():
        mine = [job_id for job_id in gone if jobs[job_id - 1][3] == name]
        taken = [amount_needed(jobs[job_id - 1][0], None) for job_id in mine]
        for what in ("gpus", "cpus", "ram_mb"):
            had = getattr(amount, what)
            assert had is None or sum(getattr(each, what) for each in taken) <= had + 1e-3
        waiting = [job_id for job_id, kind in held.items() if kind is ReasonKind.NO_ROOM]
        for waits in [job_id for job_id in waiting if jobs[job_id - 1][3] == name]:
            for goes in mine:
                assert current_priority(jobs[goes - 1][1], NOW, NOW) >= current_priority(jobs[waits - 1][1], NOW, NOW)
        assert len([job_id for job_id in waiting if jobs[job_id - 1][3] == name]) <= 1, (
            "only the first job of an engine may wait for free resources"
        )


def test_a_job_larger_than_every_node_does_not_hold_up_others(queue: Queue) -> None:
    queue.add(1, terms=ClusterTerms(need=Need(devices=3), name="wide"))
    queue.add(2)
    nodes = (Amount(gpus=1.0), Amount(gpus=2.0))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=3.0), nodes=nodes)})
    assert submitted(plan) == [2]
    assert text_of(plan, 1) == "no node of yonder has 3 GPUs; the largest has 2"


def test_a_job_for_which_no_single_node_has_all_it_needs_is_not_submitted(queue: Queue) -> None:
    queue.add(1, terms=ClusterTerms(need=Need(devices=2), name="wide", cpus=8))
    nodes = (Amount(gpus=2.0, cpus=4.0), Amount(gpus=0.0, cpus=16.0))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=2.0, cpus=20.0), nodes=nodes)})
    assert text_of(plan, 1) == "no node of yonder has 2 GPUs, 8 CPUs together"
