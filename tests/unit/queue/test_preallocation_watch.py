"""Programs that preallocate are recognised by the libraries of the process that holds most of a device."""

import pytest

from gpuyard.model.job import Attempt, Started, Usage
from gpuyard.model.machine_snapshot import Device, Host, Process, Sample, Snapshot, Vendor
from gpuyard.queue.measure_usage import EVENT, PreallocationWatch
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb

CARD_MB = 24_576.0
JAX = "/venv/lib/site-packages/jaxlib/xla_extension.so"
JUMP = ((2.0, 450.0), (3.0, 18_500.0))
CLIMB = ((2.0, 450.0), (3.0, 9000.0), (4.0, 18_500.0))


def sample(device_id: str) -> Sample:
    processes = (Process(pid=70, memory_mb=18_500.0), Process(pid=71, memory_mb=300.0))
    card = Device(id=device_id, vendor=Vendor.NVIDIA, index=0, memory_total_mb=CARD_MB, processes=processes)
    return Sample(snapshot=Snapshot(taken_at=0.0, host=Host(), devices=(card,)))


@pytest.mark.parametrize(
    ("curve", "libraries", "device_id", "is_recognised"),
    [
        pytest.param(JUMP, JAX, "GPU-0", True, id="a jump of JAX"),
        pytest.param(CLIMB, JAX, "GPU-0", False, id="JAX that climbs"),
        pytest.param(JUMP, "/venv/lib/libtorch.so", "GPU-0", False, id="a jump of another framework"),
        pytest.param(JUMP, JAX, "SIM-0", False, id="pids of a simulated device are not looked up"),
    ],
)
def test_a_jump_and_its_framework_are_recorded_once(
    queue_db: QueueDb, curve: tuple[tuple[float, float], ...], libraries: str, device_id: str, is_recognised: bool
) -> None:
    (job_id,) = queue_db.add()
    usage = Usage(peaks_mb={device_id: 18_500.0}, curve=curve)
    queue_db.store.start_attempt(
        Attempt(job_id=job_id, number=1, phase=Started(at=100.0, keeper_pid=9), devices=(device_id,), usage=usage)
    )
    transitions = JobTransitions(queue_db.store)
    transitions.reload()
    watch = PreallocationWatch(transitions, lambda pid: libraries if pid == 70 else "")
    with queue_db.store.transaction():
        for now in (110.0, 111.0):
            watch.note(sample(device_id), now)
    events = [kind for _, kind, _ in queue_db.queries.events(job_id) if kind == EVENT]
    kept = transitions.live[job_id].attempt.usage
    assert kept is not None
    assert (events, kept.preallocates) == (([EVENT], "JAX") if is_recognised else ([], ""))
