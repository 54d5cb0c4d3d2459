"""The RAM that stays free on a machine, and warnings about a program beside the queue that holds more RAM than it
declared. It is warned, and never stopped.

- Below the floor (`[host] keep_free`) nothing starts, until the floor has been free for some seconds.
- A program that holds over 5% more than it declared is warned once, and again each time it has grown by a quarter.
- When the machine has less RAM available than has to stay free, a program that holds more than it declared, or notable
  RAM without having declared any, is warned once; again only after the machine has had enough.
"""

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Host
from gpuyard.model.units import format_size
from gpuyard.policy.foreign_load import SteadyGate, judge_steadily
from gpuyard.policy.host_room import floor_mb
from gpuyard.policy.numbers import REOPEN_AFTER_S
from gpuyard.policy.wait_reasons import Reason, ReasonKind

# A program that holds less than the smaller of these would free too little.
_NOTABLE_MB, _NOTABLE_PART = 256.0, 0.1
# Programs may hold a little more than their users measured.
_OVER = 1.05
_AGAIN = 1.25
# What a program should declare: what it held and a little more.
_MORE = 1.1


def ram_figures(host: Host, keep_free_mb: float | None) -> tuple[float, float] | None:
    """Return the available RAM, and how much of it stays free; None if it is unknown, or nothing stays free."""
    floor = floor_mb(keep_free_mb, host.memory_total_mb)
    return (host.memory_available_mb, floor) if host.memory_available_mb is not None and floor else None


def judge_host(
    gate: SteadyGate, available_mb: float, floor: float, now: float, *, has_alarm: bool = False
) -> SteadyGate:
    """Close the machine to new work below the floor, and at an alarm; reopen it when the floor has been free for some
    seconds."""
    is_within = not has_alarm and available_mb >= floor
    return gate if is_within and not gate.is_closed else judge_steadily(gate, is_within, now, REOPEN_AFTER_S)


def host_closed_reason(available_mb: float, floor: float) -> Reason:
    """Return why nothing new starts on this machine for the moment."""
    text = f"{format_size(available_mb)} of RAM available, and {format_size(floor)} stay free"
    remedy = (
        f"programs start again when {format_size(floor)} have been free for {REOPEN_AFTER_S:.0f} s; "
        "keep_free under [host] in the configuration sets the floor"
    )
    return Reason(ReasonKind.HOST_TOO_FULL, text, had=available_mb, needed=floor, remedy=remedy)


def exceeds_declared(held_mb: float, declared_mb: float) -> bool:
    """Return whether a program holds noticeably more than it declared."""
    return held_mb > declared_mb * _OVER


def notable_mb(floor: float) -> float:
    """Return from where on it helps to stop a job."""
    return min(_NOTABLE_MB, _NOTABLE_PART * floor)


class HeldRam(Struct, frozen=True, kw_only=True):
    """The RAM that a program holds, and that it declared with `option`; None if it did not. `figures` are the available
    RAM of the machine and how much of it has to stay free; None if they are unknown, or nothing stays free."""

    name: str
    held_mb: float
    declared_mb: float | None
    option: str
    figures: tuple[float, float] | None = None

    @property
    def is_over(self) -> bool:
        return self.declared_mb is not None and exceeds_declared(self.held_mb, self.declared_mb)

    @property
    def is_undeclared(self) -> bool:
        """Whether it holds notable RAM that it has not declared."""
        return self.declared_mb is None and self.figures is not None and self.held_mb >= notable_mb(self.figures[1])

    @property
    def is_short(self) -> bool:
        """Whether the machine has less RAM available than has to stay free."""
        return self.figures is not None and self.figures[0] < self.figures[1]


class RamWarnings(Struct, frozen=True, kw_only=True):
    """What was said so far: the RAM that the program held at its last warning, and whether the machine was short."""

    warned_mb: float = 0.0
    is_short: bool = False


def judge_held_ram(said: RamWarnings, held: HeldRam) -> tuple[RamWarnings, str | None]:
    """Return what has been said from now on, and the warning; None if there is none."""
    is_newly_short = held.is_short and not said.is_short and (held.is_over or held.is_undeclared)
    has_grown = held.is_over and held.held_mb >= said.warned_mb * _AGAIN
    if not is_newly_short and not has_grown:
        return replace(said, is_short=said.is_short and held.is_short), None
    return RamWarnings(warned_mb=held.held_mb, is_short=held.is_short), describe_held_ram(held)


def describe_held_ram(held: HeldRam) -> str:
    declared = "which was not declared"
    if held.declared_mb is not None:
        declared = f"more than the {format_size(held.declared_mb)} of {held.option}"
    parts = [f"{held.name} holds {format_size(held.held_mb)} of RAM, {declared}"]
    if held.is_short and held.figures is not None:
        available, floor = map(format_size, held.figures)
        left = f"the machine has {available} of RAM left of the {floor} to keep"
        parts.append(f"{left}: nothing starts, and if no job can make way, the kernel may kill this program")
    return "; ".join([*parts, f"declare {format_size(held.held_mb * _MORE)} next time"])
