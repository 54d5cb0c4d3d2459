"""Where the memory of a device is that lacks memory for a job: used, and kept for whom."""

from gpuyard.model.lease import FixedMemory, Holder, Need, Share
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.policy.device_state import DeviceState, PromisedShare, describe_memory
from gpuyard.policy.rules import FreeMemory
from gpuyard.policy.wait_reasons import Reason, ReasonKind, describe_holder, group_by_device, job_of
from tests.unit.policy.test_wait_reasons import described

GB = 1024.0
ANNE = Holder(uid=1, user="anne", pid=7, label="job 3")
BEN = Holder(uid=2, user="ben", pid=8, label="notebook")
HEAD = Holder(uid=1, user="anne", pid=7, label="job 9")


def state(used_gb: float, *promises: PromisedShare) -> DeviceState:
    device = Device(id="GPU-a", vendor=Vendor.NVIDIA, memory_total_mb=24 * GB, memory_used_mb=used_gb * GB,
                    memory_free_mb=(24 - used_gb) * GB)  # fmt: skip
    return DeviceState(device, promises, None)


def promise(holder: Holder, reserved_gb: float, used_gb: float | None, *, ahead: bool = False) -> PromisedShare:
    share = Share(device_id="GPU-a", memory_mb=reserved_gb * GB, is_exclusive=False)
    return PromisedShare(share=share, holder=holder, measured_mb=None if used_gb is None else used_gb * GB,
                         is_reservation=ahead, lease_id=None if ahead else str(holder.pid))  # fmt: skip


def test_who_has_the_memory_of_a_device() -> None:
    # Memory that is kept for a job is told from memory that is used.
    found = state(7.0, promise(ANNE, 10, 4), promise(BEN, 2, 2), promise(HEAD, 6, None, ahead=True))
    assert describe_memory(found) == (
        "6 GB used by job 3 of anne; ben, pid 8 (notebook), 1 GB used by processes outside gpuyard, "
        "6 GB kept for job 3 of anne, 6 GB kept for job 9 of anne, ahead in the queue"
    )
    reason = described(FreeMemory(), Need(memory=FixedMemory(8 * GB)), found)
    assert reason.text.startswith("5 GB free, 8 GB needed: 6 GB used by job 3 of anne; ")
    assert describe_memory(state(4.0, promise(ANNE, 10, 4))) == "4 GB used by job 3 of anne, 6 GB more kept for it"
    assert describe_memory(state(0.0, promise(ANNE, 10, 0))) == "10 GB kept for job 3 of anne"
    assert describe_memory(state(0.0)) == "", "one lease that may take more is named once"
    share = Share(device_id="GPU-a", memory_mb=5 * GB, is_exclusive=False, spread_mb=GB)
    first_run = PromisedShare(share=share, holder=ANNE, measured_mb=4 * GB, lease_id="x")
    text = describe_memory(state(4.0, first_run))
    assert text.startswith("4 GB used by job 3 of anne, 1 GB more kept for it, ")
    assert text.endswith(" kept in case first runs take more")
    assert "outside gpuyard" not in text, "the margin of a first run is kept and not used"


def test_holders_and_gpus_are_named() -> None:
    # A job is named by its id and others by their process.
    assert (describe_holder(ANNE), job_of(ANNE)) == ("job 3 of anne", 3)
    assert (describe_holder(BEN), job_of(BEN)) == ("ben, pid 8 (notebook)", None)
    for label in ("job three", "job 3 4", "jobs 3", "", None, "job " + "9" * 5000):
        assert job_of(Holder(uid=1, user="anne", pid=7, label=label)) is None
    # Equal reasons of several GPUs are grouped.
    names = {"a": "0", "b": "1", "c": "2"}
    reasons = [Reason(ReasonKind.NO_ROOM, "full", each) for each in "ab"] + [Reason(ReasonKind.CLOSED, "drained", "c")]
    assert group_by_device(reasons, names) == ["GPU 0, 1: full", "GPU 2: drained"]
    assert group_by_device([Reason(ReasonKind.PAUSED, "the queue is paused")], names) == ["the queue is paused"]
