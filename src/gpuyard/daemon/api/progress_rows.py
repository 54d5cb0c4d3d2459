"""Makes what the API answers about the progress and the figures of attempts."""

from gpuyard.core.job.job import Attempt
from gpuyard.core.progress.job_progress import Figure, FigureCurves, JobProgress, time_left
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.progress import ProgressRow


def progress_row(scheduler: SchedulerLoop, attempt: Attempt | None) -> ProgressRow | None:
    progress = _progress_of(attempt)
    if attempt is None or progress is None or progress.amount is None:
        return None
    amount, fraction = progress.amount, progress.fraction
    left = time_left(progress, attempt.ran_s(scheduler.clock.now())) if attempt.ended_at is None else None
    return ProgressRow(
        done=amount.done,
        total=amount.total,
        unit=amount.unit,
        percent=None if fraction is None else round(100 * fraction, 2),
        left_s=None if left is None else round(left.likely_s, 1),
        at_s=progress.at_s,
        told=progress.is_told,
    )


def figures_of(attempt: Attempt | None) -> dict[str, Figure]:
    progress = _progress_of(attempt)
    return {} if progress is None else progress.figures


def figure_curves(attempt: Attempt) -> FigureCurves:
    progress = _progress_of(attempt)
    return FigureCurves() if progress is None else progress.curves


def _progress_of(attempt: Attempt | None) -> JobProgress | None:
    return None if attempt is None or attempt.usage is None else attempt.usage.progress
