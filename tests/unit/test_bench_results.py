"""What `python -m bench.gpu_mix` concludes from outputs, and a tiny run of the residency benchmark."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_mix.card import CardSample
from bench.gpu_mix.mix import PROGRAMS, Run, mix
from bench.gpu_mix.results import AttemptTimes, Phase, RunResult, busy_s, last_json, queue_result, summarize

ROOT = Path(__file__).parents[2]


def test_a_tiny_run_compares_its_parts(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "bench.residency_idle", str(tmp_path), "--tiny", "--parts", "transfers,whole,before",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| transfers only", "| whole run", "| whole run as before"]
    assert "failed" not in result.stdout


START = "2026-11-17T19:00:00.000Z"
END = "2026-11-17T19:00:10.500Z"


def shown(*outcomes: str) -> dict[str, Any]:
    attempt = {
        "started_at": START, "ended_at": END, "status": 0, "reason": None, "reserved_mb": 2000.0,
        "peaks_mb": {"GPU-0": 1500.0}, "suspended_s": 0.0,
    }  # fmt: skip
    return {"state": outcomes[-1], "attempts": [{**attempt, "outcome": outcome} for outcome in outcomes]}


def phase(name: str, wall_s: float, *runs: RunResult, is_complete: bool = True) -> Phase:
    return Phase(name=name, wall_s=wall_s, is_complete=is_complete, runs=list(runs), samples=[])


def result(name: str, sha256: str, state: str = "succeeded") -> RunResult:
    times = AttemptTimes(started_at=0.0, ended_at=1.0, outcome=state, status=0)
    return RunResult(name=name, state=state, printed={"sha256": sha256}, attempts=[times])


@pytest.mark.parametrize(
    ("output", "sha256"),
    [
        ('step 1\n{"sha256": "a"}\n', "a"),
        ('{"sha256": "a"}\na late warning\n', "a"),
        ('{"sha256": "a"}\n{"sha256": "b"}\n', "b"),
    ],
)
def test_the_last_result_in_the_output_counts(output: str, sha256: str) -> None:
    assert last_json(output) == {"sha256": sha256}


@pytest.mark.parametrize("output", ["", "Killed\n", '{"loss": 1}\n', '{"sha256": "a'])
def test_an_output_without_a_result_has_none(output: str) -> None:
    assert last_json(output) is None


def test_phases_are_summed_up_and_compared() -> None:
    events = [{"at": START, "kind": kind, "text": None} for kind in ("started", "suspending", "suspended", "resumed")]
    run = queue_result(Run("vit", 0), shown("out-of-memory", "preempted", "succeeded"), events, '{"sha256": "a"}')
    summary = summarize(phase("first", 10.0, run), None)
    assert (summary.attempts, summary.out_of_memory, summary.requeues, summary.suspensions) == (3, 1, 1, 1)
    assert summary.disturbed == 3, "each disturbance of a job is counted"
    assert (run.attempts[0].ended_at or 0) - (run.attempts[0].started_at or 0) == 10.5
    alone = phase("alone", 90.0, result("vit-0", "a"), result("t5-0", "b"))
    summary = summarize(phase("first", 30.0, result("vit-0", "a"), result("t5-0", "other")), alone)
    assert (summary.times_faster, summary.same_results) == (3.0, 1)
    assert summary.other_results == ["t5-0"], "a phase is compared with the same runs alone"
    alone = phase("alone", 90.0, result("vit-0", "a"))
    ended = summarize(phase("first", 30.0, result("vit-0", "", "cancelled"), is_complete=False), alone)
    fewer = summarize(phase("first", 30.0), alone)
    assert (ended.times_faster, fewer.times_faster) == (None, None)
    assert ended.not_succeeded == ["vit-0: cancelled\n"], "a phase that is not complete has no speed"
    samples = [CardSample(float(at), 0.0, 50.0) for at in range(11)]
    assert busy_s(samples) == 5.0
    assert busy_s(samples, 2.0, 4.0) == 1.0
    assert busy_s([]) is None, "the time that the card computed goes by its utilization"
    assert len(mix()) >= 14
    assert len({run.program for run in mix()}) >= 7
    assert len({each.framework for each in PROGRAMS}) >= 4
    assert len({run.name for run in mix()}) == len(mix()), "the mix has the programs that it promises"
