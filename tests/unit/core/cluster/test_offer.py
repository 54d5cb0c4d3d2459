"""How much a need is of an engine's GPUs: shares that add up on a card."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.cluster.offer import Amount, ClusterTerms, amount_needed, gpu_count, subtract
from gpuyard.core.lease import FixedMemory, Need, PartOfDevice, UnknownMemory, WholeDevice

CARD_MB = 24_576.0


def shared(memory_mb: float) -> Need:
    return Need(memory=FixedMemory(memory_mb))


def part_of_device(part: float) -> Need:
    return Need(memory=PartOfDevice(part))


@pytest.mark.parametrize(
    ("need", "card_mb", "gpus"),
    [
        (Need(devices=0), CARD_MB, 0.0),
        (Need(devices=1), CARD_MB, 1.0),
        (Need(devices=4), CARD_MB, 4.0),
        (Need(devices=1, memory=WholeDevice(8192.0)), CARD_MB, 1.0),  # alone, and that much of it free
        (Need(devices=2, memory=FixedMemory(8192.0)), CARD_MB, 2.0),  # no engine shares several at a time
        (shared(6144.0), CARD_MB, 0.25),
        (shared(8192.0), CARD_MB, 0.3333),
        (shared(14_745.6), CARD_MB, 0.6),
        (shared(60_000.0), CARD_MB, 1.0),  # more than a card has is a card
        (shared(8192.0), None, 1.0),  # of a card that nobody knows
        (part_of_device(0.5), CARD_MB, 0.5),
        (part_of_device(0.5), None, 0.5),
        (part_of_device(1 / 7), None, 0.1428),
        (shared(0.0), CARD_MB, 0.0001),  # it is to see a card
        (Need(memory=UnknownMemory()), CARD_MB, 1.0),
    ],
)
def test_a_job_asks_for_its_share_of_a_card(need: Need, card_mb: float | None, gpus: float) -> None:
    assert gpu_count(need, card_mb) == pytest.approx(gpus)


@given(count=st.integers(1, 64))
def test_as_many_as_share_a_card_evenly_fit_on_it(count: int) -> None:
    assert count * gpu_count(part_of_device(1.0 / count), None) <= 1.0 + 1e-9
    assert (count + 1) * gpu_count(part_of_device(1.0 / count), None) > 1.0


@given(memory_mb=st.floats(CARD_MB / 100, 2 * CARD_MB))
def test_nobody_asks_for_noticeably_less_than_it_needs_or_more(memory_mb: float) -> None:
    asked = gpu_count(shared(memory_mb), CARD_MB)
    needed = min(1.0, memory_mb / CARD_MB)
    assert needed - 1e-4 <= asked <= needed + 1e-4
    fit = int(1.0 / asked + 1e-9)
    assert fit * needed <= 1.0 + 1e-6, "those who fit by their shares have room"


def test_what_is_left_of_what_is_not_counted_is_not_counted() -> None:
    terms = ClusterTerms(need=part_of_device(0.5), name="x", cpus=3, ram_mb=100.0)
    taken = amount_needed(terms, None)
    assert taken == Amount(gpus=0.5, cpus=3.0, ram_mb=100.0)
    assert subtract(Amount(gpus=2.0, ram_mb=1000.0), taken) == Amount(gpus=1.5, ram_mb=900.0)
    assert subtract(Amount(), taken) == Amount()


def test_who_says_nothing_about_them_takes_one_cpu_and_no_ram() -> None:
    assert amount_needed(ClusterTerms(need=Need(devices=2), name="x"), None) == Amount(gpus=2.0, cpus=1.0, ram_mb=0.0)
