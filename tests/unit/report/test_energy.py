"""How the energy of a card is measured and shared: the parts add up, and each attempt pays for what it held."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.energy import (
    CardHolder,
    CardReading,
    EnergyPrice,
    EnergyUse,
    add_energy,
    energy_between,
    energy_figures,
    energy_totals,
    learn_power,
    part_of_energy,
    share_energy,
)

BEGINS, ENDS = 100.0, 110.0
times = st.floats(BEGINS, ENDS)
loads = st.none() | st.floats(0.0, 100.0)


def holder(key: int, since: float = BEGINS, until: float = ENDS, use: float | None = None) -> CardHolder:
    return CardHolder(key=key, since=since, until=until, use_percent=use)


@st.composite
def many_holders(draw: st.DrawFn) -> list[CardHolder]:
    found = []
    for key in range(draw(st.integers(0, 5))):
        since, until = sorted((draw(times), draw(times)))
        found.append(holder(key, since, until, draw(loads)))
    return found


def held_s(holders: list[CardHolder]) -> float:
    """Return for how long at least one of them held the card, counted edge by edge."""
    edges = sorted({BEGINS, ENDS, *(at for each in holders for at in (each.since, each.until))})
    pairs = pairwise(edges)
    return sum(b - a for a, b in pairs if any(each.since <= a and each.until >= b for each in holders))


@given(st.floats(0.0, 1e6), many_holders(), st.none() | st.floats(0.0, 500.0), st.floats(0.0, 300.0), st.booleans())
def test_the_parts_add_up_to_the_energy_of_the_card_while_it_was_held(
    joules: float, holders: list[CardHolder], idle_w: float | None, foreign: float, is_integrated: bool
) -> None:
    parts, foreign_j = share_energy(
        joules, BEGINS, ENDS, holders, idle_w=idle_w, foreign_percent=foreign, is_integrated=is_integrated
    )
    charged = sum(part.joules for part in parts.values()) + foreign_j
    assert charged == pytest.approx(joules * held_s(holders) / (ENDS - BEGINS), rel=1e-6, abs=1e-6)
    assert all(part.joules >= 0.0 for part in parts.values())
    for each in holders:
        seconds = parts[each.key].seconds if each.key in parts else 0.0
        assert seconds == pytest.approx(each.until - each.since, abs=1e-6)


def test_attempts_pay_for_what_they_held_and_used() -> None:
    parts, foreign_j = share_energy(3000.0, BEGINS, ENDS, [holder(1, use=0.0)], idle_w=50.0)
    assert parts == {1: EnergyUse(joules=3000.0, seconds=10.0, idle_s=10.0)}
    assert foreign_j == 0.0, "an attempt alone on the card pays for all of it idle draw included"
    both = [holder(1, use=80.0), holder(2, use=20.0)]
    parts, _ = share_energy(3000.0, BEGINS, ENDS, both, idle_w=100.0)
    assert (parts[1].joules, parts[2].joules) == (500.0 + 1600.0, 500.0 + 400.0)
    assert parts[1].shared_s == 10.0, "two attempts pay the idle draw in halves and the rest by use"
    parts, _ = share_energy(3000.0, BEGINS, ENDS, [holder(1, use=80.0), holder(2)], idle_w=100.0)
    assert (parts[1].joules, parts[2].joules) == (1500.0, 1500.0), "attempts of unknown use share equally"
    # An attempt pays only for the time in which it held the card.
    parts, _ = share_energy(1000.0, BEGINS, ENDS, [holder(1, until=BEGINS + 5), holder(2, since=BEGINS + 8)])
    assert [parts[1].joules, parts[2].joules] == pytest.approx([500.0, 200.0])
    parts, foreign_j = share_energy(1000.0, BEGINS, ENDS, [holder(1, use=25.0)], foreign_percent=75.0)
    assert (parts[1].joules, foreign_j) == (250.0, 750.0), "what other processes use is charged to no attempt"


def reading(at: float, counter_j: float | None = None, power_w: float | None = None) -> CardReading:
    return CardReading(at=at, counter_j=counter_j, power_w=power_w)


def test_energy_between_two_readings() -> None:
    assert energy_between(reading(0, 100.0, 50.0), reading(2, 350.0, 50.0)) == (250.0, False)
    # Without a counter power is integrated.
    assert energy_between(reading(0, None, 100.0), reading(2, None, 200.0)) == (300.0, True)
    # A counter that began again is not used.
    assert energy_between(reading(0, 9e6, 100.0), reading(2, 10.0, 100.0)) == (200.0, True)
    # A long gap is unknown without a counter.
    assert energy_between(reading(0, None, 100.0), reading(60, None, 100.0)) is None
    assert energy_between(reading(0, 0.0, 100.0), reading(60, 6000.0, 100.0)) == (6000.0, False)
    assert energy_between(reading(0), reading(1)) is None, "a card that reports nothing has no energy"


def test_energy_as_figures() -> None:
    figures = energy_figures(EnergyUse(joules=3.6e6, seconds=3600.0), EnergyPrice())
    assert (figures.kwh, figures.cost, figures.currency, figures.co2e_g) == (1.0, None, None, None)
    price = EnergyPrice(price=0.3, currency="EUR", gco2_per_kwh=350.0)
    figures = energy_figures(EnergyUse(joules=7.2e6, seconds=7200.0, shared_s=5.0), price)
    assert (figures.cost, figures.currency, figures.co2e_g, figures.mean_w) == (0.6, "EUR", 700.0, 1000.0)
    assert figures.basis == "shared", "cost and co2e follow from the configuration"
    # An unmeasured report has no energy rather than zero.
    totals = energy_totals(EnergyUse(), 7200.0, EnergyPrice(price=0.3, gco2_per_kwh=350.0))
    assert (totals.kwh, totals.cost, totals.co2e_kg, totals.unknown_gpu_hours) == (None, None, None, 2.0)


def test_sums_parts_and_learned_power() -> None:
    whole = EnergyUse(joules=100.0, seconds=10.0, idle_s=4.0, peak_w=20.0)
    quarter = part_of_energy(whole, 0.25)
    assert (quarter.joules, quarter.seconds, quarter.idle_s, quarter.peak_w) == (25.0, 2.5, 1.0, 20.0)
    # A sum keeps the highest power.
    assert add_energy(EnergyUse(joules=1.0, peak_w=300.0), EnergyUse(joules=2.0)) == EnergyUse(joules=3.0, peak_w=300.0)
    # A program that draws more is believed at once and one that draws less by halves.
    assert learn_power(None, 200.0) == 200.0
    assert learn_power(200.0, 300.0) == 300.0
    assert learn_power(300.0, 100.0) == 200.0
    assert learn_power(300.0, None) == 300.0
