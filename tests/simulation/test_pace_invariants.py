"""The checks of pace_invariants.py fail for daemons that break the pace of a batch."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from gpuyard.policy import batch_pacing, rules
from gpuyard.policy import plan as planner
from gpuyard.policy.batch_pacing import ExpectedUse
from gpuyard.policy.foreign_load import SteadyGate, smooth
from gpuyard.policy.rules import Stagger
from gpuyard.queue import decide_starts as planner_input
from gpuyard.queue.batch_gates import BatchGates
from gpuyard.store.job_store import JobStore
from tests.simulation.test_batches import simulate_batches

# Few schedules show some of the faults: these two do, and are tried first.
_TELLING = (122, 196)


def _forget_the_last_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobStore, "last_start_in_batch", lambda self, group: None)


def _record_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchGates, "record", lambda self, plan, sample, now: None)


def _start_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stagger, "refuse", lambda *_: None)


def _leave_all_gates_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_pacing, "judge_steadily", lambda *given: SteadyGate())


def _use_only_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_pacing, "smooth", lambda before, reading, now, _: smooth(before, reading, now, 0.0))


def _charge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_pacing, "_charged_mb", lambda *_: 0.0)


def _count_only_measured_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchGates, "_expected_use", lambda self, *given: ExpectedUse())


def _ignore_gates_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "device_refusal", lambda *_: None)


def _ignore_running_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_input, "running_jobs", lambda _: ())


def _let_all_wait_for_a_gated_job(monkeypatch: pytest.MonkeyPatch) -> None:
    real = planner._Planner._consider

    def consider(self: planner._Planner, lane: Any, candidate: Any) -> None:
        real(self, lane, candidate)
        job = self._waiting.get(lane.id)
        if lane.pace is not None and lane.need.devices and job is not None and self._backfill.head is None:
            self._backfill.head = self._backfill.first_head = job

    monkeypatch.setattr(planner._Planner, "_consider", consider)


@pytest.mark.parametrize(
    ("sabotage", "caught"),
    [
        (_forget_the_last_start, "s after another of its batch|older than the last launch"),
        (_record_no_launch, "s after another of its batch|older than the last launch"),
        (_start_several_at_once, "s after another of its batch|older than the last launch|began after one sample"),
        (_leave_all_gates_open, "began while"),
        (_use_only_the_last_reading, "began while"),
        (_charge_nothing, "charged"),
        (_count_only_measured_use, "MB of RAM were left"),
        (_ignore_gates_of_devices, "charged|began while SIM-"),
        (_ignore_running_jobs, "more jobs of an array than its limit|more jobs of a tag|more jobs without devices"),
        (_let_all_wait_for_a_gated_job, "waits at its gate"),
    ],
)
def test_the_checks_catch_a_daemon_that_breaks_the_pace_of_a_batch(
    sabotage: Callable[[pytest.MonkeyPatch], None], caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError, match=caught):
        _simulate_many()


def _simulate_many() -> None:
    for seed in (*_TELLING, *range(100)):
        random = Random(seed)
        simulate_batches(seed, frozenset(random.randrange(4000) for _ in range(10)))
