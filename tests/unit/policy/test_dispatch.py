"""Which jobs go to cluster engines: in which order, how many, and why the others wait."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.cluster_terms import Amount, Basis, ClusterTerms, Offer, amount_needed, gpu_count, subtract
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice, UnknownMemory, WholeDevice
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


def filled(*job_ids: int, **lane: Any) -> Queue:
    queue = Queue()
    queue.add(*job_ids, **lane)
    return queue


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


def test_jobs_are_submitted_by_priority_usage_and_age() -> None:
    queue = filled(1, 2, 3)
    plan = queue.plan()
    assert [(start.job_id, start.terms, start.claim.shares) for start in plan.starts] == [
        (1, GPU, ()), (2, GPU, ()), (3, GPU, ()),
    ]  # fmt: skip
    assert plan.waiting == (), "an engine without limits gets all jobs with their terms"
    # Jobs go by priority and then by least usage.
    queue = filled(1, tag="busy")
    queue.add(2, tag="idle")
    queue.add(3, tag="busy", priority=5)
    assert submitted(queue.plan(used={("me", "busy"): 50.0})) == [3, 2, 1]
    queue = filled(1, priority=1)
    queue.add(2, waited_s=AGEING_S / 2)
    queue.add(3, waited_s=2 * AGEING_S + 10)
    assert submitted(queue.plan()) == [3, 1, 2], "the priority of a waiting job rises with time"
    queue = filled(1, 2, 3, tag="a")
    queue.add(11, 12, 13, tag="b")
    assert submitted(queue.plan({"yonder": Offer(most_jobs=4)})) == [1, 11, 2, 12], "two tags take turns"


def test_a_step_submits_a_limited_number_and_the_next_step_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_STARTS_PER_STEP", 10)
    queue = filled(*range(1, 26))
    assert submitted(queue.plan()) == list(range(1, 11))


def test_an_engine_in_trouble_or_a_paused_queue_gets_no_jobs() -> None:
    queue = filled(1, 2)
    plan = queue.plan({"yonder": Offer(trouble="yonder cannot be reached: connection refused")})
    assert (submitted(plan), why(plan)) == ([], {1: ReasonKind.ENGINE})
    assert text_of(plan, 1) == "yonder cannot be reached: connection refused"
    queue = filled(1, 2)
    queue.terms = {}
    plan = queue.plan({"yonder": Offer(trouble="connection refused")})
    assert submitted(plan) == [], "terms are computed only for jobs that may go"
    # A paused queue submits nothing and gives that reason first.
    queue = filled(1)
    queue.add(2, engine="down")
    offers = {"yonder": Offer(), "down": Offer(trouble="it is down")}
    plan = queue.plan(offers, shut=(Reason(ReasonKind.PAUSED, "paused"),))
    assert (submitted(plan), why(plan)) == ([], {1: ReasonKind.PAUSED, 2: ReasonKind.PAUSED})
    # A stopped workspace submits nothing and others do.
    queue = filled(1, tag="sweep")
    queue.add(2, tag="other")
    plan = queue.plan(stopped=frozenset({"sweep"}))
    assert (submitted(plan), why(plan)) == ([2], {1: ReasonKind.PAUSED})
    # A refused job waits and jobs of other lanes do not.
    queue = filled(1, 2)
    refused, _ = queue.lanes[0]
    queue.add(3)
    plan = queue.plan(refused={refused.id: Reason(ReasonKind.ENGINE, "no such partition")})
    assert (submitted(plan), text_of(plan, 1)) == ([3], "no such partition")


def test_engines_have_limits_and_buffers() -> None:
    queue = filled(1, 2, 3)
    plan = queue.plan({"yonder": Offer(most_jobs=5)}, live={"yonder": 3, "": 50})
    assert (submitted(plan), why(plan)) == ([1, 2], {3: ReasonKind.LIMIT})
    assert text_of(plan, 3) == "limit reached: at most 5 jobs on yonder (most_jobs) at a time"
    # An engine with a queue gets a buffer.
    queue = filled(*range(1, 31))
    plan = queue.plan(buffered={"yonder": [0] * 6})
    assert (submitted(plan), why(plan)) == (list(range(1, 11)), {11: ReasonKind.LIMIT})
    assert text_of(plan, 11) == "enough jobs wait at yonder: others follow as they start"
    # The buffer is twice what runs there.
    queue = filled(*range(1, 101))
    assert len(submitted(queue.plan(buffered={"yonder": [0] * 30}, started={"yonder": 40}))) == 50
    queue = filled(*range(1, 31), priority=3)
    queue.add(31)
    plan = queue.plan(buffered={"yonder": [2] * 20 + [3] * 6})
    assert submitted(plan) == list(range(1, 11)), "less urgent jobs that wait there do not keep a job back"
    queue = filled(*range(1, 31))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=30.0))}, buffered={"yonder": [0] * 40})
    assert len(submitted(plan)) == 30, "an engine that reports what is free has no buffer"


def test_arrays_are_handed_over_whole_whatever_is_buffered() -> None:
    queue = filled(*range(1, 101), terms=replace(GPU, group=1))
    queue.add(*range(201, 231), waited_s=50.0)
    plan = queue.plan(buffered={"yonder": [0] * 6})
    assert len([each for each in submitted(plan) if each <= 100]) == 100
    assert len([each for each in submitted(plan) if each > 200]) == 9, "an array is handed over whole and counts as one"
    queue = filled(1, 2, 3, terms=replace(GPU, group=9))
    plan = queue.plan(buffered={"yonder": [0] * 16}, running=[running(90, group=9)])
    assert submitted(plan) == [1, 2, 3], "the rest of an array follows though the buffer is full"


def test_limits_of_tags_and_arrays_hold() -> None:
    queue = filled(1, 2, 3, tag="night")
    queue.add(4)
    plan = queue.plan(tags={"night": 3}, running=[running(90, "night"), running(91, "day")])
    assert (submitted(plan), why(plan)) == ([1, 4, 2], {3: ReasonKind.LIMIT})
    # Gpuyard keeps the limit of an array for an engine without a queue.
    queue = filled(2, 3, 4, group=1, group_limit=3)
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=50.0))}, running=[running(1, group=1)])
    assert (submitted(plan), why(plan)) == ([2, 3], {4: ReasonKind.LIMIT})
    # A job at a limit of its own does not hold up others.
    queue = filled(1, tag="night")
    queue.add(2)
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=1.0))}, tags={"night": 0})
    assert (submitted(plan), why(plan)) == ([2], {1: ReasonKind.LIMIT})
    # Gpuyard keeps the limit of an array that is several submissions at the site.
    queue = filled(2, 3, 4, group=1, group_limit=2, terms=replace(GPU, group=1, at_most=2))
    plan = queue.plan(running=[running(1, group=1)])
    assert (submitted(plan), why(plan)) == ([2], {3: ReasonKind.LIMIT})


ARRAY = replace(GPU, group=1, at_most=2)
WHOLE = {"yonder": Offer(most_in_array=1000)}


def test_an_engine_that_keeps_the_limit_of_an_array_gets_one_submission_at_a_time() -> None:
    learned = [replace(ARRAY, ram_mb=1024.0 * each, ram_basis=Basis.LEARNED) for each in range(1, 5)]
    queue = filled(2, 3, 4, 5, group=1, group_limit=2)
    queue.terms.update(zip((2, 3, 4, 5), learned, strict=True))
    assert submitted(queue.plan(WHOLE)) == [2, 3, 4, 5], "an engine that keeps the limit of an array gets it whole"
    # Jobs of an array that has others at the engine keep its limit here.
    queue = filled(2, 3, 4, group=1, group_limit=2, terms=ARRAY)
    plan = queue.plan(WHOLE, running=[running(1, group=1)])
    assert (submitted(plan), why(plan)) == ([2], {3: ReasonKind.LIMIT})
    queue = filled(2, 3, 4, 5, 6, group=1, group_limit=2, terms=ARRAY)
    plan = queue.plan({"yonder": Offer(most_in_array=3)})
    assert (submitted(plan), why(plan)) == ([2, 3, 4], {5: ReasonKind.LIMIT})
    queue.terms[4] = replace(ARRAY, cpus=4)
    plan = queue.plan(WHOLE)
    assert (submitted(plan), why(plan)) == ([2, 3], {4: ReasonKind.LIMIT}), "an array is one submission at a time"


def test_only_jobs_that_fit_are_submitted() -> None:
    queue = filled(1, 2, 3)
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=2.0))})
    assert (submitted(plan), why(plan)) == ([1, 2], {3: ReasonKind.NO_ROOM})
    assert text_of(plan, 3) == "yonder has 0 GPUs free, 1 needed"
    # No job overtakes a job that waits for free GPUs.
    queue = filled(1, terms=ClusterTerms(need=Need(devices=4), name="wide"))
    queue.add(2, terms=ClusterTerms(need=Need(devices=0), name="small"))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=3.0))})
    assert (submitted(plan), why(plan)) == ([], {1: ReasonKind.NO_ROOM, 2: ReasonKind.AWAITED})
    assert text_of(plan, 2) == "job 1 is ahead and does not fit on yonder yet"
    # A resource that is not counted holds up no job.
    queue = filled(1, terms=replace(GPU, cpus=400, ram_mb=1e9))
    assert submitted(queue.plan({"yonder": Offer(free=Amount(gpus=1.0))})) == [1]
    third = ClusterTerms(need=Need(devices=1, memory=FixedMemory(8192.0)), name="third")
    queue = filled(*range(1, 9), terms=third)
    free = Offer(free=Amount(gpus=2.0), card_mb=24_576.0)
    assert submitted(queue.plan({"yonder": free})) == [1, 2, 3, 4, 5, 6]
    assert submitted(queue.plan({"yonder": replace(free, card_mb=None)})) == [1, 2], "shares of a GPU add up"


@pytest.mark.parametrize(
    ("free", "terms", "missing"),
    [
        (Amount(cpus=3.0), replace(GPU, cpus=4), "yonder has 3 CPUs free, 4 needed"),
        (Amount(ram_mb=1024.0), replace(GPU, ram_mb=2048.0), "yonder has 1 GB RAM free, 2 GB needed"),
        (Amount(gpus=0.5, cpus=9.0), GPU, "yonder has 0.5 GPUs free, 1 needed"),
    ],
)
def test_each_counted_resource_must_be_free(free: Amount, terms: ClusterTerms, missing: str) -> None:
    queue = filled(1, terms=terms)
    plan = queue.plan({"yonder": Offer(free=free)})
    assert (submitted(plan), text_of(plan, 1)) == ([], missing)


def test_engines_do_not_hold_up_each_other() -> None:
    queue = filled(1, engine="full")
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
    queue = Queue()
    for job_id in range(MOST_LANES + 20):
        queue.add(job_id, engine="down", priority=9)
    queue.add(999)
    plan = queue.plan({"yonder": Offer(), "down": Offer(trouble="it is down")})
    assert submitted(plan) == [999]
    assert len(plan.waiting) == MOST_LANES + 20, "many lanes of an unreachable engine do not hide lanes of another"
    # A lane that a user asks about is explained among many.
    queue = Queue()
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
def test_no_more_than_is_free_is_submitted_in_order(
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


def test_a_job_has_to_fit_one_node() -> None:
    queue = filled(1, terms=ClusterTerms(need=Need(devices=3), name="wide"))
    queue.add(2)
    nodes = (Amount(gpus=1.0), Amount(gpus=2.0))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=3.0), nodes=nodes)})
    assert submitted(plan) == [2], "a job larger than every node does not hold up others"
    assert text_of(plan, 1) == "no node of yonder has 3 GPUs; the largest has 2"
    # A job for which no single node has all it needs is not submitted.
    queue = filled(1, terms=ClusterTerms(need=Need(devices=2), name="wide", cpus=8))
    nodes = (Amount(gpus=2.0, cpus=4.0), Amount(gpus=0.0, cpus=16.0))
    plan = queue.plan({"yonder": Offer(free=Amount(gpus=2.0, cpus=20.0), nodes=nodes)})
    assert text_of(plan, 1) == "no node of yonder has 2 GPUs, 8 CPUs together"


CARD_MB = 24_576.0


def shared_mb(memory_mb: float) -> Need:
    return Need(memory=FixedMemory(memory_mb))


def part_of_device(part: float) -> Need:
    return Need(memory=PartOfDevice(part))


@pytest.mark.parametrize(
    ("need", "card_mb", "gpus"),
    [
        (Need(devices=0), CARD_MB, 0.0),
        (Need(devices=1), CARD_MB, 1.0),
        (Need(devices=4), CARD_MB, 4.0),
        (Need(devices=1, memory=WholeDevice(8192.0)), CARD_MB, 1.0),  # the whole GPU, with that much free
        (Need(devices=2, memory=FixedMemory(8192.0)), CARD_MB, 2.0),  # no engine shares several GPUs at a time
        (shared_mb(6144.0), CARD_MB, 0.25),
        (shared_mb(8192.0), CARD_MB, 0.3333),
        (shared_mb(14_745.6), CARD_MB, 0.6),
        (shared_mb(60_000.0), CARD_MB, 1.0),  # more than a GPU has: the whole GPU
        (shared_mb(8192.0), None, 1.0),  # a GPU of unknown size
        (part_of_device(0.5), CARD_MB, 0.5),
        (part_of_device(0.5), None, 0.5),
        (part_of_device(1 / 7), None, 0.1428),
        (shared_mb(0.0), CARD_MB, 0.0001),  # a small share, so that the job sees a GPU
        (Need(memory=UnknownMemory()), CARD_MB, 1.0),
    ],
)
def test_a_job_asks_for_its_share_of_a_gpu(need: Need, card_mb: float | None, gpus: float) -> None:
    assert gpu_count(need, card_mb) == pytest.approx(gpus)


@given(count=st.integers(1, 64))
def test_jobs_that_share_a_gpu_evenly_all_fit_on_it(count: int) -> None:
    assert count * gpu_count(part_of_device(1.0 / count), None) <= 1.0 + 1e-9
    assert (count + 1) * gpu_count(part_of_device(1.0 / count), None) > 1.0


@given(memory_mb=st.floats(CARD_MB / 100, 2 * CARD_MB))
def test_the_share_is_close_to_the_needed_memory(memory_mb: float) -> None:
    asked = gpu_count(shared_mb(memory_mb), CARD_MB)
    needed = min(1.0, memory_mb / CARD_MB)
    assert needed - 1e-4 <= asked <= needed + 1e-4
    fit = int(1.0 / asked + 1e-9)
    assert fit * needed <= 1.0 + 1e-6, "jobs that fit by their shares also fit by memory"


def test_subtracting_keeps_uncounted_fields_uncounted() -> None:
    terms = ClusterTerms(need=part_of_device(0.5), name="x", cpus=3, ram_mb=100.0)
    taken = amount_needed(terms, None)
    assert taken == Amount(gpus=0.5, cpus=3.0, ram_mb=100.0)
    assert subtract(Amount(gpus=2.0, ram_mb=1000.0), taken) == Amount(gpus=1.5, ram_mb=900.0)
    assert subtract(Amount(), taken) == Amount()
    # The default is one CPU and no RAM.
    assert amount_needed(ClusterTerms(need=Need(devices=2), name="x"), None) == Amount(gpus=2.0, cpus=1.0, ram_mb=0.0)
