"""Which events people are notified of, who gets them, how often, and the text of the messages."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.daemon.notify.messages import (
    MINUTE_S,
    FreedDevices,
    Message,
    Occurrence,
    Outbox,
    message_of,
    occurrence_of,
    queue_summary,
    targets_of,
)
from gpuyard.model.job import Attempt, Job, Outcome, OutcomeKind, Over, PublishedEvent, PublishedEventKind, Started
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Holder, Lease, Need, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Process, Snapshot, Vendor
from gpuyard.model.subscriptions import JOB_EVENTS, Event, parse_subscription

ON, TO = ("failed", "queue-empty"), ("everybody",)


def job(job_id: int = 17, state: JobState = JobState.SUCCEEDED, *subscriptions: str, **facts: object) -> Job:
    name = facts.pop("name", None)
    spec = JobSpec(
        command=("python", "train.py", "a b"), cwd="/", environment={}, need=Need(), name=name,  # type: ignore[arg-type]
        notify=tuple(map(parse_subscription, subscriptions)),
    )  # fmt: skip
    return Job(id=job_id, spec=spec, state=state, priority=0, user="ada", submitted_at=0.0, **facts)  # type: ignore[arg-type]


def attempt(job_id: int = 17) -> Attempt:
    return Attempt(job_id=job_id, number=1, phase=Started(at=100.0, keeper_pid=1), boot_id=None, log="/logs/17.1.log")


def ended(of: Job, kind: OutcomeKind) -> PublishedEvent:
    over = Over(before=attempt().last_live_phase, at=300.0, outcome=Outcome(kind=kind))
    return PublishedEvent(kind=PublishedEventKind.ENDED, job=of, at=300.0, attempt=replace(attempt(), phase=over))


def finished(of: Job) -> PublishedEvent:
    return PublishedEvent(kind=PublishedEventKind.FINISHED, job=of, at=300.0, attempt=attempt())


def occurrence(published: PublishedEvent) -> Occurrence:
    found = occurrence_of(published)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (JobState.SUCCEEDED, Event.FINISHED),
        (JobState.FAILED, Event.FAILED),
        (JobState.REJECTED, Event.FAILED),
        (JobState.CANCELLED, None),
    ],
)
def test_a_job_that_its_user_cancelled_has_not_failed(state: JobState, event: Event | None) -> None:
    found = occurrence_of(finished(job(state=state)))
    assert (found and found.event) == event


def test_a_retried_attempt_sends_no_notification_but_for_its_lack_of_memory() -> None:
    assert (
        occurrence_of(PublishedEvent(kind=PublishedEventKind.STARTED, job=job(state=JobState.RUNNING), at=0.0)) is None
    )
    assert occurrence_of(ended(job(state=JobState.DELAYED), OutcomeKind.FAILED)) is None
    again = occurrence(ended(job(state=JobState.DELAYED, reason="retry with 12 GB"), OutcomeKind.OUT_OF_MEMORY))
    over = occurrence(ended(job(state=JobState.FAILED, reason="out of memory again"), OutcomeKind.OUT_OF_MEMORY))
    assert message_of(again, "lab").title == "Job 17 ran out of memory and will run again with more on lab"
    assert "retry with 12 GB" in message_of(again, "lab").body
    assert message_of(over, "lab").title == "Job 17 ran out of memory and will not run again on lab"


def made_way(state: JobState, text: str) -> PublishedEvent:
    kind, guarded = PublishedEventKind.MADE_WAY, job(state=state, reason="stopping: as below")
    return PublishedEvent(kind=kind, job=guarded, at=300.0, attempt=attempt(), text=text)


@pytest.mark.parametrize(
    ("state", "title", "next_step"),
    [
        (
            JobState.SUSPENDING,
            "Job 17 is suspended before its GPU runs out of memory on lab",
            "goes on from where it was",
        ),
        (
            JobState.STOPPING,
            "Job 17 is stopped and queued again before its GPU runs out of memory on lab",
            "starts again, from its beginning",
        ),
    ],
)
def test_the_memory_guard_says_what_was_left_and_what_happens_next(state: JobState, title: str, next_step: str) -> None:
    found = occurrence(made_way(state, "GPU 0 had 205 MB left while job 12 grew; it was the youngest first run"))
    message = message_of(found, "lab")
    assert (message.events, message.title, message.jobs, message.state) == ("memory-guard", title, "17", state)
    lines = message.body.split("\n")
    assert lines[1] == "GPU 0 had 205 MB left while job 12 grew; it was the youngest first run"
    assert next_step in lines[2]
    assert lines[3:] == ["It ran for 3m 20s.", "Log: /logs/17.1.log"]


def test_the_memory_guard_notifies_only_targets_that_ask_for_it() -> None:
    published = made_way(JobState.SUSPENDING, "GPU 0 had 205 MB left")
    asked = replace(published, job=job(17, JobState.SUSPENDING, "all job events", "memory-guard=mine"))
    assert targets_of(occurrence(asked), ON, TO) == ("mine",)
    assert targets_of(occurrence(published), ("memory-guard",), TO) == TO


def test_a_job_that_made_way_for_want_of_ram_is_announced_to_those_who_ask_for_it() -> None:
    why = "the machine had 1.5 GB of RAM left of the 2 GB to keep"
    published = ended(job(17, JobState.QUEUED, "all job events", "host-guard=mine", reason=why), OutcomeKind.HOST_GUARD)
    made_way = occurrence(published)
    message = message_of(made_way, "lab")
    assert message.title == "Job 17 was stopped and queued again before the machine ran out of RAM on lab"
    assert why in message.body
    assert targets_of(made_way, ON, TO) == ("mine",)


def test_a_target_gets_each_event_once_and_a_failure_not_also_as_lack_of_memory() -> None:
    subscriptions = ("failed", "failed=mine", "everybody ", "finished=other")
    failed = occurrence(finished(job(17, JobState.FAILED, *subscriptions)))
    assert targets_of(failed, ON, TO) == ("everybody", "mine", "everybody ")
    assert targets_of(failed, (), TO) == ("everybody", "mine", "everybody ")
    assert targets_of(occurrence(finished(job(17, JobState.SUCCEEDED, *subscriptions))), ON, TO) == (
        "everybody ",
        "other",
    )
    assert targets_of(occurrence(finished(job())), ON, TO) == ()
    assert targets_of(occurrence(finished(job(17, JobState.FAILED, "failed"))), ON, ()) == ()
    lack = "out-of-memory=lack"
    over = occurrence(ended(job(17, JobState.FAILED, "both ways", lack), OutcomeKind.OUT_OF_MEMORY))
    again = occurrence(ended(job(17, JobState.DELAYED, "both ways", lack), OutcomeKind.OUT_OF_MEMORY))
    assert targets_of(over, ("out-of-memory",), TO) == ("everybody", "lack")
    assert targets_of(over, ("out-of-memory", "failed"), TO) == ("lack",)
    assert targets_of(again, ("out-of-memory", "failed"), TO) == ("everybody", "both ways", "lack")


def test_a_message_names_the_job_its_outcome_and_its_log() -> None:
    failed = job(state=JobState.FAILED, reason="exit status 3", name="big")
    assert message_of(occurrence(finished(failed)), "lab") == Message(
        events="failed", title="Job 17 (big) failed on lab",
        body="python train.py 'a b'\nexit status 3\nIt ran for 3m 20s.\nLog: /logs/17.1.log", jobs="17", name="big",
        state="failed", log="/logs/17.1.log",
    )  # fmt: skip
    assert message_of(occurrence(finished(job())), "").body == "python train.py 'a b'\nIt ran for 3m 20s."
    assert message_of(occurrence(finished(job(state=JobState.REJECTED))), "").title == "Job 17 will never start"


@given(st.text(max_size=2000))
def test_a_message_is_printable_no_matter_what_the_job_is_called(text: str) -> None:
    named = job(state=JobState.FAILED, reason=text, name=text, command=(text, "\ud800\x1b[2J"))
    message = message_of(occurrence(finished(named)), "lab")
    for words in (message.title, *message.body.split("\n"), message.name):
        assert words.isprintable()
        assert len(words.encode()) < 3000


def test_an_empty_queue_says_how_its_jobs_ended() -> None:
    text = queue_summary({JobState.SUCCEEDED: 37, JobState.FAILED: 2, JobState.REJECTED: 1, JobState.CANCELLED: 0})
    message = message_of(Occurrence(event=Event.QUEUE_EMPTY, at=0.0, text=text), "lab")
    assert message.title == "The queue is empty on lab"
    assert message.body == "No jobs are left. Since the queue was last empty: 37 finished, 2 failed, 1 rejected."


def happened(event: Event, job_id: int = 17) -> Occurrence:
    states = {
        Event.FINISHED: JobState.SUCCEEDED, Event.FAILED: JobState.FAILED, Event.OUT_OF_MEMORY: JobState.DELAYED,
        Event.MEMORY_GUARD: JobState.SUSPENDING,
        Event.HOST_GUARD: JobState.QUEUED,
    }  # fmt: skip
    if event in states:
        return Occurrence(event=event, at=0.0, job=job(job_id, states[event]))
    return Occurrence(event=event, at=0.0, text=f"GPU {job_id}")


def test_the_first_messages_are_sent_at_once_and_later_ones_are_combined_by_the_rate_limit() -> None:
    outbox = Outbox()
    for number in range(2):
        outbox.add(happened(Event.FINISHED, number))
        message = outbox.take(float(number), 2, "lab")
        assert message is not None
        assert message.title == f"Job {number} finished on lab"
    for job_id in (*range(20, 57), 12, 19):
        outbox.add(happened(Event.FAILED if job_id < 20 else Event.FINISHED, job_id))
    assert outbox.take(59.9, 2, "lab") is None
    assert outbox.due_at(2) == 60.0
    message = outbox.take(60.0, 2, "lab")
    assert message is not None
    assert (message.title, message.body) == ("37 jobs finished, 2 failed on lab", "37 jobs finished, 2 failed: 12, 19")
    assert (message.events, message.jobs) == ("finished,failed", "12 19-56")
    assert outbox.take(61.0, 2, "lab") is None
    assert outbox.due_at(2) is None


def test_a_combined_message_names_some_jobs_counts_causes_and_describes_a_single_job() -> None:
    outbox = Outbox()
    for job_id in range(0, 10_000, 2):
        outbox.add(happened(Event.FAILED, job_id))
    message = outbox.take(0.0, 1, "")
    assert message is not None
    assert message.body.startswith("5000 jobs failed: 0, 2, 4, ")
    assert message.body.endswith("36, 38 and more")
    outbox = Outbox()
    for step in (7, 14, 21):
        error = f"ValueError: loss is NaN at step {step}"
        outcome = Outcome(kind=OutcomeKind.FAILED, status=1, reason=f"{error} (exit status 1)", error_line=error)
        outbox.add(Occurrence(event=Event.FAILED, at=0.0, job=job(state=JobState.FAILED, outcome=outcome)))
    killed = Outcome(kind=OutcomeKind.FAILED, status=137, reason="signal 9 (SIGKILL)")
    outbox.add(Occurrence(event=Event.FAILED, at=0.0, job=job(state=JobState.FAILED, outcome=killed)))
    message = outbox.take(0.0, 1, "")
    assert message is not None
    assert message.body.split("\n")[1:] == ["3 x ValueError: loss is NaN at step …", "1 x signal 9 (SIGKILL)"]
    outbox = Outbox()
    outbox.add(happened(Event.QUEUE_EMPTY))
    outbox.add(Occurrence(event=Event.FAILED, at=0.0, job=job(state=JobState.FAILED, reason="exit status 3")))
    message = outbox.take(0.0, 1, "")
    assert message is not None
    assert (message.title, message.events, message.state) == ("Job 17 failed", "failed,queue-empty", "failed")
    assert message.body.split("\n")[1:] == ["exit status 3", "The queue is empty"]


def test_dropped_messages_are_counted_in_the_next_message_or_one_of_their_own() -> None:
    outbox = Outbox()
    outbox.add_dropped(3)
    message = outbox.take(0.0, 9, "")
    assert message is not None
    assert (message.title, message.body) == (
        "Some notifications were dropped", "3 more were dropped: too many at once",
    )  # fmt: skip
    outbox.add(happened(Event.GPU_FREE, 0))
    outbox.add(happened(Event.GPU_FREE, 1))
    outbox.add_dropped(1)
    message = outbox.take(0.0, 9, "")
    assert message is not None
    assert message.body.split("\n") == ["GPU 0, GPU 1 are free", "1 more were dropped: too many at once"]


STEPS = st.lists(
    st.tuples(st.floats(min_value=0.0, max_value=40.0), st.lists(st.sampled_from(Event), max_size=20)), max_size=60
)
EVENTS = {
    "finished": Event.FINISHED, "failed": Event.FAILED, "ran out of memory": Event.OUT_OF_MEMORY,
    "made way on a full GPU": Event.MEMORY_GUARD,
    "made way on a full machine": Event.HOST_GUARD,
}  # fmt: skip
COUNTED = re.compile(rf"(\d+) (?:jobs? )?({'|'.join(EVENTS)})")


@given(steps=STEPS, per_minute=st.integers(min_value=1, max_value=8))
def test_the_rate_limit_holds_and_all_jobs_are_counted(steps: list[tuple[float, list[Event]]], per_minute: int) -> None:
    outbox, now = Outbox(), 0.0
    sent: list[float] = []
    counted: Counter[Event] = Counter()
    given_: Counter[Event] = Counter()
    for pause, events in [*steps, (MINUTE_S, []), (MINUTE_S, [])]:
        now += pause
        for number, event in enumerate(events):
            outbox.add(happened(event, number))
            given_[event] += 1
        message = outbox.take(now, per_minute, "")
        if message is not None:
            sent.append(now)
            counted.update(_counts(message))
    for first in sent:
        assert sum(first <= at < first + MINUTE_S for at in sent) <= per_minute
    assert {event: counted[event] for event in JOB_EVENTS} == {event: given_[event] for event in JOB_EVENTS}
    assert outbox.is_over(now + MINUTE_S)


def _counts(message: Message) -> dict[Event, int]:
    if message.state:
        return {Event(next(word for word in message.events.split(",") if word in JOB_EVENTS)): 1}
    return {EVENTS[words]: int(count) for count, words in COUNTED.findall(message.title)}


def seen(used_mb: float = 0.0, **facts: object) -> Snapshot:
    device = Device(
        id="GPU-a", vendor=Vendor.NVIDIA, index=0, memory_total_mb=24000.0, memory_used_mb=used_mb,
        memory_free_mb=24000.0 - used_mb, utilization_percent=0.0,
        processes=(Process(pid=7, memory_mb=used_mb),) if used_mb else (), **facts,  # type: ignore[arg-type]
    )  # fmt: skip
    return Snapshot(taken_at=0.0, host=Host(), devices=(device,))


LEASE = Lease(id="l", holder=Holder(pid=1, uid=1, user="ada", label="x"), shares=(Share(device_id="GPU-a"),), since=0.0)


def test_a_healthy_gpu_is_reported_free_once_after_it_was_idle_for_the_given_time() -> None:
    freed = FreedDevices()
    assert freed.update(seen(), (), 0.0, 30.0) == []
    assert freed.update(seen(), (), 100.0, 30.0) == []  # it was never in use
    assert freed.update(seen(), (LEASE,), 200.0, 30.0) == []
    assert freed.update(seen(used_mb=8000.0), (), 220.0, 30.0) == []
    assert freed.update(seen(), (), 249.0, 30.0) == []
    assert [device.id for device in freed.update(seen(), (), 250.0, 30.0)] == ["GPU-a"]
    assert freed.update(seen(), (), 300.0, 30.0) == []
    freed.note_use(["GPU-a"], 310.0)
    assert len(freed.update(seen(), (), 340.0, 30.0)) == 1
    freed = FreedDevices()
    freed.note_use(["GPU-a"], 0.0)
    assert freed.update(seen(fault="it has vanished"), (), 100.0, 30.0) == []
    assert len(freed.update(seen(used_mb=300.0), (), 100.0, 30.0)) == 1
