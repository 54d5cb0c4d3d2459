"""Jobs that would run out of memory on every device, and jobs that more memory may help."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, MemoryLack, Started, Usage
from gpuyard.model.lease import Lease, Need, WholeDevice
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.machine import Packing, would_have_run_out
from gpuyard.policy.plan import decide
from gpuyard.policy.sizing import hopeless_reason
from tests.unit.policy.test_placement import GB, card, lease, machine, shared
from tests.unit.policy.test_planner import CPU, queue, running, view, waiting_job

CARDS = (card(0), card(1))
TOO_LARGE = "out of memory: needed at least 31 GB; the largest GPU has 24 GB"
EVEN_ALONE = "out of memory even alone on the largest GPU (24 GB)"


def reason(
    asked_gb: float | None = None,
    held_gb: float | None = None,
    peak_gb: float | None = None,
    *,
    last_gb: float | None = None,
    free_gb: float | None = None,
    framework: str = "PyTorch",
    where: ShortageKind = ShortageKind.DEVICE,
    others: tuple[tuple[str, float | None], ...] = (("job 2", 12 * GB),),
    reserved_mb: float | None = 6 * GB,
    devices: tuple[Device, ...] = CARDS,
    need: Need | None = None,
) -> str | None:
    """Return why a job that ran on G0 is hopeless: beside a neighbour, unless `others` says something else."""
    asked, held, free = (None if each is None else each * GB for each in (asked_gb, held_gb, free_gb))
    curve = () if last_gb is None else ((1.0, (peak_gb or 0.0) * GB), (2.0, last_gb * GB))
    usage = None if peak_gb is None else Usage(peaks_mb={"G0": peak_gb * GB}, curve=curve)
    attempt = Attempt(job_id=1, number=1, phase=Started(at=0.0), devices=("G0",), reserved_mb=reserved_mb, usage=usage)
    shortage = Shortage(
        where=where, says="out of memory", asked_mb=asked, held_mb=held, free_mb=free, framework=framework
    )
    return hopeless_reason(need or Need(), attempt, MemoryLack(shortage=shortage, others=others), devices)


def test_a_job_that_no_gpu_could_have_served_is_hopeless() -> None:
    assert reason(asked_gb=31.0) == TOO_LARGE
    assert reason(asked_gb=11.0, held_gb=20.0) == TOO_LARGE
    assert reason(asked_gb=11.0, peak_gb=20.0, last_gb=20.0) == TOO_LARGE
    assert reason(asked_gb=11.0, peak_gb=5.0) is None
    # What it held earlier is not added to what it held when it ran out.
    assert reason(asked_gb=8.0, held_gb=10.0, peak_gb=20.0) is None
    assert reason(asked_gb=8.0, peak_gb=20.0, last_gb=10.0) is None
    large = card(1, memory_free_mb=80 * GB)
    assert reason(asked_gb=31.0, devices=(card(0), large)) is None, "a larger GPU that suits it may help"
    assert reason(asked_gb=31.0, devices=(card(0), large), need=Need(only=("G0",))) == TOO_LARGE
    assert reason(others=(), reserved_mb=None) == EVEN_ALONE
    assert reason(others=(), peak_gb=23.0) == EVEN_ALONE, "a job that ran out alone on the largest GPU is hopeless"
    assert reason(others=(("job 2", 10.0),), peak_gb=23.0) == EVEN_ALONE
    assert reason(others=(), held_gb=20.0, free_gb=3.0, peak_gb=20.0) == EVEN_ALONE


@pytest.mark.parametrize(
    "unknown", [card(1, fault="fell off the bus"), card(1, memory_total_mb=None, memory_free_mb=None)]
)
def test_a_suitable_gpu_that_cannot_be_judged_now_may_help(unknown: Device) -> None:
    devices = (card(0), unknown)
    assert reason(asked_gb=31.0, devices=devices) is None
    assert reason(asked_gb=31.0, devices=devices, need=Need(only=("G0",))) == TOO_LARGE


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"others": (), "peak_gb": 3.0}, id="it shared its device, and others may just have left"),
        pytest.param(
            {"others": (), "asked_gb": 2.0, "held_gb": 12.8, "free_gb": 0.5, "peak_gb": 12.8}, id="it held half of it"
        ),
        pytest.param({"others": (), "peak_gb": 20.0}, id="its peak leaves room for another"),
        pytest.param({"others": (("job 2", None),), "peak_gb": 23.0}, id="what another held is unknown"),
        pytest.param({"others": (("a desktop", 2 * GB),), "reserved_mb": None}, id="beside a foreign process"),
        pytest.param({"where": ShortageKind.HOST, "asked_gb": 100.0}, id="it ran out of RAM"),
        pytest.param({"asked_gb": 100.0, "devices": ()}, id="the devices are a cluster's"),
        pytest.param({"asked_gb": 10.0, "peak_gb": 18.0, "framework": "JAX"}, id="its pool is not what it used"),
    ],
)  # fmt: skip
def test_where_it_is_not_known_a_job_is_not_hopeless(given: dict[str, object]) -> None:
    assert reason(**given) is None  # type: ignore[arg-type]


def is_avoided(
    need: Need, cards: Sequence[Device], *leases: Lease, packing: Packing | None = None, **changes: Any
) -> bool:
    """Return the result for a job that waits on this machine."""
    on = machine(*cards)
    seen = view(queue(1, need), on=on, leases=leases, **changes)
    plan = decide(replace(seen, machine=replace(seen.machine, packing=packing or Packing())))
    assert not plan.starts
    job = waiting_job(plan, 1)
    return would_have_run_out(job.need, job.reasons, on)


def test_memory_that_is_promised_and_not_used_would_have_been_given_away() -> None:
    assert is_avoided(shared(12 * GB), [card(0)], lease("a", "G0", memory_mb=16 * GB))
    # A card with an exclusive lease is reserved as a whole.
    assert is_avoided(shared(4 * GB), [card(0)], lease("a", "G0"))
    held = [replace(running(7), lease_id="a"), replace(running(8), lease_id="b")]
    leases = [lease(name, "G0", memory_mb=12 * GB) for name in "ab"]
    assert is_avoided(shared(12 * GB), [card(0)], *leases, running=held), "a card that is all reserved needs no words"
    assert not is_avoided(shared(12 * GB), [card(0, used=20 * GB)], *leases, running=held)


def test_memory_that_is_used_or_unknown_would_not() -> None:
    assert not is_avoided(shared(12 * GB), [card(0, used=16 * GB)], lease("a", "G0", memory_mb=16 * GB))
    assert not is_avoided(shared(12 * GB), [card(0, used=16 * GB)])
    # Unknown memory is not free.
    assert not is_avoided(shared(12 * GB), [card(0, used=None)], lease("a", "G0", memory_mb=16 * GB))
    full = Packing(max_jobs_per_device=1)
    assert not is_avoided(shared(4 * GB), [card(0)], lease("a", "G0", memory_mb=GB), packing=full)
    assert not is_avoided(CPU, [card(0)], cpu_jobs=0), "a job with another reason does not wait for memory"
    assert not is_avoided(shared(4 * GB), [card(0)], lease("a", "G0"), tags={"": 0})
    # A full card does not count for a card at its job limit.
    cards = [card(0, used=23 * GB), card(1)]
    leases = [lease("a", "G0", memory_mb=23 * GB), lease("b", "G1", memory_mb=GB)]
    assert not is_avoided(shared(4 * GB), cards, *leases, packing=Packing(max_jobs_per_device=1))


@pytest.mark.parametrize("need", [Need(), Need(memory=WholeDevice(4 * GB))])
def test_a_job_that_waits_for_a_whole_card_does_not_wait_for_memory(need: Need) -> None:
    assert not is_avoided(need, [card(0)], lease("a", "G0", memory_mb=16 * GB))


def test_only_cards_that_the_job_may_have_count() -> None:
    wide, reserved = shared(12 * GB, devices=2), lease("a", "G0", memory_mb=16 * GB)
    assert is_avoided(wide, [card(0), card(1)], reserved), "a job that needs two cards would have got both"
    assert not is_avoided(wide, [card(0), card(1, used=16 * GB)], reserved)
    assert not is_avoided(wide, [card(0), card(1, fault="gone")], reserved)
    assert not is_avoided(replace(wide, banned=("G1",)), [card(0), card(1)], reserved)
    both = [lease(name, f"G{at}", memory_mb=16 * GB) for at, name in enumerate("ab")]
    cards = [card(0, used=16 * GB), card(1)]
    assert is_avoided(shared(12 * GB), cards, *both), "a card that it may not have does not count"
    assert not is_avoided(replace(shared(12 * GB), only=("G0",)), cards, *both)
    assert not is_avoided(shared(12 * GB), [cards[0], replace(cards[1], fault="gone")], *both)
