"""The load of each process on a card, from NVML's samples: the real probe over a fake libnvidia-ml.so.1."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeDevice, FakeNvml, FakeProcess, FakeSample, FakeState, Result, build_fake_nvml
from tests.fakes.nvml_reader import Reader

pytestmark = pytest.mark.needs("cc")

CARD = FakeDevice(
    uuid="GPU-aaaaaaaa-0000-0000-0000-000000000001",
    utilization=90,
    processes=(FakeProcess(pid=10, memory=1 << 30), FakeProcess(pid=11, memory=1 << 30)),
)
S = 1_000_000


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("nvml")
    return Reader(FakeNvml(library=build_fake_nvml(folder), state_file=folder / "state"), Path("/nonexistent"))


def loads(outcome: dict[str, Any]) -> dict[int, float | None]:
    return {process["pid"]: process["utilization_percent"] for process in outcome["devices"][0]["processes"]}


def with_samples(*samples: tuple[int, float, int], **changes: Any) -> FakeState:
    taken = tuple(FakeSample(pid=pid, at=int(at * S), percent=percent) for pid, at, percent in samples)
    return FakeState(devices=(replace(CARD, samples=taken, **changes),))


def test_the_newest_sample_of_each_process_counts_and_a_process_without_one_is_idle(reader: Reader) -> None:
    [outcome] = reader.read_each(with_samples((10, 100, 20), (10, 100.5, 85), (10, 99, 40)))
    assert loads(outcome) == {10: 85.0, 11: 0.0}


def test_old_samples_do_not_count(reader: Reader) -> None:
    [outcome] = reader.read_each(with_samples((11, 95, 70), (10, 100, 30)))
    assert loads(outcome) == {10: 30.0, 11: 0.0}


def test_each_read_requests_only_new_samples(reader: Reader) -> None:
    first = ((10, 100.0, 80), (11, 100.0, 10))
    outcomes = reader.read_each(
        with_samples(*first), with_samples(*first), with_samples(*first, (11, 103.0, 60)), with_samples((10, 90.0, 99))
    )
    assert [loads(outcome) for outcome in outcomes] == [
        {10: 80.0, 11: 10.0},
        {10: 80.0, 11: 10.0},  # the same samples are still recent enough
        {10: 0.0, 11: 60.0},
        {10: None, 11: None},  # the card is busy, but no sample is newer
    ]


def test_impossible_samples_are_ignored(reader: Reader) -> None:
    [outcome] = reader.read_each(with_samples((10, 100, 50), (10, 100.1, 4_000_000), (0, 100.1, 30), (77, 100.1, 30)))
    assert loads(outcome) == {10: 50.0, 11: 0.0}


def test_samples_with_pids_outside_the_container_make_the_load_unknown(reader: Reader) -> None:
    [outcome] = reader.read_each(with_samples((4711, 100, 90)))
    assert loads(outcome) == {10: None, 11: None}


@pytest.mark.parametrize("code", [Result.NOT_SUPPORTED, Result.NO_PERMISSION, Result.UNKNOWN_ERROR])
def test_a_driver_without_samples_makes_the_load_unknown(reader: Reader, code: Result) -> None:
    [outcome] = reader.read_each(with_samples((10, 100, 50), results={"nvmlDeviceGetProcessUtilization": code}))
    assert loads(outcome) == {10: None, 11: None}


def test_a_card_lost_while_its_samples_are_read_is_lost(reader: Reader) -> None:
    [outcome] = reader.read_each(
        with_samples((10, 100, 50), results={"nvmlDeviceGetProcessUtilization": Result.GPU_IS_LOST})
    )
    assert outcome["devices"][0]["fault"] is not None


def test_no_samples_are_requested_of_an_idle_card(reader: Reader) -> None:
    [outcome] = reader.read_each(with_samples((10, 100, 50), utilization=5))
    assert loads(outcome) == {10: None, 11: None}
