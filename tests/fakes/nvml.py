"""Build the fake libnvidia-ml.so.1 and write the state that it reads (format: nvml_state.h).

A figure that is `None` is not supported by the device. `results` sets what a function returns, by its exported name
(`nvmlDeviceGetPowerUsage`) or a prefix with `*`; `hangs` sets the seconds that it sleeps first.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal

from tests.fakes.compile_library import compile_library

_SOURCE = Path(__file__).with_name("nvml.c")


class Result(IntEnum):
    """Return codes of NVML's functions."""

    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    VERSION_MISMATCH = 18
    UNKNOWN_ERROR = 999


def build_fake_nvml(folder: Path, old_driver: bool = False) -> Path:
    """Compile `folder`/libnvidia-ml.so.1. The library of an old driver lacks the functions added in 510 and later."""
    library = folder / "libnvidia-ml.so.1"
    options = ["-DOLD_DRIVER"] if old_driver else []
    return compile_library(_SOURCE, library, f"-Wl,-soname,{library.name}", *options)


@dataclass(frozen=True, kw_only=True)
class FakeProcess:
    """`memory` is in bytes, `None` if the driver hides it."""

    pid: int
    memory: int | None = None
    kind: Literal["compute", "graphics", "mps"] = "compute"

    def lines(self) -> Iterator[str]:
        yield f"process {self.kind} {self.pid} {'hidden' if self.memory is None else self.memory}"


@dataclass(frozen=True, kw_only=True)
class FakeSample:
    """The load of a process on its card, at a time in microseconds."""

    pid: int
    at: int
    percent: int

    def lines(self) -> Iterator[str]:
        yield f"sample {self.pid} {self.at} {self.percent}"


@dataclass(frozen=True, kw_only=True)
class FakeMemory:
    """In bytes; `used` excludes `reserved`."""

    total: int
    reserved: int = 0
    used: int = 0

    def lines(self) -> Iterator[str]:
        yield f"memory {self.total} {self.reserved} {self.used}"


@dataclass(frozen=True, kw_only=True)
class FakeHealth:
    """`xids` are events by a number that rises from state to state, over all cards; each is delivered once.
    `throttle` is NVML's mask of reasons, `link` the lanes in use and the most possible."""

    ecc: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool = False
    throttle: int | None = None
    link: tuple[int, int] | None = None
    xids: Mapping[int, int] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        remap = None if self.remap_pending is None else f"{self.remap_pending:d} {self.remap_failed:d}"
        link = None if self.link is None else f"{self.link[0]} {self.link[1]}"
        yield from _figure_lines(ecc=self.ecc, remap=remap, throttle=self.throttle, link=link)
        yield from (f"xid {number} {code}" for number, code in self.xids.items())


@dataclass(frozen=True, kw_only=True)
class FakeInstance:
    """A MIG instance; `place` is its index on the card; indexes may have gaps."""

    uuid: str
    place: int
    gpu_instance: int
    compute_instance: int = 0
    name: str | None = None
    memory: FakeMemory | None = None
    processes: tuple[FakeProcess, ...] = ()
    results: Mapping[str, int] = field(default_factory=dict)
    hangs: Mapping[str, float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield f"instance {self.uuid} {self.place} {self.gpu_instance} {self.compute_instance}"
        yield from _figure_lines(name=self.name)
        for part in (self.memory, *self.processes):
            yield from part.lines() if part else ()
        yield from _rule_lines(self.results, self.hangs)


@dataclass(frozen=True, kw_only=True)
class FakeDevice:
    """A card. `places`: how many MIG instances fit on it, or None if it cannot be split."""

    uuid: str
    name: str | None = None
    pci: str | None = None
    memory: FakeMemory | None = None
    utilization: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    temperature: int | None = None
    processes: tuple[FakeProcess, ...] = ()
    samples: tuple[FakeSample, ...] = ()
    health: FakeHealth = field(default_factory=FakeHealth)
    is_split: bool = False
    places: int | None = None
    instances: tuple[FakeInstance, ...] = ()
    nvlinks: tuple[str, ...] = ()  # the bus id of the card at the other end, "switch" or "off"
    shares: Mapping[str, int] = field(default_factory=dict)  # levels of NVML by the bus id of the other card
    is_apart: bool = False  # NVSwitches join it to no other card
    results: Mapping[str, int] = field(default_factory=dict)
    hangs: Mapping[str, float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield f"device {self.uuid}"
        mig = None if self.places is None else f"{self.is_split:d} {self.is_split:d} {self.places}"
        yield from _figure_lines(
            name=self.name,
            pci=self.pci,
            utilization=self.utilization,
            power=self.power_mw,
            power_limit=self.power_limit_mw,
            energy=self.energy_mj,
            temperature=self.temperature,
            mig=mig,
        )
        for part in (self.memory, *self.processes, *self.samples, self.health):
            yield from part.lines() if part else ()
        yield from (f"nvlink {end}" for end in self.nvlinks)
        yield from (f"shares {bus_id} {level}" for bus_id, level in self.shares.items())
        yield from ["apart"] * self.is_apart
        yield from _rule_lines(self.results, self.hangs)
        for instance in self.instances:
            yield from instance.lines()


@dataclass(frozen=True, kw_only=True)
class FakeState:
    devices: tuple[FakeDevice, ...] = ()
    driver: str = "550.54.15"
    init: int = 0
    results: Mapping[str, int] = field(default_factory=dict)
    hangs: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        head = [f"driver {self.driver}", f"init {self.init}", *_rule_lines(self.results, self.hangs)]
        return "\n".join([*head, *(line for device in self.devices for line in device.lines())]) + "\n"


@dataclass(frozen=True, kw_only=True)
class FakeNvml:
    """The library and its state, for processes started with `environment()`."""

    library: Path
    state_file: Path

    def write(self, state: FakeState) -> None:
        """Replace the state atomically: processes that loaded the library see the old state or the new one."""
        fresh = self.state_file.with_name(f"{self.state_file.name}.new")
        fresh.write_text(state.text())
        fresh.replace(self.state_file)

    def environment(self) -> dict[str, str]:
        """Return the variables that a process needs to load the library."""
        folders = [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": ":".join(filter(None, folders)), "FAKE_NVML_STATE": str(self.state_file)}


def _figure_lines(**figures: str | int | None) -> Iterator[str]:
    for keyword, value in figures.items():
        if value is not None:
            yield f"{keyword} {value}"


def _rule_lines(results: Mapping[str, int], hangs: Mapping[str, float]) -> Iterator[str]:
    yield from (f"result {function} {code}" for function, code in results.items())
    yield from (f"hang {function} {seconds}" for function, seconds in hangs.items())
