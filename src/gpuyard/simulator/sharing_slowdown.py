"""How fast jobs run beside each other on one device, relative to running alone.

- Two jobs of configurations that were measured together have the measured speeds, at most 1.
- Any other two have the speed of a curve that was fitted to those pairs: with D the sum of their loads as a share of
  the device, (1 + (D / 1.35)^4)^(-1/4). Over the 1,388 measured pairs its root mean square error is 0.073.
- Among more than two, a job has the product of its pair speeds, but at least an equal share of the device's time: that
  is what a device gives processes whose work does not overlap.
- No device does more than one second of work per second. Each job has an effective demand, at most its load, such that
  for every measured pair the sum of demand times speed is at most 1; a set with a larger sum is slowed down as a whole.
  So the sum of demand times duration of all jobs, divided by the number of devices, is a true bound of this model.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from gpuyard.simulator.trace_file import number, table

SINGLE_FILE, PAIRS_FILE = "lucid-single_data.csv", "lucid-colocate_info.csv"
_KNEE, _SHARPNESS = 1.35, 4
_CACHED_SETS = 65_536
CONFIGURATION = ("model", "dataset", "batchsize", "amp")

# A configuration, and its load alone on a device in percent.
Member = tuple[str, float]
Speeds = Mapping[tuple[str, str], float]


def curve(load_percent: float) -> float:
    """Return the speed of two jobs that were not measured together, for the sum of their loads."""
    return float((1.0 + (load_percent / 100.0 / _KNEE) ** _SHARPNESS) ** (-1.0 / _SHARPNESS))


class Sharing:
    """`measured` is the speed of the first configuration beside the second; `loads` are their loads alone."""

    def __init__(self, measured: Speeds | None = None, loads: Mapping[str, float] | None = None) -> None:
        self._measured = measured or {}
        self._demands = fit_demands(loads or {}, self._measured)
        self._pair = lru_cache(maxsize=None)(self._find_pair)
        self.speeds: Callable[[tuple[Member, ...]], tuple[float, ...]] = lru_cache(_CACHED_SETS)(self._find_speeds)

    def demand(self, member: Member) -> float:
        """Return the part of a device that a job uses up for each second of its own work."""
        kind, load_percent = member
        return min(self._demands.get(kind, 1.0), load_percent / 100.0)

    def _find_pair(self, one: Member, other: Member) -> float:
        found = self._measured.get((one[0], other[0]))
        return curve(one[1] + other[1]) if found is None else found

    def _find_speeds(self, members: tuple[Member, ...]) -> tuple[float, ...]:
        speeds = []
        for position, member in enumerate(members):
            product = math.prod(self._pair(member, other) for at, other in enumerate(members) if at != position)
            speeds.append(max(product, 1.0 / len(members)))
        total = sum(self.demand(member) * speed for member, speed in zip(members, speeds, strict=True))
        return tuple(speeds) if total <= 1.0 else tuple(speed / total for speed in speeds)


def utilization_percent(loads: Iterable[float]) -> float:
    """Return the load that a device shows under several jobs: it is idle when all of them are idle at once.

    This formula has the smallest error of those that were tried on the measured pairs.
    """
    return 100.0 * (1.0 - math.prod(1.0 - load / 100.0 for load in loads))


def fit_demands(loads: Mapping[str, float], measured: Speeds) -> dict[str, float]:
    """Return demands that fit all measured pairs: reduced from the loads until all fit, then raised where possible."""
    most = {**{kind: 1.0 for pair in measured for kind in pair}, **{kind: load / 100.0 for kind, load in loads.items()}}
    demands = dict(most)
    for one, other in sorted(measured):
        total = demands[one] * measured[one, other] + demands[other] * measured[other, one]
        if total > 1.0:
            for kind in {one, other}:
                demands[kind] /= total
    beside: dict[str, list[str]] = {}
    for one, other in measured:
        beside.setdefault(one, []).append(other)
    for kind in sorted(demands):
        limits = [1.0, most[kind]]
        for other in beside.get(kind, ()):
            if kind == other:
                limits.append(1.0 / (2.0 * measured[kind, kind]))
            else:
                limits.append((1.0 - demands[other] * measured[other, kind]) / measured[kind, other])
        demands[kind] = min(limits)
    return demands


def configuration(model: str, dataset: str, batch: str, amp: str) -> str:
    """Return the name of a measured configuration."""
    return f"{model}/{dataset}/{batch}{'/amp' if amp == '1' else ''}"


def read_sharing(folder: Path) -> Sharing:
    """Return the slow-down from the measured pairs in the directory of public traces."""
    singles = table(folder / SINGLE_FILE, (*CONFIGURATION, "gpu_util"))
    loads = {configuration(*(row[column] for column in CONFIGURATION)): number(row, "gpu_util") for row in singles}
    found: dict[tuple[str, str], list[float]] = {}
    sides = [[f"{column}{side}" for column in (*CONFIGURATION, "speed")] for side in (1, 2)]
    for row in table(folder / PAIRS_FILE, [*sides[0], *sides[1]]):
        one, other = (configuration(*(row[column] for column in side[:-1])) for side in sides)
        found.setdefault((one, other), []).append(number(row, "speed1"))
        found.setdefault((other, one), []).append(number(row, "speed2"))
    return Sharing({pair: min(1.0, sum(speeds) / len(speeds)) for pair, speeds in found.items()}, loads)
