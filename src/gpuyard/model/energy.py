"""The energy of attempts: what a card used between two readings, shared by the attempts that held it.

- The card's own counter is used where it has one, else its power, integrated; over a gap of more than LONGEST_GAP_S it
  is unknown.
- Attempts that share a card pay its idle draw in equal parts, and the rest by use, or in equal parts if a use is
  unknown. What processes without a job use, or a card that no attempt holds, is charged to no attempt: so the parts add
  up to the energy of the card while it was held.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

LONGEST_GAP_S = 10.0
# A shorter interval says little about power: counters move about ten times a second.
SHORTEST_PEAK_S = 0.5
JOULES_PER_KWH = 3_600_000.0


class CardReading(Struct, frozen=True, kw_only=True):
    """A card at one moment: the energy that it has used since the driver was loaded, and its power."""

    at: float
    counter_j: float | None = None
    power_w: float | None = None


class CardHolder(Struct, frozen=True, kw_only=True):
    """An attempt that held a card from `since` to `until`, and how busy it kept the card; None: unknown."""

    key: int
    since: float
    until: float
    use_percent: float | None = None


class EnergyUse(Struct, frozen=True, kw_only=True):
    """The energy of an attempt, in all of the `seconds` that were measured on its GPUs, summed over GPUs. Of these,
    it was idle for `idle_s`, beside others for `shared_s`, and for `integrated_s` the cards had no counter. `peak_w` is
    the highest power per GPU."""

    joules: float = 0.0
    seconds: float = 0.0
    idle_s: float = 0.0
    shared_s: float = 0.0
    integrated_s: float = 0.0
    peak_w: float | None = None


class EnergyPrice(Struct, frozen=True, kw_only=True):
    """What a kWh costs, and how much CO2e it causes; None: unknown, and not shown."""

    price: float | None = None
    currency: str = "EUR"
    gco2_per_kwh: float | None = None

    def cost(self, joules: float) -> float | None:
        return None if self.price is None else joules / JOULES_PER_KWH * self.price

    def co2e_g(self, joules: float) -> float | None:
        return None if self.gco2_per_kwh is None else joules / JOULES_PER_KWH * self.gco2_per_kwh


NO_PRICE = EnergyPrice()


def energy_between(before: CardReading, now: CardReading) -> tuple[float, bool] | None:
    """Return the joules that a card used between two readings, and whether its power was integrated; None: unknown."""
    elapsed = now.at - before.at
    if elapsed <= 0:
        return None
    if before.counter_j is not None and now.counter_j is not None and now.counter_j >= before.counter_j:
        return now.counter_j - before.counter_j, False
    powers = [power for power in (before.power_w, now.power_w) if power is not None]
    if not powers or elapsed > LONGEST_GAP_S:
        return None
    return sum(powers) / len(powers) * elapsed, True


def share_energy(  # noqa: PLR0913 - all that decides who pays
    joules: float,
    begins: float,
    ends: float,
    holders: Sequence[CardHolder],
    *,
    idle_w: float | None = None,
    foreign_percent: float = 0.0,
    is_integrated: bool = False,
) -> tuple[dict[int, EnergyUse], float]:
    """Share the energy of a card in an interval. Return the part of each holder, by its key, and that of processes
    without a job. `idle_w` is the idle draw of the card, `foreign_percent` how busy these processes keep it."""
    parts: dict[int, EnergyUse] = {}
    foreign_j = 0.0
    power = joules / (ends - begins)
    edges = {at for each in holders for at in (each.since, each.until) if begins < at < ends}
    for since, until in pairwise(sorted({begins, ends, *edges})):  # within which the same attempts hold the card
        here = [each for each in holders if each.since <= since and each.until >= until]
        if not here:
            continue
        seconds = until - since
        idle_j = min(power, idle_w or 0.0) * seconds
        rest_j = power * seconds - idle_j
        # What the card draws beyond its idle power is shared by use.
        uses = [each.use_percent for each in here if each.use_percent is not None]
        total = sum(uses) + foreign_percent
        weights, rest_of_all = [1.0 / len(here)] * len(here), 1.0
        if len(uses) == len(here) and total > 0:
            weights, rest_of_all = [use / total for use in uses], sum(uses) / total
        foreign_j += rest_j * (1.0 - rest_of_all)
        for each, weight in zip(here, weights, strict=True):
            is_idle = each.use_percent is not None and each.use_percent < 5.0
            part = EnergyUse(
                joules=idle_j / len(here) + rest_j * weight,
                seconds=seconds,
                idle_s=seconds if is_idle else 0.0,
                shared_s=seconds if len(here) > 1 or foreign_percent else 0.0,
                integrated_s=seconds if is_integrated else 0.0,
            )
            parts[each.key] = add_energy(parts.get(each.key), part)
    return parts, foreign_j


def add_energy(before: EnergyUse | None, part: EnergyUse) -> EnergyUse:
    if before is None:
        return part
    peak_w = max((peak for peak in (before.peak_w, part.peak_w) if peak is not None), default=None)
    return EnergyUse(**{name: getattr(before, name) + getattr(part, name) for name in _SUMS}, peak_w=peak_w)


_SUMS = ("joules", "seconds", "idle_s", "shared_s", "integrated_s")


def learn_power(before_w: float | None, run_w: float | None) -> float | None:
    """Return the power per GPU that is expected after one more run: a higher one at once, a lower one by halves."""
    if before_w is None or run_w is None:
        return before_w if run_w is None else run_w
    return max(run_w, (before_w + run_w) / 2)


class EnergyFigures(Struct, frozen=True, kw_only=True):
    """Energy with what it costs. `basis` says how it was measured: `counter` by the card's own counter, alone on the
    card; `shared` by the counter, in part beside others; `power` in part by integrating power. `measured_s` are the
    GPU-seconds that were measured, and `idle_s` those of them in which the job was idle."""

    joules: float
    kwh: float
    cost: float | None
    currency: str | None
    co2e_g: float | None
    mean_w: float | None
    peak_w: float | None
    basis: str
    measured_s: float
    idle_s: float


def energy_figures(use: EnergyUse, price: EnergyPrice) -> EnergyFigures:
    return EnergyFigures(
        joules=use.joules,
        kwh=use.joules / JOULES_PER_KWH,
        cost=price.cost(use.joules),
        currency=None if price.price is None else price.currency,
        co2e_g=price.co2e_g(use.joules),
        mean_w=use.joules / use.seconds if use.seconds else None,
        peak_w=use.peak_w,
        basis="power" if use.integrated_s else "shared" if use.shared_s else "counter",
        measured_s=use.seconds,
        idle_s=use.idle_s,
    )


class EnergyTotals(Struct, frozen=True, kw_only=True):
    """The energy of all attempts of a report, and their GPU-hours of work, of idling, and without a measurement."""

    kwh: float | None
    cost: float | None
    currency: str | None
    co2e_kg: float | None
    worked_gpu_hours: float
    idle_gpu_hours: float
    unknown_gpu_hours: float


def energy_totals(use: EnergyUse, gpu_s: float, price: EnergyPrice) -> EnergyTotals:
    co2e_g, is_known = price.co2e_g(use.joules), use.seconds > 0
    return EnergyTotals(
        kwh=use.joules / JOULES_PER_KWH if is_known else None,
        cost=price.cost(use.joules) if is_known else None,
        currency=None if price.price is None else price.currency,
        co2e_kg=None if co2e_g is None or not is_known else co2e_g / 1000.0,
        worked_gpu_hours=(use.seconds - use.idle_s) / 3600.0,
        idle_gpu_hours=use.idle_s / 3600.0,
        unknown_gpu_hours=max(0.0, gpu_s - use.seconds) / 3600.0,
    )


def part_of_energy(use: EnergyUse, part: float) -> EnergyUse:
    """Return the energy of a part of an attempt's time, as if its power had been constant."""
    return EnergyUse(**{name: getattr(use, name) * part for name in _SUMS}, peak_w=use.peak_w)
