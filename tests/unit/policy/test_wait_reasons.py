"""A job that cannot start names the option that changes this. A card has 24 GB."""

import re

import pytest
from msgspec.structs import replace

from gpuyard.model.lease import Drain, Holder, HostShare, Need, Share, UncertainMemory
from gpuyard.model.machine_snapshot import Device, Host
from gpuyard.policy import wait_reasons
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.device_state import DeviceState, PromisedShare
from gpuyard.policy.foreign_load import NO_FOREIGN_LOAD, follow_foreign_load
from gpuyard.policy.machine import Machine, Packing
from gpuyard.policy.placement import PlacementState, choose
from gpuyard.policy.rules import DeviceRule, FreeMemory, Leased, OtherPrograms
from gpuyard.policy.sharing import depth_limit
from gpuyard.policy.wait_reasons import Reason, ReasonKind, brief_of
from tests.unit.policy.test_placement import GB, card, lease, on_cards, shared

ALICE = Holder(uid=1000, user="alice", pid=101, label="train")
BOB = Holder(uid=1001, user="bob", pid=202)


def described(rule: DeviceRule, need: Need, state: DeviceState) -> Reason:
    return rule.describe(need, state, PlacementState(on_cards(state.device)))


def refusal(rule: DeviceRule, need: Need, *holders: Holder, used: float = 0.0) -> Reason:
    """The reason of this rule on a card of 24 GB that the holders have leased."""
    leases = [PromisedShare(share=Share(device_id="G0"), holder=holder, lease_id="a") for holder in holders]
    return described(rule, need, DeviceState(card(0, used=used), leases, None))


def test_holders_are_named() -> None:
    assert wait_reasons.describe_holder(ALICE) == "alice, pid 101 (train)"
    assert wait_reasons.describe_holder(BOB) == "bob, pid 202", "a holder is named by user pid and label"
    reason = refusal(Leased(), Need(), ALICE, BOB)
    assert reason.text == "held by alice, pid 101 (train); bob, pid 202"
    assert reason.holders == (ALICE, BOB), "several holders are all named"
    assert wait_reasons.awaited("G0", (BOB,)).text == "reserved for bob, pid 202, ahead in the queue"


def test_memory_and_its_limit_are_shown() -> None:
    reason = refusal(FreeMemory(), shared(2 * GB), ALICE, BOB)
    assert reason.text == "0 MB free, 2 GB needed: 48 GB kept for alice, pid 101 (train); bob, pid 202"
    assert (reason.had, reason.needed) == (-24 * GB, 2 * GB), "overdrawn memory is shown as zero"
    # Foreign memory is shown with its limit.
    reason = refusal(OtherPrograms(), Need(), used=9 * GB)
    assert reason.text == "processes outside gpuyard hold 9 GB of it, over 1.2 GB"


@pytest.mark.parametrize(
    ("reserved_mb", "used_mb", "is_leased"),
    [(20 * GB, 0.0, True), (20 * GB, 23 * GB, True), (10 * GB, 23 * GB, False), (None, 0.0, True)],
)
def test_reserved_memory_is_told_from_used(reserved_mb: float | None, used_mb: float, *, is_leased: bool) -> None:
    share = Share(device_id="G0", memory_mb=reserved_mb, is_exclusive=False)
    lease = PromisedShare(share=share, holder=ALICE, lease_id="a")
    state = DeviceState(card(0, used=used_mb), [lease], None)
    assert described(FreeMemory(), shared(8 * GB), state).is_leased is is_leased


# They pass by themselves, name a command in their text, or come with another reason that has a remedy.
FULL = on_cards(card(0, used=20 * GB))
SHARED = on_cards(card(0), leases=(lease("a", "G0", memory_mb=4 * GB),))
BUSY = on_cards(
    card(0),
    foreign={"G0": follow_foreign_load(NO_FOREIGN_LOAD, 100.0, (), 0.0, 50.0)},
    packing=Packing(max_foreign_load_percent=50.0),
)
CASES = [
    (ReasonKind.CLOSED, Need(banned=("G0",)), FULL, "banned and banned_names under [devices]"),
    (ReasonKind.CLOSED, Need(),
     replace(FULL, closed=closed_devices(FULL.snapshot, [Drain(device_id="G0", uid=0, user="a", since=0.0)], ())),
     "gpuyard devices undrain ID"),
    (ReasonKind.UNHEALTHY, Need(), on_cards(card(0, fault="lost")), "gpuyard doctor"),
    (ReasonKind.OCCUPIED, Need(), FULL, "--vram SIZE (in a script: vram=)"),
    (ReasonKind.NO_ROOM, shared(8 * GB), FULL, "programs outside gpuyard leave 4 GB: with --vram SIZE"),
    (
        ReasonKind.NO_ROOM,
        Need(memory=UncertainMemory(12 * GB, 12 * GB, 0.0)),
        FULL,
        "a job without an estimate asks for 12 GB: with --vram",
    ),
    (ReasonKind.OCCUPIED, shared(GB), BUSY, "--max-gpu 100 (in a script: utilization_threshold_percent=100)"),
    (ReasonKind.NO_GAIN, shared(GB), replace(SHARED, packing=Packing(max_load_percent=50.0), loads={"G0": 90.0}),
     "max_load_percent under [packing]"),
    (ReasonKind.NO_GAIN, replace(shared(GB), load_percent=100.0),
     replace(SHARED, packing=Packing(min_gain_percent=90.0)), "min_gain_percent under [packing]"),
    (ReasonKind.NO_GAIN, replace(shared(GB), load_percent=100.0),
     on_cards(card(0), card(1), packing=Packing(depth=depth_limit(2, 2)),
              leases=(lease("a", "G0", memory_mb=4 * GB), lease("b", "G1"))),
     "min_gain_percent = -100 under [packing]"),
    (ReasonKind.LIMIT, shared(GB), replace(SHARED, packing=Packing(max_jobs_per_device=1)), "max_jobs_per_device"),
    (ReasonKind.TOO_FULL, Need(max_memory_used_mb=GB), FULL, "--max-gpu-mem-mb"),
    (ReasonKind.TOO_BUSY, Need(max_utilization_percent=5.0),
     on_cards(card(0, utilization_percent=9.0)), "--max-gpu"),
    (ReasonKind.POWER_LIMIT, Need(max_power_w=5.0), FULL, "--max-power-w"),
    (ReasonKind.HOST_TOO_BUSY, Need(max_cpu_percent=5.0),
     on_cards(card(0), host=Host(cpu_percent=90.0)), "--max-cpu"),
    (ReasonKind.HOST_TOO_FULL, Need(min_host_memory_mb=5.0),
     on_cards(card(0), host=Host(memory_available_mb=1.0)), "--min-free-mem-mb"),
    (ReasonKind.NOT_LINKED, Need(devices=2, is_linked=True),
     on_cards(card(0), card(1)), "--linked and --same-node (in a script: linked="),
    (ReasonKind.HOST_ROOM, Need(devices=0, host=HostShare(ram_mb=8 * GB)),
     on_cards(host=Host(memory_available_mb=1.0)), "--ram (in a script: ram=)"),
    (ReasonKind.HOST_ROOM, Need(devices=0, host=HostShare(cpus=8.0)),
     on_cards(host=Host(cpu_count=1.0)), "--cpus (in a script: cpus=)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "need", "view", "names"), CASES)
def test_a_reason_names_the_option_that_changes_it(kind: ReasonKind, need: Need, view: Machine, names: str) -> None:
    [found] = [reason for reason in choose(need, view).reasons if reason.kind is kind]
    assert names in found.remedy


BRIEFS = [
    (Need(), FULL, "programs outside gpuyard use its memory"),
    (shared(8 * GB), FULL, "too little free memory"),
    (shared(GB), replace(SHARED, packing=Packing(max_load_percent=50.0), loads={"G0": 90.0}), "too busy for another"),
    (replace(shared(GB), load_percent=100.0), replace(SHARED, packing=Packing(min_gain_percent=90.0)),
     "sharing it would not get more work done"),
    (Need(devices=0, host=HostShare(ram_mb=8 * GB)),
     on_cards(host=Host(memory_available_mb=1.0)), "too little free RAM"),
    (Need(devices=0, host=HostShare(cpus=8.0)), on_cards(host=Host(cpu_count=1.0)),
     "too few free CPUs"),
]  # fmt: skip


@pytest.mark.parametrize(("need", "view", "brief"), BRIEFS)
def test_a_reason_has_a_brief_form_without_figures(need: Need, view: Machine, brief: str) -> None:
    found = choose(need, view).reasons[0]
    assert brief_of(found).startswith(brief)
    assert "GB" not in brief_of(found)
    assert "GB" not in brief_of(replace(found, holders=()))


def test_a_job_that_waits_for_first_runs_names_them_and_what_would_start_it_now() -> None:
    first_run = Share(device_id="G0", memory_mb=8 * GB, spread_mb=4 * GB, is_exclusive=False)
    view = replace(SHARED, leases=(replace(lease("job 1", "G0"), shares=(first_run,)),))
    unknown = UncertainMemory(16 * GB, 8 * GB, 8 * GB)
    [found, _] = choose(Need(memory=unknown), view).reasons
    assert found.kind is ReasonKind.NO_ROOM
    assert re.fullmatch(r"until .* has shown how much memory it uses \(first run\)", brief_of(found)), found
    size = re.fullmatch(r"`--vram (\d+)G` would start it now, if that is enough", found.remedy)
    assert size is not None, found.remedy
    assert choose(shared(int(size[1]) * GB), view).claim is not None
    [declared, _] = choose(shared(14 * GB), view).reasons
    assert (declared.remedy, brief_of(declared)[:6]) == ("", "until ")


def test_a_card_of_unknown_size_and_memory_of_a_lease() -> None:
    [found, _] = choose(shared(22 * GB), SHARED).reasons
    assert (found.kind, found.remedy) == (ReasonKind.NO_ROOM, ""), "memory that a lease will free needs no remedy"
    unknown: Device = card(0, used=None, memory_total_mb=None)
    [found, _] = choose(shared(GB), on_cards(unknown)).reasons
    assert found.remedy == "without --vram it gets the whole GPU", "a card of unknown size is available as a whole"
