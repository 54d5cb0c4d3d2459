"""The summary of a batch as lines for people."""

from collections.abc import Iterator

from gpuyard.core.units import format_count, format_duration
from gpuyard.recipes.batch.finish import Summary, UnsuccessfulRun
from gpuyard.recipes.batch.plan import BatchPlan
from gpuyard.ui.cli.text_table import clean, lay_out_facts, pad

_MOST_SHOWN = 20
_WAITS = {
    "cpu": "for the CPU to be less busy (--max-cpu)",
    "memory": "for RAM (--min-free-mem-mb)",
    "gpu": "for a GPU to be less busy (--max-gpu)",
    "gpu-memory": "for GPU memory (--max-gpu-mem-mb)",
    "room": "for a free GPU",
    "concurrency": "for other runs to finish (--concurrency)",
    "stagger": "between starts (--stagger)",
    "pause": "while the queue was paused",
}


def summary_lines(summary: Summary, plan: BatchPlan) -> Iterator[str]:
    yield f"{summary.name}: {_verdict(summary)}"
    yield ""
    yield from lay_out_facts(_facts(summary, plan))


def _verdict(summary: Summary) -> str:
    if summary.is_whole:
        verdict = "the run succeeded" if summary.runs == 1 else f"all {summary.runs:,} runs succeeded"
    else:
        parts = [f"{summary.succeeded:,} of {format_count(summary.runs, 'run')} succeeded"]
        parts += [f"{summary.failed:,} failed"] if summary.failed else []
        parts += [f"{summary.cancelled:,} cancelled"] if summary.cancelled else []
        verdict = ", ".join(parts)
    return verdict if summary.seconds is None else f"{verdict}, in {format_duration(summary.seconds)}"


def _facts(summary: Summary, plan: BatchPlan) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading with its lines."""
    if summary.attempts > summary.runs:
        yield "attempts", [f"{summary.attempts:,}"]
    if summary.frames is not None:
        yield "frames", [f"{summary.frames:,}"]
    if summary.kept is not None and summary.kept_in is not None:
        yield "kept", [f"{format_count(summary.kept, 'run')} with data, in {clean(summary.kept_in)}"]
    if plan.pruned_root is not None:
        where = "" if summary.kept_in == plan.pruned_root else f", in {clean(plan.pruned_root)}"
        yield "pruned", [f"{format_count(summary.pruned, 'run')} without a frame{where}"]
    if summary.left:
        yield "not pruned", list(_cut([f"{each.run}: {clean(each.why)}" for each in summary.left]))
    waits = sorted(((seconds, gate) for gate, seconds in summary.waits_s.items() if seconds >= 1), reverse=True)
    if waits:
        times = [format_duration(seconds) for seconds, _ in waits]
        width = max(map(len, times))
        causes = [_WAITS.get(gate, gate) for _, gate in waits]
        yield "waited", [f"{pad(at, width, is_right=True)} {why}" for at, why in zip(times, causes, strict=True)]
    if summary.unknown:
        yield "unchecked", [f"{bound}: no probe measures it" for bound in summary.unknown]
    failures = [each for each in summary.failures if each.state != "cancelled"]
    if failures:
        yield "failed", list(_cut([_failure(each) for each in failures]))
    yield "files", [clean(summary.root)]


def _failure(run: UnsuccessfulRun) -> str:
    log = f"  {clean(run.log)}" if run.log else ""
    return f"run {run.index}, seed {run.seed}: {clean(run.reason or run.state)}{log}"


def _cut(lines: list[str]) -> Iterator[str]:
    yield from lines[:_MOST_SHOWN]
    if len(lines) > _MOST_SHOWN:
        yield f"and {len(lines) - _MOST_SHOWN:,} more: see summary.json"
