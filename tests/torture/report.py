"""The report of a torture run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from tests.torture.evidence import Run
from tests.torture.records import Records, Submission


class Report(Struct, kw_only=True):
    seed: int
    minutes: float
    faults: Counter[str]
    left_out: dict[str, str]
    load: Mapping[str, int]
    submissions: Sequence[Submission]
    records: Records
    runs: Sequence[Run]
    recoveries: Sequence[tuple[str, float]]
    violations: Sequence[str]
    work: str

    def text(self) -> str:
        answers = Counter(each.answer for each in self.submissions)
        states = Counter(job.state for job in self.records.jobs.values())
        kinds = Counter(attempt.kind for attempt in self.records.attempts.values())
        worst = max(self.recoveries, key=lambda each: each[1], default=("none", 0.0))
        beside = sum(run.attempt is None for run in self.runs)
        lines = [
            f"seed {self.seed}, {self.minutes:g} minutes",
            f"faults: {self.faults.total()} ({_counts(self.faults)})",
            *(f"left out: {name}: {why}" for name, why in self.left_out.items()),
            f"load: {_counts(self.load)}",
            f"submissions: {len(self.submissions)} ({_counts(answers)})",
            f"jobs: {len(self.records.jobs)} ({_counts(states)})",
            f"attempts: {len(self.records.attempts)} ({_counts(kinds)}), programs beside the queue: {beside}",
            f"worst recovery: {worst[1]:.1f} s, after '{worst[0]}'",
            f"violations: {len(self.violations)}",
            *(f"  {violation}" for violation in self.violations),
        ]
        if self.violations:
            lines.append(f"kept: {self.work}")
        return "\n".join(lines)


def _counts(counted: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items(), key=lambda each: -each[1]))
