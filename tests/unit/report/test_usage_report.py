"""Reports: what is counted, how it is clipped, and that the parts add up, checked by counting quarters of hours."""

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.energy import EnergyPrice, EnergyUse
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.report.chart_rows import HOUR_S, LocalTime, TimeWindow
from gpuyard.report.usage_report import MAX_GROUPS, PastAttempt, Reporter, UsageReport
from tests.known import known

CARDS = [Device(id=name, vendor=Vendor.SIMULATED, index=at, memory_total_mb=1024.0) for at, name in enumerate("AB")]
WINDOW = TimeWindow(1_000.0, 1_000.0 + 3 * HOUR_S)


def in_zone(name: str) -> LocalTime:
    zone = ZoneInfo(name)
    return lambda at: datetime.fromtimestamp(at, UTC).astimezone(zone)


def report_on(*attempts: PastAttempt, window: TimeWindow = WINDOW, local: LocalTime | None = None) -> UsageReport:
    reporter = Reporter(window, CARDS, local or in_zone("UTC"))
    for each in attempts:
        reporter.add(each)
    return reporter.report()


def ran(**fields: Any) -> PastAttempt:
    """Return an attempt of one hour alone on one device, from the start of the window."""
    usual: dict[str, Any] = {"job": 1, "group": "ada", "started_at": WINDOW.since, "ended_at": WINDOW.since + HOUR_S,
             "devices": ("A",), "gpus": 1, "is_alone": True, "outcome": "succeeded"}  # fmt: skip
    return PastAttempt(**{**usual, **fields})


def at(hours: float) -> float:
    return WINDOW.since + hours * HOUR_S


@st.composite
def attempts_(draw: st.DrawFn) -> PastAttempt:
    """Draw attempts of whole quarters of an hour that begin before or in the window and may still run."""
    quarter = st.integers(-4, 16)
    times = sorted(draw(st.lists(quarter, min_size=2, max_size=6, unique=True)))
    moments = [at(time / 4) for time in times]
    is_live = draw(st.booleans())
    pauses: list[tuple[float, float | None]] = list(zip(moments[1::2], moments[2::2], strict=False))
    if len(moments) % 2 and pauses and draw(st.booleans()):
        pauses[-1] = (pauses[-1][0], None)  # suspended to its end
    devices = draw(st.sampled_from([(), ("A",), ("B",), ("A", "B"), ("gone",)]))
    return PastAttempt(
        job=draw(st.integers(1, 5)), group=draw(st.sampled_from("xyz")), started_at=moments[0],
        ended_at=None if is_live else moments[-1], devices=devices, gpus=len(devices),
        outcome=None if is_live else "succeeded", is_alone=draw(st.booleans()),
        reserved_mb=draw(st.sampled_from([None, 512.0])),
        peaks_mb=draw(st.sampled_from([{}, {"A": 300.0}, {"A": 700.0, "B": 100.0}])),
        suspended=tuple(pauses),
    )  # fmt: skip


def quarters_of(each: PastAttempt) -> set[int]:
    """Return the quarters of the window in which the attempt ran, counted one by one."""

    started_at = known(each.started_at)

    def runs(moment: float) -> bool:
        is_there = started_at <= moment and (each.ended_at is None or moment < each.ended_at)
        return is_there and not any(begin <= moment and (end is None or moment < end) for begin, end in each.suspended)

    return {quarter for quarter in range(12) if runs(at((quarter + 0.5) / 4))}


@given(st.lists(attempts_(), max_size=8))
def test_hours_groups_and_memory_add_up(attempts: list[PastAttempt]) -> None:
    # Gpu hours are the time in which attempts ran in the window.
    report = report_on(*attempts)
    counted = sum(len(quarters_of(each)) * each.gpus for each in attempts)
    assert report.total.gpu_hours * 4 == pytest.approx(counted)
    there = sum(
        len(quarters_of(ran(started_at=each.started_at, ended_at=each.ended_at))) for each in attempts if each.suspended
    )
    ran_in_it = sum(len(quarters_of(each)) for each in attempts if each.suspended)
    assert report.total.suspended_hours * 4 == pytest.approx(there - ran_in_it)
    report = report_on(*attempts)
    quarters = {
        card.id: set().union(*(quarters_of(each) for each in attempts if card.id in each.devices)) for card in CARDS
    }
    found = {use.id: use.busy_hours * 4 for use in report.devices if use.is_there}
    assert found == {card: pytest.approx(len(busy)) for card, busy in quarters.items()}
    assert report.box.busy_hours * 4 == pytest.approx(sum(map(len, quarters.values())))
    assert report.box.device_hours == pytest.approx(2 * 3), "a shared device counts as in use once"
    report = report_on(*attempts)
    groups = report.groups
    assert sum(each.gpu_hours for each in groups) == pytest.approx(report.total.gpu_hours)
    assert sum(each.suspended_hours for each in groups) == pytest.approx(report.total.suspended_hours)
    assert sum(each.attempts for each in groups) == report.total.attempts == len(attempts)
    assert sum(each.memory.unused_gb_hours for each in groups) == pytest.approx(report.total.memory.unused_gb_hours)
    assert report.total.jobs == len({each.job for each in attempts}), "groups add up to the whole"
    memory = report_on(*attempts).total.memory
    known_hours = 0.0
    for each in attempts:
        hours = len(quarters_of(each)) / 4
        for device in each.devices:
            is_bounded = device != "gone" if each.is_alone else each.reserved_mb is not None
            known_hours += hours if is_bounded and device in each.peaks_mb else 0
    assert memory.unknown_gpu_hours == pytest.approx(
        sum(len(quarters_of(each)) / 4 * each.gpus for each in attempts) - known_hours
    )
    assert 0 <= memory.unused_gb_hours <= memory.reserved_gb_hours, "memory is known or unknown for every gpu hour"


@given(st.lists(attempts_(), max_size=8), st.sampled_from(["UTC", "Asia/Kolkata", "America/St_Johns"]))
def test_the_hourly_cells_add_up_to_all_gpu_hours(attempts: list[PastAttempt], zone: str) -> None:
    report = report_on(*attempts, local=in_zone(zone))
    assert sum(sum(row.gpu_hours) for row in report.picture.rows) == pytest.approx(report.total.gpu_hours)


def test_memory_waste_is_above_the_peak_or_unknown() -> None:
    shared = ran(is_alone=False, reserved_mb=512.0, peaks_mb={"A": 384.0})
    alone = ran(devices=("B",), peaks_mb={"B": 256.0})
    grew = ran(is_alone=False, reserved_mb=512.0, peaks_mb={"A": 900.0})
    memory = report_on(shared, alone, grew).total.memory
    assert memory.reserved_gb_hours == pytest.approx(0.5 + 1 + 0.5)
    assert memory.unused_gb_hours == pytest.approx(0.125 + 0.75)
    assert memory.unused_percent == pytest.approx(100 * 0.875 / 2)
    assert memory.unknown_gpu_hours == 0, "waste is reserved memory above the peak"
    # Memory that was not measured is unknown and not zero.
    memory = report_on(ran()).total.memory
    assert (memory.unused_percent, memory.unknown_gpu_hours) == (None, 1.0)


def test_attempts_at_engines_and_before_their_start() -> None:
    report = report_on(ran(devices=(), gpus=4))
    assert (report.total.gpu_hours, report.total.memory.unknown_gpu_hours) == (4.0, 4.0)
    assert report.box.busy_hours == 0, "an attempt at an engine counts as many GPUs as it asked for"
    report = report_on(ran(started_at=None, ended_at=None, outcome=None))
    assert (report.total.attempts, report.total.gpu_hours, report.total.running) == (1, 0.0, 0)
    assert report.total.waits.jobs == 0, "a submitted attempt that has not begun takes no time"
    total = report_on(ran(suspended=((at(0.75), at(0.25)),))).total
    assert total.gpu_hours == pytest.approx(1.0)
    assert total.suspended_hours == 0.0, "no time counts twice if the clock was set back"


def test_waits_are_of_first_starts_in_the_window() -> None:
    waits = [ran(job=number, started_at=at(1), ended_at=at(2), queued_at=at(1) - number) for number in range(1, 11)]
    before = ran(job=11, started_at=at(-1), queued_at=at(-3))
    again = ran(job=1, started_at=at(2), ended_at=at(3))
    found = report_on(*waits, before, again).total.waits
    assert (found.jobs, found.median_s, found.p90_s, found.longest_s) == (10, 5.5, 9.0, 10.0)
    assert report_on(again).total.waits.median_s is None


def test_failures_are_listed_by_cause_with_the_most_frequent_first() -> None:
    report = report_on(
        ran(outcome="failed", status=3),
        ran(outcome="out-of-memory", status=1, lacked="device", is_healed=True),
        ran(outcome="out-of-memory", status=137, lacked="device"),
        ran(outcome="timed-out", status=143),
        ran(outcome="failed", status=1),
        ran(),
        ran(ended_at=None, outcome=None),
    )
    causes = [(each.outcome, each.status, each.where, each.attempts, each.healed) for each in report.total.causes]
    assert causes == [
        ("out-of-memory", None, "device", 2, 1),
        ("failed", 1, None, 1, 0),
        ("failed", 3, None, 1, 0),
        ("timed-out", None, None, 1, 0),
    ]
    assert (report.total.succeeded, report.total.running) == (1, 1)


def test_groups_beyond_the_limit_are_combined() -> None:
    attempts = [ran(job=number, group=f"g{number}", ended_at=at(1 / number)) for number in range(1, MAX_GROUPS + 4)]
    report = report_on(*attempts)
    assert [group.group for group in report.groups[:2]] == ["g1", "g2"]
    assert (len(report.groups), report.groups[-1].group, report.groups[-1].groups) == (MAX_GROUPS + 1, None, 3)
    assert sum(group.gpu_hours for group in report.groups) == pytest.approx(report.total.gpu_hours)


def test_cells_are_shares_of_local_hours() -> None:
    window = TimeWindow(
        datetime(2026, 11, 9, 22, tzinfo=UTC).timestamp(), datetime(2026, 11, 10, 1, tzinfo=UTC).timestamp()
    )
    half = ran(started_at=window.since + HOUR_S, ended_at=window.since + 1.5 * HOUR_S, devices=("A", "B"), gpus=2)
    rows = report_on(half, ran(started_at=window.since, ended_at=window.until), window=window).picture.rows
    assert [row.day for row in rows] == ["2026-11-09", "2026-11-10"]
    assert (rows[0].used_percent, rows[1].used_percent) == ((None,) * 22 + (50.0, 75.0), (50.0,) + (None,) * 23)
    assert rows[0].gpu_hours[22:] == (1.0, 2.0), "a cell is the share of GPUs in use in that hour"
    ten = datetime(2026, 11, 9, 10, tzinfo=ZoneInfo("Asia/Kolkata")).timestamp()
    window = TimeWindow(ten - 0.75 * HOUR_S, ten + 2 * HOUR_S)
    attempt = ran(started_at=ten, ended_at=ten + HOUR_S)
    (row,) = report_on(attempt, window=window, local=in_zone("Asia/Kolkata")).picture.rows
    assert row.used_percent[8:13] == (None, 0.0, 50.0, 0.0, None), "hours are in local time"
    berlin = in_zone("Europe/Berlin")
    window = TimeWindow(
        datetime(2026, 10, 25, 0, tzinfo=UTC).timestamp(), datetime(2026, 10, 25, 3, tzinfo=UTC).timestamp()
    )
    report = report_on(ran(started_at=window.since, ended_at=window.until), window=window, local=berlin)
    assert report.picture.rows[0].gpu_hours[1:5] == (0.0, 2.0, 1.0, 0.0), "an hour that the clock has twice is one cell"
    assert report.picture.rows[0].used_percent[1:5] == (None, 50.0, 50.0, None)


@pytest.mark.parametrize(
    ("days", "per_row", "rows"), [(7, 1, 8), (30, 1, 31), (31, 7, 5), (365, 14, 27), (3660, 224, 17)]
)
def test_a_long_window_has_no_more_rows_than_a_month(days: int, per_row: int, rows: int) -> None:
    until = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
    picture = report_on(window=TimeWindow(until - days * 24 * HOUR_S, until)).picture
    assert (picture.days_per_row, len(picture.rows)) == (per_row, rows)


def test_energy_counts_in_the_window_and_by_group() -> None:
    used = EnergyUse(joules=7.2e6, seconds=2 * HOUR_S, idle_s=HOUR_S)
    half = ran(started_at=at(-1), ended_at=at(1), energy=used)
    found = Reporter(WINDOW, CARDS, in_zone("UTC"), EnergyPrice(price=0.5, currency="CHF", gco2_per_kwh=100.0))
    found.add(half)
    energy = found.report().total.energy
    assert (energy.kwh, energy.cost, energy.currency, energy.co2e_kg) == (1.0, 0.5, "CHF", 0.1)
    assert (energy.worked_gpu_hours, energy.idle_gpu_hours, energy.unknown_gpu_hours) == (0.5, 0.5, 0.0)
    used = EnergyUse(joules=3.6e6, seconds=HOUR_S)
    report = report_on(ran(energy=used), ran(job=2, group="bob", energy=used), ran(job=3, group="bob"))
    assert report.total.energy.kwh == sum(group.energy.kwh or 0.0 for group in report.groups) == 2.0
    assert report.total.energy.unknown_gpu_hours == 1.0
    assert report.total.energy.cost is None, "the energy of all groups adds up and unmeasured time is unknown"
