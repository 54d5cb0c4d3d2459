"""The controller with a cluster engine: terms, states, refusals, and how attempts end at the site."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import Amount, Basis, ClusterTerms, Offer
from gpuyard.model.job import Attempt, HandedOver, Job, Outcome, OutcomeKind, Usage
from gpuyard.model.job_spec import TagSharing
from gpuyard.model.lease import FixedMemory, PartOfDevice
from gpuyard.model.lifecycle import JobState
from gpuyard.model.submission import SubmissionRequest, parse_submission
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.ports import Ended, IsCutOff, Launch, PlacesNothing, Prepared, SiteStatus
from gpuyard.queue.engine_set import OPEN_AGAIN_S, EngineSet
from gpuyard.queue.step import Step
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from tests.simulation.behaviors import plain_behavior
from tests.simulation.crash_points import CrashPoints
from tests.simulation.simulated_daemon import RULES, SimulatedDaemon
from tests.simulation.world import World


class ClusterEngine(PlacesNothing):
    """A cluster engine that records what it gets and reports what a test sets."""

    def __init__(self) -> None:
        self.offered = Offer()
        self.submitted: dict[int, Launch] = {}
        self.adopted: list[Attempt] = []
        self.signals: list[str] = []
        self.changes: list[SiteStatus] = []
        self.ends: list[Ended] = []
        self.fault: str | None = None
        self._prepared: list[Launch] = []

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        if self.fault is not None:
            raise EnvironmentFault(self.fault)
        self._prepared.append(launch)
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, log="/log")

    def start_prepared(self) -> None:
        self.submitted |= {launch.job_id: launch for launch in self._prepared}
        self._prepared.clear()

    def discard_prepared(self) -> None:
        self._prepared.clear()

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        self.adopted += attempts

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        ends, self.ends = self.ends, []
        return ends

    def site_changes(self) -> list[SiteStatus]:
        changes, self.changes = self.changes, []
        return changes

    def offer(self) -> Offer:
        return self.offered

    def signal(self, attempt: Attempt, signum: int) -> int:
        self.signals.append(attempt.key)
        return 1


class QueueUnderTest:
    """A controller with that engine, and a clock that only tests advance."""

    def __init__(self) -> None:
        self.engine = ClusterEngine()
        self.world = World(1, plain_behavior)
        self.database = open_database(None)[0]
        self.daemon = SimulatedDaemon(
            self.world, self.database, CrashPoints(), rules=RULES, trouble=0.0, moves_fail=0.0
        )
        self.daemon.controller.engines._open_engine = lambda _: self.engine
        self.daemon.controller.recover()

    def submit(self, *command: str, rule: TagSharing | None = None, **options: Any) -> int:
        typed = {"gpus": "0", "engine": "yonder", **{name.replace("_", "-"): each for name, each in options.items()}}
        own = {"CUDA_VISIBLE_DEVICES": "7"}
        asked = SubmissionRequest(cwd="/", environment=own, token="", command=command, options=typed, tag_sharing=rule)
        pieces = self.daemon.requests.submit(parse_submission(asked), "me")
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return int(end.value[0])

    def step(self, after_s: float = 0.0) -> Step:
        self.world.advance(self.world.now + after_s)
        return self.daemon.step()

    def wakes_after(self, step: Step) -> float:
        assert step.wake_at is not None
        return step.wake_at - self.world.now

    def report(self, job_id: int, attempt: int = 1, **other: Any) -> None:
        self.engine.changes.append(SiteStatus(job_id=job_id, attempt=attempt, **{"site_id": "77", **other}))
        self.step()

    def end(self, job_id: int, kind: OutcomeKind, attempt: int = 1, reason: str | None = None) -> None:
        outcome = Outcome(kind=kind, status=None, reason=reason or f"it was {kind}")
        self.engine.ends.append(Ended(job_id=job_id, attempt=attempt, outcome=outcome))
        self.step()

    def job(self, job_id: int) -> Job:
        job = JobStore(self.database).job(job_id)
        assert job is not None
        return job

    def attempt(self, job_id: int) -> Attempt:
        return JobStore(self.database).attempts(job_id)[-1]

    def why(self, job_id: int) -> list[tuple[ReasonKind, str]]:
        controller = self.daemon.controller
        return [
            (reason.kind, reason.text) for reason in controller.explain(self.job(job_id), self.daemon.sample()).reasons
        ]


@pytest.fixture
def queue() -> Iterator[QueueUnderTest]:
    queue = QueueUnderTest()
    yield queue
    queue.database.close()


def test_the_typed_options_are_the_terms_and_no_local_device_is_named(queue: QueueUnderTest) -> None:
    job_id = queue.submit(
        "train", gpus="1", vram="8G", cpus="4", ram="2G", time_limit="60s", priority="3", name="x",
        engine_option=["-q a"],
    )  # fmt: skip
    queue.step()
    launch = queue.engine.submitted[job_id]
    terms = launch.terms
    assert terms is not None
    assert (terms.need.devices, terms.need.memory) == (1, FixedMemory(8192.0))
    assert (terms.cpus, terms.ram_mb, terms.limit_s) == (4, 2048.0, 60.0)
    assert (terms.priority, terms.name, terms.options) == (3, "x", ("-q a",))
    assert launch.environment["GPUYARD_JOB_ID"] == str(job_id)
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "7", "the node leaves out variables of this machine"


def test_the_limit_of_an_array_is_part_of_its_terms(queue: QueueUnderTest) -> None:
    first = queue.submit("train", "{index}", array="0-2%2")
    queue.step()
    assert {
        (launch.terms.group, launch.terms.at_most) for launch in queue.engine.submitted.values() if launch.terms
    } == {(first, 2)}


def test_jobs_with_a_sharing_rule_ask_for_their_share_of_a_gpu_without_an_estimate(queue: QueueUnderTest) -> None:
    rule = TagSharing(most_per_device=3, stagger_s=0.0)
    job_id = queue.submit("train", gpus="1", rule=rule, tag="w")
    queue.step()
    terms = queue.engine.submitted[job_id].terms
    assert terms is not None
    assert terms.need.memory == PartOfDevice(1 / 3)


def test_a_job_is_pending_until_it_runs_at_the_site_and_its_time_counts_from_then(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train", time_limit="100s")
    queue.step()
    assert queue.job(job_id).state is JobState.PENDING
    queue.report(job_id, reason="Priority")
    assert (queue.job(job_id).state, queue.job(job_id).reason) == (JobState.PENDING, "yonder 77: Priority")
    began = queue.world.now + 30.0
    queue.step(after_s=40.0)
    queue.report(job_id, place="n3", at=began)
    job, attempt = queue.job(job_id), queue.attempt(job_id)
    assert (job.state, job.reason, attempt.place, attempt.started_at) == (JobState.RUNNING, None, "n3", began)
    queue.step(after_s=began + 99.0 - queue.world.now)
    assert queue.job(job_id).state is JobState.RUNNING
    step = queue.step(after_s=1.0)
    assert queue.job(job_id).state is JobState.STOPPING
    assert queue.engine.signals == [f"{job_id}.1"]
    assert step.wake_at is not None


def test_a_running_job_does_not_become_pending_and_keeps_its_name_at_the_site(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train")
    queue.step()
    queue.report(job_id, place="n3", at=queue.world.now)
    queue.report(job_id, reason="yonder cannot be reached", site_id="")
    assert (queue.job(job_id).state, queue.attempt(job_id).place) == (JobState.RUNNING, "n3")
    queue.report(job_id, place="n4", at=queue.world.now, site_id="")
    assert (queue.attempt(job_id).place, queue.attempt(job_id).site_id) == ("n4", "77")


def test_a_job_that_its_site_suspends_is_suspended_and_its_time_limit_waits(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train", time_limit="100s")
    queue.step()
    began = queue.world.now
    queue.report(job_id, place="n3", at=began)
    queue.report(job_id, place="n3", at=began, is_suspended=True)
    assert (queue.job(job_id).state, queue.job(job_id).reason) == (JobState.SUSPENDED, "yonder has suspended it")
    for _ in range(2):  # also if it is reported again
        queue.step(after_s=150.0)
        queue.report(job_id, place="n3", at=began, is_suspended=True)
        assert (queue.job(job_id).state, queue.engine.signals) == (JobState.SUSPENDED, [])
    queue.report(job_id, place="n3", at=began)  # the site was not asked yet
    assert queue.job(job_id).state is JobState.SUSPENDED
    queue.report(job_id, place="n3", at=began, is_suspended=False)
    queue.report(job_id, place="n4", at=began, is_suspended=False)
    attempt = queue.attempt(job_id)
    assert (queue.job(job_id).state, queue.job(job_id).reason) == (JobState.RUNNING, None)
    assert attempt.ran_s(queue.world.now) < 10.0
    queue.step(after_s=90.0)
    assert queue.job(job_id).state is JobState.RUNNING
    queue.step(after_s=20.0)
    assert queue.job(job_id).state is JobState.STOPPING


def test_a_report_about_an_earlier_attempt_changes_nothing(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train", retries="1")
    queue.step()
    queue.end(job_id, OutcomeKind.LOST)
    queue.step(after_s=1.0)
    assert queue.job(job_id).state is JobState.PENDING
    queue.report(job_id, attempt=1, place="n3")
    queue.end(job_id, OutcomeKind.SUCCEEDED, attempt=1)
    assert (queue.job(job_id).state, queue.attempt(job_id).number) == (JobState.PENDING, 2)


def test_a_job_cancelled_at_the_site_is_cancelled_with_the_engines_reason(queue: QueueUnderTest) -> None:
    ids = [queue.submit("train"), queue.submit("train")]
    queue.step()
    queue.report(ids[1], place="n3", at=queue.world.now)
    for job_id in ids:
        queue.end(job_id, OutcomeKind.CANCELLED, reason="cancelled at yonder (by root)")
        assert (queue.job(job_id).state, queue.job(job_id).reason) == (
            JobState.CANCELLED,
            "cancelled at yonder (by root)",
        )


def test_a_job_preempted_at_the_site_is_requeued_without_using_a_retry(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train")
    queue.step()
    queue.end(job_id, OutcomeKind.PREEMPTED)
    queue.step()
    assert (queue.job(job_id).state, queue.job(job_id).failures) == (JobState.PENDING, 0)


@pytest.mark.parametrize(
    ("on_reboot", "state", "failures"),
    [
        (None, JobState.PENDING, 0),
        ("requeue", JobState.PENDING, 0),
        ("hold", JobState.HELD, 0),
        ("fail", JobState.FAILED, 1),
    ],
)
def test_a_job_lost_at_the_site_is_retried_unless_an_option_forbids_it(
    queue: QueueUnderTest, on_reboot: str | None, state: JobState, failures: int
) -> None:
    options: dict[str, Any] = {} if on_reboot is None else {"on_reboot": on_reboot}
    job_id = queue.submit("train", **options)
    queue.step()
    queue.end(job_id, OutcomeKind.LOST)
    queue.step()
    assert (queue.job(job_id).state, queue.job(job_id).failures) == (state, failures)


def test_a_job_that_is_lost_repeatedly_is_held(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train")
    for number in range(1, 8):
        queue.step()
        if queue.job(job_id).state is JobState.HELD:
            break
        queue.end(job_id, OutcomeKind.LOST, attempt=number)
    assert queue.job(job_id).state is JobState.HELD
    assert "gpuyard release" in (queue.job(job_id).reason or "")


def test_only_lost_attempts_count_as_lost(queue: QueueUnderTest) -> None:
    """Not failures before `gpuyard retry`, which resets their number, nor numbers that were skipped after a restore."""
    job_id = queue.submit("train")
    queue.step()
    queue.end(job_id, OutcomeKind.FAILED)
    with queue.database.transaction():
        JobStore(queue.database).skip_attempts(job_id, 9)
        queue.daemon.requests.retry(queue.job(job_id), queue.world.now)
    queue.step()
    queue.end(job_id, OutcomeKind.LOST, attempt=10)
    assert queue.job(job_id).state is JobState.PENDING


def test_a_job_over_its_expected_time_is_rerun_without_an_expected_time(queue: QueueUnderTest) -> None:
    first = queue.submit("train")
    queue.step()
    queue.report(first, place="n3", at=queue.world.now)
    queue.step(after_s=100.0)
    queue.end(first, OutcomeKind.SUCCEEDED)
    job_id = queue.submit("train")
    queue.step()
    terms = queue.engine.submitted[job_id].terms
    assert terms is not None
    assert terms.expected_s is not None
    assert terms.expected_s > 300.0
    queue.end(job_id, OutcomeKind.TIMED_OUT)
    queue.step()
    assert queue.job(job_id).state is JobState.PENDING
    again = queue.engine.submitted[job_id].terms
    assert again is not None
    assert again.expected_s is None
    assert queue.job(job_id).failures == 0, "the limit was not the user's"
    queue.end(job_id, OutcomeKind.TIMED_OUT, attempt=2)
    assert queue.job(job_id).state is JobState.FAILED


def run_once(queue: QueueUnderTest, *command: str, seconds: float, ram_mb: float) -> ClusterTerms:
    """Run a job that succeeds, and return the terms it was handed over with."""
    job_id = queue.submit(*command)
    queue.step()
    queue.report(job_id, place="n3", at=queue.world.now)
    queue.step(after_s=seconds)
    outcome, usage = Outcome(kind=OutcomeKind.SUCCEEDED, status=0), Usage(ram_mb=ram_mb)
    queue.engine.ends.append(Ended(job_id=job_id, attempt=1, outcome=outcome, usage=usage))
    queue.step()
    terms = queue.engine.submitted[job_id].terms
    assert terms is not None
    return terms


def test_what_a_command_needed_limits_its_own_next_run_with_wide_room(queue: QueueUnderTest) -> None:
    for argument in ("2", "3", "4"):
        terms = run_once(queue, "python", "sl.py", argument, seconds=2.0, ram_mb=100.0)
        assert (terms.expected_s, terms.ram_mb) == (None, None)
    run_once(queue, "python", "sl.py", "2", seconds=2.0, ram_mb=100.0)
    terms = run_once(queue, "python", "sl.py", "2", seconds=2.1, ram_mb=103.7)
    assert (terms.expected_s, terms.ram_mb) == (1800.0, 1536.0)
    assert (terms.time_basis, terms.ram_basis) == (Basis.LEARNED, Basis.LEARNED)
    assert run_once(queue, "python", "sl.py", "2", seconds=2.0, ram_mb=100.0) == terms, "rounded"


def test_no_learned_amount_is_a_limit_of_a_later_attempt(queue: QueueUnderTest) -> None:
    run_once(queue, "train", seconds=2.0, ram_mb=100.0)
    job_id = queue.submit("train", retries="1")
    queue.step()
    queue.end(job_id, OutcomeKind.LOST)
    queue.step(after_s=60.0)
    again = queue.engine.submitted[job_id]
    assert again.attempt == 2
    assert again.terms is not None
    assert (again.terms.expected_s, again.terms.ram_mb) == (None, None)


def refuse(queue: QueueUnderTest, job_id: int) -> float:
    """Let the engine refuse the job. Return the seconds until it is offered again."""
    queue.end(job_id, OutcomeKind.NEVER_STARTED, reason="no such partition")
    wait_s = queue.wakes_after(queue.step())
    assert queue.job(job_id).state is JobState.QUEUED
    return wait_s


def test_a_refused_job_is_offered_again_with_growing_delays_and_no_attempt_counts(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train")
    queue.step()
    waits = []
    for _ in range(9):
        waits.append(round(refuse(queue, job_id)))
        [(kind, text)] = queue.why(job_id)
        assert kind is ReasonKind.ENGINE
        assert text.startswith("yonder refused it: no such partition; next try in")
        assert queue.job(job_id).attempts == 0
        queue.step(after_s=waits[-1] + 0.01)
        assert queue.job(job_id).state is JobState.PENDING
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_refusal_of_long_ago_is_forgotten(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train")
    queue.step()
    assert refuse(queue, job_id) == pytest.approx(5.0)
    queue.step(after_s=5.01)
    queue.report(job_id, reason="Priority")
    queue.step(after_s=3600.0)
    assert refuse(queue, job_id) == pytest.approx(5.0)


def test_jobs_with_other_terms_are_submitted_meanwhile(queue: QueueUnderTest) -> None:
    refused, other = queue.submit("train"), queue.submit("train", priority="2")
    queue.step()
    queue.end(refused, OutcomeKind.NEVER_STARTED)
    later, like = queue.submit("train", priority="2"), queue.submit("train")
    queue.step()
    states = [queue.job(each).state for each in (refused, other, later, like)]
    assert states == [JobState.QUEUED, JobState.PENDING, JobState.PENDING, JobState.QUEUED]


def test_a_job_that_cannot_be_prepared_waits_and_gives_the_reason(queue: QueueUnderTest) -> None:
    job_id = queue.submit("train")
    queue.engine.fault = "the folder /net cannot be made"
    assert queue.wakes_after(queue.step()) == pytest.approx(5.0)
    assert queue.job(job_id).state is JobState.QUEUED
    assert "the folder /net cannot be made" in queue.why(job_id)[0][1]
    queue.engine.fault = None
    queue.step(after_s=5.01)
    assert queue.job(job_id).state is JobState.PENDING


def test_a_full_engine_says_what_is_missing_and_is_not_polled(queue: QueueUnderTest) -> None:
    queue.engine.offered = Offer(free=Amount(gpus=1.0))
    first, second = queue.submit("a", gpus="1"), queue.submit("b", gpus="2")
    step = queue.step()
    assert [queue.job(each).state for each in (first, second)] == [JobState.PENDING, JobState.QUEUED]
    assert queue.why(second) == [(ReasonKind.NO_ROOM, "yonder has 1 GPUs free, 2 needed")]
    assert step.wake_at is None, "the engine reports when GPUs become free"


class Door:
    """Opens the engine, or raises `error`."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.tries = 0
        self.now = 1000.0
        self.engine = ClusterEngine()
        self.engines = EngineSet(ClusterEngine(), self.open, lambda: self.now)

    def open(self, name: str) -> ClusterEngine:
        self.tries += 1
        if self.error is not None:
            raise self.error
        return self.engine


def attempt_of(job_id: int) -> Attempt:
    return Attempt(job_id=job_id, number=1, phase=HandedOver(at=0.0), engine="yonder")


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (EnvironmentFault("no folder", hint="make one"), "no folder (make one)"),
        (KeyError("x"), "the engine yonder cannot be opened: KeyError: 'x'"),
    ],
)
def test_an_engine_that_cannot_be_opened_gives_the_reason_and_is_tried_again(error: Exception, trouble: str) -> None:
    door = Door(error)
    assert [door.engines.offer_of("yonder").trouble for _ in range(3)] == [trouble] * 3
    assert (door.tries, door.engines.is_closed("yonder")) == (1, True)
    door.error = None
    door.now += OPEN_AGAIN_S
    assert door.engines.offer_of("yonder") == Offer()
    assert not door.engines.is_closed("yonder")


def test_an_engine_that_is_opened_late_adopts_the_attempts_of_an_earlier_daemon(queue: QueueUnderTest) -> None:
    door = Door(EnvironmentFault("no folder"))
    door.engines.adopt([attempt_of(1), attempt_of(2)])
    assert door.engines.ended() == []
    assert door.engines.signal_each([attempt_of(1)], 15) == [1], "the engine is not opened again at once"
    assert door.tries == 1
    door.error = None
    door.now += OPEN_AGAIN_S
    door.engines.ended()
    assert [attempt.job_id for attempt in door.engine.adopted] == [1, 2]
    door.engines.ended()
    assert len(door.engine.adopted) == 2


def test_jobs_for_an_engine_that_cannot_be_opened_wait_and_the_daemon_tries_again(queue: QueueUnderTest) -> None:
    def cannot(_: str) -> ClusterEngine:
        raise EnvironmentFault("its package is broken")

    queue.daemon.controller.engines._open_engine = cannot
    job_id, here = queue.submit("train"), queue.submit("run", "5", engine="local")
    assert queue.wakes_after(queue.step()) == pytest.approx(OPEN_AGAIN_S)
    assert queue.why(job_id) == [(ReasonKind.ENGINE, "its package is broken")]
    assert queue.job(here).state is JobState.RUNNING
