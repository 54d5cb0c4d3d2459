"""Scenarios about memory: estimates, out-of-memory reruns, suspension and preemption; no job is forgotten wherever the
daemon is killed. A device has 24 GB."""

from typing import Any

import pytest

from gpuyard.model.submission import SubmissionRequest
from gpuyard.policy.numbers import AGEING_S
from tests.scale import seeds, size
from tests.simulation.behaviors import EVERYTHING, Behavior, BehaviorOf
from tests.simulation.clients import Operation
from tests.simulation.scenario import Scenario, ScenarioResult, Script

GB = 1024.0


def run(at: float, token: str, *command: str, **options: Any) -> Operation:
    """Submit `command` under the name `token`."""
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    asked = SubmissionRequest(cwd="/", environment={}, token=token, command=command, options={"name": token, **typed})
    return Operation(at=at, kind="submit", asked=asked)


def ask(at: float, kind: str, jobs: str = "1") -> Operation:
    return Operation(at=at, kind=kind, jobs=jobs)


def known(**behaviors: Behavior) -> BehaviorOf:
    """Return the behavior that the last argument of the command names."""
    return lambda command, _: behaviors[command[-1]]


def steady(gigabytes: float, runs_s: float = 30.0, **options: Any) -> Behavior:
    return Behavior(runs_s=runs_s, climbs=((0.5, gigabytes * GB),), **options)


def simulate(
    behavior_of: BehaviorOf,
    *operations: Operation,
    devices: int = 1,
    crash_at: frozenset[int] = frozenset(),
    foreign_mb: float = 0.0,
    moves_fail: float = 0.0,
    shares_first_runs: bool = False,
) -> ScenarioResult:
    script = Script(
        seed=1,
        operations=tuple(sorted(operations, key=lambda one: one.at)),
        devices=devices,
        measures_every_s=1.0,
        moves_fail=moves_fail,
        foreign_mb=foreign_mb,
        shares_first_runs=shares_first_runs,
    )
    return Scenario(script, crash_at, behavior_of).run()


def logged(result: ScenarioResult, kind: str, since: float = 0.0) -> list[Any]:
    return [what for at, logged_kind, what in result.log if logged_kind == kind and at >= since]


def times_of(result: ScenarioResult, kind: str, what: Any) -> list[float]:
    return [at for at, logged_kind, about in result.log if (logged_kind, about) == (kind, what)]


# Estimates


def test_the_first_run_of_a_program_is_alone_and_later_runs_share_the_device() -> None:
    again = [run(100, f"again{number}", "train", "six") for number in range(3)]
    result = simulate(known(six=steady(6)), run(0, "first", "train", "six"), run(1, "second", "train", "six"), *again)
    assert result.starts["second"] >= 10, "it joined a job without an estimate"
    assert {result.starts[f"again{number}"] for number in range(3)} == {100}
    assert not logged(result, "out of memory")


def test_a_new_program_that_needs_more_than_its_part_of_a_device_is_rerun_with_more() -> None:
    behaviors = known(small=steady(5), large=steady(20))
    jobs = [run(0, f"job{number}", f"program{number}", ("small", "large")[number % 2]) for number in range(4)]
    result = simulate(behaviors, *jobs, shares_first_runs=True)
    assert set(result.states.values()) == {"succeeded"}
    assert result.starts["job1"] < 30, "two new programs should share a device, each with half of it"
    assert logged(result, "out of memory")


def test_an_input_that_takes_ten_times_the_memory_is_rerun_with_more_and_then_estimated() -> None:
    behaviors = known(small=steady(1.8), other=steady(1.8), big=steady(18))
    small = [run(40 * number, f"small{number}", "train", ("small", "other")[number % 2]) for number in range(4)]
    beside = [run(200, f"beside{number}", "train", "small") for number in range(4)] + [run(200, "big", "train", "big")]
    once_more = [run(600, "big-again", "train", "big"), run(600, "small-again", "train", "small")]
    result = simulate(behaviors, *small, *beside, *once_more)
    assert set(result.states.values()) == {"succeeded"}
    assert logged(result, "out of memory", since=200), "the first large input did not run out of memory"
    assert not logged(result, "out of memory", since=600)
    assert result.starts["big-again"] == result.starts["small-again"] == 600


def test_the_estimate_of_a_program_that_needs_less_than_before_decreases() -> None:
    behaviors: BehaviorOf = lambda command, _: steady(20 if int(command[-1]) < 2 else 2, 5.0)  # noqa: E731
    many = [run(10.0 * number, f"job{number}", "train.py", str(number)) for number in range(60)]
    result = simulate(behaviors, *many, run(1000, "a", "train.py", "70"), run(1000, "b", "train.py", "71"))
    assert result.starts["a"] == result.starts["b"] == 1000


def test_a_job_whose_memory_grows_late_is_rerun_once_and_succeeds() -> None:
    """Other jobs wait to join it all the time: after its rerun the job keeps its device alone to the end."""
    late = Behavior(runs_s=60.0, climbs=((0.5, 4 * GB), (50.0, 20 * GB)))
    behaviors = known(late=late, beside=steady(15, 20.0))
    beside = [run(10.0 * number, f"beside{number}", "fill", "beside", vram="16G") for number in range(1, 20)]
    result = simulate(behaviors, run(0, "late", "climb", "late"), *beside, run(2000, "again", "climb", "late"))
    assert set(result.states.values()) == {"succeeded"}
    assert result.starts["beside1"] < 50, "no job joined it"
    assert len(logged(result, "out of memory")) == 1
    assert not logged(result, "out of memory", since=2000)


def test_a_job_that_joined_a_settled_job_keeps_its_memory_after_a_restart() -> None:
    """The settled job has grown a little since, and the new daemon does not know how it settled."""
    behaviors = known(grows=Behavior(runs_s=200.0, climbs=((0.5, 8 * GB), (60.0, 9 * GB))), beside=steady(11, 190.0))
    beside = run(15, "beside", "b", "beside", vram="12G")
    result = simulate(behaviors, run(0, "grows", "a", "grows"), beside, Operation(at=100, kind="kill"))
    assert result.starts["beside"] < 60
    assert set(result.states.values()) == {"succeeded"}


def test_a_job_that_grows_slowly_does_not_settle() -> None:
    """It grows by 1% with each sample, all the time: a job beside it would run out of memory."""
    creeping = tuple((float(second), 4 * GB * 1.01**second) for second in range(1, 160))
    behaviors = known(creeping=Behavior(runs_s=160.0, climbs=creeping), other=steady(6))
    result = simulate(behaviors, run(0, "creeps", "a", "creeping"), run(5, "other", "b", "other"))
    assert result.starts["other"] >= 160
    assert not logged(result, "out of memory")


def test_a_program_that_takes_all_free_memory_gets_a_device_alone_and_harms_no_other_job() -> None:
    behaviors = known(all=Behavior(runs_s=30.0, climbs=((0.5, EVERYTHING),)), small=steady(3, 20.0))
    first = [run(0, "small", "b", "small"), run(30, "all", "a", "all"), run(40, "other", "b", "small")]
    again = [run(200, "all-again", "a", "all"), run(201, "small-again", "b", "small")]
    result = simulate(behaviors, *first, *again)
    assert set(result.states.values()) == {"succeeded"}
    assert not logged(result, "out of memory")
    assert (result.starts["other"], result.starts["small-again"]) == (60, 230)


def test_an_estimate_that_nearly_fills_the_device_does_not_wait_for_a_desktop_to_end() -> None:
    """An estimate never keeps a job from running: foreign processes always hold half a gigabyte here."""
    behaviors = known(large=steady(21.2))
    result = simulate(behaviors, run(0, "first", "a", "large"), run(100, "again", "a", "large"), foreign_mb=500.0)
    assert result.starts["again"] == 100


# Out of memory


def test_a_job_too_large_for_any_device_fails_after_three_reruns_without_using_its_retries() -> None:
    result = simulate(known(huge=steady(26)), run(0, "huge", "a", "huge", retries="5"))
    assert (result.attempts, result.states) == (4, {"huge": "failed"})


def test_a_program_that_halves_its_batch_after_each_shortage_succeeds() -> None:
    result = simulate(known(halves=steady(60, halves=True)), run(0, "halves", "a", "halves"))
    assert (result.attempts, result.states) == (3, {"halves": "succeeded"})


def test_jobs_that_declared_too_little_memory_are_rerun_beside_others() -> None:
    """All declare 4 GB and need 7: a job that ran out of memory gets more in its rerun, and all succeed."""
    jobs = [run(0, f"job{number}", f"program{number}", "seven", vram="4G") for number in range(6)]
    result = simulate(known(seven=steady(7)), *jobs)
    assert set(result.states.values()) == {"succeeded"}
    assert logged(result, "out of memory")


# Suspended by users


def test_the_time_limit_does_not_count_while_a_job_is_suspended() -> None:
    job = run(0, "job", "a", "ten", time_limit="12s")
    result = simulate(known(ten=steady(8, 10.0)), job, ask(3, "suspend"), ask(100, "resume"))
    assert (result.attempts, result.states) == (1, {"job": "succeeded"})
    assert times_of(result, "over", ((1, 1), "0"))[0] > 100


def test_a_suspended_job_frees_its_device_and_resumes_when_it_is_free_again() -> None:
    behaviors = known(long=steady(20, 50.0), other=steady(20, 30.0))
    operations = run(0, "job", "a", "long"), ask(5, "suspend"), run(6, "other", "b", "other"), ask(10, "resume")
    result = simulate(behaviors, *operations)
    assert 5 < result.starts["other"] < 10
    assert (result.attempts, set(result.states.values())) == (2, {"succeeded"})
    other_ended, job_ended = times_of(result, "over", ((2, 1), "0"))[0], times_of(result, "over", ((1, 1), "0"))[0]
    assert job_ended > other_ended + 40


def test_a_job_that_had_its_device_alone_has_it_alone_after_it_resumes() -> None:
    """It was suspended soon after its start: its memory then does not predict its peak."""
    grows = Behavior(runs_s=40.0, climbs=((0.5, 1 * GB), (20.0, 20 * GB)))
    operations = run(0, "grows", "a", "grows"), ask(2, "suspend"), ask(6, "resume"), run(12, "other", "b", "other")
    result = simulate(known(grows=grows, other=steady(10)), *operations)
    assert not logged(result, "out of memory")
    assert result.starts["other"] > 40


def test_a_resumed_first_run_is_charged_what_is_expected_of_it() -> None:
    """It held 1 GB when it was suspended, and it had not been flat for long: others of unknown need wait a little."""
    behaviors = known(first=steady(1, 40.0), other=steady(10), third=steady(10))
    operations = run(0, "first", "a", "first"), ask(2, "suspend"), ask(6, "resume"), run(7, "other", "b", "other")
    result = simulate(behaviors, *operations, run(7, "third", "c", "third"), shares_first_runs=True)
    assert result.starts["other"] < 15 < result.starts["third"]


# The memory guard


def climbing(runs_s: float, first_gb: float, gb_per_s: float, last_gb: float) -> Behavior:
    seconds = range(int((last_gb - first_gb) / gb_per_s) + 1)
    return Behavior(runs_s=runs_s, climbs=tuple((1.0 + at, (first_gb + gb_per_s * at) * GB) for at in seconds))


def test_a_first_run_that_outgrows_its_device_is_suspended_until_the_one_before_it_has_ended() -> None:
    behaviors = known(first=steady(5, 250.0), grows=climbing(300.0, 4.0, 0.1, 20.0))
    jobs = run(0, "first", "a", "first"), run(20, "grows", "b", "grows")
    result = simulate(behaviors, *jobs, shares_first_runs=True)
    assert (set(result.states.values()), result.attempts) == ({"succeeded"}, 2)
    assert not logged(result, "out of memory")
    assert logged(result, "moved") == [((2, 1), "Suspension", True, False), ((2, 1), "Resumption", True, False)]
    assert times_of(result, "over", ((1, 1), "0")) == [250.0], "the first job was not touched"


def test_a_young_first_run_that_may_not_be_suspended_is_queued_again() -> None:
    behaviors = known(first=steady(5, 100.0), grows=climbing(60.0, 12.0, 0.2, 20.0))
    jobs = run(0, "first", "a", "first"), run(20, "grows", "b", "grows", on_preempt="requeue")
    result = simulate(behaviors, *jobs, shares_first_runs=True)
    assert (set(result.states.values()), result.attempts) == ({"succeeded"}, 3)
    assert not logged(result, "out of memory")
    assert times_of(result, "over", ((1, 1), "0")) == [100.0], "the first job was not touched"


def test_a_first_run_is_not_suspended_again_and_again() -> None:
    """Each of three programs needs 9 GB of a device of 24 GB; two of them fit."""
    behaviors = known(**{name: climbing(150.0, 2.0, 0.2, 9.0) for name in ("a", "b", "c")})
    result = simulate(behaviors, *(run(0, name, name, name) for name in ("a", "b", "c")), shares_first_runs=True)
    assert set(result.states.values()) == {"succeeded"}
    assert not logged(result, "out of memory")
    assert len(logged(result, "moved")) <= 4


def test_a_suspended_job_can_be_cancelled() -> None:
    result = simulate(known(long=steady(8, 100.0)), run(0, "job", "a", "long"), ask(5, "suspend"), ask(20, "cancel"))
    assert result.states == {"job": "cancelled"}
    assert [at for at, kind, _ in result.log if kind == "over"] == [20]


@pytest.mark.parametrize("moves_fail", [0.0, 1.0])
def test_a_resume_during_the_suspension_brings_the_job_back(moves_fail: float) -> None:
    """If the suspension fails, the job runs on: the user did not ask to preempt it."""
    operations = run(0, "job", "a", "long", on_preempt="never"), ask(5, "suspend"), ask(5, "resume")
    result = simulate(known(long=steady(8, 50.0)), *operations, moves_fail=moves_fail)
    assert (result.attempts, result.states) == (1, {"job": "succeeded"})


# Preemption


def test_an_urgent_job_gets_a_device_at_once_and_the_preempted_job_resumes_later() -> None:
    """The preempted job has run for long, but ages only since its suspension, not since its submission."""
    behaviors = known(long=steady(20, 3 * AGEING_S), urgent=steady(20, 30.0))
    urgent_at = 2 * AGEING_S
    urgent = run(urgent_at, "urgent", "b", "urgent", preempt=True, priority="1")
    result = simulate(behaviors, run(0, "long", "a", "long"), urgent)
    assert result.starts["urgent"] <= urgent_at + 5
    assert (result.attempts, set(result.states.values())) == (2, {"succeeded"})
    assert times_of(result, "over", ((2, 1), "0"))[0] < times_of(result, "over", ((1, 1), "0"))[0]
    assert len(logged(result, "moved")) == 2


def test_no_more_jobs_are_preempted_than_necessary() -> None:
    """The sample is older than the suspension of the first job: its memory counts as free all the same."""
    behaviors = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    long = [run(0, f"long{number}", f"a{number}", "long") for number in range(3)]
    result = simulate(behaviors, *long, run(10, "urgent", "b", "urgent", preempt=True), devices=3)
    assert result.starts["urgent"] < 20
    assert len({what[0] for what in logged(result, "moved")}) == 1


def test_each_urgent_job_preempts_another_job_once() -> None:
    """A sample older than the suspension must not count the job's memory as foreign, nor let the job resume."""
    behaviors = known(long=steady(4, 200.0), urgent=steady(20, 10.0))
    jobs = [run(0, f"long{number}", f"a{number}", "long", vram="5G") for number in range(2)]
    jobs += [run(at, f"urgent{at}", "b", "urgent", preempt=True, exclusive=True) for at in (10, 11, 12)]
    result = simulate(behaviors, *jobs)
    assert result.starts["urgent12"] < 60
    suspensions = [what for what in logged(result, "moved") if what[1] == "Suspension"]
    assert 2 <= len(suspensions) <= 2 * 3
    assert set(result.states.values()) == {"succeeded"}


@pytest.mark.parametrize(
    ("option", "attempts", "urgent_before"), [("suspend", 1, True), ("requeue", 2, True), ("never", 1, False)]
)
def test_a_preempted_job_is_suspended_requeued_or_left_alone_as_its_option_says(
    option: str, attempts: int, urgent_before: bool
) -> None:
    behaviors = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    jobs = run(0, "long", "a", "long", on_preempt=option), run(10, "urgent", "b", "urgent", preempt=True)
    result = simulate(behaviors, *jobs)
    assert set(result.states.values()) == {"succeeded"}
    assert sum(what[0] == 1 for what in logged(result, "begins")) == attempts
    assert (result.starts["urgent"] < 100) is urgent_before


def test_a_job_that_cannot_be_suspended_is_requeued_for_an_urgent_job() -> None:
    behaviors = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    jobs = run(0, "long", "a", "long"), run(10, "urgent", "b", "urgent", preempt=True)
    result = simulate(behaviors, *jobs, moves_fail=1.0)
    assert result.starts["urgent"] < 40
    assert (result.attempts, set(result.states.values())) == (3, {"succeeded"})


def test_a_job_preempted_while_its_suspension_fails_is_not_forgotten() -> None:
    behaviors = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    for late in range(0, 40, size(8, full=1)):
        urgent = run(10 + late / 20, "urgent", "b", "urgent", preempt=True)
        result = simulate(behaviors, run(0, "long", "a", "long"), ask(10, "suspend"), urgent, moves_fail=1.0)
        assert set(result.states.values()) == {"succeeded"}


def test_a_running_job_with_a_raised_priority_is_not_preempted() -> None:
    behaviors = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    raised = Operation(at=5, kind="priority", jobs="1", priority=200)
    result = simulate(behaviors, run(0, "long", "a", "long"), raised, run(10, "urgent", "b", "urgent", preempt=True))
    assert result.starts["urgent"] >= 100


def test_a_retry_by_a_user_resets_the_memory_to_what_was_submitted() -> None:
    """The job ran out of memory and was given up; after the retry it asks for its declared memory again."""
    behaviors = known(huge=steady(26), small=steady(2, 100.0))
    operations = run(0, "huge", "a", "huge", vram="20G"), run(300, "small", "b", "small", vram="2G")
    result = simulate(behaviors, *operations, ask(310, "retry"))
    begun = [at for at, kind, what in result.log if kind == "begins" and what[0] == 1 and at >= 300]
    assert begun[0] < 320, "it waited for a whole device"


# Crashes


def simulate_suspensions(crash_at: frozenset[int] = frozenset()) -> ScenarioResult:
    """One job is preempted and resumes, one is suspended by its user and resumed, one runs out of memory."""
    behaviors = known(
        long=steady(14, 25.0),
        urgent=steady(14, 6.0),
        late=Behavior(runs_s=14.0, climbs=((0.5, 2 * GB), (9.0, 12 * GB))),
    )
    return simulate(
        behaviors,
        run(0, "late", "c", "late", vram="4G"),
        run(0, "long", "a", "long", vram="15G", time_limit="60s"),
        run(4, "urgent", "b", "urgent", vram="15G", preempt=True),
        ask(5, "suspend", "1"),
        ask(12, "resume", "1"),
        ask(16, "suspend", "2"),
        ask(30, "resume", "2"),
        crash_at=crash_at,
    )


def test_no_job_is_forgotten_wherever_the_daemon_is_killed_during_suspensions() -> None:
    undisturbed = simulate_suspensions()
    assert len(logged(undisturbed, "moved")) >= 5
    assert logged(undisturbed, "out of memory")
    passed = undisturbed.passed
    assert {name for name, _ in passed} >= {"suspender.suspend", "suspender.resume", "suspender.moved"}
    for place in range(0, len(passed), 1 if seeds(0, full=0) > 1000 else size(67, full=17)):
        result = simulate_suspensions(frozenset({place}))
        assert set(result.states.values()) == {"succeeded"}, f"after a crash at {place}, {passed[place]}"
        assert sum(what[0] == 2 for what in logged(result, "begins")) == 1, f"at {place} the job lost its progress"
