"""Run a scenario: users send requests, time passes, the daemon does a step when it would wake up, crashes at the chosen
calls and restarts. All invariants are checked after each turn."""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.model.lease import FixedMemory, Need, WholeDevice
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.step import Step
from gpuyard.simulator.virtual_machine import EPOCH
from gpuyard.store.database import open_database
from tests.simulation.behaviors import MEMORY_MB, BehaviorOf, random_behavior
from tests.simulation.clients import TAGS, Clients, Operation, operations
from tests.simulation.crash_points import Crash, CrashPoint, CrashPoints
from tests.simulation.invariants import Checker
from tests.simulation.keeper import CALM, KeeperHabits
from tests.simulation.ledger import Other, Others
from tests.simulation.simulated_daemon import LIMITS, RULES, SimulatedDaemon
from tests.simulation.world import LoadSpike, LogEntry, World

SAMPLE_EVERY_S = 3.0
# How long a requested sample takes.
SAMPLING_S = 0.05
TRY_AGAIN_S = 1.0
MOST_TURNS = 4000
WITHIN_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Script:
    """The description of a scenario.

    `trouble` is how often a port fails, and `moves_fail` how often a suspension or resumption fails. `others`
    processes use the ledger, foreign processes hold `foreign_mb` on each device, and `load_spikes` add load for a
    while. `clock_steps` are pairs of a time and the seconds by which the wall clock is set forward then.
    `shares_first_runs`: a new program shares a device from its start. Probes do not read the figures named
    in `blind`. `habits` are those of keepers, and `late_samples` is how often a new sample takes a while, and
    `late_reads` how often reading what an attempt has written does. Others, foreign processes and faults of devices
    come `within_s`.
    """

    seed: int
    operations: tuple[Operation, ...] = ()
    others: int = 0
    trouble: float = 0.0
    devices: int = 2
    is_crowded: bool = False
    measures_every_s: float = 30.0
    moves_fail: float = 0.08
    foreign_mb: float = 0.0
    shares_first_runs: bool = False
    load_spikes: tuple[LoadSpike, ...] = ()
    clock_steps: tuple[tuple[float, float], ...] = ()
    blind: frozenset[str] = frozenset({"gpu"})
    habits: KeeperHabits = CALM
    late_samples: float = 0.0
    late_reads: float = 0.0
    within_s: float = WITHIN_S


def random_script(seed: int) -> Script:
    is_crowded = seed % 2 == 1
    count = 4 + seed % 8 + 4 * is_crowded
    return Script(
        seed=seed,
        operations=tuple(operations(seed, count, WITHIN_S, is_crowded=is_crowded)),
        others=seed % 4,
        trouble=0.06 if seed % 3 == 0 else 0.0,
        devices=1 + seed % 3 if seed % 5 else 2,
        is_crowded=is_crowded,
        measures_every_s=SAMPLE_EVERY_S if is_crowded else 10.0,
        shares_first_runs=seed % 7 >= 3,
        late_reads=0.3 if seed % 5 > 2 else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class ScenarioResult:
    log: list[LogEntry]
    passed: list[CrashPoint]
    crashed: list[CrashPoint]
    deaths: int
    jobs: int
    attempts: int
    starts: dict[str, float]
    backfilled: dict[str, set[str]]
    states: dict[str, str]


class Scenario:
    def __init__(
        self,
        script: Script,
        crash_at: frozenset[int] = frozenset(),
        behavior_of: BehaviorOf | None = None,
    ) -> None:
        behavior_of = behavior_of or random_behavior(script.seed, is_crowded=script.is_crowded)
        self.world = World(script.seed, behavior_of, script.devices)
        self.database = open_database(None)[0]
        self.crash_points = CrashPoints(crash_at)
        self.clients = Clients(self.world, script.is_crowded)
        self.others = Others(self.world)
        self.checker = Checker(self.world, self.database, self.clients)
        self.deaths = 0
        self.backfilled: dict[int, set[int]] = {}
        self.limits = LIMITS
        self._script = script
        self._pending = list(script.operations)
        self._step: Step | None = None
        self._wake_at: float | None = self.world.now
        self._is_calm = False
        self.world.foreign_mb = dict.fromkeys(self.world.device_ids, script.foreign_mb)
        self.world.blind = script.blind
        self.daemon = self._new_life()
        for spike in script.load_spikes:
            self.world.after(spike.at, lambda spike=spike: self._add_load(spike))  # type: ignore[misc]
        for at, step_s in script.clock_steps:
            self.world.after(at, lambda step_s=step_s: self._set_clock(step_s))  # type: ignore[misc]
        self._plan_others()

    def run(self) -> ScenarioResult:
        try:
            for _ in range(MOST_TURNS):
                if self._turn():
                    self.checker.check_end()
                    result = self._played()
                    self._delete_all_jobs()
                    return result
            raise AssertionError(f"the scenario does not end: {self.checker.unfinished()}")
        finally:
            self.database.close()

    def _played(self) -> ScenarioResult:
        log = self.world.log
        names = self.checker.names()
        starts: dict[str, float] = {}
        for at, kind, what in log:
            if kind == "begins":
                starts.setdefault(names[what[0]], at)
        return ScenarioResult(
            log=log,
            passed=self.crash_points.passed,
            crashed=self.crash_points.crashed,
            deaths=self.deaths,
            jobs=len(names),
            attempts=sum(kind == "begins" for _, kind, _ in log),
            starts=starts,
            backfilled={names[head]: {names[one] for one in passed} for head, passed in self.backfilled.items()},
            states=self.checker.states_by_name(),
        )

    # A turn

    def _turn(self) -> bool:
        """Return whether the scenario is over."""
        try:
            if self._ask():
                self.clients.proceed(self.daemon)
                self.checker.check(self.daemon.controller.transitions)
            if self._is_awake():
                self._do_step()
                self.checker.check(self.daemon.controller.transitions)
            self.others.try_again()
            is_busy = bool(self.clients.waiting) and self.clients.wait_until(self.daemon) is None
            return not is_busy and self._pass_time()
        except Crash:
            self._die()
            return False

    def _ask(self) -> bool:
        """Send the requests that are due, and those without an answer again. Return whether there were any."""
        has_asked = False
        self.clients.send_again(self.daemon)
        while self._pending and EPOCH + self._pending[0].at <= self.world.now:
            operation, has_asked = self._pending.pop(0), True
            self._wake_at = self.world.now
            if operation.kind == "kill":
                raise Crash
            if operation.kind in ("kill_keeper", "stop_keeper", "limits", "foreign"):
                self._interfere(operation)
                continue
            if operation.kind == "reboot":
                self.world.reboot()
                raise Crash
            try:
                self.clients.ask(operation, self.daemon)
            except EnvironmentFault:
                self.world.record("refused", operation.kind)
        if self.clients.waiting:
            self._wake_at = self.world.now
        return has_asked or bool(self.clients.waiting)

    def _interfere(self, operation: Operation) -> None:
        """Do what is no request: kill or stop the keeper, change the limits in the configuration, or let a foreign
        process take memory."""
        random = self.world.random("interfere")
        self.world.record(operation.kind, None)
        if operation.kind == "kill_keeper":
            self.world.kill_keeper(self.daemon.engine.keeper)
        elif operation.kind == "stop_keeper":
            self.daemon.engine.keeper.stop(random.choice((0.01, 0.1, 1.0, 3.0)))
        elif operation.kind == "foreign":
            if self.world.device_ids:
                self._foreign_process(random.choice(self.world.device_ids))()
        else:
            cpu_jobs = LIMITS.cpu_jobs - 1 if self.limits == LIMITS else LIMITS.cpu_jobs
            self._set_limits(SchedulingLimits(cpu_jobs=cpu_jobs, tags=LIMITS.tags))

    def _set_limits(self, limits: SchedulingLimits) -> None:
        self.limits = limits
        self.daemon.controller.rules = replace(self.daemon.controller.rules, limits=limits)

    def _is_awake(self) -> bool:
        is_due = self._wake_at is not None and self._wake_at <= self.world.now
        watches = self._step is None or (self._step.waits_for_devices and self.daemon.is_blocked_by_others())
        return is_due or self.daemon.has_events() or (self.world.ledger_woke and watches)

    def _do_step(self) -> None:
        self.world.ledger_woke = False
        self.checker.before_step()
        try:
            self._step = self.daemon.step()
        except StoreFault:
            self.world.record("the disk is full", None)
            self.checker.slices.has_failed_step = True
            self._wake_at = self.world.now + TRY_AGAIN_S
            return
        self.checker.slices.has_failed_step = False
        plan = self.daemon.controller.plan
        head = None if plan.head is None else plan.head.job_id
        passed = self.checker.after_step(self.daemon, self._step.started)
        self.world.record("step", self._step.started)
        if passed:
            self.backfilled.setdefault(head or 0, set()).update(passed)
        times = [self._step.wake_at, self.daemon.wake_at()]
        times.append(self.world.now + SAMPLE_EVERY_S if self._step.waits_for_devices else None)
        times.append(self.world.now + SAMPLE_EVERY_S if self.daemon.controller.batch_gates.is_waiting else None)
        times.append(self.world.now + SAMPLING_S if self.daemon.wants_sample() else None)
        times.append(self.world.now + self._script.measures_every_s if self.daemon.measures() else None)
        self._wake_at = min((at for at in times if at is not None), default=None)

    def _pass_time(self) -> bool:
        """Advance to the next event. Return True if there is none and the scenario is over."""
        if self.daemon.has_events():
            return False
        times = [self._wake_at, self.world.next_event()]
        times.append(EPOCH + self._pending[0].at if self._pending else None)
        times.append(self.world.now + TRY_AGAIN_S if self.clients.again else None)
        times.append(self.clients.wait_until(self.daemon))
        known = [at for at in times if at is not None]
        if not self._pending and not self._is_calm and not self.clients.waiting:
            self._calm_down()
            return False
        if self._is_calm and self.world.next_event() is None and self.daemon.controller.batch_gates.is_waiting:
            self._release_all()  # a batch is stepped even while users hold its runs
        if known:
            self.world.advance(max(self.world.now, min(known)))
            return False
        return self._is_over()

    def _release_all(self) -> bool:
        """Release and resume jobs that users held or suspended. Return whether there were any."""
        for kind, meant in (("release", self.checker.held()), ("resume", self.checker.suspended_by_hand())):
            if meant:
                self.clients.change(kind, " ".join(map(str, meant)), 0, self.daemon)
                self._wake_at = self.world.now
                return True
        return False

    def _is_over(self) -> bool:
        if self._release_all():
            return False
        assert self.checker.is_all_finished(), f"the daemon sleeps, and jobs wait: {self.checker.unfinished()}"
        return True

    def _calm_down(self) -> None:
        """Remove other processes, faults and foreign load, so that nothing keeps a job from running."""
        try:
            self.daemon.begin_change()
            self.daemon.requests.set_paused(paused=False)
            for tag in TAGS:
                self.daemon.requests.set_stopped(tag, stopped=False)
        except StoreFault:
            return
        finally:
            self.daemon.end_change()
        self._is_calm = True
        self._set_limits(LIMITS)
        self.world.drains.clear()
        self.checker.slices.allow_all()
        self.others.leave()
        self.world.foreign_mb = dict.fromkeys(self.world.device_ids, self._script.foreign_mb)
        self.world.faults.clear()
        self.world.load_spikes.clear()
        self._wake_at = self.world.now

    def _delete_all_jobs(self) -> None:
        is_done = False
        while not is_done:
            try:
                for _ in self.daemon.requests.clean(-1.0):
                    self.checker.check()
                is_done = True
            except StoreFault:
                continue
            except Crash:
                self._die()
        self.checker.check_nothing_is_left()

    # Deaths

    def _die(self) -> None:
        self.world.record("dies", self.crash_points.crashed[-1:])
        self.deaths += 1
        self.daemon.die()
        self.clients.lose_daemon()
        self.daemon = self._new_life()
        self._wake_at = self.world.now
        self.checker.check()

    def _new_life(self) -> SimulatedDaemon:
        """Start a daemon; it may crash during recovery and is then started again."""
        while True:
            script = self._script
            rules = replace(RULES, shares_first_runs=script.shares_first_runs, limits=self.limits)
            daemon = SimulatedDaemon(
                self.world,
                self.database,
                self.crash_points,
                rules=rules,
                trouble=script.trouble,
                moves_fail=script.moves_fail,
                habits=script.habits,
                late_samples=script.late_samples,
                late_reads=script.late_reads,
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

    # The rest of the machine

    def _set_clock(self, step_s: float) -> None:
        self.world.clock.shift += step_s

    def _add_load(self, spike: LoadSpike) -> None:
        def leave() -> None:
            if spike in self.world.load_spikes:
                self.world.load_spikes.remove(spike)

        if not self._is_calm:
            self.world.load_spikes.append(spike)
            self.world.after(spike.lasts_s, leave)

    def _plan_others(self) -> None:
        random = self.world.random("others")
        for number in range(self._script.others):
            devices = random.choice((1, 1, len(self.world.device_ids)))
            shared = random.choice((None, 2048.0, 6000.0))
            need = Need(devices=devices, memory=WholeDevice() if shared is None else FixedMemory(shared))
            other = Other(
                name=f"other {number}",
                need=need,
                priority=random.randint(0, 1),
                runs_s=random.uniform(0.5, 15.0),
                waits_s=random.uniform(1.0, 30.0),
            )
            self.world.after(random.uniform(0.0, self._script.within_s), lambda other=other: self.others.arrive(other))  # type: ignore[misc]
            for happens in (self._foreign_process, self._fault):
                at_s, device_id = random.uniform(0.0, self._script.within_s), random.choice(self.world.device_ids)
                self.world.after(at_s, happens(device_id))

    def _foreign_process(self, device_id: str) -> Callable[[], None]:
        def change() -> None:
            if not self._is_calm:
                self.world.set_foreign_memory(
                    device_id, self.world.random("stranger").choice((0.0, 500.0, MEMORY_MB / 2))
                )

        return change

    def _fault(self, device_id: str) -> Callable[[], None]:
        def fail_for_a_while() -> None:
            if not self._is_calm:
                self.world.faults[device_id] = "it fell off the bus"
                self.world.after(5.0, recover)

        def recover() -> None:
            self.world.faults.pop(device_id, None)

        return fail_for_a_while
