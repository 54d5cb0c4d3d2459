"""The checks of memory_invariants.py fail for daemons that break a rule of memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model import retry
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.model.lifecycle import JobEvent
from gpuyard.policy import numbers, sizing
from gpuyard.queue import suspend_jobs
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions
from tests.simulation.test_scenarios import failed_checks


def _forget_to_request_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SuspendControl.__init__

    def begin(self: SuspendControl, *given: Any) -> None:
        real(self, *given)
        self._requested.update((job_id, state) for job_id in range(50) for state in suspend_jobs._MOVING)

    monkeypatch.setattr(SuspendControl, "__init__", begin)
    monkeypatch.setattr(SuspendControl, "request", _request_without_forgetting)


def _request_without_forgetting(self: SuspendControl) -> None:
    for job_id, live in self._transitions.live.items():
        key = (job_id, live.job.state)
        if live.job.state in suspend_jobs._MOVING and key not in self._requested:
            self._suspender.suspend(live.attempt)


def _leave_leases_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuspendControl, "release_leases", lambda self, leases, now: [])


def _resume_without_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Need(memory=FixedMemory(0.0))
    monkeypatch.setattr(
        suspend_jobs,
        "resume_need",
        lambda live, _: replace(free, devices=len(live.attempt.devices), only=live.attempt.devices),
    )


def _count_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JobTransitions.move_suspension

    def move(self: JobTransitions, job_id: int, event: JobEvent, now: float, text: str | None = None) -> None:
        stop_at = self.live[job_id].attempt.stop_at
        real(self, job_id, event, now, text)
        live = self.live[job_id]
        self.keep_attempt(live, replace(live.attempt, stop_at=stop_at))

    monkeypatch.setattr(JobTransitions, "move_suspension", move)


def _count_shortages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = retry.judge_shortage
    monkeypatch.setattr(retry, "judge_shortage", lambda *given: replace(real(*given), counts=True))


def _rerun_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MOST_RERUNS", 6)
    monkeypatch.setattr(sizing, "_GROWTH", (1.25, 1.6, 1.6, 1.6, 1.6))


def _preempt_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SuspendControl,
        "with_costs",
        lambda self, running, *given: [replace(run, preempt_cost_s=1.0, priority=-99) for run in running],
    )


@pytest.mark.parametrize(
    ("sabotage", "caught"),
    [
        (_forget_to_request_after_a_crash, "and no helper works on it"),
        (_leave_leases_as_they_are, "its lease has shares"),
        (_resume_without_free_memory, "and holds more"),
        (_count_suspended_time, "below its limit of"),
        (_count_shortages, "has more failures than attempts"),
        (_rerun_too_often, "was run again too often|out of memory 5 times"),
        (_preempt_any_job, "must never be preempted|no higher priority"),
    ],
)
def test_the_checks_catch_a_daemon_that_breaks_a_rule_of_memory(
    sabotage: Callable[[pytest.MonkeyPatch], None], caught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    assert any(re.search(caught, message) for message in failed_checks(200))
