"""A supervisor and the program that it runs: the memory of the program, and how long it has run."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuyard.model.out_of_memory import Shortage
from gpuyard.simulator.virtual_machine import ScheduledEvent
from tests.simulation.behaviors import Behavior

if TYPE_CHECKING:
    from tests.simulation.keeper import SimulatedKeeper


@dataclass(kw_only=True)
class Program:
    """`journal_entry` is the program's last one; `fate` says what happened to a program without one.

    `memory_mb` is held on devices, `measured_mb` is the most of it that a probe has read, and `stash_mb` was moved to
    RAM while the program is suspended. A frozen program does not run: `ran_s` is its run time until then, `goes_since`
    the time since which it runs. `events` are planned while it runs; freezing it cancels them.

    Its `keeper` starts the `rest` of its slice after it. `after` is the program before it in its slice. `is_unreported`
    means that the keeper has not told its daemon about the end yet, `known_at` is when the daemon that started it read
    about the end.
    """

    job_id: int
    attempt: int
    pid: int
    born_at: float
    boot: int
    command: tuple[str, ...]
    behavior: Behavior
    lease_id: str | None
    devices: tuple[str, ...] = ()
    runs_out: int = 0
    keeper: "SimulatedKeeper | None" = None
    rest: "deque[Program]" = field(default_factory=deque)
    after: "Program | None" = None
    is_unreported: bool = False
    exited_at: float | None = None
    known_at: float | None = None
    began_at: float | None = None
    ended_at: float | None = None
    is_supervised: bool = True
    is_running: bool = False
    journal_entry: str | None = None
    fate: str | None = None
    memory_mb: dict[str, float] = field(default_factory=dict)
    stash_mb: dict[str, float] | None = None
    measured_mb: dict[str, float] = field(default_factory=dict)
    goes_since: float | None = None
    ran_s: float = 0.0
    events: list[ScheduledEvent] = field(default_factory=list)
    climbed: int = 0
    has_sigterm: bool = False
    is_ruined: bool = False
    shortage: Shortage | None = None
    orders: list[Callable[[], None]] = field(default_factory=list)

    @property
    def name(self) -> tuple[int, int]:
        return self.job_id, self.attempt

    @property
    def is_frozen(self) -> bool:
        return self.is_running and self.goes_since is None

    def target_mb(self, climb: int) -> float:
        target = self.behavior.climbs[climb][1]
        return target / 2**self.runs_out if self.behavior.halves and target > 0 else target

    def freeze(self, now: float) -> None:
        if self.goes_since is not None:
            self.ran_s += now - self.goes_since
            self.goes_since = None
            self._cancel_events()

    def drop_all(self) -> None:
        self.memory_mb.clear()
        self.stash_mb = None
        self._cancel_events()

    def _cancel_events(self) -> None:
        for event in self.events:
            event.cancel()
        self.events.clear()
