"""How many GPUs of an engine a need takes: shares of a GPU that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.cluster_terms import Amount, ClusterTerms, amount_needed, gpu_count, subtract
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice, UnknownMemory, WholeDevice

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
        (Need(devices=1, memory=WholeDevice(8192.0)), CARD_MB, 1.0),  # the whole GPU, with that much free
        (Need(devices=2, memory=FixedMemory(8192.0)), CARD_MB, 2.0),  # no engine shares several GPUs at a time
        (shared(6144.0), CARD_MB, 0.25),
        (shared(8192.0), CARD_MB, 0.3333),
        (shared(14_745.6), CARD_MB, 0.6),
        (shared(60_000.0), CARD_MB, 1.0),  # more than a GPU has: the whole GPU
        (shared(8192.0), None, 1.0),  # a GPU of unknown size
        (part_of_device(0.5), CARD_MB, 0.5),
        (part_of_device(0.5), None, 0.5),
        (part_of_device(1 / 7), None, 0.1428),
        (shared(0.0), CARD_MB, 0.0001),  # a small share, so that the job sees a GPU
        (Need(memory=UnknownMemory()), CARD_MB, 1.0),
    ],
)
def test_a_job_asks_for_its_share_of_a_gpu(need: Need, card_mb: float | None, gpus: float) -> None:
    assert gpu_count(need, card_mb) == pytest.approx(gpus)


@given(count=st.integers(1, 64))
def test_jobs_that_share_a_gpu_evenly_all_fit_on_it(count: int) -> None:
    assert count * gpu_count(part_of_device(1.0 / count), None) <= 1.0 + 1e-9
    assert (count + 1) * gpu_count(part_of_device(1.0 / count), None) > 1.0


@given(memory_mb=st.floats(CARD_MB / 100, 2 * CARD_MB))
def test_the_share_is_close_to_the_needed_memory(memory_mb: float) -> None:
    asked = gpu_count(shared(memory_mb), CARD_MB)
    needed = min(1.0, memory_mb / CARD_MB)
    assert needed - 1e-4 <= asked <= needed + 1e-4
    fit = int(1.0 / asked + 1e-9)
    assert fit * needed <= 1.0 + 1e-6, "jobs that fit by their shares also fit by memory"


def test_subtracting_keeps_uncounted_fields_uncounted() -> None:
    terms = ClusterTerms(need=part_of_device(0.5), name="x", cpus=3, ram_mb=100.0)
    taken = amount_needed(terms, None)
    assert taken == Amount(gpus=0.5, cpus=3.0, ram_mb=100.0)
    assert subtract(Amount(gpus=2.0, ram_mb=1000.0), taken) == Amount(gpus=1.5, ram_mb=900.0)
    assert subtract(Amount(), taken) == Amount()


def test_the_default_is_one_cpu_and_no_ram() -> None:
    assert amount_needed(ClusterTerms(need=Need(devices=2), name="x"), None) == Amount(gpus=2.0, cpus=1.0, ram_mb=0.0)
