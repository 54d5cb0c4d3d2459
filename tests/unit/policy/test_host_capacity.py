"""Free RAM and CPUs of the host. The machine has 23 GB, of which 2 GB stay free, and 8 CPUs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Claim, Holder, HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.host_room import (
    HostLimits,
    HostState,
    HostUse,
    HostView,
    check_host,
    describe_reserved,
    floor_mb,
    sum_reserved,
)
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose
from gpuyard.policy.wait_reasons import ReasonKind
from tests.unit.policy.test_placement import ALICE, BOB, GB, ticket

HOST = Host(memory_total_mb=23 * GB, memory_available_mb=23 * GB, cpu_count=8.0)
LIMITS = HostLimits()
BOUNDED = HostLimits(max_cpu_load_percent=100.0)


def ram(size_gb: float, **others: object) -> Need:
    return Need(devices=0, host=HostShare(ram_mb=size_gb * GB, **others))  # type: ignore[arg-type]


def cpus(count: float, *, are_learned: bool = False) -> Need:
    return Need(devices=0, host=HostShare(cpus=count, are_cpus_learned=are_learned))


def held(name: str, host: HostShare, holder: Holder = ALICE) -> Lease:
    return Lease(id=name, holder=holder, shares=(), since=0.0, host=host)


def state(*leases: Lease, host: Host = HOST, limits: HostLimits = LIMITS, **used: HostUse) -> HostState:
    return HostState.of_leases(host, HostView(limits=limits, used=used), leases)


def eight_gb(*names: str) -> list[Lease]:
    return [held(name, HostShare(ram_mb=8 * GB)) for name in names]


def available(size_gb: float) -> Host:
    return replace(HOST, memory_available_mb=size_gb * GB)


# RAM


@pytest.mark.parametrize(
    ("keep_free_mb", "total_gb", "expected_gb"),
    [
        (None, 24.0, 2.0),
        (None, 100.0, 5.0),
        (None, 4.0, 1.0),  # else nothing could start on a small machine
        (None, None, None),
        (512.0, 24.0, 0.5),
        (0.0, 24.0, 0.0),
    ],
)
def test_the_floor_is_a_setting_or_follows_from_the_size_of_the_ram(
    keep_free_mb: float | None, total_gb: float | None, expected_gb: float | None
) -> None:
    found = floor_mb(keep_free_mb, None if total_gb is None else total_gb * GB)
    assert found == (None if expected_gb is None else pytest.approx(expected_gb * GB))


def test_two_leases_of_8_gb_leave_no_room_for_a_third_although_they_have_taken_nothing() -> None:
    assert state(*eight_gb("a")).lacks(ram(8)) is None
    assert state(*eight_gb("a", "b")).lacks(ram(8)) == "RAM"


def test_ram_that_a_lease_has_taken_is_not_charged_twice() -> None:
    """13 GB are left: 8 GB of 23 are taken, and 2 GB stay free."""
    found = state(*eight_gb("a"), host=available(15), a=HostUse(ram_mb=8 * GB))
    assert found.free_mb == 13 * GB


def test_a_lease_that_grew_is_charged_what_it_uses() -> None:
    found = state(*eight_gb("a"), host=available(11), a=HostUse(ram_mb=12 * GB))
    assert found.free_mb == 9 * GB


def test_ram_of_programs_outside_gpuyard_is_taken() -> None:
    assert state(host=available(9)).lacks(ram(8)) == "RAM"
    assert state(host=available(10)).lacks(ram(8)) is None


def test_a_lease_whose_processes_cannot_be_read_is_still_to_take_all_that_it_reserved() -> None:
    assert state(*eight_gb("a"), a=HostUse()).free_mb == 13 * GB


def test_a_lease_that_says_what_it_uses_is_believed_where_it_was_not_measured() -> None:
    lease = held("a", HostShare(ram_mb=8 * GB, used_mb=8 * GB))
    assert state(lease, host=available(15)).free_mb == 13 * GB


def test_shared_pages_that_are_counted_twice_do_not_let_leases_reserve_more_than_the_machine_has() -> None:
    """Both leases seem to have taken their RAM, and the kernel counts only half of it."""
    found = state(*eight_gb("a", "b"), host=available(15), a=HostUse(ram_mb=8 * GB), b=HostUse(ram_mb=8 * GB))
    assert found.lacks(ram(8)) == "RAM"


def test_within_the_limit_of_a_container_leases_outside_of_it_do_not_count() -> None:
    outside = held("a", HostShare(ram_mb=100 * GB), replace(ALICE, machine="box"))
    view = HostView(machine="container")
    limited = HostState.of_leases(replace(HOST, limited_by="cgroup"), view, [outside])
    assert limited.free_mb == 21 * GB
    assert HostState.of_leases(HOST, view, [outside]).lacks(ram(8)) == "RAM"


def test_what_cannot_be_read_limits_nothing() -> None:
    assert state(host=Host()).lacks(ram(1000, cpus=1000.0)) is None


def test_the_reason_has_the_figures_and_the_holders() -> None:
    view = Machine(now=1.0, snapshot=Snapshot(taken_at=1.0, host=HOST), leases=tuple(eight_gb("a", "b")))
    (reason,) = choose(ram(8), view).reasons
    assert reason.text == (
        "5 GB of 23 GB RAM free, 8 GB needed (16 GB promised, 2 GB kept free), beside alice, pid 101 (train)"
    )
    assert (reason.kind, reason.had, reason.needed) == (ReasonKind.HOST_ROOM, 5 * GB, 8 * GB)
    assert "keep_free" in reason.remedy


def test_a_request_ahead_that_could_have_the_ram_now_keeps_it() -> None:
    ahead = replace(ticket(ram(16)), holder=BOB)
    view = Machine(now=1.0, snapshot=Snapshot(taken_at=1.0, host=HOST), ahead=(ahead,))
    (reason,) = choose(ram(8), view).reasons
    assert reason.kind is ReasonKind.AWAITED
    assert reason.text == "RAM reserved for bob, pid 202, ahead in the queue"
    assert choose(ram(5), view).claim == Claim(shares=(), host=HostShare(ram_mb=5 * GB))


@pytest.mark.parametrize(("waited_s", "starts"), [(1.0, True), (100.0, False)])
def test_a_request_that_waits_for_ram_reserves_it_after_a_minute(waited_s: float, *, starts: bool) -> None:
    """Until then smaller requests may pass it, as on devices."""
    ahead = ticket(ram(16), since=0.0)
    view = Machine(
        now=waited_s, snapshot=Snapshot(taken_at=1.0, host=HOST), leases=tuple(eight_gb("a")), ahead=(ahead,)
    )
    assert (choose(ram(6), view).claim is not None) is starts


def test_a_request_of_more_than_the_machine_has_reserves_nothing() -> None:
    view = Machine(now=100.0, snapshot=Snapshot(taken_at=1.0, host=HOST), ahead=(ticket(ram(64)),))
    assert choose(ram(8), view).claim is not None


def test_more_ram_than_the_machine_can_ever_give_is_refused() -> None:
    with pytest.raises(UserError, match=r"64 GB of RAM is more than this machine can give \(21 GB of 23 GB\)"):
        check_host(ram(64), HOST, LIMITS)
    check_host(ram(21), HOST, LIMITS)
    check_host(ram(64), Host(), LIMITS)


# CPUs


def test_declared_cpus_together_do_not_exceed_those_of_the_machine() -> None:
    found = state(held("a", HostShare(cpus=6.0)))
    assert found.lacks(cpus(2)) is None
    assert found.lacks(cpus(3)) == "CPUs"
    (reason,) = found.reasons(cpus(3))
    assert reason.text == "2 of 8 CPUs free, 3 needed, beside alice, pid 101 (train)"


def test_learned_cpus_count_only_with_a_limit_of_the_configuration() -> None:
    learned = held("a", HostShare(cpus=6.0, are_cpus_learned=True))
    assert state(learned).lacks(cpus(8)) is None
    assert state(learned).lacks(cpus(4, are_learned=True)) is None
    assert state(learned, limits=BOUNDED).lacks(cpus(4)) == "CPUs"
    assert state(learned, limits=BOUNDED).lacks(cpus(4, are_learned=True)) == "CPUs"


def test_what_a_lease_is_seen_to_use_goes_before_its_learned_cpus_and_not_before_declared_ones() -> None:
    idle = HostUse(cpus=0.5)
    learned, declared = HostShare(cpus=6.0, are_cpus_learned=True), HostShare(cpus=6.0)
    assert state(held("a", learned), limits=BOUNDED, a=idle).lacks(cpus(4)) is None
    assert state(held("a", declared), limits=BOUNDED, a=idle).lacks(cpus(4)) == "CPUs"


def test_work_that_learned_to_use_more_cpus_than_the_limit_runs_alone() -> None:
    assert state(limits=BOUNDED).lacks(cpus(20, are_learned=True)) is None


def test_more_cpus_than_the_machine_can_ever_give_are_refused() -> None:
    with pytest.raises(UserError, match=r"16 CPUs are more than this machine can give \(8 of 8\)"):
        check_host(cpus(16), HOST, LIMITS)
    check_host(cpus(16), HOST, HostLimits(max_cpu_load_percent=200.0))


# Views


def test_the_line_of_the_host_says_what_is_reserved() -> None:
    found = state(*eight_gb("a"), held("b", HostShare(ram_mb=GB, cpus=4.0)))
    text = "9 GB of RAM and 4 CPUs reserved by 2 leases, 2 GB kept free; 12 GB left to reserve"
    assert describe_reserved(sum_reserved(found)) == text


# Properties

SIZES = st.floats(min_value=0.0, max_value=25.0)


@given(st.lists(st.tuples(SIZES, st.floats(min_value=0.0, max_value=1.5), st.booleans()), max_size=12))
def test_claims_never_exceed_the_ram_without_the_floor(steps: Sequence[tuple[float, float, bool]]) -> None:
    """Each step claims RAM; then the new lease uses a part of it, or more than it reserved, and some lease may end."""
    leases: list[Lease] = []
    used: dict[str, HostUse] = {}
    for number, (size_gb, part, ends) in enumerate(steps):
        taken_mb = sum(use.ram_mb or 0.0 for use in used.values())
        host = available(max(0.0, 23.0 - taken_mb / GB))
        view = Machine(
            now=1.0, snapshot=Snapshot(taken_at=1.0, host=host), leases=tuple(leases), host=HostView(used=used)
        )
        claim = choose(ram(size_gb), view).claim
        if claim is not None:
            assert claim.host is not None
            leases.append(held(str(number), claim.host))
            charged = sum(max(each.host.ram_mb or 0.0, (used.get(each.id) or HostUse()).ram_mb or 0.0)
                          for each in leases if each.host)  # fmt: skip
            assert charged <= 21 * GB + 1e-6
            used[str(number)] = HostUse(ram_mb=size_gb * GB * part)
        if ends and leases:
            used.pop(leases.pop(0).id, None)


@given(st.lists(SIZES, max_size=10), st.randoms(use_true_random=False))
def test_the_order_of_claims_does_not_change_that(sizes: list[float], order: object) -> None:
    order.shuffle(sizes)  # type: ignore[attr-defined]
    leases: list[Lease] = []
    for size_gb in sizes:
        if state(*leases).lacks(ram(size_gb)) is None:
            leases.append(held(f"{len(leases)}", HostShare(ram_mb=size_gb * GB)))
    assert sum(each.host.ram_mb or 0.0 for each in leases if each.host) <= 21 * GB + 1e-6
