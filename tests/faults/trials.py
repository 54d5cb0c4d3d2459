"""Trials: find out which test catches a fault, and in which stage.

A fault is tried with its `near` tests first, then with all tests of `make test`, then with all tests of `make
test-full`. A test catches a fault if it fails, and fails again alone: a test that failed by chance does not count.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.faults.fault import Fault
from tests.faults.sandbox import Run, Sandbox

CLUSTERS = "tests/integration/clusters"
TEST_TIMEOUT_S = 60
_FULL = "GPUYARD_FULL"
_PASSED, _FAILED, _INTERRUPTED, _NONE_CHOSEN = 0, 1, 2, 5
_MOST_BY_CHANCE = 3
THE_WHOLE_RUN = "the run as a whole"


class Stage(StrEnum):
    """The stages of a trial, in this order."""

    NEAR = "near"
    TEST = "test"
    FULL = "full"


_RUN_TIMEOUT_S = {Stage.NEAR: 600.0, Stage.TEST: 7200.0, Stage.FULL: 7200.0}
STAGES = tuple(Stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`caught` is the stage in which `test` caught the fault, None if no test did up to the stage `tried`.

    `by_chance` are tests that failed once and passed when they ran again alone.
    """

    id: str
    digest: str
    tried: Stage
    caught: Stage | None = None
    test: str | None = None
    seconds: float = 0.0
    by_chance: tuple[str, ...] = ()


class BrokenRun(Exception):
    """pytest itself failed, so the run gives no result about a fault."""


class Trials:
    """`workers` is the number of processes for large runs; with 0, tests run in one process."""

    def __init__(self, sandbox: Sandbox, workers: int) -> None:
        self._sandbox = sandbox
        self._spread = ("--numprocesses", str(workers), "--dist", "worksteal") if workers else ()

    def check(self, faults: Sequence[Fault]) -> list[str]:
        """Return the near tests that fail without any fault."""
        near = {test for fault in faults for test in fault.near}
        return self._failures(Stage.NEAR, *self._spread, *sorted(near))

    def judge(self, fault: Fault, up_to: Stage, before: Result | None = None) -> Result:
        """Try all stages up to `up_to`, except those that `before` covers."""
        began = time.monotonic()
        by_chance = [] if before is None else list(before.by_chance)
        first = 0 if before is None else STAGES.index(before.tried) + 1
        stage, test = up_to, None
        with self._sandbox.planted(fault):
            for stage in STAGES[first : STAGES.index(up_to) + 1]:
                test = self._catch(fault, stage, by_chance)
                if test is not None:
                    break
        return Result(
            id=fault.id,
            digest=fault.digest,
            tried=stage,
            caught=None if test is None else stage,
            test=test,
            seconds=round((0.0 if before is None else before.seconds) + time.monotonic() - began, 1),
            by_chance=tuple(by_chance),
        )

    def _catch(self, fault: Fault, stage: Stage, by_chance: list[str]) -> str | None:
        for chosen in self._runs(fault, stage):
            for _ in range(_MOST_BY_CHANCE):
                others = (f"--deselect={test}" for test in by_chance)
                failed = self._failures(stage, "--exitfirst", *others, *chosen)
                if not failed:
                    break
                if failed[0] == THE_WHOLE_RUN or self._failures(stage, failed[0]):
                    return failed[0]
                by_chance.append(failed[0])
        return None

    def _runs(self, fault: Fault, stage: Stage) -> Iterator[Sequence[str]]:
        """Yield the arguments of each call of pytest. Tests of one cluster run in one process."""
        if stage is Stage.NEAR:
            yield fault.near
            return
        yield (*self._spread, f"--ignore={CLUSTERS}", "tests")
        yield (f"{CLUSTERS}/slurm",)
        yield (f"{CLUSTERS}/ray",)

    def _failures(self, stage: Stage, *chosen: str) -> list[str]:
        """Return the ids of failing tests in order of failure. A run that does not end in time fails as a whole."""
        is_full = stage is Stage.FULL
        which = () if is_full else ("-m", "not full")
        run = self._sandbox.pytest(
            *("-q", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", *which, *chosen),
            timeout_s=_RUN_TIMEOUT_S[stage],
            environment=_environment(is_full=is_full),
        )
        return failures_of(run)


def _environment(*, is_full: bool) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name != _FULL}
    return {**ours, _FULL: "1"} if is_full else ours


def failures_of(run: Run) -> list[str]:
    if run.status in (_PASSED, _NONE_CHOSEN):
        return []
    if run.status not in (_FAILED, _INTERRUPTED, None):
        raise BrokenRun(f"pytest ended with status {run.status}:\n{run.output[-3000:]}")
    return run.failed or [THE_WHOLE_RUN]
