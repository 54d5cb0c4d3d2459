"""Each check of the torture run finds its violation, and is silent about what faults and requests explain."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from tests.torture import checks
from tests.torture.evidence import Run, read_runs
from tests.torture.records import AttemptRecord, Happened, JobRecord, Records, Submission

CAPACITY = {"0": 24_000.0, "1": 24_000.0}
KEEPER = 4242


def run(name: str = "1.1", **fields: Any) -> Run:
    whole: dict[str, Any] = {
        "run": name, "pid": 100, "start": 10.0, "last": 15.0, "devices": ("0",), "mb": 6_000.0, "name": "s1",
        "printed": 3, "status": 0, "missed": set(),
    }  # fmt: skip
    return Run(**{**whole, **fields})


def attempt(job: int = 1, number: int = 1, kind: str | None = "succeeded", **fields: Any) -> AttemptRecord:
    status = {"succeeded": 0}.get(str(kind))
    return AttemptRecord(**{"job": job, "number": number, "keeper_pid": KEEPER, "kind": kind, "status": status,
                            "reason": "", **fields})  # fmt: skip


def records(*attempts: AttemptRecord, state: str = "succeeded", jobs: Mapping[int, str] | None = None) -> Records:
    found = {each.job: f"s{each.job}" for each in attempts} if jobs is None else jobs
    return Records(
        jobs={job: JobRecord(id=job, name=name, state=state) for job, name in found.items()},
        attempts={(each.job, each.number): each for each in attempts},
    )


def accepted(job: int = 1, **fields: Any) -> Submission:
    return Submission(**{"name": f"s{job}", "answer": "accepted", "ids": (job,), **fields})


def logs(*runs: Run) -> dict[str, bytes | None]:
    return {each.run: _text(each.run, range(1, each.printed + 1)) for each in runs}


def _text(name: str, lines: Any) -> bytes:
    return b"".join(b"line %s %d .\n" % (name.encode(), line) for line in lines)


happened = Happened


def everything(
    runs: list[Run], found: Records, submissions: list[Submission] | None = None, **fields: Any
) -> list[str]:
    sent = [accepted(job) for job in found.jobs] if submissions is None else submissions
    return checks.check_all(runs, found, sent, happened(**fields), logs=logs(*runs), capacity_mb=CAPACITY)


def test_a_job_that_ran_once_and_whole_violates_nothing() -> None:
    assert everything([run()], records(attempt())) == []


def test_evidence_is_read_by_process() -> None:
    lines = [
        "start 7.1 50 1.0 0,1 6144 s3",
        "tick 7.1 50 1.5 4",
        "miss 7.1 50 1.6 5 28",
        "printed 7.1 50 1.9 8",
        "end 7.1 50 2.0 3",
        "start 7.2 51 3.0 -1 - s3",
    ]
    first, second = read_runs(lines)
    assert (first.attempt, first.devices, first.mb, first.last, first.status) == ((7, 1), ("0", "1"), 6144.0, 2.0, 3)
    assert (first.printed, first.missed) == (8, {5})
    assert (second.attempt, second.devices, second.mb, second.status) == ((7, 2), (), None, None)
    assert run("script5").attempt is None


# Submissions


@pytest.mark.parametrize(
    ("submission", "jobs", "violation"),
    [
        (accepted(1), {}, "s1 was accepted as [1], and the queue has []"),
        (accepted(1, ids=(1, 2), count=2), {1: "s1"}, "s1 was accepted as [1, 2], and the queue has [1]"),
        (accepted(1), {1: "s1", 2: "s1"}, "s1 was accepted as [1], and the queue has [1, 2]"),
        (accepted(1, is_valid=False), {1: "s1"}, "s1 was to be refused, and was accepted as [1]"),
        (Submission(name="s1", answer="refused", is_valid=False), {1: "s1"}, "s1 was refused, and the queue has [1]: "),
        (Submission(name="s1", answer="refused", text="no GPU"), {}, "s1 was refused without a cause: no GPU"),
        (Submission(name="s1", count=3), {1: "s1", 2: "s1"}, "s1 was sent as 3 jobs, and the queue has [1, 2]"),
        (accepted(1), {1: "s1", 2: "other"}, "jobs [2] of the name 'other' were never submitted"),
    ],
)
def test_submissions_that_vanish_or_appear(submission: Submission, jobs: dict[int, str], violation: str) -> None:
    assert list(checks.check_submissions(records(jobs=jobs), [submission])) == [violation]


@pytest.mark.parametrize("jobs", [{}, {1: "s1", 2: "s1", 3: "s1"}])
def test_a_submission_without_an_answer_counts_whole_or_not_at_all(jobs: dict[int, str]) -> None:
    assert list(checks.check_submissions(records(jobs=jobs), [Submission(name="s1", count=3)])) == []


def test_a_job_that_is_stuck() -> None:
    assert everything([run()], records(attempt(), state="running")) == ["job 1 (s1) is running at the end: "]


# Attempts


def test_an_attempt_that_ran_twice() -> None:
    twice = [run(), run(pid=101, start=20.0, last=22.0)]
    assert everything(twice, records(attempt())) == ["attempt 1.1 ran 2 times: pid 100 at 10.00, pid 101 at 20.00"]


def test_an_attempt_without_a_record() -> None:
    found = everything([run(), run("1.2", start=20.0, last=22.0)], records(attempt()))
    assert found == ["attempt 1.2 ran (pid 100 at 20.00), and there is no record of it"]


@pytest.mark.parametrize("kind", ["succeeded", "failed", "out-of-memory"])
def test_an_attempt_that_is_recorded_and_never_ran(kind: str) -> None:
    assert everything([], records(attempt(kind=kind, reason="x"))) == [
        f"attempt 1.1 is recorded as {kind} (x), and it never ran"
    ]


def test_an_attempt_that_was_killed_before_it_wrote_its_start() -> None:
    found = records(attempt(kind="failed", status=137, pid=55))
    assert everything([], found, killed_jobs={55}) == []
    assert len(everything([], found, killed_jobs={56})) == 1


def test_an_attempt_without_an_outcome() -> None:
    assert "attempt 1.1 has no outcome" in everything([run()], records(attempt(kind=None)))


@pytest.mark.parametrize(
    ("status", "record", "explained"),
    [
        (0, attempt(kind="lost"), {"killed_keepers": {KEEPER}}),
        (None, attempt(kind="failed", status=137), {"killed_jobs": {100}}),
        (143, attempt(kind="cancelled"), {"cancelled": {1}}),
    ],
)
def test_outcomes_that_only_a_fault_or_a_request_explains(
    status: int | None, record: AttemptRecord, explained: dict[str, Any]
) -> None:
    assert everything([run(status=status)], records(record), **explained) == []
    assert len(everything([run(status=status)], records(record))) == 1


@pytest.mark.parametrize(
    ("status", "record"),
    [
        (0, attempt(kind="cannot-start", status=126)),
        (0, attempt(kind="failed", status=1)),
        (3, attempt(kind="succeeded")),
        (3, attempt(kind="failed", status=4)),
        (0, attempt(kind="timed-out")),
        (143, attempt(kind="failed", status=143)),
        (None, attempt(kind="succeeded")),
    ],
)
def test_outcomes_that_the_program_itself_contradicts(status: int | None, record: AttemptRecord) -> None:
    [violation] = everything([run(status=status)], records(record))
    assert violation.startswith(f"attempt 1.1 is recorded as {record.kind}")


def test_a_time_limit_that_fires_early_or_never() -> None:
    limited = {1: accepted(limit_s=60.0)}
    record = records(attempt(kind="timed-out"))
    assert list(checks.check_limits([run(last=70.0, status=143)], record, limited, happened())) == []
    assert list(checks.check_limits([run(last=13.0, status=143)], record, limited, happened())) == [
        "attempt 1.1 was stopped after 3.0 s, and its limit is 60 s"
    ]
    assert len(list(checks.check_limits([run(last=10.0, status=None)], record, limited, happened()))) == 1
    slept = happened(suspended=[12.0])
    assert list(checks.check_limits([run(last=13.0, status=143)], record, limited, slept)) == []
    assert list(checks.check_limits([run(last=400.0)], records(attempt()), limited, happened())) == [
        "attempt 1.1 ran for 390.0 s, and its limit is 60 s"
    ]


def test_two_live_attempts_of_a_job() -> None:
    both = [run("1.1", last=15.0), run("1.2", pid=101, start=14.0, last=20.0, devices=())]
    assert list(checks.check_overlap(both)) == ["1.2 started at 14.00 while 1.1 (pid 100) lived until 15.00"]
    assert list(checks.check_overlap([both[0], replace(both[1], start=15.0)])) == []


# Devices


@pytest.mark.parametrize(
    ("second", "is_over"),
    [
        (run("2.1", mb=18_000.0, start=12.0), False),
        (run("2.1", mb=18_100.0, start=12.0), True),
        (run("2.1", mb=18_100.0, start=12.0, devices=("1",)), False),
        (run("2.1", mb=18_100.0, start=15.0), False),
        (run("2.1", mb=None, start=12.0), True),
        (run("script3", mb=None, start=12.0), True),
    ],
)
def test_a_device_over_capacity(second: Run, is_over: bool) -> None:
    found = list(checks.check_capacity([run(), second], records(attempt(), attempt(2)), CAPACITY, happened()))
    assert bool(found) == is_over
    assert all(text.startswith("GPU 0 (24000 MB) was over capacity at 12.00: 1.1 (6000 MB), ") for text in found)


def test_memory_that_a_job_got_after_it_ran_out_counts() -> None:
    found = records(attempt(reserved_mb=12_000.0), attempt(2))
    both = [run(), run("2.1", mb=14_000.0, start=12.0)]
    assert len(list(checks.check_capacity(both, found, CAPACITY, happened()))) == 1


def test_a_script_may_get_the_device_of_a_job_whose_lease_was_removed_and_another_job_may_not() -> None:
    removed, found = happened(removed_leases=[11.0]), records(attempt(), attempt(2))
    script, job = run("script3", mb=None, start=12.0), run("2.1", mb=None, start=13.0)
    assert list(checks.check_capacity([run(), script], found, CAPACITY, removed)) == []
    assert len(list(checks.check_capacity([run(), script, job], found, CAPACITY, removed))) == 1


# Logs


@pytest.mark.parametrize(
    ("text", "violation"),
    [
        (_text("1.1", (1, 3)), "the log of attempt 1.1: 1 of 3 lines are missing, first 2"),
        (_text("1.1", (1, 3, 2)), "the log of attempt 1.1: line 2 comes after line 3"),
        (_text("1.1", (1, 2, 2, 3)), "the log of attempt 1.1: line 2 comes after line 2"),
        (_text("2.1", (1, 2, 3)), "the log of attempt 1.1: 3 of 3 lines are missing, first 1"),
        (None, "attempt 1.1 has no log"),
    ],
)
def test_a_log_that_is_not_whole(text: bytes | None, violation: str) -> None:
    assert list(checks.check_logs([run()], {}, happened(), {"1.1": text})) == [violation]


def test_lines_that_the_job_could_not_print_are_not_missed() -> None:
    assert list(checks.check_logs([run(missed={2})], {}, happened(), {"1.1": b"line 1." + _text("1.1", (1, 3))})) == []


def test_a_capped_log_may_lack_lines_but_keeps_their_order() -> None:
    capped = {1: accepted(is_capped=True)}
    assert list(checks.check_logs([run()], capped, happened(), {"1.1": _text("1.1", (3,))})) == []
    assert list(checks.check_logs([run()], capped, happened(), {"1.1": _text("1.1", (3, 1))})) != []


def test_a_log_that_a_fault_removed_is_not_missed() -> None:
    assert list(checks.check_logs([run()], {}, happened(removed_logs={"1.1.log"}), {"1.1": None})) == []


# Recovery


def test_a_queue_that_takes_too_long_to_move_again() -> None:
    found = happened(recoveries=[("kill daemon", 59.0), ("fill home", 61.5)])
    assert list(checks.check_recoveries(found)) == [
        "61.5 s passed from the end of the fault 'fill home' to the next start of a job"
    ]


def test_what_was_seen_during_the_run_and_in_the_database_is_reported() -> None:
    found = Records(jobs={}, attempts={}, problems=["integrity_check: bad"])
    assert everything([], found, [], observed=["2 daemons run"]) == ["integrity_check: bad", "2 daemons run"]
