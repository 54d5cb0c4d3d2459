"""How busy processes without a lease keep a device, and when jobs start there."""

import pytest

from gpuyard.model.lease import FixedMemory, Holder, Lease, Need, Share, WholeDevice
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.policy.foreign_load import (
    NO_FOREIGN_LOAD,
    ForeignLoad,
    ForeignProcess,
    Smoothed,
    follow_foreign_load,
    read_foreign_load,
)
from gpuyard.policy.machine import Machine, Packing
from gpuyard.policy.placement import choose
from gpuyard.policy.wait_reasons import ReasonKind
from tests.unit.policy.test_placement import GB, card, devices_of, on_cards

SHARED = Need(memory=FixedMemory(2 * GB))


def foreign_process(pid: int = 7, percent: float | None = None) -> ForeignProcess:
    return ForeignProcess(
        process=Process(pid=pid, memory_mb=GB, name="python", utilization_percent=percent), user="bob"
    )


def loaded(index: int = 0, percent: float | None = 100.0) -> Device:
    return card(index, used=GB, utilization_percent=percent, processes=())


def share(percent: float | None) -> Share:
    return Share(device_id="G0", memory_mb=GB, load_percent=percent, is_exclusive=False)


def load(percent: float, *, is_over: bool = False) -> ForeignLoad:
    average = Smoothed(value=percent, at=0.0)
    return ForeignLoad(average=average, is_over=is_over, processes=(foreign_process(7, percent),))


@pytest.mark.parametrize(
    ("processes_seen", "own", "percent"),
    [
        ([foreign_process(percent=30.0), foreign_process(8, 15.0)], [share(None)], 45.0),
        ([foreign_process(percent=80.0), foreign_process(8, 70.0)], [], 100.0),
        ([foreign_process(percent=30.0)], [], 90.0),
        ([foreign_process(percent=30.0), foreign_process(8)], [], 90.0),
        ([foreign_process()], [], 90.0),
        ([foreign_process()], [share(60.0)], 30.0),
        ([foreign_process()], [share(60.0), share(40.0)], 0.0),
        ([foreign_process()], [share(None)], 0.0),
    ],
)
def test_figures_of_processes_go_first(processes_seen: list[ForeignProcess], own: list[Share], percent: float) -> None:
    assert read_foreign_load(loaded(percent=90.0), processes_seen, own) == percent


def test_foreign_load_is_smoothed_and_opens_well_below_its_bound() -> None:
    assert read_foreign_load(loaded(percent=None), [foreign_process()], []) is None
    quiet = follow_foreign_load(NO_FOREIGN_LOAD, 5.0, [foreign_process()], 0.0, 50.0)
    spike = follow_foreign_load(quiet, 100.0, [foreign_process()], 1.0, 50.0)
    assert not spike.is_over
    busy = follow_foreign_load(NO_FOREIGN_LOAD, 100.0, [foreign_process()], 0.0, 50.0)
    lull = follow_foreign_load(busy, 0.0, [foreign_process()], 1.0, 50.0)
    assert lull.is_over, "one spike does not close a device and one lull does not open it"
    # It opens only well below the bound.
    closed = load(100.0, is_over=True)
    assert follow_foreign_load(closed, 45.0, [foreign_process()], 1000.0, 50.0).is_over
    assert not follow_foreign_load(closed, 39.0, [foreign_process()], 1000.0, 50.0).is_over
    assert not follow_foreign_load(NO_FOREIGN_LOAD, 45.0, [foreign_process()], 1000.0, 50.0).is_over


@pytest.mark.parametrize("bound", [None, 100.0])
def test_without_a_bound_nothing_is_over(bound: float | None) -> None:
    followed = follow_foreign_load(NO_FOREIGN_LOAD, 100.0, [foreign_process()], 0.0, bound)
    assert (followed.percent, followed.is_over) == (100.0, False)


def view(
    *percents: float, over: bool = False, leases: tuple[Lease, ...] = (), packing: Packing | None = None
) -> Machine:
    """Return cards that foreign processes keep this busy."""
    loads = {f"G{index}": load(each, is_over=over and each > 50) for index, each in enumerate(percents) if each}
    cards = (loaded(index) for index in range(len(percents)))
    return on_cards(*cards, leases=leases, foreign=loads, packing=packing or Packing(max_foreign_load_percent=50.0))


def chosen(need: Need, machine: Machine) -> tuple[str, ...]:
    return devices_of(choose(need, machine))


@pytest.mark.parametrize(
    "need", [SHARED, Need(memory=WholeDevice(2 * GB)), Need(), Need(max_utilization_percent=100.0)]
)
def test_among_the_devices_that_fit_the_idle_one_wins(need: Need) -> None:
    assert chosen(need, view(100.0, 0.0)) == ("G1",)
    assert chosen(need, view(40.0, 90.0)) == ("G0",)


def test_a_job_waits_for_a_device_under_foreign_load() -> None:
    choice = choose(SHARED, view(98.0, over=True))
    assert choice.claim is None, "a job waits for a device under foreign load and the reason names the process"
    reason = choice.reasons[0]
    assert (reason.kind, reason.had, reason.needed) == (ReasonKind.OCCUPIED, 98.0, 50.0)
    assert reason.text.startswith("python (pid 7, user bob) keeps it 98% busy without a lease; the limit is 50%")
    held = Lease(id="a", holder=Holder(uid=0, user="me", pid=1), shares=(share(10.0),), since=0.0)
    assert choose(Need(), view(98.0, over=True, leases=(held,))).claim is None, "foreign load stays when leases end"
    packing = Packing(max_load_percent=80.0)
    assert chosen(SHARED, view(70.0, packing=packing)) == ("G0",), "the limit on all load includes foreign load"
    busy = choose(SHARED, view(90.0, packing=packing))
    assert (busy.claim, busy.reasons[0].kind) == (None, ReasonKind.NO_GAIN)
    assert chosen(SHARED, view(5.0, 0.0)) == ("G0",), "a screen is no reason to go elsewhere"


@pytest.mark.parametrize(
    "need",
    [
        Need(memory=FixedMemory(2 * GB), max_utilization_percent=100.0),
        Need(memory=FixedMemory(2 * GB), ignores_foreign_load=True),
    ],
)
def test_a_bound_of_its_own_wins(need: Need) -> None:
    assert chosen(need, view(98.0, over=True)) == ("G0",)
