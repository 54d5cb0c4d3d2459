"""Short stories with a point: order, patience, backfill, limits, troubles, restarts; and that the checks have teeth."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.control.controller import Controller
from gpuyard.core.job.submission import SubmissionRequest
from gpuyard.core.scheduling.backfill import Backfill
from gpuyard.core.scheduling.queue_order import AGEING_S
from gpuyard.core.scheduling.start_limits import StartLimits
from gpuyard.store.job_store import JobStore
from tests.scale import seeds, size
from tests.simulation.clients import Operation
from tests.simulation.engine import SimulatedEngine
from tests.simulation.natures import Nature, plain_nature
from tests.simulation.play import Play, Played, Script, wild
from tests.simulation.world import World


def submit(at: float, token: str, *words: str, **options: Any) -> Operation:
    """Each is a program of its own, so that nothing is learned of one from another."""
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    asked = SubmissionRequest(
        cwd="/", environment={}, token=token, command=(token, *words), options={"name": token, **typed}
    )
    return Operation(at=at, kind="submit", asked=asked)


def script(*operations: Operation, devices: int = 1, seed: int = 1) -> Script:
    return Script(seed=seed, operations=tuple(sorted(operations, key=lambda one: one.at)), devices=devices)


def play(*operations: Operation, devices: int = 1, crash_at: frozenset[int] = frozenset()) -> Played:
    return Play(script(*operations, devices=devices), crash_at, plain_nature).run()


# Order


def test_the_higher_priority_goes_first_and_among_equals_the_earlier_one() -> None:
    played = play(
        submit(0, "running", "10"),
        submit(1, "low", "10", priority="-1"),
        submit(2, "first", "10"),
        submit(3, "second", "10"),
        submit(4, "high", "10", priority="1"),
    )
    assert sorted(played.starts, key=played.starts.__getitem__) == ["running", "high", "first", "second", "low"]


def test_a_low_job_under_a_stream_of_high_ones_has_its_turn() -> None:
    stream = [submit(60.0 * number, f"high{number}", "60", priority="3") for number in range(60)]
    played = play(submit(1, "low", "5", priority="0"), *stream)
    assert played.starts["low"] <= 4 * AGEING_S
    assert played.starts["low"] > 2 * AGEING_S, "it was no stream"


def test_a_job_for_all_devices_is_not_starved_by_small_ones() -> None:
    stream = [submit(10.0 * number, f"small{number}", "30") for number in range(60)]
    played = play(submit(35, "large", "5", gpus="2"), *stream, devices=2)
    assert played.starts["large"] <= 70


# Backfill


def crowd(seed: int) -> list[Operation]:
    """All at once, so that who is first stays first. Some say how long they take, and are right."""
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
    """How many passed one who was first, and whom that delayed: without them it starts sooner in the same story."""
    passed, found = 0, []
    for seed in seeds:
        operations = crowd(seed)
        played = play(*operations, devices=3)
        for head, others in played.backfilled.items():
            passed += len(others)
            without = [one for one in operations if one.asked is not None and one.asked.token not in others]
            alone = play(*without, devices=3).starts[head]
            if played.starts[head] > alone:
                found.append(f"seed {seed}: {head} at {played.starts[head]}, and at {alone} without {others}")
    return passed, found


def test_whoever_is_first_is_never_delayed_by_those_who_pass_it() -> None:
    count = seeds(15, full=50)
    passed, found = delays(range(count))
    assert not found
    assert passed > count


def test_a_delay_of_the_first_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backfill, "_ends_before_head_starts", lambda self, candidate: True)
    assert delays(range(10))[1]


def test_an_array_at_its_limit_leaves_the_other_devices_to_others() -> None:
    played = play(submit(0, "array", "10", array="0-3%1"), submit(1, "other", "10"), devices=2)
    assert played.starts["other"] == 1


def test_jobs_beside_a_tag_at_its_limit_start() -> None:
    played = play(
        submit(0, "one", "10", tag="night"), submit(1, "two", "10", tag="night"), submit(2, "other", "10"), devices=3
    )
    assert played.starts == {"one": 0, "two": 10, "other": 2}


# Dependencies, limits, holds


def test_those_who_wait_for_others_start_when_they_may_and_are_rejected_when_they_never_will() -> None:
    played = play(
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
    states = played.states
    assert {name for name, state in states.items() if state == "rejected"} == {
        "after_bad", "if_good_fails", "after_the_rejected",
    }  # fmt: skip
    assert {name for name in states if played.starts.get(name, 0) >= 5} == {"after_good", "after_any", "if_bad"}


def test_a_job_over_its_limit_is_stopped_and_tried_again_as_often_as_it_may_be() -> None:
    played = play(submit(0, "long", "100", time_limit="10s", retries="2", gpus="0"))
    assert (played.attempts, played.states) == (3, {"long": "failed"})


def test_a_cancelled_job_that_ignores_the_request_is_killed_after_its_grace() -> None:
    deaf = Nature(runs_s=1000.0, heeds_term=False)
    operations = (submit(0, "deaf", grace="7s"), Operation(at=3, kind="cancel", jobs="1"))
    played = Play(script(*operations), nature_of=lambda *_: deaf).run()
    ended = [at for at, kind, _ in played.log if kind == "over"]
    assert (ended, played.states) == ([10.0], {"deaf": "cancelled"})


def test_a_job_that_fails_is_tried_again_after_pauses_that_double() -> None:
    played = play(submit(0, "bad", "10", "1", retries="3", gpus="0"))
    begun = [at for at, kind, _ in played.log if kind == "begins"]
    assert [after - before - 10 for before, after in pairwise(begun)] == [1, 2, 4]


# Troubles


def test_a_start_that_is_refused_holds_up_nobody() -> None:
    """What nobody can run gives its place to the next at once, though nothing else happens."""
    played = play(submit(0, "bad", "1", "\0", tag="night"), submit(0, "good", "1", tag="night"))
    assert played.states == {"bad": "rejected", "good": "succeeded"}
    assert played.starts["good"] == 0


def test_a_trouble_that_is_over_does_not_keep_the_daemon_awake() -> None:
    """Each seed has its troubles; none of them leaves a time to wake at that has passed."""
    for seed in range(0, 90, 3):
        times = [at for at, kind, _ in Play(wild(seed)).run().log if kind == "step"]
        assert max(times.count(at) for at in set(times)) < 40, f"seed {seed}"


def test_a_large_submission_that_fails_half_way_leaves_nothing_and_can_be_sent_again(
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
            played = Play(replace_trouble(script(many)), nature_of=plain_nature).run()
        assert played.jobs in (0, 8)
        assert set(played.states.values()) <= {"succeeded"}


def replace_trouble(one: Script) -> Script:
    return Script(seed=one.seed, operations=one.operations, devices=one.devices, trouble=0.0001)


def test_jobs_of_a_submission_that_is_not_complete_do_not_start_though_they_are_moved() -> None:
    operations = (
        submit(0, "there", "1", gpus="0"),
        submit(1, "many", "1", gpus="0", array="0-7"),
        Operation(at=1, kind="priority", jobs="all", priority=5),
    )
    count = len(play(*operations).passed)
    for place in range(0, count, size(13, full=3)):
        assert play(*operations, crash_at=frozenset({place})).states["there"] == "succeeded"


# Restarts of the machine


@pytest.mark.parametrize(
    ("wish", "attempts", "state"), [("requeue", 2, "succeeded"), ("hold", 2, "succeeded"), ("fail", 1, "failed")]
)
def test_what_ran_when_the_machine_was_restarted_goes_the_way_it_was_asked_to(
    wish: str, attempts: int, state: str
) -> None:
    played = play(submit(0, "job", "20", on_reboot=wish), Operation(at=5, kind="reboot"))
    assert (played.attempts, played.states["job"]) == (attempts, state)


@pytest.mark.parametrize("wish", ["requeue", "hold", "fail"])
def test_what_had_succeeded_before_the_machine_was_restarted_does_not_run_again(wish: str) -> None:
    """It ended when nobody was there to record it."""
    played = play(submit(0, "job", "5", on_reboot=wish), Operation(at=5, kind="reboot"))
    assert (played.attempts, played.states) == (1, {"job": "succeeded"})


# The checks have teeth


def _begin_without_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedEngine.prepare

    def prepare(self: SimulatedEngine, *arguments: Any) -> Any:
        prepared = real(self, *arguments)
        self.start_prepared()
        return prepared

    monkeypatch.setattr(SimulatedEngine, "prepare", prepare)


def _forget_ends_before_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedEngine.ended

    def ended(self: SimulatedEngine) -> Any:
        told = real(self)
        self._world.journal.clear()
        return told

    monkeypatch.setattr(SimulatedEngine, "ended", ended)


def _leave_orphans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "signal", lambda self, job_id, attempt, signum: 0)


def _count_unbegun_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobStore, "drop_attempt", lambda self, job_id, number: None)


def _ignore_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartLimits, "refusals", lambda self, lane: self._view.closed_reasons)


def _see_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller._claim
    monkeypatch.setattr(
        Controller,
        "_claim",
        lambda self, look, now, queues, leases, tickets: real(self, look, now, queues, (), tickets),
    )


def _never_wake_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Controller._result
    monkeypatch.setattr(Controller, "_result", lambda self, *given: replace(real(self, *given), wake_at=None))


def _keep_incomplete_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobStore, "drop_incomplete_submissions", lambda self, token=None: None)


@pytest.mark.parametrize(
    ("sabotage", "caught"),
    [
        (_begin_without_a_gate, "runs, and nobody knows of it"),
        (_forget_ends_before_they_are_recorded, "ran unrecorded"),
        (_leave_orphans_alone, "runs, and nobody knows of it"),
        pytest.param(_count_unbegun_attempts, "live attempts and states do not agree", marks=pytest.mark.full),
        (_ignore_limits, "than (its|their) limit"),
        (_see_no_leases, "is somebody's alone, and leased to 2|its lease is for something"),
        (_never_wake_for_a_time, "the daemon sleeps, and jobs wait"),
        (_keep_incomplete_submissions, "the daemon sleeps, and jobs wait"),
    ],
)
def test_a_daemon_that_breaks_a_rule_is_caught(
    sabotage: Callable[[pytest.MonkeyPatch], None], caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    assert any(re.search(caught, complaint) for complaint in complaints(60))


def complaints(count: int) -> Iterator[str]:
    """Of each story in which a check fails: of several that notice the same thing, another may be the first to."""
    for seed in range(count):
        random = Random(seed)
        try:
            Play(wild(seed), frozenset(random.randrange(800) for _ in range(12))).run()
        except AssertionError as error:
            yield str(error)
