"""Each option of the table reaches the job, comes back from it, and has its place in what users read.

Whoever adds an option is told here what it still needs.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Job
from gpuyard.model.lifecycle import JobState
from gpuyard.model.option_values import Options
from gpuyard.model.resubmit import edited, options_of
from gpuyard.model.submission import Submission, SubmissionRequest, parse_submission
from gpuyard.model.submit_options import COMMAND_LINE_OPTIONS, NOT_EDITED, SUBMIT_OPTIONS, SubmitOption
from gpuyard.ui.cli.jobs.show import fact_lines
from tests.fakes.queue_standin import attempt, job

# A value of each option, for those whose kind or choices do not suggest one.
VALUES: dict[str, Any] = {
    "array": "0-9", "sweep": ["a=1,2"], "env": ["A=2"], "retry-on": ["timeout"], "signal": "USR1@300s", "at": "+2h",
    "notify": ["failed=mail ann"], "engine": "slurm", "mount": ["/data"], "output-root": "/data", "device": "GPU-a",
    "on-preempt": "never", "engine-option": ["--qos=high"], "container-option": ["--network=host"],
}  # fmt: skip
BY_KIND = {
    "flag": True, "whole": 3, "number": 50, "size": "3G", "time": "3m", "text": "some.txt", "word": "some",
    "ids": ["7"],
}  # fmt: skip
# The options that others need beside them.
BESIDE: dict[str, dict[str, Any]] = {
    "sample": {"sweep": ["a=1..9:lin9"]}, "seed": {"sweep": ["a=1..9:lin9"], "sample": 3}, "stagger": {"array": "0-9"},
    "linked": {"gpus": 2}, "same-node": {"gpus": 2}, "retry-on": {"retries": 2}, "engine-option": {"engine": "slurm"},
    "mount": {"image": "docker.io/x"}, "container-option": {"image": "docker.io/x"}, "retry-delay": {"retries": 2},
}  # fmt: skip
# What is not an option of the job that it made: a moment that passes, variables that are the job's environment.
NOT_KEPT = {"at", "env"}


def value_of(option: SubmitOption) -> Any:
    return VALUES.get(option.name, option.choices[-1] if option.choices else BY_KIND.get(option.kind))


def submitted(options: dict[str, Any]) -> Submission:
    request = SubmissionRequest(cwd="/", environment={}, command=("run", "{a}"), options=options)
    made = parse_submission(request if "sweep" in options else replace(request, command=("run",)))
    return replace(made, elements=tuple(made.elements))


def beside(option: SubmitOption) -> dict[str, Any]:
    return {**({"concurrency": 2} if option.is_for_batch and option.name != "concurrency" else {}),
            **BESIDE.get(option.name, {})}  # fmt: skip


@pytest.mark.parametrize("option", SUBMIT_OPTIONS.values(), ids=SUBMIT_OPTIONS)
def test_every_option_changes_what_is_submitted(option: SubmitOption) -> None:
    others = beside(option)
    assert submitted({**others, option.name: value_of(option)}) != submitted(others), "parse it in `submission.py`"


KEPT = [each for each in SUBMIT_OPTIONS.values() if not (each.makes_many or each.is_for_batch)
        and each.name not in {*NOT_EDITED, *NOT_KEPT}]  # fmt: skip


@pytest.mark.parametrize("option", KEPT, ids=lambda each: each.name)
def test_every_option_that_a_job_keeps_comes_back_from_it(option: SubmitOption) -> None:
    made = submitted({**beside(option), option.name: value_of(option)})
    spec = replace(made.spec, need=replace(made.spec.need, only=made.devices))
    kept = Job(id=1, spec=spec, state=JobState.QUEUED, priority=made.priority, user="me", submitted_at=0.0)
    assert option.name in options_of(kept), "find it in `resubmit.py`"
    again = edited(kept, {})
    assert (again.spec, again.priority) == (replace(made.spec, need=replace(made.spec.need, only=None)), made.priority)


# What no line of `show` tells: where a job may run and waits at its start, and how others of its submission differ.
NOT_SHOWN = {"device", "min-free-disk", "hold", "sample", "seed", "stagger"}
# A job for each line that `show` writes itself.
OWN_LINES: dict[str, dict[str, Any]] = {
    "memory": {}, "GPUs": {"gpus": 2}, "name": {"name": "some"}, "priority": {"priority": 3},
    "RAM": {"need": {"host": {"ram_mb": 3072}}},
    "after": {"after": [{"id": 7, "kind": "ok", "state": "queued", "met": False}]}, "array": {"array": 7},
    "values": {"values": {"a": "1"}}, "retries": {"retries": 3}, "not before": {"not_before": "2026-01-02T03:04:05Z"},
    "signal before it is stopped": {"signal": "USR1@5m"}, "retried after": {"retry_on": ["oom"]},
    "notify": {"notify": [{"target": "mail", "events": ["failed"]}]}, "error": {"error_output": "some.txt"},
    "standard error": {"attempts": [attempt(1, Path("log"), error_log="some.txt")]}, "environment": {},
    "engine": {"engine": "slurm"},
    "container": {"container": {"image": "x", "tool": "podman", "mounts": [], "options": []}},
}  # fmt: skip


@pytest.mark.parametrize("option", [each for each in SUBMIT_OPTIONS.values() if not each.is_for_batch and
                                    each.name not in NOT_SHOWN], ids=lambda each: each.name)  # fmt: skip
def test_show_tells_every_option(option: SubmitOption) -> None:
    assert option.shown, "give it `shown`, and a `field` or a line of its own in `show.py`"
    facts: dict[str, Any] = OWN_LINES.get(option.shown) or {}
    if option.shown not in OWN_LINES:
        assert option.field is not None, "give it a `field`, or add its line to `OWN_LINES`"
        value = Options({option.name: value_of(option)}, SUBMIT_OPTIONS)[option.name]
        for name in reversed(option.field.split(".")):
            value = {name: value}
        facts = value
    lines = fact_lines(job(17, **facts))
    assert any(line.startswith(f"{option.shown}: ") for line in lines), "write it in `show.py`"
    if option.shown not in OWN_LINES:
        assert not any(line.startswith(f"{option.shown}: ") for line in fact_lines(job(17))), "it is the default"


def test_the_reference_has_every_option() -> None:
    page = Path("docs/reference/commands.md").read_text(encoding="utf-8")
    section = page.partition("\n## `gpuyard submit`\n")[2].partition("\n### ")[0]
    known = set(re.findall(r"`(?:-\w`, `)?--([\w-]+)", section))
    assert not set(COMMAND_LINE_OPTIONS) - known, (
        "add it to the table of `gpuyard submit` in docs/reference/commands.md"
    )
