"""The card's idle time, and its causes, as the residency benchmark's timeline counts them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.disk_bound import idle_s, work
from bench.gpu_mix.card import CardSample
from bench.gpu_mix.mix import PROGRAMS, Run, mix
from bench.gpu_mix.results import AttemptTimes, Phase, RunResult, busy_s, last_json, queue_result, summarize
from bench.intervals import Span, ThreadStates, by_size, gaps, total, union
from bench.lock_probe import IssueTimes, percentiles_us
from bench.residency_data import Shape
from gpuyard.recipes.render.planning.assets_and_units import Asset, Kind, Label, Unit


def test_intervals_unite_and_leave_gaps() -> None:
    # The union covers overlapping intervals once.
    assert union([(3, 4), (0, 2), (1, 2.5), (2.5, 2.75)]) == [(0, 2.75), (3, 4)]
    assert gaps([(1, 2), (3, 4)], (0, 5)) == [(0, 1), (2, 3), (4, 5)]
    assert gaps([(-1, 2), (3, 9)], (0, 5)) == [(2, 3)]
    assert gaps([], (0, 5)) == [(0, 5)], "the gaps are what the union leaves of the window"
    # Gaps are counted by their length.
    assert by_size([(0, 1e-5), (1, 1.001), (2, 2.001), (3, 4)]) == {
        "under 20 us": 0.0,
        "under 2 ms": pytest.approx(0.002),
        "longer": 1.0,
    }


def test_states_of_threads_are_causes_of_idle_time() -> None:
    # The innermost span is the state of a thread.
    states = ThreadStates([Span("w", "read back", 2, 3), Span("w", "render", 1, 4), Span("w", "wait", 4, 6)])

    assert [states.at("w", when) for when in (0.5, 1.5, 2.5, 3.5, 5, 7)] == [
        "idle", "render", "read back", "render", "wait", "idle",
    ]  # fmt: skip
    assert states.seconds("w", (0, 8)) == {"idle": 3.0, "render": 2.0, "read back": 1.0, "wait": 2.0}
    spans = [Span("w0", "render", 0, 10), Span("w1", "wait for disk", 0, 5), Span("w1", "render", 5, 10)]
    idle = [(1.0, 4.0), (6.0, 7.0), (8.0, 9.0)]

    causes = ThreadStates(spans).causes(idle, ["w0", "w1"])

    assert causes == [("1 render, 1 wait for disk", 3.0), ("2 render", 2.0)]
    assert total(idle) == 5.0, "idle time is charged to what the workers did"


ASSETS = {
    key: Asset(key=key, kind=kind, nbytes=100)
    for key, kind in (("s1", Kind.SCENE), ("s2", Kind.SCENE), ("a", Kind.ACTOR))
}


def units(*scenes: str) -> list[Unit]:
    return [Unit(scene=scene, actor="a", labels=(Label(name="one", value=None),)) for scene in scenes]


def test_the_disk_bound_counts_waits_and_reads() -> None:
    # The card waits while the next asset is read.
    assert idle_s(units("s1", "s2"), ASSETS, bytes_per_s=100.0, label_s=0.4) == pytest.approx(0.6)
    # The card never waits for what was read.
    assert idle_s(units("s1", "s1", "s1"), ASSETS, bytes_per_s=100.0, label_s=0.4) == 0.0
    assert idle_s(units("s1", "s2"), ASSETS, bytes_per_s=100.0, label_s=1.0) == 0.0
    # The benchmark has all labels and reads each asset once.
    shape = Shape()
    ordered, assets = work(shape)
    assert sum(len(unit.labels) for unit in ordered) == shape.labels
    assert sum(asset.nbytes for asset in assets.values()) == shape.nbytes


ROOT = Path(__file__).parents[2]


def test_percentiles_and_issue_times() -> None:
    assert percentiles_us([1e-6 * n for n in range(101)]) == {"mean": 50.0, "median": 50.0, "90%": 90.0, "99%": 99.0}
    assert percentiles_us([]) == {}, "percentiles are in microseconds"
    owner = SimpleNamespace(draw=lambda number: number + 1)
    times = IssueTimes()
    times.wrap(owner, "draw")
    assert owner.draw(1) == 2
    assert set(times.take()) == {"wall_ms", "cpu_ms", "waiting_ms"}
    assert times.take() == {}, "issue times are means since the last call"


def test_a_tiny_run_compares_its_parts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.residency_idle",
        str(tmp_path),
        "--tiny",
        "--parts",
        "transfers,whole,before",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| transfers only", "| whole run", "| whole run as before"]
    assert "failed" not in result.stdout


START = "2026-11-17T19:00:00.000Z"
END = "2026-11-17T19:00:10.500Z"


def shown(*outcomes: str) -> dict[str, Any]:
    attempt = {
        "started_at": START,
        "ended_at": END,
        "status": 0,
        "reason": None,
        "reserved_mb": 2000.0,
        "peaks_mb": {"GPU-0": 1500.0},
        "suspended_s": 0.0,
    }
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
    assert summary.times_faster == 3.0
    assert summary.same_results == 1
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
