"""Short scenarios: queue order, ageing, backfill, limits, failures and reboots; and faults that the checks catch."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.submission import SubmissionRequest
from gpuyard.policy.numbers import AGEING_S
from gpuyard.policy.plan import Backfill
from gpuyard.policy.rules import RunningLimit
from gpuyard.queue.decide_starts import Starts
from gpuyard.queue.step import Controller
from gpuyard.store.job_store import JobStore
from tests.scale import seeds, size
from tests.simulation.behaviors import Behavior, plain_behavior
from tests.simulation.clients import Operation
from tests.simulation.engine import SimulatedEngine
from tests.simulation.scenario import Scenario, ScenarioResult, Script, random_script
from tests.simulation.world import World


def submit(at: float, token: str, *command: str, **options: Any) -> Operation:
    """Submit a job with its token as its program, so that nothing is learned from other jobs."""
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    asked = SubmissionRequest(
        cwd="/", environment={}, token=token, command=(token, *command), options={"name": token, **typed}
    )
    return Operation(at=at, kind="submit", asked=asked)


def script(*operations: Operation, devices: int = 1, seed: int = 1) -> Script:
    return Script(seed=seed, operations=tuple(sorted(operations, key=lambda one: one.at)), devices=devices)


def simulate(*operations: Operation, devices: int = 1, crash_at: frozenset[int] = frozenset()) -> ScenarioResult:
    return Scenario(script(*operations, devices=devices), crash_at, plain_behavior).run()


# Order


def test_jobs_start_by_priority_and_then_in_order_of_submission() -> None:
    result = simulate(
        submit(0, "running", "10"),
        submit(1, "low", "10", priority="-1"),
        submit(2, "first", "10"),
        submit(3, "second", "10"),
        submit(4, "high", "10", priority="1"),
    )
    assert sorted(result.starts, key=result.starts.__getitem__) == ["running", "high", "first", "second", "low"]


def test_ageing_lets_a_low_priority_job_start_before_newer_high_priority_jobs() -> None:
    stream = [submit(60.0 * number, f"high{number}", "60", priority="3") for number in range(60)]
    result = simulate(submit(1, "low", "5", priority="0"), *stream)
    assert result.starts["low"] <= 4 * AGEING_S
    assert result.starts["low"] > 2 * AGEING_S, "the high-priority jobs did not keep the device busy"


def test_small_jobs_do_not_starve_a_job_for_all_devices() -> None:
    stream = [submit(10.0 * number, f"small{number}", "30") for number in range(60)]
    result = simulate(submit(35, "large", "5", gpus="2"), *stream, devices=2)
    assert result.starts["large"] <= 70


# Backfill


def crowd(seed: int) -> list[Operation]:
    """Return jobs that are submitted at once, so that the first stays first. Some declare their duration, correctly."""
    random = Random(seed)
    operations = []
    for number in range(12):
        runs_s = random.randint(1, 30)
        options: dict[str, Any] = {"gpus": str(random.choice((1, 1, 2, 3))), "priority": str(random.randint(0, 2))}
        options.update(random.choice(({}, {"vram": "8G"}, {"vram": "14G"})))
        if random.random() < 0.75:
            options["duration"] = f"{runs_s}s"
        operations.append(submit(0, f"j{number}", str(runs_s), **options))
    return operations


def delays(seeds: range) -> tuple[int, list[str]]:
    """Return how many jobs were backfilled, and which first jobs they delayed.

    A first job was delayed if it starts sooner in the same scenario without the backfilled jobs.
    """
    passed, found = 0, []
    for seed in seeds:
        operations = crowd(seed)
        result = simulate(*operations, devices=3)
        for head, others in result.backfilled.items():
            passed += len(others)
            without = [one for one in operations if one.asked is not None and one.asked.token not in others]
            alone = simulate(*without, devices=3).starts[head]
            if result.starts[head] > alone:
                found.append(f"seed {seed}: {head} at {result.starts[head]}, and at {alone} without {others}")
    return passed, found


def test_backfilled_jobs_never_delay_the_first_job() -> None:
    count = seeds(15, full=50)
    passed, found = delays(range(count))
    assert not found
    assert passed > count


def test_a_delay_of_the_first_job_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backfill, "_ends_before", lambda *_: True)
    assert delays(range(10))[1]


def test_an_array_at_its_limit_leaves_the_other_devices_to_others() -> None:
    result = simulate(submit(0, "array", "10", array="0-3%1"), submit(1, "other", "10"), devices=2)
    assert result.starts["other"] == 1


def test_a_tag_at_its_limit_does_not_hold_up_other_jobs() -> None:
    result = simulate(
        submit(0, "one", "10", tag="night"), submit(1, "two", "10", tag="night"), submit(2, "other", "10"), devices=3
    )
    assert result.starts == {"one": 0, "two": 10, "other": 2}


# Dependencies, limits, holds


def test_a_job_starts_after_its_dependencies_and_is_rejected_if_they_cannot_be_met() -> None:
    result = simulate(
        submit(0, "good", "5"),
        submit(0, "bad", "5", "1"),
        submit(1, "after_good", "1", after=["1"]),
        submit(1, "after_bad", "1", after=["2"]),
        submit(1, "after_any", "1", after_any=["1-2"]),
        submit(1, "if_bad", "1", after_failed=["2"]),
        submit(1, "if_good_fails", "1", after_failed=["1"]),
        submit(1, "after_the_rejected", "1", after=["name=after_bad"]),
        devices=2,
    )
    states = result.states
    assert {name for name, state in states.items() if state == "rejected"} == {
        "after_bad", "if_good_fails", "after_the_rejected",
    }  # fmt: skip
    assert {name for name in states if result.starts.get(name, 0) >= 5} == {"after_good", "after_any", "if_bad"}


def test_a_job_over_its_time_limit_is_stopped_and_retried_up_to_its_retries() -> None:
    result = simulate(submit(0, "long", "100", time_limit="10s", retries="2", gpus="0"))
    assert (result.attempts, result.states) == (3, {"long": "failed"})


def test_a_cancelled_job_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    ignores_sigterm = Behavior(runs_s=1000.0, heeds_term=False)
    operations = (submit(0, "deaf", grace="7s"), Operation(at=3, kind="cancel", jobs="1"))
    result = Scenario(script(*operations), behavior_of=lambda *_: ignores_sigterm).run()
    ended = [at for at, kind, _ in result.log if kind == "over"]
    assert (ended, result.states) == ([10.0], {"deaf": "cancelled"})


def test_a_job_that_fails_is_retried_after_pauses_that_double() -> None:
    result = simulate(submit(0, "bad", "10", "1", retries="3", gpus="0"))
    begun = [at for at, kind, _ in result.log if kind == "begins"]
    assert [after - before - 10 for before, after in pairwise(begun)] == [1, 2, 4]


# Failures


def test_a_job_that_cannot_start_does_not_hold_up_the_next() -> None:
    """A command that cannot be executed leaves its place to the next job at once, without another event."""
    result = simulate(submit(0, "bad", "1", "\0", tag="night"), submit(0, "good", "1", tag="night"))
    assert result.states == {"bad": "rejected", "good": "succeeded"}
    assert result.starts["good"] == 0


def test_a_past_failure_does_not_keep_the_daemon_awake() -> None:
    """Each of these seeds has failing ports; no failure leaves a wake-up time in the past."""
    for seed in range(0, 90, 3):
        times = [at for at, kind, _ in Scenario(random_script(seed)).run().log if kind == "step"]
        assert max(times.count(at) for at in set(times)) < 40, f"seed {seed}"


def test_a_large_submission_that_fails_half_way_leaves_no_jobs_and_can_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for failing in range(6):
        count = iter(range(1000))
        real = World.random

        def full_once(self: World, kind: str, failing: int = failing, count: Any = count, real: Any = real) -> Random:
            random: Random = real(self, kind)
            if kind == "disk":
                random.random = lambda: 0.0 if next(count) == failing else 1.0  # type: ignore[method-assign]
            return random

        with monkeypatch.context() as patch:
            patch.setattr(World, "random", full_once)
            many = submit(1, "many", "1", gpus="0", array="0-7")
            result = Scenario(with_rare_failures(script(many)), behavior_of=plain_behavior).run()
        assert result.jobs in (0, 8)
        assert set(result.states.values()) <= {"succeeded"}


def with_rare_failures(script: Script) -> Script:
    return Script(seed=script.seed, operations=script.operations, devices=script.devices, trouble=0.0001)


def test_jobs_of_an_incomplete_submission_do_not_start_when_their_priority_changes() -> None:
    operations = (
        submit(0, "there", "1", gpus="0"),
        submit(1, "many", "1", gpus="0", array="0-7"),
        Operation(at=1, kind="priority", jobs="all", priority=5),
    )
    count = len(simulate(*operations).passed)
    for place in range(0, count, size(13, full=3)):
        assert simulate(*operations, crash_at=frozenset({place})).states["there"] == "succeeded"


# Reboots


@pytest.mark.parametrize(
    ("option", "attempts", "state"), [("requeue", 2, "succeeded"), ("hold", 2, "succeeded"), ("fail", 1, "failed")]
)
def test_after_a_reboot_a_job_is_requeued_held_or_failed_as_its_option_says(
    option: str, attempts: int, state: str
) -> None:
    result = simulate(submit(0, "job", "20", on_reboot=option), Operation(at=5, kind="reboot"))
    assert (result.attempts, result.states["job"]) == (attempts, state)


@pytest.mark.parametrize("option", ["requeue", "hold", "fail"])
def test_a_job_that_succeeded_just_before_a_reboot_does_not_run_again(option: str) -> None:
    """It ended when no daemon ran that could record it."""
    result = simulate(submit(0, "job", "5", on_reboot=option), Operation(at=5, kind="reboot"))
    assert (result.attempts, result.states) == (1, {"job": "succeeded"})


# Daemons that the checks must catch


def _begin_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedEngine.prepare

    def prepare(self: SimulatedEngine, *arguments: Any) -> Any:
        prepared = real(self, *arguments)
        self.start_prepared()
        return prepared

    monkeypatch.setattr(SimulatedEngine, "prepare", prepare)


def _forget_ends_before_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedEngine.ended

    def ended(self: SimulatedEngine, *arguments: Any, **named: Any) -> Any:
        ended_attempts = real(self, *arguments, **named)
        self._world.journal.clear()
        return ended_attempts

    monkeypatch.setattr(SimulatedEngine, "ended", ended)


def _leave_orphans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "signal", lambda self, job_id, attempt, signum: 0)


def _count_unbegun_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobStore, "drop_attempt", lambda self, job_id, number: None)


def _ignore_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningLimit, "refuse", lambda *_: None)


def _see_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Starts._claims
    monkeypatch.setattr(
        Starts,
        "_claims",
        lambda self, sample, now, queues, ledger: real(self, sample, now, queues, ((), ledger[1])),
    )


def _never_wake_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller._result
    monkeypatch.setattr(
        Controller, "_result", lambda self, *given, **named: replace(real(self, *given, **named), wake_at=None)
    )


def _keep_incomplete_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobStore, "drop_incomplete_submissions", lambda self, token=None: None)


@pytest.mark.parametrize(
    ("sabotage", "caught"),
    [
        (_begin_before_the_commit, "runs and is not recorded"),
        (_forget_ends_before_they_are_recorded, "ran unrecorded|begins twice"),
        (_leave_orphans_alone, "runs and is not recorded"),
        pytest.param(_count_unbegun_attempts, "live attempts and states do not agree", marks=pytest.mark.full),
        (_ignore_limits, "than (its|their) limit"),
        (_see_no_leases, "is exclusive and leased to 2|its lease has shares"),
        (_never_wake_for_a_time, "the daemon sleeps, and jobs wait"),
        (_keep_incomplete_submissions, "the daemon sleeps, and jobs wait"),
    ],
)
def test_the_checks_catch_a_daemon_that_breaks_a_rule(
    sabotage: Callable[[pytest.MonkeyPatch], None], caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    assert any(re.search(caught, message) for message in failed_checks(180))


def failed_checks(count: int) -> Iterator[str]:
    """Yield the message of each scenario in which a check fails. Several checks may notice the same fault."""
    for seed in range(count):
        random = Random(seed)
        try:
            Scenario(random_script(seed), frozenset(random.randrange(800) for _ in range(12))).run()
        except AssertionError as error:
            yield str(error)
