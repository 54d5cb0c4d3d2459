"""What programs do: how long they run, how they end, whether they obey SIGTERM, and when they take how much memory.

A behavior depends only on the seed, the command and the attempt number, not on what happened before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

MEMORY_MB = 24_576.0
# The declared memory, so that a program can be about as large as its user says.
DECLARED = "--declared="
# All free memory, as a framework that preallocates takes it.
EVERYTHING = -1.0


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """What one program does.

    Its supervisor is killed after `lost_after_s`; `is_orphan` means that the program runs on without it. A process of
    the job keeps the lease for `lingers_s` after the end. `climbs` are pairs of run time and memory on each device. A
    program that `halves` needs half as much after each time that it ran out; a `silent` one crashes without a message.
    It holds `ram_mb` from `ram_after_s` on. One that `ends_suspended` needs no device for the rest of its work: it ends
    while it is suspended.
    """

    runs_s: float
    exit_status: str = "0"
    heeds_term: bool = True
    term_s: float = 0.0
    lost_after_s: float | None = None
    is_orphan: bool = False
    lingers_s: float = 0.0
    climbs: tuple[tuple[float, float], ...] = ()
    halves: bool = False
    silent: bool = False
    cpu_percent: float = 0.0
    gpu_percent: float = 0.0
    ram_mb: float = 0.0
    ram_after_s: float = 0.0
    ends_suspended: bool = False

    @property
    def peak_mb(self) -> float:
        return max((target for _, target in self.climbs), default=0.0)


BehaviorOf: TypeAlias = Callable[[tuple[str, ...], int], Behavior]


def plain_behavior(command: tuple[str, ...], _: int) -> Behavior:
    """`run SECONDS [STATUS]`"""
    return Behavior(runs_s=float(command[1]), exit_status=command[2] if len(command) > 2 else "0")


def random_behavior(seed: int, *, is_crowded: bool = False) -> BehaviorOf:
    """Return random behaviors. With `is_crowded`, most programs run longer."""

    def behavior(command: tuple[str, ...], attempt: int) -> Behavior:
        random = Random(f"{seed} {command} {attempt}")
        runs_s = random.choice((0.0, random.uniform(0.0, 0.5), random.uniform(1.0, 8.0), random.uniform(4.0, 25.0)))
        runs_s = max(runs_s, random.uniform(0.0, 40.0)) if is_crowded else runs_s
        is_lost = random.random() < 0.06
        return Behavior(
            runs_s=runs_s,
            exit_status=random.choices(("0", "1", "3", "139", "no-program"), (75, 12, 5, 5, 3))[0],
            heeds_term=random.random() < 0.75,
            term_s=random.choice((0.0, random.uniform(0.0, 3.0))),
            lost_after_s=random.uniform(0.0, runs_s) if is_lost else None,
            is_orphan=random.random() < 0.5,
            lingers_s=random.uniform(0.0, 6.0) if random.random() < 0.08 else 0.0,
            climbs=_random_climbs(seed, command, runs_s),
            halves=random.random() < 0.2,
            silent=random.random() < 0.1,
        )

    return behavior


def _random_climbs(seed: int, command: tuple[str, ...], runs_s: float) -> tuple[tuple[float, float], ...]:
    """Return the climbs of a command: the same for all its attempts, except for the times."""
    random = Random(f"{seed} {command} memory")
    declared = next(
        (float(argument.removeprefix(DECLARED)) for argument in command if argument.startswith(DECLARED)), None
    )
    if declared is not None:
        peak = declared * random.choice((0.0, 0.5, 0.9, 1.0, 1.2))
    else:
        peak = random.choice((0.0, 700.0, 2_500.0, 6_000.0, 11_000.0, 20_000.0, 23_000.0, 26_000.0, EVERYTHING))
    first_s = random.uniform(0.0, 2.0)
    if peak <= 0.0:
        return ((first_s, peak),) if peak else ()
    shape = random.choice(("at once", "ramp", "late"))
    if shape == "at once":
        return ((first_s, peak),)
    if shape == "late":
        return (first_s, 0.3 * peak), (max(first_s, 0.8 * runs_s), peak)
    return tuple((first_s + step * runs_s / 8, peak * (step + 1) / 5) for step in range(5))
