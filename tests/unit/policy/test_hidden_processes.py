"""Where the driver lists no processes, earlier use tells foreign memory from that of leases. A card has 24 GB."""

import pytest

from gpuyard.model.lease import Lease, Need, Share
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import PlacementChoice, choose
from tests.unit.policy.test_placement import ALICE, GB, card, devices_of, free_memory, machine, shared


def unlisted(used: float, processes: tuple[Process, ...] | None = None) -> Device:
    return card(0, used=used, processes=processes)


def test_a_share_records_the_foreign_memory_at_its_grant() -> None:
    [share] = claimed(choose(shared(4 * GB), Machine(now=0.0, snapshot=machine(unlisted(2 * GB)))))
    assert share.foreign_mb == 2 * GB
    beside = Machine(
        now=0.0,
        snapshot=machine(unlisted(5 * GB)),
        leases=(Lease(id="a", holder=ALICE, shares=(share,), since=0.0),),
        measured={("a", "G0"): 3 * GB},
    )
    [second] = claimed(choose(shared(4 * GB), beside))
    assert second.foreign_mb == 2 * GB, "never the use of a lease"


@pytest.mark.parametrize(("used", "free"), [(5.0, 18.0), (9.0, 15.0), (1.0, 19.0)])
def test_earlier_foreign_memory_does_not_count_as_use_of_a_reservation(used: float, free: float) -> None:
    """The desktop has 2 GB, and the lease is for 4 GB. Use beyond both is foreign, too."""
    share = Share(device_id="G0", memory_mb=4 * GB, is_exclusive=False, foreign_mb=2 * GB)
    leases = (Lease(id="a", holder=ALICE, shares=(share,), since=0.0),)
    device = unlisted(used * GB)
    assert free_memory(device, Machine(now=0.0, snapshot=machine(device), leases=leases)) == free * GB


def test_where_processes_are_listed_nothing_is_noted_since_each_is_seen() -> None:
    [share] = claimed(choose(shared(4 * GB), Machine(now=0.0, snapshot=machine(card(0, used=2 * GB)))))
    assert share.foreign_mb is None


@pytest.mark.parametrize(("device", "starts"), [
    (unlisted(1.8 * GB), True), (unlisted(1.8 * GB, ()), True), (unlisted(13 * GB), False),
    (card(0, used=1.8 * GB), False),
])  # fmt: skip
def test_where_processes_are_hidden_an_exclusive_device_may_have_a_desktop_on_it(device: Device, starts: bool) -> None:
    assert bool(devices_of(choose(Need(), Machine(now=0.0, snapshot=machine(device))))) is starts


def claimed(choice: PlacementChoice) -> tuple[Share, ...]:
    assert choice.claim is not None
    return choice.claim.shares
