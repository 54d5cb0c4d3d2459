"""Scenarios of cluster jobs: the real controller, the real cluster engine with its files, a simulated cluster.

The thread of the engine runs in the world's time. The daemon may be killed between any two calls of the site or of the
submission folders, as of every other port.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from gpuyard.engines.cluster import engine as cluster_engine
from gpuyard.engines.cluster import in_flight
from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.model.job import Attempt, Job, OutcomeKind
from gpuyard.model.lifecycle import JobState
from gpuyard.model.submission import SubmissionRequest
from gpuyard.ports import Engine
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from tests.simulation.clients import Clients, Operation
from tests.simulation.cluster import MOST_JOBS, Cluster, ClusterBehaviorOf, Run, random_cluster_behavior
from tests.simulation.crash_points import Crash, CrashPoints, Port, Thread
from tests.simulation.invariants import Checker
from tests.simulation.scenario import Scenario, Script
from tests.simulation.simulated_daemon import LIMITS, RULES, SimulatedDaemon
from tests.simulation.world import World

WITHIN_S = 40.0
ENGINE = Cluster.name
# All outages of the cluster end before this.
LAST = Operation(at=WITHIN_S + 20.0, kind="unpause")
KINDS = {
    "submit": 40, "cancel": 14, "hold": 4, "release": 4, "retry": 6, "priority": 5, "pause": 2, "unpause": 4, "kill": 5,
    "reboot": 3, "why": 6, "suspend": 2,
}  # fmt: skip


class FilesPort(Port):
    def path(self, token: str) -> str:
        """Return the path without a crash point: the call changes nothing."""
        found: str = self._target.path(token)
        return found


class SteppedClusterEngine(cluster_engine.ClusterEngine):
    """A cluster engine without a thread: its turns are events of the world while its daemon lives."""

    def __init__(self, world: World, thread: Thread, cluster: Cluster, folder: Path, daemon: "ClusterDaemon") -> None:
        super().__init__(Port("site", cluster, thread), folder, daemon.hear, poll_s=8.0)
        self._submissions = FilesPort("submissions", self._submissions, thread)  # type: ignore[assignment]
        self._in_flight = in_flight.InFlightJobs(self._site, self._submissions)
        self._world = world
        self._daemon = thread
        self._alarm = 0

    def _wake(self) -> None:
        self._thread = threading.current_thread()
        self._turn_after(self._world.random("ring").uniform(0.0, 0.05))

    def _note_trouble(self, error: EnvironmentFault) -> None:
        assert "a bug" not in str(error), error
        super()._note_trouble(error)

    def _turn_after(self, seconds: float) -> None:
        self._alarm += 1
        alarm = self._alarm
        self._world.after(seconds, lambda: self._take_turn(alarm))

    def _take_turn(self, alarm: int) -> None:
        if alarm == self._alarm and not self._daemon.is_cut:
            self._run_once()
            rest_s = self._pause_s()
            if rest_s is not None:
                self._turn_after(max(rest_s, 0.001))


class ClusterDaemon(SimulatedDaemon):
    """A daemon that can submit to the cluster."""

    def __init__(
        self, world: World, database: Database, crash_points: CrashPoints, cluster: Cluster, folder: Path, **other: Any
    ) -> None:
        super().__init__(world, database, crash_points, **other)
        self._cluster = cluster
        self._folder = folder
        self._has_news = False
        self.controller.engines._open_engine = self._open_cluster_engine

    def _open_cluster_engine(self, name: str) -> Engine:
        assert name == ENGINE
        opened = SteppedClusterEngine(self._world, self.thread, self._cluster, self._folder, self)
        engine: Engine = Port("cluster engine", opened, self.thread)
        return engine

    def hear(self) -> None:
        self._has_news = True

    def step(self) -> Any:
        self._has_news = False
        return super().step()

    def has_events(self) -> bool:
        return self._has_news or super().has_events()

    def measures(self) -> bool:
        """Return whether any attempt is live: the daemon then takes samples now and then."""
        return bool(self.controller.transitions.live)


class ClusterChecker(Checker):
    def __init__(self, world: World, database: Database, clients: Clients, cluster: Cluster) -> None:
        super().__init__(world, database, clients)
        self._cluster = cluster

    def _check_limits(self, jobs: Sequence[Job]) -> None:
        super()._check_limits([job for job in jobs if not job.spec.engine])
        tags = Counter(job.spec.tag for job in jobs)
        assert all(tags[tag] <= most for tag, most in LIMITS.tags.items()), (
            "more jobs of a tag than its limit, here and on the cluster together"
        )
        assert sum(bool(job.spec.engine) for job in jobs) <= MOST_JOBS, "more jobs on the cluster than its limit"
        self._check_overlapping_attempts()

    def _check_live(self, store: JobStore, states: dict[int, JobState]) -> None:
        super()._check_live(store, states)
        for job, attempt in store.live_attempts():
            if job.state in (JobState.PENDING, JobState.RUNNING):
                has_started = job.state is JobState.RUNNING
                assert (attempt.started is not None) is has_started, (
                    f"job {job.id} is {job.state}, and at {attempt.place}"
                )

    def _check_overlapping_attempts(self) -> None:
        """Assert that no job runs beside an earlier attempt of itself, though that was lost."""
        alive = Counter(run.job_id for run in self._cluster.runs if run.is_alive)
        assert all(count == 1 for count in alive.values()), f"runs twice at the same time: {alive.most_common(1)}"

    def _is_before(self, job: Job, other: Job) -> bool:
        return job.spec.engine == other.spec.engine and super()._is_before(job, other)

    def _check_runs(self, attempts: Sequence[Attempt], limits: Mapping[int, float | None]) -> None:
        super()._check_runs([attempt for attempt in attempts if not attempt.engine], limits)
        recorded = {(attempt.job_id, attempt.number): attempt for attempt in attempts if attempt.engine}
        runs = {run.key: run for run in self._cluster.runs}
        assert runs.keys() <= recorded.keys(), f"ran unrecorded: {sorted(runs.keys() - recorded.keys())}"
        for key, attempt in recorded.items():
            check_outcome(attempt, runs.get(key), limits[attempt.job_id])
            if key in runs and not self._cluster.could_not_start:
                check_end_of_lost(attempt, runs[key])
        starts = [attempt for attempt in recorded.values() if _kind(attempt) is OutcomeKind.CANNOT_START]
        assert len(starts) <= self._cluster.could_not_start


def check_outcome(attempt: Attempt, run: Run | None, limit_s: float | None) -> None:
    """Assert that the recorded outcome is what happened to the program."""
    outcome, stopping = attempt.outcome, attempt.stopping
    assert outcome is not None, f"{attempt.key} has no outcome"
    hit_by, exit_status = (run.hit_by, run.exit_status) if run is not None else ("", None)
    if hit_by == "scancel" and stopping is OutcomeKind.CANCELLED:
        return
    if stopping is not None:
        assert outcome.kind is stopping
        return
    if run is None:
        assert outcome.kind is OutcomeKind.CANNOT_START, f"{attempt.key} never ran, and is {outcome}"
        return
    exited = _by_exit_status(exit_status, limit_s)
    expected = {
        "": exited, "oom": {OutcomeKind.OUT_OF_MEMORY}, "preempted": {OutcomeKind.PREEMPTED},
        "scancel": {OutcomeKind.CANCELLED},
    }.get(hit_by, {OutcomeKind.LOST} | (exited if exit_status is not None else set()))  # fmt: skip
    assert outcome.kind in expected, f"{attempt.key} exited with {exit_status}, was hit by {hit_by}, and is {outcome}"
    assert outcome.kind is not OutcomeKind.FAILED or str(outcome.status) == exit_status


def check_end_of_lost(attempt: Attempt, run: Run) -> None:
    """Assert that a program that was given up as lost ends soon."""
    if _kind(attempt) is OutcomeKind.LOST and run.ended_at is not None and attempt.ended_at is not None:
        assert run.ended_at <= attempt.ended_at, f"{run.key} went on though it was lost"


def _kind(attempt: Attempt) -> OutcomeKind | None:
    return None if attempt.outcome is None else attempt.outcome.kind


def _by_exit_status(exit_status: str | None, limit_s: float | None) -> set[OutcomeKind]:
    if exit_status == "0":
        return {OutcomeKind.SUCCEEDED}
    return {OutcomeKind.FAILED} if limit_s is None else {OutcomeKind.FAILED, OutcomeKind.TIMED_OUT}


class ClusterScenario(Scenario):
    """A scenario with a cluster that `reports_free` GPUs or accepts everything; `outages` are (at, seconds, kind)."""

    def __init__(
        self,
        script: Script,
        folder: Path,
        *,
        crash_at: frozenset[int] = frozenset(),
        behavior_of: ClusterBehaviorOf | None = None,
        reports_free: bool = False,
        outages: Sequence[tuple[float, float, str]] = (),
    ) -> None:
        self._folder = folder
        self._behavior_of = behavior_of or random_cluster_behavior(script.seed)
        self._reports_free = reports_free
        self.cluster: Cluster | None = None
        super().__init__(script, crash_at)
        for at, lasts_s, what in outages:
            self.world.after(at, lambda what=what: self._start_outage(what))  # type: ignore[misc]
            self.world.after(at + lasts_s, self._end_outages)

    def _make_cluster(self) -> Cluster:
        """Create the cluster; the world must exist."""
        shared = self._folder / "shared"
        cluster = Cluster(self.world, shared, self._behavior_of, reports_free=self._reports_free)
        self.checker = ClusterChecker(self.world, self.database, self.clients, cluster)
        # The engine uses the world's clock, and the same seed gives the same tokens.
        tokens = SimpleNamespace(token_hex=lambda _: f"{self.world.number('token'):06}")
        vars(cluster_engine)["time"] = vars(in_flight)["time"] = self.world.clock
        vars(in_flight)["secrets"] = tokens
        return cluster

    def _new_life(self) -> SimulatedDaemon:
        self.cluster = self.cluster or self._make_cluster()
        script = self._script
        while True:
            daemon = ClusterDaemon(
                self.world,
                self.database,
                self.crash_points,
                self.cluster,
                self._folder / "shared",
                rules=replace(RULES, shares_first_runs=script.shares_first_runs),
                trouble=script.trouble,
                moves_fail=script.moves_fail,
            )
            self._step = None
            try:
                daemon.controller.recover()
            except (Crash, StoreFault):
                self.deaths += 1
                daemon.die()
            else:
                self.checker.watch(daemon)
                return daemon

    # Outages

    def _start_outage(self, what: str) -> None:
        assert self.cluster is not None
        if self._is_calm:
            return
        self.world.record("outage", what)
        self.cluster.down = self.cluster.down or what == "down"
        self.cluster.loses_replies = self.cluster.loses_replies or what == "loses_replies"
        self.cluster.refuses = "no such partition" if what == "refuses" else self.cluster.refuses
        shared = self._folder / "shared"
        if what == "away" and shared.is_dir():
            shared.rename(self._folder / "away")
            shared.touch()  # so that the engine cannot create a new folder

    def _end_outages(self) -> None:
        assert self.cluster is not None
        self.cluster.end_outages()
        shared, away = self._folder / "shared", self._folder / "away"
        if away.exists():
            shared.unlink()
            away.rename(shared)

    def _calm_down(self) -> None:
        super()._calm_down()
        self._end_outages()


# Random scenarios


def random_cluster_scenario(seed: int) -> tuple[Script, dict[str, Any]]:
    """Return a script, and the options of the cluster."""
    random = Random(f"{seed} handing")
    count = 5 + seed % 9
    times = sorted(random.choice((0.0, random.uniform(0.0, WITHIN_S))) for _ in range(count))
    kinds = ["submit", *random.choices(list(KINDS), list(KINDS.values()), k=count - 1)]
    operations = [
        Operation(at=at, kind=kind, number=number, asked=_asked(seed, number) if kind == "submit" else None)
        for number, (at, kind) in enumerate(zip(times, kinds, strict=True))
    ]
    operations.append(LAST)
    kinds_of_outage = ("down", "loses_replies", "refuses", "away")
    outages = [
        (random.uniform(0.0, WITHIN_S), random.uniform(0.5, 15.0), random.choice(kinds_of_outage))
        for _ in range(seed % 4)
    ]
    script = Script(seed=seed, operations=tuple(operations), trouble=0.04 if seed % 3 == 0 else 0.0)
    return script, {"reports_free": seed % 2 == 1, "outages": outages}


def _asked(seed: int, number: int) -> SubmissionRequest:
    random, token = Random(f"{seed} asked {number}"), f"s{number}"
    is_here = random.random() < 0.15
    options: dict[str, Any] = {"name": token, "gpus": random.choice(("0", "1", "1", "1", "2"))}
    options |= {} if is_here else {"engine": ENGINE}
    command = ["wild", token]
    chances: tuple[tuple[float, str, Any], ...] = (
        (0.4, "priority", str(random.randint(-2, 3))),
        (0.4, "retries", str(random.randint(1, 2))),
        (0.3, "time-limit", f"{random.randint(1, 12)}s"),
        (0.5, "grace", f"{random.randint(0, 4)}s"),
        (0.4, "tag", random.choice(("night", "day"))),
        (0.1, "hold", True),
        (0.4, "on-reboot", random.choice(("requeue", "hold", "fail"))),
        (0.2, "after-any", [f"name=s{random.randrange(number)}"] if number else None),
        (0.3, "array", f"0-{random.randint(0, 6)}{random.choice(('', '%1', '%2'))}"),
    )
    options |= {name: value for chance, name, value in chances if value is not None and random.random() < chance}
    if "array" in options:
        command.append("{index}")
    return SubmissionRequest(cwd="/", environment={}, token=token, command=tuple(command), options=options)
