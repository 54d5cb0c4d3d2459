"""The limit on the power of all GPUs: what counts, who waits, and that no job waits for ever."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.lease import Lease, Need
from gpuyard.model.machine_snapshot import Device
from gpuyard.policy.estimates import Estimate
from gpuyard.policy.plan import decide
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import JobFacts, Plan, PowerLimit, RunningJob, World
from tests.unit.policy.test_placement import card, lease, machine, shared
from tests.unit.policy.test_planner import NOW, kinds_of, queue, running, started, view, waiting_job

IDLE_W, CARD_W = 20.0, 300.0


def power(
    limit_w: float, learned: Mapping[int, float] | None = None, *running_ids: int, most_s: float | None = None
) -> dict[str, Any]:
    """Return the limit, and the facts of jobs of which it is known what they draw, as arguments of `view`."""
    known = learned or {}
    facts = {job_id: JobFacts(power_w=each_w, estimate=Estimate(most_s=most_s)) for job_id, each_w in known.items()}
    return {
        "power": PowerLimit(limit_w=limit_w, running_w={each: known.get(each) for each in running_ids}),
        "facts": facts,
    }


def cards(count: int) -> list[Device]:
    return [card(index, power_draw_w=IDLE_W, power_limit_w=CARD_W) for index in range(count)]


def on_card(job_id: int, index: int) -> tuple[RunningJob, Lease]:
    run = replace(running(job_id), device_ids=(f"G{index}",), lease_id=f"L{job_id}")
    return run, lease(f"L{job_id}", f"G{index}")


def plan_beside_one(limit: dict[str, Any], **changes: Any) -> Plan:
    """Plan job 2 on two cards, one of which job 1 uses."""
    run, held = on_card(1, 0)
    return decide(view(queue(2, Need()), on=machine(*cards(2)), leases=[held], running=[run], **limit, **changes))


def test_jobs_start_while_the_power_of_all_fits() -> None:
    assert started(decide(view(queue(1, Need(), 1, 2), on=machine(*cards(2))))) == {1: ("G0",), 2: ("G1",)}
    # A job starts if the learned draw of all fits.
    assert started(plan_beside_one(power(450.0, {1: 200.0, 2: 250.0}, 1))) == {2: ("G1",)}
    # A job of unknown draw counts with the limit of its card.
    assert started(plan_beside_one(power(599.0, {}, 1))) == {}
    assert started(plan_beside_one(power(600.0, {}, 1))) == {2: ("G1",)}
    run, held = on_card(1, 0)
    held = lease("L1", "G0", memory_mb=1024.0)
    limit = power(300.0, {1: 250.0, 2: 250.0}, 1)
    plan = decide(view(queue(2, shared(1024.0)), on=machine(*cards(1)), leases=[held], running=[run], **limit))
    assert started(plan) == {2: ("G0",)}, "jobs that share a card draw no more than the card may"
    plan = decide(view(queue(1, Need(), 1, 2), on=machine(*cards(2)), **power(100.0)))
    assert started(plan) == {1: ("G0",)}, "a job that could never fit starts while nothing else runs"
    assert kinds_of(waiting_job(plan, 1)) == [ReasonKind.POWER_LIMIT]
    learned = dict.fromkeys(range(1, 5), 100.0)
    plan = decide(view(queue(1, Need(), 1, 2, 3, 4), on=machine(*cards(4)), **power(341.0, learned)))
    assert len(plan.starts) == 3, "the starts of one plan count together"


def test_a_job_waits_if_it_would_exceed_the_limit_and_says_by_how_much() -> None:
    plan = plan_beside_one(power(440.0, {1: 200.0, 2: 250.0}, 1))
    [reason] = waiting_job(plan, 2).reasons
    assert (reason.kind, reason.had, reason.needed) == (ReasonKind.POWER_LIMIT, 450.0, 440.0)
    assert "about 450 W with it and about 220 W without it" in reason.text
    assert "max_gpu_power_w" in reason.remedy


def test_others_draw_counts_and_jobs_without_gpus_draw_none() -> None:
    foreign = [*cards(2), card(2, power_draw_w=250.0, power_limit_w=CARD_W)]
    run, held = on_card(1, 0)
    limit = power(500.0, {1: 100.0, 2: 100.0}, 1)
    asked = Need(only=("G1",))
    fits = decide(view(queue(2, asked), on=machine(*foreign), leases=[held], running=[run], **limit))
    over = power(440.0, {1: 100.0, 2: 100.0}, 1)
    waits = decide(view(queue(2, asked), on=machine(*foreign), leases=[held], running=[run], **over))
    assert (started(fits), started(waits)) == ({2: ("G1",)}, {}), "what others draw now counts"
    run, held = on_card(1, 0)
    plan = decide(
        view(queue(2, Need(devices=0)), on=machine(*cards(1)), leases=[held], running=[run], **power(1.0, {}, 1))
    )
    assert started(plan) == {2: ()}, "jobs without GPUs do not wait for power"


def plan_behind_a_large_one(most_s: float | None) -> Plan:
    """Job 1 runs for 100 s at least, job 2 waits for its power, and job 3 would fit beside job 1."""
    run, held = on_card(1, 0)
    learned = {1: 200.0, 2: 290.0, 3: 50.0}
    return decide(
        view(
            queue(2, Need()), queue(3, Need()), on=machine(*cards(3)), leases=[held],
            running=[replace(run, ends_after=NOW + 100.0)], **power(400.0, learned, 1, most_s=most_s),
        )
    )  # fmt: skip


def test_a_job_that_waits_for_power_is_not_overtaken_for_ever() -> None:
    assert started(plan_behind_a_large_one(90.0)) == {3: ("G1",)}, "a short job goes ahead of one that waits for power"
    # A job that could delay the waiting one waits too.
    for most_s in (110.0, None):
        plan = plan_behind_a_large_one(most_s)
        assert started(plan) == {}
        assert "another job waits for power" in waiting_job(plan, 3).reasons[0].text


@given(st.lists(st.none() | st.floats(0.0, CARD_W), min_size=1, max_size=6), st.integers(0, 3), st.floats(1.0, 1500.0))
def test_no_plan_exceeds_the_limit_but_a_job_alone(draws: list[float | None], already: int, limit_w: float) -> None:
    known = {job_id: draw for job_id, draw in enumerate(draws, 1) if draw is not None}
    runs = [on_card(100 + index, index) for index in range(already)]
    limit = power(limit_w, known | {run.job_id: 100.0 for run, _ in runs}, *(run.job_id for run, _ in runs))
    given_view: World = view(
        *(queue(job_id, Need()) for job_id in range(1, len(draws) + 1)),
        on=machine(*cards(4)),
        leases=[held for _, held in runs],
        running=[run for run, _ in runs],
        **limit,
    )
    plan = decide(given_view)
    drawn = {f"G{index}": max(IDLE_W, 100.0 if index < already else 0.0) for index in range(4)}
    for start in plan.starts:
        drawn[start.claim.shares[0].device_id] = max(IDLE_W, known.get(start.job_id, CARD_W))
    is_alone = len(plan.starts) == 1 and not already
    assert not plan.starts or is_alone or sum(drawn.values()) <= limit_w + 1e-6
    assert already or plan.starts, "nothing runs, so a job has to start"
