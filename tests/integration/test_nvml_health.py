"""What the NVML probe reports about the health of cards, over the fake library."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeDevice, FakeHealth, FakeMemory, FakeNvml, FakeState, Result, build_fake_nvml
from tests.fakes.nvml_reader import Reader, by_id

pytestmark = pytest.mark.needs("cc")

MIB = 1048576
CARDS = tuple(
    FakeDevice(
        uuid=f"GPU-0000000{number}-aaaa-bbbb-cccc-000000000000",
        name="NVIDIA Test",
        pci=f"00000000:0{number}:00.0",
        memory=FakeMemory(total=24576 * MIB, used=0),
        utilization=50,
    )
    for number in (1, 2)
)
FIRST, SECOND = CARDS[0].uuid, CARDS[1].uuid
HW_THERMAL, HW_SLOWDOWN, SW_POWER_CAP = 64, 8, 4


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def reader(library: Path, tmp_path: Path) -> Reader:
    return Reader(FakeNvml(library=library, state_file=tmp_path / "state"), tmp_path / "root")


def state(health: FakeHealth, **changes: Any) -> FakeState:
    """Return both cards, the first with this health."""
    return FakeState(devices=(replace(CARDS[0], health=health, **changes), CARDS[1]))


def health_of(outcome: dict[str, Any], uuid: str = FIRST) -> dict[str, Any]:
    found: dict[str, Any] = by_id(outcome)[uuid]["health"]
    return found


def test_every_figure_of_health_is_read(reader: Reader) -> None:
    health = FakeHealth(ecc=3, remap_pending=True, throttle=HW_THERMAL | HW_SLOWDOWN | SW_POWER_CAP, link=(8, 16))
    (outcome,) = reader.read_each(state(health))
    assert health_of(outcome) == {
        "ecc_uncorrected": 3,
        "remap_pending": True,
        "remap_failed": False,
        "throttle": ["hw-thermal", "hw-slowdown"],
        "link_width": 8,
        "link_width_max": 16,
        "unreleased_mb": None,
        "xids": [],
        "is_lost": False,
    }


def test_what_a_card_does_not_report_is_unknown(reader: Reader) -> None:
    (outcome,) = reader.read_each(state(FakeHealth()))
    figures = health_of(outcome)
    assert {figures[name] for name in ("ecc_uncorrected", "remap_pending", "throttle", "link_width")} == {None}


def test_a_power_limit_is_no_throttling(reader: Reader) -> None:
    (outcome,) = reader.read_each(state(FakeHealth(throttle=SW_POWER_CAP)))
    assert health_of(outcome)["throttle"] == []


def test_an_xid_is_reported_from_the_next_reading_on_and_only_for_its_card(reader: Reader) -> None:
    quiet, loud = state(FakeHealth()), state(FakeHealth(xids={1: 79}))
    outcomes = reader.read_each(quiet, loud, loud)
    assert [[event["code"] for event in health_of(each)["xids"]] for each in outcomes] == [[], [79], [79]]
    assert health_of(outcomes[-1], SECOND)["xids"] == []


def test_an_event_makes_the_figures_that_are_asked_for_seldom_known_at_once(reader: Reader) -> None:
    quiet, silent = state(FakeHealth(ecc=0)), state(FakeHealth(ecc=1))
    loud = state(FakeHealth(ecc=1, remap_pending=True, xids={1: 48}))
    outcomes = reader.read_each(quiet, quiet, silent, loud)
    assert [health_of(each)["ecc_uncorrected"] for each in outcomes] == [0, 0, 0, 1]
    assert health_of(outcomes[-1])["remap_pending"] is True


def test_xids_outlast_a_new_start_of_the_library(reader: Reader) -> None:
    quiet, loud = state(FakeHealth()), state(FakeHealth(xids={1: 94}))
    louder = state(FakeHealth(xids={1: 94, 2: 95}))
    *_, opened, last = reader.read_each(quiet, quiet, loud, loud, loud, louder, close_before=3)
    assert [event["code"] for event in health_of(opened)["xids"]] == [94]
    assert [event["code"] for event in health_of(last)["xids"]] == [94, 95]


def test_a_lost_card_keeps_its_xids(reader: Reader) -> None:
    quiet = state(FakeHealth())
    lost = state(FakeHealth(xids={1: 79}), results={"*": Result.GPU_IS_LOST})
    outcomes = reader.read_each(quiet, quiet, lost)
    figures = health_of(outcomes[-1])
    assert (figures["is_lost"], [event["code"] for event in figures["xids"]]) == (True, [79])


def test_an_idle_card_with_a_narrow_link_says_nothing_about_its_lanes(reader: Reader) -> None:
    narrow = FakeHealth(link=(4, 16))
    idle, busy = reader.read_each(state(narrow, utilization=0))[0], reader.read_each(state(narrow))[0]
    assert (health_of(idle)["link_width"], health_of(busy)["link_width"]) == (None, 4)
    wide = reader.read_each(state(FakeHealth(link=(16, 16)), utilization=0))[0]
    assert health_of(wide)["link_width"] == 16


def test_where_the_driver_sends_no_events_the_kernel_log_is_read(reader: Reader) -> None:
    """The log is a file here: what is appended after the second reading is new."""
    log = reader.root / "dev/kmsg"
    log.parent.mkdir(parents=True)
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:01:00): 79, from before\n")
    refuses = FakeState(devices=CARDS, results={"nvmlDeviceRegisterEvents": Result.NOT_SUPPORTED})
    appended = "4,2,2,-;NVRM: Xid (PCI:0000:02:00): 48, pid=7, An uncorrectable double bit error\n"
    outcomes = reader.read_each(refuses, refuses, refuses, append={2: (str(log), appended)})
    assert [event["code"] for event in health_of(outcomes[-1], SECOND)["xids"]] == [48]
    assert health_of(outcomes[-1])["xids"] == []
