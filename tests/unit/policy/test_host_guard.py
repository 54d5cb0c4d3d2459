"""The host guard: when RAM is about to run out, which job makes way, and how often RAM is read. The floor is 2 GB."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job import Growth
from gpuyard.model.lease import HostShare, Need
from gpuyard.model.machine_snapshot import Host
from gpuyard.policy.foreign_load import SteadyGate
from gpuyard.policy.host_room import HostLimits, HostState
from gpuyard.policy.memory_guards import (
    HostAlarm,
    HostJob,
    HostProgram,
    MemoryClimb,
    find_host_alarm,
    grown_ram,
    host_alarm_text,
    host_closed_reason,
    judge_host,
    must_kill,
    notable_mb,
    ram_to_restart,
    watch_every_s,
)

GB = 1024.0
FLOOR = 2 * GB
STEADY = MemoryClimb()


def falling(mb_s: float, available_mb: float = 10 * GB) -> MemoryClimb:
    """Return the climb of RAM that is not available, read ten times in a second."""
    climb = MemoryClimb()
    for tick in range(11):
        climb = climb.add(tick / 10, mb_s * tick / 10 - available_mb)
    return climb


def job(job_id: int, held_gb: float = 1.0, **more: Any) -> HostJob:
    return HostJob(job_id=job_id, since=100.0 + job_id, held_mb=held_gb * GB, **more)


def victim(available_gb: float, *jobs: HostJob, fall: MemoryClimb = STEADY) -> int | None:
    alarm = find_host_alarm(available_gb * GB, FLOOR, fall, jobs)
    return None if alarm is None else alarm.victim


@pytest.mark.parametrize(
    ("available_gb", "mb_s", "is_short"),
    [
        (8.0, 0.0, False),
        (1.9, 0.0, False),  # low and steady costs no job its work
        (1.9, 200.0, True),  # gone in 10 s
        (1.9, 50.0, False),  # gone in 39 s
        (0.9, 0.0, True),
        (2.5, 3000.0, True),  # above the floor, and gone within a second
        (2.5, 1000.0, False),
    ],
)
def test_a_job_makes_way_when_ram_is_about_to_run_out(available_gb: float, mb_s: float, is_short: bool) -> None:
    found = find_host_alarm(available_gb * GB, FLOOR, falling(mb_s), [job(1), job(2)])
    assert (found is not None) is is_short


def test_who_makes_way() -> None:
    assert victim(1.9, job(1, rate_mb_s=60.0), job(2)) == 2
    assert victim(1.9, job(1), job(2)) is None, "below the floor a job makes way while one of them grows"
    assert victim(2.1, job(1, rate_mb_s=60.0), job(2)) is None
    assert victim(0.4, job(1), job(2), job(3, held_gb=1.5, is_leaving=True, rate_mb_s=60.0)) is None
    assert victim(0.9, job(1), job(2), job(3)) == 3
    assert victim(0.9, job(1)) is None, "the youngest makes way and never the first"
    assert victim(0.9, job(1), job(2, held_gb=0.05)) is None, "the second frees too little"
    assert victim(0.9, job(1, held_gb=0.05), job(2)) is None, "of those with notable RAM the second was there first"

    def chosen(*jobs: HostJob, since: float, held_gb: float = 1.0) -> int | None:
        beside = [HostProgram(since=since, held_mb=held_gb * GB)]
        alarm = find_host_alarm(0.9 * GB, FLOOR, STEADY, jobs, beside)
        return None if alarm is None else alarm.victim

    assert chosen(job(1), since=50.0) == 1
    assert chosen(job(1), job(2), since=50.0) == 2, "a single job makes way for an older program beside the queue"
    assert chosen(job(1), since=150.0) is None, "the job was there first"
    assert chosen(job(1), since=50.0, held_gb=0.05) is None, "a program without notable RAM is in no danger"
    assert chosen(job(1, may_be_stopped=False), since=50.0) is None


def test_who_is_spared() -> None:
    assert victim(0.9, job(1), job(2), job(3, declared_mb=1.5 * GB)) == 2
    assert victim(0.9, job(1), job(2), job(3, declared_mb=0.5 * GB)) == 3, "it holds more than it declared"
    assert victim(0.9, job(1), job(2, declared_mb=2 * GB), job(3, declared_mb=2 * GB)) == 3
    assert victim(0.9, job(1), job(2), job(3, may_be_stopped=False)) == 2
    assert victim(0.9, job(1), job(2), job(3, times=2)) == 3
    assert victim(0.9, job(1), job(2), job(3, times=3)) == 2
    assert victim(0.9, job(1), job(2, times=3)) is None, "a job that may not be stopped or made way often is spared"
    # RAM of a job that leaves counts as available.
    assert victim(0.9, job(1), job(2), job(3, held_gb=1.5, is_leaving=True)) is None
    assert victim(0.9, job(1), job(2), job(3, held_gb=0.05, is_leaving=True)) == 2


@given(
    jobs=st.lists(
        st.builds(
            HostJob,
            job_id=st.integers(1, 1000),
            since=st.floats(0.0, 1000.0),
            held_mb=st.floats(0.0, 4096.0),
            declared_mb=st.none() | st.floats(1.0, 4096.0),
            is_leaving=st.booleans(),
            times=st.integers(0, 4),
            may_be_stopped=st.booleans(),
        ),
        max_size=8,
        unique_by=lambda each: each.job_id,
    ),
    available_mb=st.floats(0.0, 8192.0),
)
def test_the_victim_is_never_the_first_and_always_helps(jobs: list[HostJob], available_mb: float) -> None:
    alarm = find_host_alarm(available_mb, FLOOR, STEADY, jobs)
    if alarm is None or alarm.victim is None:
        return
    chosen = next(each for each in jobs if each.job_id == alarm.victim)
    others = [each for each in jobs if each is not chosen and not each.is_leaving]
    older = [each for each in others if (each.since, each.job_id) < (chosen.since, chosen.job_id)]
    assert any(each.held_mb >= notable_mb(FLOOR) for each in older)
    assert chosen.held_mb >= notable_mb(FLOOR)
    assert chosen.may_be_stopped
    assert not chosen.is_leaving
    assert chosen.times < 3


def test_near_the_floor_ram_is_read_often_and_jobs_are_killed_early() -> None:
    assert not must_kill(0.9 * GB, FLOOR, STEADY)
    assert must_kill(0.4 * GB, FLOOR, STEADY), "a stopping job is killed early only when nearly nothing is left"
    assert must_kill(0.9 * GB, FLOOR, falling(2000.0))
    assert watch_every_s(20 * GB, FLOOR) == 1.0
    assert watch_every_s(6 * GB, FLOOR) == pytest.approx(0.5)
    assert watch_every_s(2.5 * GB, FLOOR) == 0.1
    assert watch_every_s(1 * GB, FLOOR) == 0.1, "RAM is read more often the nearer the floor"


@given(available_mb=st.floats(0.0, 1e6), rate=st.floats(0.0, 4096.0))
def test_a_fast_climb_is_seen_before_it_passes_the_floor(available_mb: float, rate: float) -> None:
    every_s = watch_every_s(available_mb, FLOOR)
    lost = rate * every_s
    assert available_mb - lost >= min(available_mb, FLOOR) - 4096.0 * 0.1 - 1e-6


def test_the_machine_opens_again_when_the_floor_has_been_free_for_some_seconds() -> None:
    gate = judge_host(SteadyGate(), 3 * GB, FLOOR, 10.0, has_alarm=False)
    assert not gate.is_closed
    gate = judge_host(gate, 1.9 * GB, FLOOR, 11.0, has_alarm=False)
    assert gate.is_closed
    gate = judge_host(gate, 3 * GB, FLOOR, 12.0, has_alarm=False)
    assert judge_host(gate, 3 * GB, FLOOR, 16.0, has_alarm=False).is_closed
    assert not judge_host(gate, 3 * GB, FLOOR, 17.0, has_alarm=False).is_closed
    assert judge_host(SteadyGate(), 3 * GB, FLOOR, 18.0, has_alarm=True).is_closed


def test_the_texts_have_the_figures() -> None:
    assert host_closed_reason(1.5 * GB, FLOOR).text == "1.5 GB of RAM available, and 2 GB stay free"
    alarm = HostAlarm(available_mb=1.5 * GB, floor_mb=FLOOR, rate_mb_s=400.0, victim=3)
    text = host_alarm_text(alarm, job(3, held_gb=3.0), 3.75 * GB)
    assert text == (
        "the machine had 1.5 GB of RAM left of the 2 GB to keep; it was the youngest job with notable RAM, and held "
        "3 GB; it starts again when 5.8 GB are available"
    )
    assert "more than its 1 GB (--ram)" in host_alarm_text(alarm, job(3, held_gb=3.0, declared_mb=GB), 3.75 * GB)


def test_a_stopped_job_starts_when_what_it_held_fits_above_the_floor() -> None:
    assert ram_to_restart(4 * GB, FLOOR, 24 * GB, 2 * GB) == 5 * GB
    assert ram_to_restart(20 * GB, FLOOR, 24 * GB, 2 * GB) == 0.9 * 20 * GB, "it has to fit without jobs"
    assert ram_to_restart(0.25 * GB, 20 * GB, 24 * GB, 2 * GB) == 0.3125 * GB, "also where the floor is high"
    assert ram_to_restart(4 * GB, FLOOR, None, None) == 5 * GB
    assert grown_ram(Growth(count=1), 7 * GB) == Growth(count=1, ram_mb=7 * GB)
    assert grown_ram(Growth(ram_mb=9 * GB), 7 * GB) == Growth(ram_mb=9 * GB)
    # A stopped job starts when it fits above the floor which is counted once.
    wanted_mb = ram_to_restart(4 * GB, FLOOR, 24 * GB, 2 * GB)
    need = Need(devices=0, host=HostShare(ram_mb=wanted_mb))
    for missing_mb, is_refused in ((1.0, True), (0.0, False)):
        host = Host(memory_total_mb=24 * GB, memory_available_mb=FLOOR + wanted_mb - missing_mb)
        assert (HostState(host, HostLimits(), ()).lacks(need) is not None) is is_refused
