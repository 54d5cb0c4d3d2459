"""Calls that share the time of a reading, and optional calls."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.errors import ProbeCrashed, ProbeTimeout
from gpuyard.model.machine_snapshot import Device, Reading, Vendor
from gpuyard.probes.run_tool import Deadline, OptionalCall, problem_beside, run_until

Tools = Callable[[str, str], Path]
ANSWER = Reading(devices=(Device(id="a", vendor=Vendor.AMD),))


def failing(*_: object) -> Reading:
    raise ProbeCrashed("tool", "it ended with status 3", hint="try again")


def test_a_tool_is_not_started_without_time_left(tools: Tools, tmp_path: Path) -> None:
    tools("tool", f"open({str(tmp_path / 'started')!r}, 'w')")
    with pytest.raises(ProbeTimeout, match="no time was left for `tool --now`"):
        run_until(["tool", "--now"], Deadline(0))
    assert not (tmp_path / "started").exists()


def test_the_problem_of_an_optional_call_does_not_contain_its_timeout() -> None:
    late = ProbeTimeout("tool", "no answer within 1.3 s", hint="see dmesg")
    problem = problem_beside(late, Vendor.AMD, "`tool list`")
    assert (problem.message, problem.kind, problem.hint) == ("`tool list`: no answer in time", "timeout", "see dmesg")
    stuck = ProbeTimeout("tool", "process 12 of an earlier call hangs and cannot be killed")
    assert problem_beside(stuck, Vendor.AMD).message == stuck.message


def test_an_optional_call_that_fails_leaves_a_problem() -> None:
    names = OptionalCall(Vendor.AMD, "names")
    (problem,) = names.read(failing, Deadline(9)).problems
    assert (problem.source, problem.message) == ("tool", "names: it ended with status 3")
    assert names.read(lambda: ANSWER, Deadline(9)) == ANSWER


def test_an_optional_call_that_hangs_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls, hangs = 100.0, 0, True
    monkeypatch.setattr("gpuyard.probes.run_tool.time.monotonic", lambda: now)

    def call() -> Reading:
        nonlocal calls
        calls += 1
        if hangs:
            raise ProbeTimeout("tool", "no answer within 1.3 s")
        return ANSWER

    users = OptionalCall(Vendor.AMD, "users")
    for now, called in ((100.0, 1), (100.9, 1), (101.0, 2), (102.9, 2), (103.0, 3)):  # noqa: B007 - read by the clock
        assert users.read(call, Deadline(9)).problems[0].message == "users: no answer in time"
        assert calls == called
    hangs, now = False, 107.0
    assert users.read(call, Deadline(9)) == users.read(call, Deadline(9)) == ANSWER
    assert calls == 5
