"""Jobs that would run out of memory on every device, and jobs that more memory may help."""

import pytest

from gpuyard.model.job import Attempt, MemoryLack, Started, Usage
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.sizing import hopeless_reason
from tests.unit.policy.test_placement import GB, card

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
    # A job that needed more than the largest gpu has is hopeless also beside others.
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
