"""A cluster engine with a site of real processes, and daemons that replace each other."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpuyard.engines.cluster.engine import ClusterEngine
from gpuyard.engines.cluster.site import ClusterSubmission, Site, SiteReport
from gpuyard.model.cluster_terms import Amount, ClusterTerms
from gpuyard.model.job import Attempt, HandedOver, OutcomeKind
from gpuyard.model.lease import Need
from gpuyard.ports import Ended, Launch, SiteStatus
from tests.contract.engine import DEADLINE_S, until
from tests.fakes.site import ProcessSite

TERMS = ClusterTerms(need=Need(devices=0), name="job")
SUCCEEDED = (OutcomeKind.SUCCEEDED, 0)
NEVER_STARTED = (OutcomeKind.NEVER_STARTED, None)


class GatedSite(ProcessSite):
    """While its gate is shut, `report` waits; `came` is set when a call arrives."""

    def __init__(self, *, most: int = 8, free: Amount | None = None) -> None:
        super().__init__(most=most, free=free)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        self.reached.set()
        assert self.gate.wait(DEADLINE_S)
        return super().report(live)

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Shut the gate, and wait until the engine's thread has reached it."""
        self.gate.clear()
        self.reached.clear()
        assert self.reached.wait(DEADLINE_S)
        yield
        self.gate.set()


class EngineHarness:
    """A cluster engine as a daemon uses it, and its results so far."""

    def __init__(self, folder: Path, site: Site) -> None:
        self.folder = folder
        self.site = site
        self.statuses: list[SiteStatus] = []
        self.ends: dict[int, Ended] = {}
        (folder / "runs").mkdir(exist_ok=True)
        self.engine = ClusterEngine(site, folder / "shared", lambda: None, poll_s=0.05)

    def take_over(self, *attempts: Attempt) -> None:
        """Take over as the next daemon does, which knows the recorded attempts."""
        self.close()
        self.engine = ClusterEngine(self.site, self.folder / "shared", lambda: None, poll_s=0.05)
        self.engine.adopt(attempts)

    def close(self) -> None:
        self.engine.close()

    def launch(self, job_id: int, script: str = "true", terms: ClusterTerms = TERMS) -> Launch:
        return Launch(
            job_id=job_id,
            attempt=1,
            command=("sh", "-c", f"echo ran >>{self.folder}/runs/{job_id}; {script}"),
            cwd="/",
            environment={"PATH": os.environ["PATH"]},
            engine="yonder",
            terms=terms,
        )

    def waiting(self, job_id: int, terms: ClusterTerms = TERMS) -> Launch:
        """Return a launch that waits for `let_go`."""
        pipe = self.folder / f"pipe{job_id}"
        if not pipe.exists():
            os.mkfifo(pipe)
        return self.launch(job_id, f"read word <{pipe}", terms)

    def let_go(self, job_id: int) -> None:
        (self.folder / f"pipe{job_id}").write_text("go\n")

    def hand_over(self, *launches: Launch) -> list[Attempt]:
        prepared = [self.engine.prepare(launch, None) for launch in launches]
        self.engine.start_prepared()
        return [attempt_of(one.job_id) for one in prepared]

    def listen(self) -> None:
        """Record results at once, as a controller does."""
        self.ends.update((ended.job_id, ended) for ended in self.engine.ended())
        self.statuses += self.engine.site_changes()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def listens() -> object:
            self.listen()
            return condition()

        until(listens, what, every_s=0.01)

    def until_ended(self, *job_ids: int) -> list[tuple[OutcomeKind, int | None]]:
        self.until(lambda: set(job_ids) <= self.ends.keys(), f"the ends of {job_ids}")
        return [(self.ends[each].outcome.kind, self.ends[each].outcome.status) for each in job_ids]

    def until_runs(self, *job_ids: int) -> None:
        self.until(lambda: all(map(self.runs, job_ids)), f"runs of {job_ids}")

    def runs(self, job_id: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            return len((self.folder / "runs" / str(job_id)).read_text().splitlines())
        return 0

    def submissions(self) -> list[Path]:
        return list((self.folder / "shared/yonder/submissions").glob("[!.]*"))

    def trouble(self) -> str:
        return self.engine.offer().trouble or ""


def attempt_of(job_id: int) -> Attempt:
    return Attempt(job_id=job_id, number=1, phase=HandedOver(at=0.0), engine="yonder")
