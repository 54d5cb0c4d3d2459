"""Warnings about a program beside the queue that holds more RAM than it declared. It is warned, and never stopped.

- A program that holds over 5% more than it declared is warned once, and again each time it has grown by a quarter.
- When the machine has less RAM available than has to stay free, a program that holds more than it declared, or notable
  RAM without having declared any, is warned once; again only after the machine has had enough.
"""

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.memory.host_guard import exceeds_declared, notable_mb
from gpuyard.core.units import format_size

_AGAIN = 1.25
# What a program should declare: what it held and a little more.
_MORE = 1.1


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
