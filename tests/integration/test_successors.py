"""Short jobs that the keeper starts one after the other: each runs once, and every request wins over what was put."""

import contextlib
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpuyard.engines.local.keeper_connection import JournalEntry, parse_journal
from gpuyard.leases.ledger import open_ledger
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
from tests.integration.queue_fixture import QueueUnderTest, until

_MANY = 300
# Jobs that start between a submission and its first step: the two that run may end, and be followed, in that moment.
_BEFORE_URGENT = 4
# Jobs that may begin between the moment at which we see that none may, and the step that takes back those that wait.
_BEGUN = 8
# Logs of jobs that have not begun, when the daemon is killed: more than those that the next one starts by itself first.
_LEFT = 20


def _follow_count(queue: QueueUnderTest) -> int:
    """Return how many attempts the keeper started by itself."""
    return sum(entry.after is not None for entry in _entries(queue))


def _entries(queue: QueueUnderTest) -> list[JournalEntry]:
    return parse_journal((queue.home / "journal").read_bytes())[0]


def _last_words(queue: QueueUnderTest) -> dict[str, str]:
    """Return the last word of the journal on each attempt."""
    return {entry.key: entry.word for entry in _entries(queue)}


def _await_more(queue: QueueUnderTest) -> None:
    """Wait until the keeper has started some more by itself."""
    before = _follow_count(queue)
    until(lambda: _follow_count(queue) > before + 20, "jobs that follow others")


def _runs(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def _rows(queue: QueueUnderTest, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database:
        return database.execute(query).fetchall()


def _keeper_pid(queue: QueueUnderTest) -> int:
    return next(int(path.stem) for path in (queue.home / "keepers").glob("*.sock"))


def test_short_jobs_follow_each_other_and_each_runs_once(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array=f"1-{_MANY}")
    queue.wait()
    assert sorted(map(int, _runs(runs))) == list(range(1, _MANY + 1))
    assert queue.counts() == {"succeeded": _MANY}
    assert _follow_count(queue) > _MANY // 4
    starts = [at for (at,) in _rows(queue, "SELECT started_at FROM jobs ORDER BY id")]
    # Two places: a job may start just before the one before it.
    assert all(later >= earlier - 0.25 for earlier, later in zip(starts, starts[2:], strict=False))


def test_a_successor_has_the_lease_and_the_device_of_the_job_before_it(queue: QueueUnderTest) -> None:
    queue.shell(
        'echo "$GPUYARD_JOB_ID $GPUYARD_ATTEMPT $GPUYARD_ARRAY_INDEX $GPUYARD_LEASE $CUDA_VISIBLE_DEVICES $NAME"',
        array=f"1-{_MANY}",
        environment={"PATH": os.environ["PATH"], "NAME": "value"},
    )
    queue.wait()
    assert _follow_count(queue)
    devices: dict[str, set[str]] = {}
    for job_id, lease, device in _rows(queue, "SELECT job, lease_id, devices FROM attempts"):
        words = queue.log_of(job_id).split()
        assert words[:4] == [str(job_id), "1", str(job_id), lease]
        assert words[5:] == ["value"]
        devices.setdefault(device, set()).add(words[4])
    assert sorted(map(len, devices.values())) == [1, 1]


def test_a_lease_that_passes_on_names_the_job_that_has_it(queue: QueueUnderTest) -> None:
    queue.shell("true", array="1-3000")

    def jobs_in_ledger() -> list[int]:
        labels = [lease.holder.label or "" for lease in open_ledger().leases()]
        return [int(label.removeprefix("job ")) for label in labels]

    until(lambda: jobs_in_ledger() and min(jobs_in_ledger(), default=0) > 200, "leases of later jobs")
    queue.post("/jobs/cancel", ids="all")
    queue.wait()


def test_the_successors_of_a_failed_job_run_as_well(queue: QueueUnderTest) -> None:
    queue.shell("exit $((GPUYARD_ARRAY_INDEX % 50 == 0))", array=f"1-{_MANY}", gpus=0)
    queue.wait()
    assert queue.counts() == {"succeeded": _MANY - _MANY // 50, "failed": _MANY // 50}
    failed = [job_id for (job_id,) in _rows(queue, "SELECT id FROM jobs WHERE state = 'failed'")]
    assert failed == list(range(50, _MANY + 1, 50))
    entries, _ = parse_journal((queue.home / "journal").read_bytes())
    ends = {entry.key: entry.word for entry in entries}
    assert {ends[entry.after] for entry in entries if entry.after is not None} == {"0"}


def test_cancelled_jobs_never_run(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-2000")
    until(lambda: len(_runs(runs)) > 50, "the first runs")
    answer = queue.post("/jobs/cancel", ids="all")
    before = len(_runs(runs))
    queue.wait()
    ran = {int(job_id) for job_id in _runs(runs)}
    assert len(ran) <= before + 2  # those that ran when it was answered
    ranges = [part.partition("-") for part in answer["changed"].replace(",", " ").split()]
    changed = {job_id for first, _, last in ranges for job_id in range(int(first), int(last or first) + 1)}
    assert len(changed) == answer["count"]
    succeeded = {job_id for (job_id,) in _rows(queue, "SELECT id FROM jobs WHERE state = 'succeeded'")}
    assert not changed & succeeded
    with_attempt = {job_id for (job_id,) in _rows(queue, "SELECT job FROM attempts")}
    assert ran <= with_attempt
    cancelled = [job_id for (job_id,) in _rows(queue, "SELECT id FROM jobs WHERE state = 'cancelled'")]
    assert cancelled
    assert not {job_id for job_id in cancelled if job_id not in with_attempt} & ran


def test_a_job_of_higher_priority_goes_before_the_jobs_that_wait(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-1000")
    until(lambda: len(_runs(runs)) > 50, "the first runs")
    urgent = queue.shell("true", priority=50)
    queue.wait()
    query = f"SELECT count(*) FROM attempts WHERE started_at > (SELECT submitted_at FROM jobs WHERE id = {urgent})"
    query += f" AND started_at < (SELECT started_at FROM jobs WHERE id = {urgent})"
    assert _rows(queue, query)[0][0] <= _BEFORE_URGENT


def test_a_paused_queue_starts_nothing(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-1000", gpus=0)
    until(lambda: len(_runs(runs)) > 50, "the first runs")
    queue.post("/pause")
    until(lambda: "running" not in queue.counts(), "the end of what runs")
    ran = len(_runs(runs))
    assert queue.counts() == {"succeeded": ran, "queued": 1000 - ran}
    queue.post("/unpause")
    queue.wait()
    assert len(_runs(runs)) == 1000


@pytest.mark.parametrize("devices", [0, 1])
def test_a_killed_daemon_loses_and_repeats_nothing(queue: QueueUnderTest, tmp_path: Path, devices: int) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-1200", gpus=devices)
    for number in range(1, 6):
        until(lambda number=number: len(_runs(runs)) > 100 * number, "more runs")  # type: ignore[misc]
        queue.restart()
    queue.wait()
    assert sorted(map(int, _runs(runs))) == list(range(1, 1201))
    assert queue.counts() == {"succeeded": 1200}
    assert _follow_count(queue)


def test_jobs_whose_logs_a_killed_daemon_left_follow_each_other_as_well(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-10000", vram="8G")
    left: set[str] = set()
    while len(left) < _LEFT:
        _await_more(queue)
        queue.kill9()
        until(lambda: "began" not in _last_words(queue).values(), "the ends of those that have begun")
        begun = set(_last_words(queue))
        left = {path.name.removesuffix(".log") for path in (queue.home / "logs").glob("*.log")} - begun
        queue.start()
    until(lambda: left <= set(_last_words(queue)), "the jobs whose logs were there")
    assert left & {entry.key for entry in _entries(queue) if entry.after is not None}
    queue.post("/jobs/cancel", ids="all")
    queue.wait()
    assert len(_runs(runs)) == len(set(_runs(runs)))


def test_a_change_waits_for_a_slow_keeper_and_others_do_not(queue: QueueUnderTest, tmp_path: Path) -> None:
    """The keeper is stopped after it has begun jobs that it has not reported."""
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-1000", gpus=0)
    until(lambda: len(_runs(runs)) > 50, "the first runs")
    keeper, other = _keeper_pid(queue), QueueUnderTest(queue.home)
    os.kill(keeper, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        try:
            change = pool.submit(other.post, "/jobs/cancel", ids="all")
            for _ in range(20):
                queue.get("/status")
        finally:
            os.kill(keeper, signal.SIGCONT)
        change.result()
    other.client.close()
    queue.wait()
    with_attempt = {job_id for (job_id,) in _rows(queue, "SELECT job FROM attempts")}
    assert {int(job_id) for job_id in _runs(runs)} <= with_attempt
    assert queue.daemon is not None
    assert "began after it was changed" not in queue.daemon.log


def test_a_stopped_keeper_starts_nothing_that_the_next_daemon_decides_about(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-1000", gpus=0)
    until(lambda: len(_runs(runs)) > 50, "the first runs")
    keeper = _keeper_pid(queue)
    os.kill(keeper, signal.SIGSTOP)
    try:
        queue.restart()
    finally:
        os.kill(keeper, signal.SIGCONT)
    queue.wait()
    assert sorted(map(int, _runs(runs))) == list(range(1, 1001))


def test_what_a_late_keeper_has_begun_is_not_held_and_runs_once(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-1000", gpus=0)
    for number in range(1, 6):
        until(lambda number=number: len(_runs(runs)) > 100 * number, "more runs")  # type: ignore[misc]
        keeper = _keeper_pid(queue)
        os.kill(keeper, signal.SIGSTOP)
        try:
            queue.post("/jobs/hold", ids="all")
        finally:
            os.kill(keeper, signal.SIGCONT)
        queue.post("/jobs/release", ids="all")
    queue.wait()
    assert sorted(map(int, _runs(runs))) == list(range(1, 1001))
    assert queue.counts() == {"succeeded": 1000}


@pytest.mark.parametrize("kills_daemon", [False, True])
def test_of_what_a_killed_keeper_had_only_begun_jobs_are_lost(
    queue: QueueUnderTest, tmp_path: Path, *, kills_daemon: bool
) -> None:
    """All others run once: those in its prefetch queue, and those that were sent to it."""
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-600", vram="8G")
    for number in range(1, 6):
        until(lambda number=number: len(_runs(runs)) > 50 * number, "more runs")  # type: ignore[misc]
        keeper = _keeper_pid(queue)
        if kills_daemon and number % 2:
            queue.kill9()
        with contextlib.suppress(ProcessLookupError):  # it has ended after its daemon
            os.kill(keeper, signal.SIGKILL)
        if kills_daemon and not number % 2:
            queue.kill9()
        if kills_daemon:
            queue.start()
    queue.wait()
    words = _last_words(queue)
    lost = {job_id for (job_id,) in _rows(queue, "SELECT id FROM jobs WHERE state != 'succeeded'")}
    assert {words[f"{job_id}.1"] for job_id in lost} <= {"began"}
    assert len(lost) <= 6 * 5  # as many as fit on two GPUs, each time
    assert len(_runs(runs)) == len(set(_runs(runs)))
    assert set(range(1, 601)) - lost <= set(map(int, _runs(runs)))


def _outlier(folder: Path) -> str:
    """Return a script whose first job runs until it is stopped and `end` is there, and then succeeds. The others write
    their leases to `runs`."""
    stopped = f"until [ -e {folder}/end ]; do sleep 0.02; done; exit 0"
    endless = f"trap '{stopped}' TERM; : > {folder}/ready; while :; do sleep 0.02; done"
    return f'if [ "$GPUYARD_ARRAY_INDEX" = 1 ]; then {endless}; fi; echo "$GPUYARD_LEASE" >> {folder}/runs'


@pytest.mark.parametrize("suspends", [True, False])
def test_no_job_follows_one_that_was_suspended_or_stopped(
    queue: QueueUnderTest, tmp_path: Path, *, suspends: bool
) -> None:
    runs = tmp_path / "runs"
    first = queue.shell(_outlier(tmp_path), array="1-10000", vram="8G")
    until(lambda: (tmp_path / "ready").exists() and len(_runs(runs)) > 50, "the first runs")
    ((lease,),) = _rows(queue, f"SELECT lease_id FROM attempts WHERE job = {first}")
    if suspends:
        queue.post("/jobs/suspend", ids=str(first))
        queue.until_state(first, "suspended")
        _await_more(queue)
    queue.post("/jobs/cancel", ids=str(first))
    queue.until_state(first, "stopping")
    _await_more(queue)
    (tmp_path / "end").touch()
    queue.until_state(first, "cancelled")
    _await_more(queue)
    queue.post("/jobs/cancel", ids="all")
    queue.wait()
    assert lease not in _runs(runs)


def _await_halt(queue: QueueUnderTest) -> None:
    """Wait until nothing runs, although jobs wait. A few may have begun already, but no more follow them."""
    before = _follow_count(queue)
    until(lambda: "running" not in queue.counts(), "the end of what runs")
    assert set(queue.counts()) == {"queued", "succeeded"}
    assert _follow_count(queue) <= before + _BEGUN


def test_jobs_of_a_stopped_tag_do_not_follow_each_other(queue: QueueUnderTest) -> None:
    queue.shell("sleep 0.05", array="1-10000", gpus=0, tag="t")
    _await_more(queue)
    queue.post("/tags/stop", tag="t")
    _await_halt(queue)
    queue.post("/jobs/cancel", ids="all")


def _running_beside(events: list[str]) -> int:
    """Return how many jobs began while another ran."""
    running = [events[: place + 1].count("begins") - events[:place].count("ends") for place in range(len(events))]
    return sum(count > 1 and event == "begins" for count, event in zip(running, events, strict=True))


def test_a_lower_limit_holds_for_jobs_that_follow_each_other(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs, config = tmp_path / "runs", queue.home / "config.toml"
    config.write_text("[queue]\ncpu_jobs = 2\n")
    queue.shell(f"echo begins >> {runs}; sleep 0.05; echo ends >> {runs}", array="1-10000", gpus=0)
    _await_more(queue)
    config.write_text("[queue]\ncpu_jobs = 1\n")
    until(lambda: "at most 1 job " in queue.why(10000), "the new limit")
    before, follow_count = _running_beside(_runs(runs)), _follow_count(queue)
    until(lambda: _follow_count(queue) > follow_count + 40, "jobs that follow each other in the one place")
    assert _running_beside(_runs(runs)) <= before + _BEGUN
    queue.post("/jobs/cancel", ids="all")


def test_no_job_follows_where_a_process_outside_gpuyard_takes_the_memory(queue: QueueUnderTest) -> None:
    queue.shell("sleep 0.05", array="1-10000", vram="8G")
    _await_more(queue)
    with contextlib.closing(SimulatedUse(SimulatedDevices("2x24GB"))) as usage:
        for device_id in ("SIM-0", "SIM-1"):
            usage.allocate(device_id, 20 * 1024)
        until(lambda: "processes outside gpuyard" in queue.why(10000), "a sample that shows the process")
        _await_halt(queue)
    _await_more(queue)
    queue.post("/jobs/cancel", ids="all")


def test_a_job_that_waited_for_one_of_them_goes_before_those_behind_it(queue: QueueUnderTest) -> None:
    first = queue.submit("true", array="1-1000", gpus=0)
    awaited = first + 599
    urgent = queue.submit("true", priority=50, gpus=0, after=str(awaited))
    queue.wait()
    query = f"SELECT count(*) FROM attempts WHERE started_at > (SELECT ended_at FROM jobs WHERE id = {awaited})"
    query += f" AND started_at < (SELECT started_at FROM jobs WHERE id = {urgent})"
    assert _rows(queue, query)[0][0] <= _BEFORE_URGENT
    assert _follow_count(queue) > 100


def test_on_a_drained_gpu_no_job_follows_and_elsewhere_they_do(queue: QueueUnderTest) -> None:
    on_gpus = queue.shell("sleep 0.02", array="1-10000", vram="8G")
    _await_more(queue)
    open_ledger().drain("SIM-1")
    there, elsewhere = (
        f"SELECT max(started_at) FROM attempts WHERE devices {how} '%SIM-1%'" for how in ("LIKE", "NOT LIKE")
    )
    until(lambda: _rows(queue, elsewhere)[0][0] > _rows(queue, there)[0][0] + 0.5, "starts on the other GPU alone")
    last = _rows(queue, there)
    _await_more(queue)
    assert _rows(queue, there) == last
    queue.post("/jobs/cancel", ids=f"{on_gpus}-{on_gpus + 9999}")
    queue.wait()
    queue.submit("true", array="1-10000", gpus=0)
    _await_more(queue)
    open_ledger().undrain("SIM-1")
    queue.post("/jobs/cancel", ids="all")


def test_a_gpu_that_becomes_free_gets_a_job_that_the_keeper_has_for_another(queue: QueueUnderTest) -> None:
    """The keeper has it for the place of a job that runs for longer than those before it."""
    open_ledger().drain("SIM-1")
    first = queue.shell("[ $GPUYARD_ARRAY_INDEX -lt 200 ] || exec sleep 60", array="0-205", vram="20G")
    running = "SELECT id FROM jobs WHERE state = 'running' ORDER BY id"
    until(lambda: _rows(queue, running) == [(first + 200,)], "the first of the long jobs")
    open_ledger().undrain("SIM-1")
    until(lambda: _rows(queue, running) == [(first + 200,), (first + 201,)], "the next one on the other GPU")
    assert _follow_count(queue) > 100
    queue.post("/jobs/cancel", ids="all")
