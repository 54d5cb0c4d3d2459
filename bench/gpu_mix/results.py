"""What a phase has shown: each run's end, time and results, taken from its output and from `gpuyard show --json` and
`gpuyard history --json`. Pure."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from bench.gpu_mix.card import CardSample
from bench.gpu_mix.mix import PROGRAMS, Run

_DETERMINISTIC = {each.name for each in PROGRAMS if each.is_deterministic}


class AttemptTimes(Struct, frozen=True, kw_only=True):
    """One start of a program. Times are in seconds since the epoch."""

    started_at: float | None
    ended_at: float | None
    outcome: str | None
    status: int | None
    reason: str | None = None
    reserved_mb: float | None = None
    peak_mb: float | None = None
    suspended_s: float = 0.0


class RunResult(Struct, frozen=True, kw_only=True):
    """`printed` is the last line of the program, `None` if it did not get that far. `said` is the end of its output if
    it failed."""

    name: str
    state: str
    printed: dict[str, Any] | None
    attempts: list[AttemptTimes]
    suspensions: int = 0
    events: list[str] = []
    said: str = ""

    @property
    def sha256(self) -> str | None:
        return None if self.printed is None else self.printed.get("sha256")


class Phase(Struct, frozen=True, kw_only=True):
    name: str
    wall_s: float
    is_complete: bool  # false if the time limit ended it
    runs: list[RunResult]
    samples: list[CardSample]


class Summary(Struct, frozen=True, kw_only=True):
    """`disturbed` is the number of starts that were suspended, or that a run needed beyond its first."""

    phase: str
    wall_s: float
    times_faster: float | None
    runs: int
    succeeded: int
    attempts: int
    out_of_memory: int
    suspensions: int
    requeues: int
    disturbed: int
    same_results: int
    other_results: list[str]
    peak_used_mb: float | None
    busy_s: float | None
    not_succeeded: list[str]


def last_json(output: str) -> dict[str, Any] | None:
    """Return the last line of a program's output that is a JSON object with a hash, or None."""
    for line in reversed(output.splitlines()):
        if line.startswith("{") and '"sha256"' in line:
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                return None
            return found
    return None


def last_lines(output: str, count: int = 12) -> str:
    return "\n".join(output.splitlines()[-count:])


def queue_result(run: Run, shown: Mapping[str, Any], events: Sequence[Mapping[str, Any]], output: str) -> RunResult:
    """Return the result of a job, by what `show` and `history` print and the output of its last attempt."""
    return RunResult(
        name=run.name,
        state=shown["state"],
        printed=last_json(output),
        attempts=[_attempt(each) for each in shown["attempts"]],
        suspensions=sum(event["kind"] == "suspending" for event in events),
        events=[f"{event['at']} {event['kind']}: {event['text'] or ''}" for event in events],
        said="" if shown["state"] == "succeeded" else last_lines(output),
    )


def _attempt(shown: Mapping[str, Any]) -> AttemptTimes:
    return AttemptTimes(
        started_at=_seconds(shown["started_at"]),
        ended_at=_seconds(shown["ended_at"]),
        outcome=shown["outcome"],
        status=shown["status"],
        reason=shown["reason"],
        reserved_mb=shown["reserved_mb"],
        peak_mb=max(shown["peaks_mb"].values(), default=None),
        suspended_s=shown["suspended_s"],
    )


def _seconds(moment: str | None) -> float | None:
    return None if moment is None else datetime.fromisoformat(moment).timestamp()


def summarize(phase: Phase, alone: Phase | None) -> Summary:
    """Compare a phase with the same runs one at a time; without `alone`, no speed and no results are compared."""
    attempts = [attempt for run in phase.runs for attempt in run.attempts]
    suspensions = sum(run.suspensions for run in phase.runs)
    expected = {run.name: run.sha256 for run in alone.runs if run.sha256 is not None} if alone is not None else {}
    compared = [run for run in phase.runs if run.name.rpartition("-")[0] in _DETERMINISTIC and run.name in expected]
    same = [run for run in compared if run.sha256 == expected[run.name]]
    return Summary(
        phase=phase.name,
        wall_s=phase.wall_s,
        times_faster=_times_faster(phase, alone),
        runs=len(phase.runs),
        succeeded=sum(run.state == "succeeded" for run in phase.runs),
        attempts=len(attempts),
        out_of_memory=sum(attempt.outcome == "out-of-memory" for attempt in attempts),
        suspensions=suspensions,
        requeues=sum(attempt.outcome == "preempted" for attempt in attempts),
        disturbed=suspensions + sum(max(len(run.attempts) - 1, 0) for run in phase.runs),
        same_results=len(same),
        other_results=[run.name for run in compared if run not in same],
        peak_used_mb=max((sample.used_mb for sample in phase.samples), default=None),
        busy_s=busy_s(phase.samples),
        not_succeeded=[f"{run.name}: {run.state}\n{run.said}" for run in phase.runs if run.state != "succeeded"],
    )


def _times_faster(phase: Phase, alone: Phase | None) -> float | None:
    """Return the ratio of times, if both phases have run all programs."""
    if alone is None or not (phase.is_complete and alone.is_complete) or phase.wall_s <= 0:
        return None
    if {run.name for run in phase.runs} != {run.name for run in alone.runs}:
        return None
    return alone.wall_s / phase.wall_s


def busy_s(samples: Sequence[CardSample], since: float = 0.0, until: float = float("inf")) -> float | None:
    """Return for how many seconds the card computed between two moments, or None without samples."""
    chosen = [sample for sample in samples if since <= sample.at_s <= until]
    if len(chosen) < 2:
        return None
    part = sum(sample.utilization_percent for sample in chosen) / len(chosen) / 100
    return (chosen[-1].at_s - chosen[0].at_s) * part


def summary_lines(summary: Summary) -> list[str]:
    starts = f"{summary.disturbed} of {summary.attempts} starts disturbed"
    faster = "" if summary.times_faster is None else f", {summary.times_faster:.2f} times as fast as one at a time"
    lines = [
        f"{summary.phase}: {summary.wall_s:.1f} s{faster}",
        f"  {summary.succeeded} of {summary.runs} succeeded; {starts}",
        f"  {summary.out_of_memory} out of memory, {summary.suspensions} suspensions, {summary.requeues} requeues",
    ]
    if summary.peak_used_mb is not None and summary.busy_s is not None:
        lines.append(
            f"  at most {summary.peak_used_mb / 1024:.1f} GB used; the card computed for {summary.busy_s:.1f} s"
        )
    if summary.same_results or summary.other_results:
        others = f"; DIFFERENT: {', '.join(summary.other_results)}" if summary.other_results else ""
        lines.append(f"  results equal to those of a run alone: {summary.same_results}{others}")
    return lines + [f"  NOT SUCCEEDED {each}" for each in summary.not_succeeded]


def run_lines(phase: Phase) -> list[str]:
    """Return a table with a line for each run: its time, how long it loaded, and what it used."""
    begin = min((a.started_at for run in phase.runs for a in run.attempts if a.started_at is not None), default=0.0)
    names = f"{'starts':>6}{'from':>7}{'until':>7}{'loading':>8}{'peak MB':>9}{'card MB':>9}{'busy':>6}"
    head = f"  {'run':<16}{'state':<11}{names}"
    return [head, *(_run_line(phase, run, begin) for run in phase.runs)]


def _run_line(phase: Phase, run: RunResult, begin: float) -> str:
    since = next((a.started_at for a in run.attempts if a.started_at is not None), None)
    until = next((a.ended_at for a in reversed(run.attempts) if a.ended_at is not None), None)
    printed = run.printed or {}
    loading, peak = printed.get("loading_s"), printed.get("peak_mb")
    card = _card_mb(phase, run)
    busy = busy_s(phase.samples, since, until) if phase.name == "alone" and since and until else None
    return (
        f"  {run.name:<16}{run.state:<11}{len(run.attempts):>6}"
        f"{_figure(since and since - begin, 1):>7}{_figure(until and until - begin, 1):>7}"
        f"{_figure(loading, 1):>8}{_figure(peak, 0):>9}{_figure(card, 0):>9}{_figure(busy, 1):>6}"
    )


def _card_mb(phase: Phase, run: RunResult) -> float | None:
    """Return what the run took of the card: by gpuyard's measurement, or by the samples of a run alone."""
    measured = max((a.peak_mb for a in run.attempts if a.peak_mb is not None), default=None)
    if measured is not None or phase.name != "alone" or not phase.samples:
        return measured
    times = run.attempts[0]
    if times.started_at is None or times.ended_at is None:
        return None
    during = [s.used_mb for s in phase.samples if times.started_at <= s.at_s <= times.ended_at]
    return max(during, default=0.0) - min(sample.used_mb for sample in phase.samples) if during else None


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
