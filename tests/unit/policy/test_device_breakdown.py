"""A device's memory, divided into this queue's jobs, other leases, foreign processes and free memory."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lease import FixedMemory, Holder, Need, Share
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.policy.device_state import DeviceState, MemoryParts, PromisedShare, break_down, describe_memory
from gpuyard.policy.rules import FreeMemory
from gpuyard.policy.wait_reasons import Reason, ReasonKind, describe_holder, group_by_device, job_of
from tests.unit.policy.test_placement import GB
from tests.unit.policy.test_wait_reasons import described

ME = Holder(uid=1, user="me", pid=7)
OWN = frozenset({"own", "own-2"})
sizes = st.floats(0, 50_000, allow_nan=False)


def device(used_mb: float | None, total_mb: float = 24_000.0) -> Device:
    free = None if used_mb is None else total_mb - used_mb
    return Device(
        id="GPU-a", vendor=Vendor.NVIDIA, memory_total_mb=total_mb, memory_used_mb=used_mb, memory_free_mb=free
    )


def promise(
    lease_id: str, reserved_mb: float | None, measured_mb: float | None, *, alone: bool = False, spread_mb: float = 0.0
) -> PromisedShare:
    share = Share(device_id="GPU-a", memory_mb=reserved_mb, is_exclusive=alone, spread_mb=spread_mb)
    return PromisedShare(share=share, holder=ME, measured_mb=measured_mb, lease_id=lease_id)


def parts(own: tuple[float, float], others: tuple[float, float], foreign: float, free: float) -> MemoryParts:
    return MemoryParts(
        capacity_mb=24_000.0, own_mb=own[0], own_used_mb=own[1], others_mb=others[0], others_used_mb=others[1],
        foreign_mb=foreign, free_mb=free,
    )  # fmt: skip


def test_a_device_is_divided_into_leases_foreign_and_free_memory() -> None:
    promises = [promise("own", 8_000.0, 2_000.0), promise("own-2", 1_000.0, 3_000.0), promise("x", 4_000.0, 1_000.0)]
    assert break_down(device(7_000.0), promises, OWN) == parts(
        (11_000.0, 5_000.0), (4_000.0, 1_000.0), foreign=1_000.0, free=8_000.0
    )
    # An exclusive lease has the whole device except foreign memory.
    found = break_down(device(5_000.0), [promise("own", None, 2_000.0, alone=True)], OWN)
    assert found == parts((21_000.0, 2_000.0), (0.0, 0.0), foreign=3_000.0, free=0.0)
    # A device without leases is free.
    assert break_down(device(0.0), [], OWN) == parts((0.0, 0.0), (0.0, 0.0), foreign=0.0, free=24_000.0)


def test_the_margin_of_first_runs_is_reserved_by_them_and_is_not_foreign() -> None:
    alone = break_down(device(4_000.0), [promise("own", 4_900.0, 4_000.0, spread_mb=1_000.0)], OWN)
    assert (alone.foreign_mb, alone.own_used_mb) == (0.0, 4_000.0)
    assert alone.own_mb is not None
    assert alone.own_mb > 4_900.0, "what is expected, and the margin"
    shared = [promise("own", 4_900.0, 4_000.0, spread_mb=1_000.0), promise("x", 2_000.0, 2_000.0, spread_mb=1_000.0)]
    both = break_down(device(6_500.0), shared, OWN)
    assert both.foreign_mb == 500.0
    assert both.own_mb is not None and both.others_mb is not None  # noqa: PT018 - for the type checker
    assert both.own_mb - 4_900.0 == both.others_mb - 2_000.0 > 0.0


def test_hidden_use_is_charged_and_a_device_without_figures_is_unknown() -> None:
    found = break_down(device(6_000.0), [promise("own", 8_000.0, None)], OWN)
    assert (found.own_mb, found.own_used_mb) == (8_000.0, None)
    assert (found.foreign_mb, found.free_mb) == (0.0, 16_000.0), "hidden use is unknown and still charged"
    # Of a device without figures nothing is known.
    unknown = Device(id="GPU-a", vendor=Vendor.INTEL)
    found = break_down(unknown, [promise("own", 8_000.0, None)], OWN)
    assert (found.capacity_mb, found.own_mb, found.foreign_mb, found.free_mb) == (None, None, None, None)


@given(
    st.floats(0, 24_000),
    st.lists(
        st.builds(
            promise, st.sampled_from(["own", "x", "y"]), sizes, st.none() | sizes, alone=st.booleans(), spread_mb=sizes
        )
    ),
)
def test_the_parts_are_never_negative_and_add_up_to_the_device(used_mb: float, promises: list[PromisedShare]) -> None:
    found = break_down(device(used_mb), promises, OWN)
    given_out = [found.own_mb, found.others_mb, found.foreign_mb, found.free_mb]
    assert all(part is not None and part >= 0 for part in given_out)
    assert abs(sum(part or 0.0 for part in given_out) - 24_000.0) < 0.01


ANNE = Holder(uid=1, user="anne", pid=7, label="job 3")
BEN = Holder(uid=2, user="ben", pid=8, label="notebook")
HEAD = Holder(uid=1, user="anne", pid=7, label="job 9")


def memory_of(used_gb: float, *promises: PromisedShare) -> DeviceState:
    device = Device(id="GPU-a", vendor=Vendor.NVIDIA, memory_total_mb=24 * GB, memory_used_mb=used_gb * GB,
                    memory_free_mb=(24 - used_gb) * GB)  # fmt: skip
    return DeviceState(device, promises, None)


def promised_to(holder: Holder, reserved_gb: float, used_gb: float | None, *, ahead: bool = False) -> PromisedShare:
    share = Share(device_id="GPU-a", memory_mb=reserved_gb * GB, is_exclusive=False)
    return PromisedShare(share=share, holder=holder, measured_mb=None if used_gb is None else used_gb * GB,
                         is_reservation=ahead, lease_id=None if ahead else str(holder.pid))  # fmt: skip


def test_who_has_the_memory_of_a_device() -> None:
    found = memory_of(7.0, promised_to(ANNE, 10, 4), promised_to(BEN, 2, 2), promised_to(HEAD, 6, None, ahead=True))
    assert describe_memory(found) == (
        "6 GB used by job 3 of anne; ben, pid 8 (notebook), 1 GB used by processes outside gpuyard, "
        "6 GB kept for job 3 of anne, 6 GB kept for job 9 of anne, ahead in the queue"
    )
    reason = described(FreeMemory(), Need(memory=FixedMemory(8 * GB)), found)
    assert reason.text.startswith("5 GB free, 8 GB needed: 6 GB used by job 3 of anne; ")
    assert (
        describe_memory(memory_of(4.0, promised_to(ANNE, 10, 4))) == "4 GB used by job 3 of anne, 6 GB more kept for it"
    )
    assert describe_memory(memory_of(0.0, promised_to(ANNE, 10, 0))) == "10 GB kept for job 3 of anne"
    assert describe_memory(memory_of(0.0)) == "", "one lease that may take more is named once"
    share = Share(device_id="GPU-a", memory_mb=5 * GB, is_exclusive=False, spread_mb=GB)
    first_run = PromisedShare(share=share, holder=ANNE, measured_mb=4 * GB, lease_id="x")
    text = describe_memory(memory_of(4.0, first_run))
    assert text.startswith("4 GB used by job 3 of anne, 1 GB more kept for it, ")
    assert text.endswith(" kept in case first runs take more")
    assert "outside gpuyard" not in text, "the margin of a first run is kept and not used"


def test_holders_and_gpus_are_named() -> None:
    assert (describe_holder(ANNE), job_of(ANNE)) == ("job 3 of anne", 3)
    assert (describe_holder(BEN), job_of(BEN)) == ("ben, pid 8 (notebook)", None)
    for label in ("job three", "job 3 4", "jobs 3", "", None, "job " + "9" * 5000):
        assert job_of(Holder(uid=1, user="anne", pid=7, label=label)) is None
    # Equal reasons of several GPUs are grouped.
    names = {"a": "0", "b": "1", "c": "2"}
    reasons = [Reason(ReasonKind.NO_ROOM, "full", each) for each in "ab"] + [Reason(ReasonKind.CLOSED, "drained", "c")]
    assert group_by_device(reasons, names) == ["GPU 0, 1: full", "GPU 2: drained"]
    assert group_by_device([Reason(ReasonKind.PAUSED, "the queue is paused")], names) == ["the queue is paused"]
