"""Slices of short jobs, which the keeper runs one after the other: each runs once, and every request wins over what has
not begun."""

import contextlib
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpuyard.engines.common.spawn_program import BEGAN
from gpuyard.engines.local.keeper_connection import JournalEntry, parse_journal
from gpuyard.ledger.ledger import open_ledger
from tests.integration.queue_fixture import QueueUnderTest, until

_MANY = 300
# What a request or an urgent job waits for at most, on a machine that is busy.
_SOON_S = 1.5


def _turns(queue: QueueUnderTest) -> int:
    """Return how many attempts took their turn in a slice."""
    return sum(entry.word == BEGAN and entry.at is not None for entry in _entries(queue))


def _entries(queue: QueueUnderTest) -> list[JournalEntry]:
    return parse_journal((queue.home / "journal").read_bytes())[0]


def _last_words(queue: QueueUnderTest) -> dict[str, str]:
    """Return the last word of the journal on each attempt."""
    return {entry.key: entry.word for entry in _entries(queue)}


def _await_more(queue: QueueUnderTest) -> None:
    """Wait until some more have taken their turns."""
    before = _turns(queue)
    until(lambda: _turns(queue) > before + 20, "jobs that take their turns")


def _runs(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def _rows(queue: QueueUnderTest, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database:
        return database.execute(query).fetchall()


def _keeper_pid(queue: QueueUnderTest) -> int:
    until(lambda: any((queue.home / "keepers").glob("*.sock")), "a keeper")
    return next(int(path.stem) for path in (queue.home / "keepers").glob("*.sock"))


def test_short_jobs_run_in_slices_and_each_runs_once(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array=f"1-{_MANY}")
    queue.wait()
    assert sorted(map(int, _runs(runs))) == list(range(1, _MANY + 1))
    assert queue.counts() == {"succeeded": _MANY}
    assert _turns(queue) > _MANY // 4
    starts = [at for (at,) in _rows(queue, "SELECT started_at FROM jobs ORDER BY id")]
    # Two places share the jobs: one may be ahead of the other by a slice.
    assert all(later >= earlier - 1.0 for earlier, later in zip(starts, starts[2:], strict=False))


def test_the_jobs_of_a_slice_have_one_lease_and_its_device(queue: QueueUnderTest) -> None:
    queue.shell(
        'echo "$GPUYARD_JOB_ID $GPUYARD_ATTEMPT $GPUYARD_ARRAY_INDEX $GPUYARD_LEASE $CUDA_VISIBLE_DEVICES $NAME"',
        array=f"1-{_MANY}",
        environment={"PATH": os.environ["PATH"], "NAME": "value"},
    )
    queue.wait()
    assert _turns(queue)
    devices: dict[str, set[str]] = {}
    for job_id, lease, device in _rows(queue, "SELECT job, lease_id, devices FROM attempts"):
        words = queue.log_of(job_id).split()
        assert words[:4] == [str(job_id), "1", str(job_id), lease]
        assert words[5:] == ["value"]
        devices.setdefault(device, set()).add(words[4])
    assert sorted(map(len, devices.values())) == [1, 1]


def test_a_failed_job_does_not_stop_the_rest_of_its_slice(queue: QueueUnderTest) -> None:
    queue.shell("exit $((GPUYARD_ARRAY_INDEX % 50 == 0))", array=f"1-{_MANY}", gpus=0)
    queue.wait()
    assert queue.counts() == {"succeeded": _MANY - _MANY // 50, "failed": _MANY // 50}
    failed = [job_id for (job_id,) in _rows(queue, "SELECT id FROM jobs WHERE state = 'failed'")]
    assert failed == list(range(50, _MANY + 1, 50))
    assert _turns(queue) > _MANY // 2


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


def test_an_urgent_job_waits_for_a_second_at_most(queue: QueueUnderTest, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}; sleep 0.02", array="1-1000")
    until(lambda: len(_runs(runs)) > 50, "the first runs")
    urgent = queue.shell("true", priority=50)
    queue.until_state(urgent, "succeeded")
    ((waited_s,),) = _rows(queue, f"SELECT started_at - submitted_at FROM jobs WHERE id = {urgent}")
    assert waited_s < _SOON_S
    queue.post("/jobs/cancel", ids="all")


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
    assert _turns(queue)


def test_a_change_waits_for_a_slow_keeper_and_others_do_not(queue: QueueUnderTest, tmp_path: Path) -> None:
    """The keeper is stopped within a slice."""
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
    """All others run once, also the rest of its slices."""
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


def test_what_a_job_of_a_slice_left_behind_is_stopped_before_its_next_attempt(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    """The job kills its keeper before the daemon has recorded that it began."""
    left, beside = tmp_path / "left", tmp_path / "beside"
    kills = f"echo $$ > {left}; kill -9 $PPID; exec sleep 77"
    is_there = f"grep -q . /proc/$(cat {left})/cmdline"  # not so for a zombie
    queue.shell(
        f"if [ $GPUYARD_ARRAY_INDEX.$GPUYARD_ATTEMPT = 150.1 ]; then {kills}; fi\n"
        f"if [ $GPUYARD_ARRAY_INDEX = 150 ] && {is_there}; then : > {beside}; fi",
        array="1-200",
        gpus="0",
        retries="2",
    )
    queue.wait()
    assert left.exists()
    assert not beside.exists()
    assert queue.counts() == {"succeeded": 200}


def _outlier(folder: Path) -> str:
    """Return a script whose first job runs until it is stopped and `end` is there, and then succeeds. The others write
    their leases to `runs`."""
    stopped = f"until [ -e {folder}/end ]; do sleep 0.02; done; exit 0"
    endless = f"trap '{stopped}' TERM; : > {folder}/ready; while :; do sleep 0.02; done"
    return f'if [ "$GPUYARD_ARRAY_INDEX" = 1 ]; then {endless}; fi; echo "$GPUYARD_LEASE" >> {folder}/runs'


@pytest.mark.parametrize("suspends", [True, False])
def test_no_job_takes_its_turn_after_one_that_was_suspended_or_stopped(
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
    """Wait until nothing runs, although jobs wait."""
    until(lambda: "running" not in queue.counts(), "the end of what runs")
    assert set(queue.counts()) == {"queued", "succeeded"}


def test_no_job_of_a_stopped_tag_takes_its_turn(queue: QueueUnderTest) -> None:
    queue.shell("sleep 0.05", array="1-10000", gpus=0, tag="t")
    _await_more(queue)
    queue.post("/tags/stop", tag="t")
    _await_halt(queue)
    queue.post("/jobs/cancel", ids="all")


def test_on_a_drained_gpu_no_slice_begins_and_elsewhere_they_do(queue: QueueUnderTest) -> None:
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


def test_the_rest_of_a_slice_runs_elsewhere_when_one_of_it_takes_long(queue: QueueUnderTest) -> None:
    first = queue.shell("[ $GPUYARD_ARRAY_INDEX -ne 100 ] || exec sleep 60", array="0-299", vram="20G")
    until(lambda: queue.counts() == {"running": 1, "succeeded": 299}, "all others")
    assert queue.job(first + 100)["state"] == "running"
    queue.post("/jobs/cancel", ids="all")
