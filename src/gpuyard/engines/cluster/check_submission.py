"""Refuse a submission that no node of its cluster can ever take, before it is stored.

The cluster is asked once for jobs that need the same, and not while it cannot be reached: then a job is taken as it is,
and waits in the queue."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.job.job_spec import JobSpec
from gpuyard.engines.cluster.site import SiteRefused, SiteUnreachable
from gpuyard.errors import EnvironmentFault, UserError

_GOOD_FOR_S = 60.0


class CheckingSite(Protocol):
    def check(self, terms: ClusterTerms) -> None:
        """Raise SiteRefused if no node can ever take a job on these terms, SiteUnreachable if that is unknown."""


class SubmissionCheck:
    """For several threads. `open_site` returns None for an engine that cannot be asked, such as a plugin's."""

    def __init__(self, open_site: Callable[[str], CheckingSite | None]) -> None:
        self._open_site = open_site
        self._lock = threading.Lock()
        self._good_until: dict[tuple[str, ClusterTerms | None], float] = {}  # None: the site cannot be reached

    def check(self, spec: JobSpec) -> None:
        """Raise UserError if no node of the job's cluster can ever take it."""
        engine, terms = spec.engine, terms_of(spec)
        if self._is_good(engine, terms) or self._is_good(engine, None):
            return
        try:
            site = self._open_site(engine)
            if site is not None:
                site.check(terms)
        except SiteRefused as error:
            raise UserError(str(error), hint=error.hint, code="impossible") from error
        except (SiteUnreachable, EnvironmentFault):  # its engine gives the reason while the job waits
            self._keep(engine, None)
        else:
            self._keep(engine, terms)

    def _is_good(self, engine: str, terms: ClusterTerms | None) -> bool:
        with self._lock:
            return time.monotonic() < self._good_until.get((engine, terms), 0.0)

    def _keep(self, engine: str, terms: ClusterTerms | None) -> None:
        now = time.monotonic()
        with self._lock:
            self._good_until = {key: until for key, until in self._good_until.items() if now < until}
            self._good_until[engine, terms] = now + _GOOD_FOR_S


def terms_of(spec: JobSpec) -> ClusterTerms:
    """Return what is declared of a job's need; its name and its place in the queue do not decide who can take it."""
    need = replace(spec.need, host=None)
    return ClusterTerms(
        need=need, name="", cpus=spec.cpus, ram_mb=spec.need.ram_mb, limit_s=spec.time_limit_s,
        options=spec.engine_options,
    )  # fmt: skip
