"""Engines report wall times; the queue gets its own."""

from types import SimpleNamespace
from typing import Any

from gpuyard.control.engine_set import EngineSet
from gpuyard.core.job.job import Outcome, OutcomeKind
from gpuyard.ports import Ended, SiteStatus

DONE = Outcome(kind=OutcomeKind.SUCCEEDED, status=0)


def test_the_times_that_engines_report_become_times_of_the_queue() -> None:
    ends = [Ended(job_id=1, attempt=1, outcome=DONE, at=86_500.0), Ended(job_id=2, attempt=1, outcome=DONE)]
    local: Any = SimpleNamespace(ended=lambda _, **__: ends)
    site: Any = SimpleNamespace(
        ended=list,
        site_changes=lambda: [SiteStatus(job_id=3, attempt=1, site_id="7", place="n0", at=86_420.0)],
        offer=lambda: None,
    )
    engines = EngineSet(local, lambda _: site, from_wall=lambda at: at - 86_400.0)
    engines.offer_of("slurm")
    assert [each.at for each in engines.ended()] == [100.0, None]
    assert [each.at for each in engines.site_changes()] == [20.0]
