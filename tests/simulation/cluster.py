"""A simulated cluster: it accepts submissions, queues their elements, runs them, loses some, and is not always up.

Its supervisors do what `engines/cluster/node_supervisor.py` does, to real files: the supervisor that creates
`N.started` runs the program and writes its exit status to `N.ended`; `N.lost` makes it end the program. What programs
do follows from the seed, the command and the number of the attempt.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gpuyard.engines.cluster.site import (
    OVER,
    ClusterSubmission,
    ElementRef,
    Sighting,
    SiteRefused,
    SiteReport,
    SiteState,
    SiteUnreachable,
)
from gpuyard.model.cluster_terms import Amount, Offer, gpu_count
from gpuyard.model.job import SiteRequest
from tests.simulation.world import World

GPUS = 4
MOST_JOBS = 6
_CHECK_LOST_EVERY_S = 2.0
_KILL_AFTER_S = 5.0
# How a run may fail from outside, and the failures after which its exit status is unknown.
FAILURES = ("node", "orphaned", "forgotten", "supervisor", "oom", "preempted", "scancel")
LOSSES = frozenset({"node", "orphaned", "forgotten", "supervisor"})
_AT = {
    "node": SiteState.LOST, "orphaned": SiteState.LOST, "supervisor": SiteState.FAILED,
    "oom": SiteState.OUT_OF_MEMORY, "preempted": SiteState.PREEMPTED,
    "scancel": SiteState.CANCELLED,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterBehavior:
    """How long a program runs and how it exits; `failure` happens half-way.

    The supervisor's exit status arrives `late_s` after the end; with `site_is_late`, the site's state does.
    """

    runs_s: float
    status: int = 0
    failure: str = ""
    heeds_term: bool = True
    term_s: float = 0.0
    late_s: float = 0.0
    site_is_late: bool = False


ClusterBehaviorOf = Callable[[tuple[str, ...], int], ClusterBehavior]


def random_cluster_behavior(seed: int) -> ClusterBehaviorOf:
    def behavior(command: tuple[str, ...], attempt: int) -> ClusterBehavior:
        random = Random(f"{seed} {command} {attempt} course")
        return ClusterBehavior(
            runs_s=random.choice((0.0, random.uniform(0.0, 1.0), random.uniform(1.0, 12.0))),
            status=random.choices((0, 3, 143), (80, 15, 5))[0],
            failure=random.choice(FAILURES) if random.random() < 0.25 else "",
            heeds_term=random.random() < 0.8,
            term_s=random.choice((0.0, random.uniform(0.0, 3.0))),
            late_s=random.choice((0.0, random.uniform(0.0, 0.8))),
            site_is_late=random.random() < 0.5,
        )

    return behavior


@dataclass(kw_only=True)
class Run:
    """A program that has begun. `exit_status` is what its supervisor wrote."""

    job_id: int
    attempt: int
    behavior: ClusterBehavior
    began_at: float
    is_alive: bool = True
    is_supervised: bool = True
    ended_at: float | None = None
    exit_status: str | None = None
    hit_by: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.job_id, self.attempt


@dataclass(kw_only=True)
class SiteElement:
    """An element of a submission, at the site."""

    ref: ElementRef
    submission: ClusterSubmission
    gpus: float
    at: SiteState = SiteState.PENDING
    status: int | None = None
    is_due: bool = False
    run: Run | None = None

    @property
    def path(self) -> str:
        return f"{self.submission.folder}/{self.ref[1]}"


class Cluster:
    """Implements `Site`.

    While it is `down` no call succeeds. While it `loses_replies` it may carry out a call, now or later, with no reply.
    `refuses` is the reason with which it refuses submissions. A cluster that `reports_free` GPUs has no queue, as Ray;
    otherwise it accepts everything, as Slurm.
    """

    name = "yonder"
    most_in_submission = 5

    def __init__(self, world: World, shared: Path, behavior_of: ClusterBehaviorOf, *, reports_free: bool) -> None:
        self.runs: list[Run] = []
        self.elements: dict[ElementRef, SiteElement] = {}
        self.down = False
        self.loses_replies = False
        self.refuses: str | None = None
        self.calls = 0
        self.took_late = False
        self.could_not_start = 0
        self._world = world
        self._shared = shared
        self._behavior_of = behavior_of
        self._reports_free = reports_free

    # Calls of the engine

    def submit(self, submission: ClusterSubmission) -> str:
        self._answer()
        if self.refuses is not None:
            raise SiteRefused(self.refuses)
        if self.loses_replies and self._random("late").random() < 0.2:
            self.took_late = True
            self._world.after(self._random("late").uniform(0.5, 8.0), lambda: self._take(submission))
            raise SiteUnreachable("it took too long to answer")
        self._take(submission)
        is_over = self._reports_free and not self.took_late and self._in_use() > GPUS + 1e-6
        assert not is_over, f"{self._in_use()} GPUs were submitted to, of {GPUS}"
        self._may_lose_reply("submit")
        return ""

    def _take(self, submission: ClusterSubmission) -> None:
        for number in range(submission.count):
            element = SiteElement(
                ref=(submission.token, number), submission=submission, gpus=gpu_count(submission.terms.need, None)
            )
            assert element.ref not in self.elements, "the same submission arrived twice"
            self.elements[element.ref] = element
            self._world.after(self._random("wait").uniform(0.0, 3.0), lambda element=element: self._due(element))  # type: ignore[misc]

    def _in_use(self) -> float:
        return sum(element.gpus for element in self.elements.values() if element.at not in OVER)

    def request(self, submission: ClusterSubmission, number: int) -> SiteRequest:
        return SiteRequest(text=f"element {number} of {submission.token}")

    def report(self, live: Sequence[ClusterSubmission]) -> SiteReport:
        self._answer()
        tokens = {submission.token for submission in live}
        seen = {ref: self._sighting(element) for ref, element in self.elements.items() if ref[0] in tokens}
        free = Amount(gpus=GPUS - self._in_use()) if self._reports_free else None
        return SiteReport(sightings=seen, offer=Offer(free=free, most_jobs=MOST_JOBS))

    def cancel(self, ids: Sequence[str]) -> None:
        self._answer()
        for element in [element for element in self.elements.values() if _id(element) in ids]:
            if element.at is SiteState.PENDING or (element.at is SiteState.RUNNING and element.run is None):
                element.at = SiteState.CANCELLED
            elif element.at is SiteState.RUNNING and element.run is not None:
                self._end_politely(element, element.run, SiteState.CANCELLED)
        self._may_lose_reply("cancel")

    def output(self, sighting: Sighting) -> bytes | None:
        return None

    def _answer(self) -> None:
        self.calls += 1
        if self.down:
            raise SiteUnreachable("the site is down")

    def _may_lose_reply(self, what: str) -> None:
        if self.loses_replies and self._random(what).random() < 0.3:
            raise SiteUnreachable("the answer was lost")

    def _sighting(self, element: SiteElement) -> Sighting:
        run, is_running = element.run, element.at is SiteState.RUNNING
        return Sighting(
            id=_id(element),
            at=element.at,
            reason="its turn comes" if element.at is SiteState.PENDING else "",
            place="n0" if is_running else "",
            started_at=run.began_at if run is not None else None,
            ended_at=run.ended_at if run is not None and not is_running else None,
            status=element.status,
        )

    def end_outages(self) -> None:
        self.down = self.loses_replies = False
        self.refuses = None

    # Events of the cluster

    def _random(self, kind: str) -> Random:
        return self._world.random(f"cluster {kind}")

    def _due(self, element: SiteElement) -> None:
        element.is_due = True
        self._schedule()

    def _schedule(self) -> None:
        """Start elements in the order of arrival, at most `at_most` of a submission at a time."""
        busy = sum(element.gpus for element in self.elements.values() if element.at is SiteState.RUNNING)
        for element in list(self.elements.values()):
            if element.at is not SiteState.PENDING or not element.is_due or busy + element.gpus > GPUS + 1e-6:
                continue
            beside = sum(
                other.at is SiteState.RUNNING for other in self.elements.values() if other.ref[0] == element.ref[0]
            )
            if beside < (element.submission.terms.at_most or beside + 1):
                busy += element.gpus
                element.at = SiteState.RUNNING
                late_s = self._random("start").choice((0.0, self._random("start").uniform(0.0, 2.0)))
                self._world.after(late_s, lambda element=element: self._start(element))  # type: ignore[misc]

    def _start(self, element: SiteElement) -> None:
        """Start the supervisor, sometimes just after a cancellation; it is then ended at once."""
        if element.at is not SiteState.RUNNING and self._random("cancelled").random() < 0.5:
            return
        try:
            content = json.loads(Path(element.submission.folder, "submission.json").read_bytes())["elements"][
                element.ref[1]
            ]
            file = os.open(f"{element.path}.started", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._over(element, SiteState.SUCCEEDED, 0)
            return
        except OSError:  # the submission folder is not there
            self.could_not_start += 1
            self._over(element, SiteState.FAILED, 1)
            return
        with open(file, "w") as stream:
            json.dump({"at": self._world.now, "node": "n0", "pid": 7}, stream)
        job_id, attempt = map(int, content["key"].split("."))
        self._run(element, job_id, attempt, tuple(content["command"]))

    def _run(self, element: SiteElement, job_id: int, attempt: int, command: tuple[str, ...]) -> None:
        behavior = self._behavior_of(command, attempt)
        run = element.run = Run(job_id=job_id, attempt=attempt, behavior=behavior, began_at=self._world.now)
        assert run.key not in {each.key for each in self.runs}, f"attempt {run.key} runs twice"
        self.runs.append(run)
        self._world.record("begins there", run.key)
        self._world.after(behavior.runs_s, lambda: self._finish(element, run, str(behavior.status)))
        if behavior.failure:
            self._world.after(behavior.runs_s / 2, lambda: self._fail(element, run))
        if element.at is not SiteState.RUNNING:
            self._finish(element, run, "143")
        limit_s = element.submission.terms.limit_s
        if limit_s is not None:
            self._world.after(limit_s + 0.5, lambda: self._end_politely(element, run, SiteState.TIMED_OUT))

    def _finish(self, element: SiteElement, run: Run, exit_status: str, at: SiteState | None = None) -> None:
        """End the run; its supervisor and the site report this one after the other."""
        if not run.is_alive:
            return
        self._kill(run)
        status = int(exit_status)
        found = at or (SiteState.FAILED if status else SiteState.SUCCEEDED)
        late_s = run.behavior.late_s
        self._world.after(
            0.0 if run.behavior.site_is_late else late_s, lambda: self._write_exit_status(element, run, exit_status)
        )
        self._world.after(late_s if run.behavior.site_is_late else 0.0, lambda: self._over(element, found, status))

    def _kill(self, run: Run) -> None:
        run.is_alive, run.ended_at = False, self._world.now
        self._world.record("over there", run.key)

    def _write_exit_status(self, element: SiteElement, run: Run, exit_status: str) -> None:
        """Write the exit status, and try again while the shared folder is unavailable."""
        if not run.is_supervised:
            return
        try:
            draft = Path(f"{element.path}.draft")
            draft.write_text(json.dumps({"word": exit_status, "pid": 8, "at": self._world.now, "usage": None}))
            draft.rename(f"{element.path}.ended")
            run.exit_status = exit_status
        except OSError:
            if not self._shared.is_dir():
                self._world.after(1.0, lambda: self._write_exit_status(element, run, exit_status))

    def _over(self, element: SiteElement, at: SiteState, status: int | None) -> None:
        if element.at is SiteState.RUNNING:
            element.at, element.status = at, status
            self._schedule()

    def _end_politely(self, element: SiteElement, run: Run, at: SiteState) -> None:
        """SIGTERM, and after a while SIGKILL."""
        if run.is_alive and element.at is SiteState.RUNNING:
            heeds, term_s = run.behavior.heeds_term, run.behavior.term_s
            after_s, exit_status = (term_s, "143") if heeds else (_KILL_AFTER_S, "137")
            self._world.after(after_s, lambda: self._finish(element, run, exit_status, at))

    def _fail(self, element: SiteElement, run: Run) -> None:
        failure = run.behavior.failure
        if not run.is_alive or element.at is not SiteState.RUNNING:
            return
        run.hit_by = failure
        self._world.record(failure, run.key)
        if failure in ("oom", "preempted", "scancel"):
            self._finish(element, run, "137", _AT[failure])
            return
        run.is_supervised = failure in ("orphaned", "forgotten")
        if run.is_supervised:
            self._check_for_lost_file(element, run)
        else:
            self._kill(run)
        if failure == "forgotten":
            del self.elements[element.ref]
            self._schedule()
        else:
            self._over(element, _AT[failure], 137 if failure == "supervisor" else None)

    def _check_for_lost_file(self, element: SiteElement, run: Run) -> None:
        if run.is_alive and os.path.exists(f"{element.path}.lost"):
            run.is_supervised = False
            self._kill(run)
        elif run.is_alive:
            self._world.after(_CHECK_LOST_EVERY_S, lambda: self._check_for_lost_file(element, run))


def _id(element: SiteElement) -> str:
    return f"{element.ref[0]}_{element.ref[1]}"
