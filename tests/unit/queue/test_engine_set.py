"""Engines report wall times; the queue gets its own."""

from types import SimpleNamespace
from typing import Any

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import Attempt, HandedOver, Outcome, OutcomeKind
from gpuyard.ports import Ended, SiteStatus
from gpuyard.queue.engine_set import EngineSet

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


def test_attempts_of_an_engine_that_cannot_be_opened_are_not_taken_for_withdrawn() -> None:
    withdrawn: list[str] = []
    site: Any = SimpleNamespace(withdraw=lambda attempt: withdrawn.append(attempt.key))
    opened: list[Any] = []

    def open_engine(_: str) -> Any:
        if not opened:
            raise EnvironmentFault("its shared disk is not mounted")
        return opened[0]

    now = [0.0]
    local: Any = SimpleNamespace()
    engines = EngineSet(local, open_engine, monotonic=lambda: now[0])
    attempt = Attempt(job_id=3, number=1, phase=HandedOver(at=0.0), engine="slurm")
    assert engines.withdraw([attempt]) == set()
    opened.append(site)
    now[0] = 1000.0
    assert engines.withdraw([attempt]) == {"3.1"}
    assert withdrawn == ["3.1"]
