"""Stories about memory: it is learned, it runs out, it is moved away for others and comes back; and nobody is forgotten
on the way, wherever the daemon dies. A card has 24 GB."""

from typing import Any

import pytest

from gpuyard.core.job.submission import SubmissionRequest
from gpuyard.core.scheduling.queue_order import AGEING_S
from tests.scale import seeds, size
from tests.simulation.clients import Operation
from tests.simulation.natures import EVERYTHING, Nature, NatureOf
from tests.simulation.play import Play, Played, Script

GB = 1024.0


def run(at: float, token: str, *words: str, **options: Any) -> Operation:
    """What is run is `words`, whatever the job is called."""
    typed = {name.replace("_", "-"): value for name, value in options.items()}
    asked = SubmissionRequest(cwd="/", environment={}, token=token, command=words, options={"name": token, **typed})
    return Operation(at=at, kind="submit", asked=asked)


def ask(at: float, kind: str, jobs: str = "1") -> Operation:
    return Operation(at=at, kind=kind, jobs=jobs)


def known(**natures: Nature) -> NatureOf:
    """By their last word."""
    return lambda words, _: natures[words[-1]]


def steady(gigabytes: float, runs_s: float = 30.0, **said: Any) -> Nature:
    return Nature(runs_s=runs_s, climbs=((0.5, gigabytes * GB),), **said)


def play(
    nature_of: NatureOf,
    *operations: Operation,
    devices: int = 1,
    crash_at: frozenset[int] = frozenset(),
    strangers_mb: float = 0.0,
    moves_fail: float = 0.0,
    first_run_part: float = 1.0,
) -> Played:
    script = Script(
        seed=1,
        operations=tuple(sorted(operations, key=lambda one: one.at)),
        devices=devices,
        measures_every_s=1.0,
        moves_fail=moves_fail,
        strangers_mb=strangers_mb,
        first_run_part=first_run_part,
    )
    return Play(script, crash_at, nature_of).run()


def told(played: Played, kind: str, since: float = 0.0) -> list[Any]:
    return [what for at, said, what in played.log if said == kind and at >= since]


def times_of(played: Played, kind: str, what: Any) -> list[float]:
    return [at for at, said, about in played.log if (said, about) == (kind, what)]


# What is learned


def test_the_first_run_is_alone_and_the_next_ones_share_the_card() -> None:
    again = [run(100, f"again{number}", "train", "six") for number in range(3)]
    played = play(known(six=steady(6)), run(0, "first", "train", "six"), run(1, "second", "train", "six"), *again)
    assert played.starts["second"] >= 10, "it joined one of which nothing was known yet"
    assert {played.starts[f"again{number}"] for number in range(3)} == {100}
    assert not told(played, "out of memory")


def test_a_new_program_that_needs_more_than_its_part_of_a_card_is_run_again_with_room() -> None:
    natures = known(small=steady(5), large=steady(20))
    jobs = [run(0, f"job{number}", f"program{number}", ("small", "large")[number % 2]) for number in range(4)]
    played = play(natures, *jobs, first_run_part=0.5)
    assert set(played.states.values()) == {"succeeded"}
    assert played.starts["job1"] < 30, "two halves of a card are two jobs"
    assert told(played, "out of memory")


def test_an_input_that_takes_ten_times_the_memory_is_run_again_with_room_and_then_known() -> None:
    natures = known(small=steady(1.8), other=steady(1.8), big=steady(18))
    small = [run(40 * number, f"small{number}", "train", ("small", "other")[number % 2]) for number in range(4)]
    beside = [run(200, f"beside{number}", "train", "small") for number in range(4)] + [run(200, "big", "train", "big")]
    once_more = [run(600, "big-again", "train", "big"), run(600, "small-again", "train", "small")]
    played = play(natures, *small, *beside, *once_more)
    assert set(played.states.values()) == {"succeeded"}
    assert told(played, "out of memory", since=200), "it was no surprise"
    assert not told(played, "out of memory", since=600)
    assert played.starts["big-again"] == played.starts["small-again"] == 600


def test_a_program_that_needs_a_tenth_of_what_it_did_is_given_less_in_time() -> None:
    natures: NatureOf = lambda words, _: steady(20 if int(words[-1]) < 2 else 2, 5.0)  # noqa: E731
    many = [run(10.0 * number, f"job{number}", "train.py", str(number)) for number in range(60)]
    played = play(natures, *many, run(1000, "a", "train.py", "70"), run(1000, "b", "train.py", "71"))
    assert played.starts["a"] == played.starts["b"] == 1000


def test_memory_that_climbs_late_costs_a_run_and_not_the_job() -> None:
    """Others wait to join it all the time: the one who had to be run again has its card alone to the end."""
    late = Nature(runs_s=60.0, climbs=((0.5, 4 * GB), (50.0, 20 * GB)))
    natures = known(late=late, beside=steady(15, 20.0))
    beside = [run(10.0 * number, f"beside{number}", "fill", "beside", vram="16G") for number in range(1, 20)]
    played = play(natures, run(0, "late", "climb", "late"), *beside, run(2000, "again", "climb", "late"))
    assert set(played.states.values()) == {"succeeded"}
    assert played.starts["beside1"] < 50, "nobody joined it"
    assert len(told(played, "out of memory")) == 1
    assert not told(played, "out of memory", since=2000)


def test_whoever_joined_one_that_settled_keeps_what_it_was_promised() -> None:
    """The one that settled grew a little since, and a new daemon knows nothing of how it settled."""
    natures = known(grows=Nature(runs_s=200.0, climbs=((0.5, 8 * GB), (30.0, 9 * GB))), beside=steady(11, 190.0))
    beside = run(15, "beside", "b", "beside", vram="12G")
    played = play(natures, run(0, "grows", "a", "grows"), beside, Operation(at=100, kind="kill"))
    assert played.starts["beside"] < 30
    assert set(played.states.values()) == {"succeeded"}


def test_one_that_grows_slowly_does_not_settle() -> None:
    """By one part in a hundred at each look, for ever: whoever joined it would run out."""
    creeping = tuple((float(second), 4 * GB * 1.01**second) for second in range(1, 160))
    natures = known(creeping=Nature(runs_s=160.0, climbs=creeping), other=steady(6))
    played = play(natures, run(0, "creeps", "a", "creeping"), run(5, "other", "b", "other"))
    assert played.starts["other"] >= 160
    assert not told(played, "out of memory")


def test_a_program_that_takes_all_there_is_has_its_card_alone_and_harms_nobody() -> None:
    natures = known(all=Nature(runs_s=30.0, climbs=((0.5, EVERYTHING),)), small=steady(3, 20.0))
    first = [run(0, "small", "b", "small"), run(30, "all", "a", "all"), run(40, "other", "b", "small")]
    again = [run(200, "all-again", "a", "all"), run(201, "small-again", "b", "small")]
    played = play(natures, *first, *again)
    assert set(played.states.values()) == {"succeeded"}
    assert not told(played, "out of memory")
    assert (played.starts["other"], played.starts["small-again"]) == (60, 230)


def test_a_need_that_nearly_fills_the_card_does_not_wait_for_a_screen_to_go() -> None:
    """What was learned never keeps a job from running: half a gigabyte is always somebody else's here."""
    natures = known(large=steady(21.2))
    played = play(natures, run(0, "first", "a", "large"), run(100, "again", "a", "large"), strangers_mb=500.0)
    assert played.starts["again"] == 100


# Running out


def test_what_no_card_can_hold_is_given_up_after_three_reruns_and_its_retries_are_its_own() -> None:
    played = play(known(huge=steady(26)), run(0, "huge", "a", "huge", retries="5"))
    assert (played.attempts, played.states) == (4, {"huge": "failed"})


def test_a_script_that_halves_its_batch_each_time_gets_through() -> None:
    played = play(known(halves=steady(60, halves=True)), run(0, "halves", "a", "halves"))
    assert (played.attempts, played.states) == (3, {"halves": "succeeded"})


def test_one_that_was_told_too_little_is_run_again_beside_others() -> None:
    """They all said 4 GB and need 7: what ran out has more the next time, and all succeed."""
    jobs = [run(0, f"job{number}", f"program{number}", "seven", vram="4G") for number in range(6)]
    played = play(known(seven=steady(7)), *jobs)
    assert set(played.states.values()) == {"succeeded"}
    assert told(played, "out of memory")


# By hand


def test_the_time_of_a_suspended_job_does_not_run() -> None:
    job = run(0, "job", "a", "ten", time_limit="12s")
    played = play(known(ten=steady(8, 10.0)), job, ask(3, "suspend"), ask(100, "resume"))
    assert (played.attempts, played.states) == (1, {"job": "succeeded"})
    assert times_of(played, "over", ((1, 1), "0"))[0] > 100


def test_a_suspended_job_leaves_its_card_to_others_and_goes_on_when_it_is_free_again() -> None:
    natures = known(long=steady(20, 50.0), other=steady(20, 30.0))
    operations = run(0, "job", "a", "long"), ask(5, "suspend"), run(6, "other", "b", "other"), ask(10, "resume")
    played = play(natures, *operations)
    assert 5 < played.starts["other"] < 10
    assert (played.attempts, set(played.states.values())) == (2, {"succeeded"})
    other_ended, job_ended = times_of(played, "over", ((2, 1), "0"))[0], times_of(played, "over", ((1, 1), "0"))[0]
    assert job_ended > other_ended + 40


def test_one_that_had_its_card_alone_has_it_alone_when_it_goes_on() -> None:
    """It had just begun: what it held then says nothing about what it will."""
    grows = Nature(runs_s=40.0, climbs=((0.5, 1 * GB), (20.0, 20 * GB)))
    operations = run(0, "grows", "a", "grows"), ask(2, "suspend"), ask(6, "resume"), run(12, "other", "b", "other")
    played = play(known(grows=grows, other=steady(10)), *operations)
    assert not told(played, "out of memory")
    assert played.starts["other"] > 40


def test_a_first_run_that_goes_on_is_joined_by_nobody_until_it_has_settled() -> None:
    """It settles after five seconds without growing, of which it has run two when it is suspended."""
    natures = known(first=steady(1, 40.0), other=steady(10))
    operations = run(0, "first", "a", "first"), ask(2, "suspend"), ask(6, "resume"), run(7, "other", "b", "other")
    played = play(natures, *operations, first_run_part=0.5)
    assert 9 <= played.starts["other"] < 15


def test_a_suspended_job_can_be_cancelled() -> None:
    played = play(known(long=steady(8, 100.0)), run(0, "job", "a", "long"), ask(5, "suspend"), ask(20, "cancel"))
    assert played.states == {"job": "cancelled"}
    assert [at for at, kind, _ in played.log if kind == "over"] == [20]


@pytest.mark.parametrize("moves_fail", [0.0, 1.0])
def test_a_resume_that_comes_while_it_is_still_being_suspended_brings_it_back(moves_fail: float) -> None:
    """And where it cannot be suspended at all, it runs on: nobody asked it to make room."""
    operations = run(0, "job", "a", "long", on_preempt="never"), ask(5, "suspend"), ask(5, "resume")
    played = play(known(long=steady(8, 50.0)), *operations, moves_fail=moves_fail)
    assert (played.attempts, played.states) == (1, {"job": "succeeded"})


# For others


def test_an_urgent_job_has_its_card_at_once_and_the_one_it_displaced_goes_on_later() -> None:
    """However long that one has run: it waits since it was suspended, and not since it was submitted."""
    natures = known(long=steady(20, 3 * AGEING_S), urgent=steady(20, 30.0))
    urgent_at = 2 * AGEING_S
    urgent = run(urgent_at, "urgent", "b", "urgent", preempt=True, priority="1")
    played = play(natures, run(0, "long", "a", "long"), urgent)
    assert played.starts["urgent"] <= urgent_at + 5
    assert (played.attempts, set(played.states.values())) == (2, {"succeeded"})
    assert times_of(played, "over", ((2, 1), "0"))[0] < times_of(played, "over", ((1, 1), "0"))[0]
    assert len(told(played, "moved")) == 2


def test_no_more_are_displaced_than_need_be() -> None:
    """The look at the machine is older than the departure of the first: it has left all the same."""
    natures = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    long = [run(0, f"long{number}", f"a{number}", "long") for number in range(3)]
    played = play(natures, *long, run(10, "urgent", "b", "urgent", preempt=True), devices=3)
    assert played.starts["urgent"] < 20
    assert len({what[0] for what in told(played, "moved")}) == 1


def test_each_urgent_job_displaces_another_once() -> None:
    """By a look that is older than its departure, its memory would be a stranger's, and it would be let back in."""
    natures = known(long=steady(4, 200.0), urgent=steady(20, 10.0))
    jobs = [run(0, f"long{number}", f"a{number}", "long", vram="5G") for number in range(2)]
    jobs += [run(at, f"urgent{at}", "b", "urgent", preempt=True, exclusive=True) for at in (10, 11, 12)]
    played = play(natures, *jobs)
    assert played.starts["urgent12"] < 60
    away = [what for what in told(played, "moved") if what[1] == "Suspension"]
    assert 2 <= len(away) <= 2 * 3
    assert set(played.states.values()) == {"succeeded"}


@pytest.mark.parametrize(
    ("wish", "attempts", "urgent_before"), [("suspend", 1, True), ("requeue", 2, True), ("never", 1, False)]
)
def test_a_job_makes_room_as_it_said_it_would(wish: str, attempts: int, urgent_before: bool) -> None:
    natures = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    jobs = run(0, "long", "a", "long", on_preempt=wish), run(10, "urgent", "b", "urgent", preempt=True)
    played = play(natures, *jobs)
    assert set(played.states.values()) == {"succeeded"}
    assert sum(what[0] == 1 for what in told(played, "begins")) == attempts
    assert (played.starts["urgent"] < 100) is urgent_before


def test_one_that_cannot_be_suspended_is_stopped_and_queued_again_for_an_urgent_one() -> None:
    natures = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    jobs = run(0, "long", "a", "long"), run(10, "urgent", "b", "urgent", preempt=True)
    played = play(natures, *jobs, moves_fail=1.0)
    assert played.starts["urgent"] < 40
    assert (played.attempts, set(played.states.values())) == (3, {"succeeded"})


def test_one_whose_suspension_fails_and_that_is_displaced_at_the_same_moment_is_not_forgotten() -> None:
    natures = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    for late in range(0, 40, size(8, full=1)):
        urgent = run(10 + late / 20, "urgent", "b", "urgent", preempt=True)
        played = play(natures, run(0, "long", "a", "long"), ask(10, "suspend"), urgent, moves_fail=1.0)
        assert set(played.states.values()) == {"succeeded"}


def test_a_raised_priority_keeps_a_running_job_where_it_is() -> None:
    natures = known(long=steady(20, 100.0), urgent=steady(20, 30.0))
    raised = Operation(at=5, kind="priority", jobs="1", priority=200)
    played = play(natures, run(0, "long", "a", "long"), raised, run(10, "urgent", "b", "urgent", preempt=True))
    assert played.starts["urgent"] >= 100


def test_what_a_retry_forgives_is_forgotten() -> None:
    """It ran out, was given up, and is run again by hand: it is asked for as it was submitted."""
    natures = known(huge=steady(26), small=steady(2, 100.0))
    operations = run(0, "huge", "a", "huge", vram="20G"), run(300, "small", "b", "small", vram="2G")
    played = play(natures, *operations, ask(310, "retry"))
    begun = [at for at, kind, what in played.log if kind == "begins" and what[0] == 1 and at >= 300]
    assert begun[0] < 320, "it waited for a card of its own"


# Wherever the daemon dies


def displaced(crash_at: frozenset[int] = frozenset()) -> Played:
    """One is displaced and goes on, one is suspended by hand and resumed, one runs out of memory and comes back."""
    natures = known(
        long=steady(14, 25.0), urgent=steady(14, 6.0), late=Nature(runs_s=14.0, climbs=((0.5, 2 * GB), (9.0, 12 * GB)))
    )
    return play(
        natures,
        run(0, "late", "c", "late", vram="4G"),
        run(0, "long", "a", "long", vram="15G", time_limit="60s"),
        run(4, "urgent", "b", "urgent", vram="15G", preempt=True),
        ask(5, "suspend", "1"),
        ask(12, "resume", "1"),
        ask(16, "suspend", "2"),
        ask(30, "resume", "2"),
        crash_at=crash_at,
    )


def test_nobody_is_forgotten_wherever_the_daemon_dies_in_a_story_with_suspensions() -> None:
    undisturbed = displaced()
    assert len(told(undisturbed, "moved")) >= 5
    assert told(undisturbed, "out of memory")
    passed = undisturbed.passed
    assert {name for name, _ in passed} >= {"suspender.suspend", "suspender.resume", "suspender.moved"}
    for place in range(0, len(passed), 1 if seeds(0, full=0) > 1000 else size(67, full=17)):
        played = displaced(frozenset({place}))
        assert set(played.states.values()) == {"succeeded"}, f"after a crash at {place}, {passed[place]}"
        assert sum(what[0] == 2 for what in told(played, "begins")) == 1, f"at {place} it lost what it had done"
