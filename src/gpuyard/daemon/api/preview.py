"""What a submission would submit."""

import shlex
from collections.abc import Sequence
from itertools import islice

from gpuyard.core.job.placeholders import fill_in
from gpuyard.core.job.submission import ArrayElement, Submission
from gpuyard.schema.sweeps import PreviewedJob, SubmissionPreview

_MOST_SHOWN = 1000


def preview_of(submission: Submission, notes: Sequence[str]) -> SubmissionPreview:
    shown = islice(submission.elements, _MOST_SHOWN)
    return SubmissionPreview(
        count=submission.count,
        varies=submission.spec.varies,
        jobs=[_preview_job(submission, element) for element in shown],
        notes=list(notes),
    )


def _preview_job(submission: Submission, element: ArrayElement) -> PreviewedJob:
    values = element.values if element.index is None else {**element.values, "index": str(element.index)}
    command = submission.spec.command if element.command is None else element.command
    filled = fill_in(command, values) if values else command
    return PreviewedJob(command=shlex.join(filled), index=element.index, values=element.values)
