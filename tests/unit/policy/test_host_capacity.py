"""Free RAM and CPUs of the host. The machine has 23 GB, of which 2 GB stay free, and 8 CPUs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Claim, Holder, HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.estimates import FinishedRun, Profile, learn
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
from gpuyard.policy.memory_guards import HeldRam, RamWarnings, judge_held_ram
from gpuyard.policy.numbers import LEAST_RAM_MB
from gpuyard.policy.placement import choose
from gpuyard.policy.sizing import KnownRuns, expected_ram_mb, learned_cpus, learned_ram_mb, size_host
from gpuyard.policy.wait_reasons import ReasonKind
from tests.known import known
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
def test_the_floor_is_a_setting_or_a_part_of_the_ram(
    keep_free_mb: float | None, total_gb: float | None, expected_gb: float | None
) -> None:
    found = floor_mb(keep_free_mb, None if total_gb is None else total_gb * GB)
    assert found == (None if expected_gb is None else pytest.approx(expected_gb * GB))


def test_ram_is_reserved_and_charged_once() -> None:
    assert state(*eight_gb("a")).lacks(ram(8)) is None
    assert state(*eight_gb("a", "b")).lacks(ram(8)) == "RAM"
    found = state(*eight_gb("a"), host=available(15), a=HostUse(ram_mb=8 * GB))
    assert found.free_mb == 13 * GB, "RAM that a lease has taken is not charged twice"
    found = state(*eight_gb("a"), host=available(11), a=HostUse(ram_mb=12 * GB))
    assert found.free_mb == 9 * GB, "a lease that grew is charged what it uses"
    assert state(host=available(9)).lacks(ram(8)) == "RAM"
    assert state(host=available(10)).lacks(ram(8)) is None, "RAM of programs outside gpuyard is taken"


def test_ram_of_leases_that_are_not_measured() -> None:
    assert state(*eight_gb("a"), a=HostUse()).free_mb == 13 * GB
    # A lease that says what it uses is believed where it was not measured.
    lease = held("a", HostShare(ram_mb=8 * GB, used_mb=8 * GB))
    assert state(lease, host=available(15)).free_mb == 13 * GB
    # Shared pages that are counted twice do not let leases reserve more than the machine has.
    found = state(*eight_gb("a", "b"), host=available(15), a=HostUse(ram_mb=8 * GB), b=HostUse(ram_mb=8 * GB))
    assert found.lacks(ram(8)) == "RAM"
    outside = held("a", HostShare(ram_mb=100 * GB), replace(ALICE, machine="box"))
    view = HostView(machine="container")
    limited = HostState.of_leases(replace(HOST, limited_by="cgroup"), view, [outside])
    assert limited.free_mb == 21 * GB, "within the limit of a container leases outside of it do not count"
    assert HostState.of_leases(HOST, view, [outside]).lacks(ram(8)) == "RAM"
    assert state(host=Host()).lacks(ram(1000, cpus=1000.0)) is None, "what cannot be read limits nothing"


def test_the_reason_and_the_line_of_the_host_have_the_figures() -> None:
    view = Machine(now=1.0, snapshot=Snapshot(taken_at=1.0, host=HOST), leases=tuple(eight_gb("a", "b")))
    (reason,) = choose(ram(8), view).reasons
    assert reason.text == (
        "5 GB of 23 GB RAM free, 8 GB needed (16 GB promised, 2 GB kept free), beside alice, pid 101 (train)"
    )
    assert (reason.kind, reason.had, reason.needed) == (ReasonKind.HOST_ROOM, 5 * GB, 8 * GB)
    assert "keep_free" in reason.remedy, "the reason has the figures and the holders"
    found = state(*eight_gb("a"), held("b", HostShare(ram_mb=GB, cpus=4.0)))
    text = "9 GB of RAM and 4 CPUs reserved by 2 leases, 2 GB kept free; 12 GB left to reserve"
    assert describe_reserved(sum_reserved(found)) == text, "the line of the host says what is reserved"


def test_a_request_ahead_keeps_ram_that_it_could_have() -> None:
    ahead = replace(ticket(ram(16)), holder=BOB)
    view = Machine(now=1.0, snapshot=Snapshot(taken_at=1.0, host=HOST), ahead=(ahead,))
    (reason,) = choose(ram(8), view).reasons
    assert reason.kind is ReasonKind.AWAITED, "a request ahead that could have the RAM now keeps it"
    assert reason.text == "RAM reserved for bob, pid 202, ahead in the queue"
    assert choose(ram(5), view).claim == Claim(shares=(), host=HostShare(ram_mb=5 * GB))
    view = Machine(now=100.0, snapshot=Snapshot(taken_at=1.0, host=HOST), ahead=(ticket(ram(64)),))
    assert choose(ram(8), view).claim is not None, "a request of more than the machine has reserves nothing"


@pytest.mark.parametrize(("waited_s", "starts"), [(1.0, True), (100.0, False)])
def test_a_request_that_waits_for_ram_reserves_it_after_a_minute(waited_s: float, *, starts: bool) -> None:
    """Until then smaller requests may pass it, as on devices."""
    ahead = ticket(ram(16), since=0.0)
    view = Machine(
        now=waited_s, snapshot=Snapshot(taken_at=1.0, host=HOST), leases=tuple(eight_gb("a")), ahead=(ahead,)
    )
    assert (choose(ram(6), view).claim is not None) is starts


def test_more_than_the_machine_can_ever_give_is_refused() -> None:
    with pytest.raises(UserError, match=r"64 GB of RAM is more than this machine can give \(21 GB of 23 GB\)"):
        check_host(ram(64), HOST, LIMITS)
    check_host(ram(21), HOST, LIMITS)
    check_host(ram(64), Host(), LIMITS)
    # More CPUs than the machine can ever give are refused.
    with pytest.raises(UserError, match=r"16 CPUs are more than this machine can give \(8 of 8\)"):
        check_host(cpus(16), HOST, LIMITS)
    check_host(cpus(16), HOST, HostLimits(max_cpu_load_percent=200.0))


def test_cpus_are_reserved_as_declared_or_learned() -> None:
    found = state(held("a", HostShare(cpus=6.0)))
    assert found.lacks(cpus(2)) is None
    assert found.lacks(cpus(3)) == "CPUs", "declared CPUs together do not exceed those of the machine"
    (reason,) = found.reasons(cpus(3))
    assert reason.text == "2 of 8 CPUs free, 3 needed, beside alice, pid 101 (train)"
    learned = held("a", HostShare(cpus=6.0, are_cpus_learned=True))
    assert state(learned).lacks(cpus(8)) is None, "learned CPUs count only with a limit of the configuration"
    assert state(learned).lacks(cpus(4, are_learned=True)) is None
    assert state(learned, limits=BOUNDED).lacks(cpus(4)) == "CPUs"
    assert state(learned, limits=BOUNDED).lacks(cpus(4, are_learned=True)) == "CPUs"
    # What a lease is seen to use goes before its learned CPUs and not before declared ones.
    idle = HostUse(cpus=0.5)
    assert state(learned, limits=BOUNDED, a=idle).lacks(cpus(4)) is None
    assert state(held("a", HostShare(cpus=6.0)), limits=BOUNDED, a=idle).lacks(cpus(4)) == "CPUs"
    # Work that learned to use more CPUs than the limit runs alone.
    assert state(limits=BOUNDED).lacks(cpus(20, are_learned=True)) is None


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


CPU_JOB, GPU_JOB = Need(devices=0), Need(devices=1)


def exact(*peaks_gb: float, cpus: tuple[float, ...] = ()) -> Profile:
    return Profile(ram_peaks_mb=tuple(peak * GB for peak in peaks_gb), cpu_uses=cpus)


def program(*peaks_gb: float) -> Profile:
    return Profile(is_exact=False, ram_peaks_mb=tuple(peak * GB for peak in peaks_gb))


def test_what_a_job_reserves() -> None:
    need = Need(devices=1, host=HostShare(ram_mb=2 * GB, cpus=3.0))
    assert size_host(need, KnownRuns(exact=exact(8, cpus=(6.0,))), 100 * GB) == need.host, "a declared amount wins"
    # A first run with devices is charged what is expected.
    share = size_host(GPU_JOB, KnownRuns(), 21 * GB)
    assert share == HostShare(ram_mb=21 * GB / 64, is_ram_expected=True)
    assert size_host(GPU_JOB, KnownRuns(), None) == HostShare(ram_mb=512.0, is_ram_expected=True)
    share = size_host(GPU_JOB, KnownRuns(machine=program(1, 3, 9)), 21 * GB)
    assert share == HostShare(ram_mb=3 * GB, is_ram_expected=True)
    assert size_host(CPU_JOB, KnownRuns(), 21 * GB) is None, "a small job without devices reserves nothing"
    assert size_host(CPU_JOB, KnownRuns(exact=exact(0.1, cpus=(0.9,))), 21 * GB) is None


def test_runs_teach_ram_with_a_margin() -> None:
    one, many = learned_ram_mb(exact(4), None), learned_ram_mb(exact(*[4] * 9), None)
    assert one is not None
    assert many is not None
    assert 4 * GB < many < one < 5 * GB, "the highest run counts with a margin that shrinks with evidence"
    assert learned_ram_mb(None, program(4, 5)) is not None
    assert learned_ram_mb(None, program(1, 5)) is None
    assert learned_ram_mb(None, program(4)) is None, "other arguments count if the runs of the program are alike"
    profile = learn(Profile(), FinishedRun(seconds=9.0, ram_mb=100.0, cpus_used=2.0))
    profile = learn(profile, FinishedRun(ram_mb=50.0, cpus_used=9.0, is_whole=False))
    assert (profile.ram_peaks_mb, profile.cpu_uses) == ((100.0,), (2.0,)), (
        "a run that was cut short proves nothing less"
    )
    profile = learn(profile, FinishedRun(ram_mb=150.0, is_whole=False))
    assert profile.ram_peaks_mb == (100.0, 150.0), "runs teach RAM and CPUs"
    assert learned_cpus(exact(1, cpus=(3.1, 3.2, 11.0)), None) == 3.5
    assert learned_cpus(None, None) is None, "CPUs are the median in halves"
    assert expected_ram_mb(500.0, 20.0, 1.0) == 500.0
    assert expected_ram_mb(500.0, 900.0, 1.0) == 900.0
    assert expected_ram_mb(500.0, 20.0, 60.0) == 25.0, "the expected RAM follows what a job uses once it has shown it"


def test_what_a_job_reserves_at_most() -> None:
    share = known(size_host(CPU_JOB, KnownRuns(exact=exact(4, cpus=(0.9,))), 21 * GB))
    assert (share.ram_mb or 0.0) > 4 * GB > LEAST_RAM_MB, "a large job without devices reserves what it learned"
    assert (share.cpus, share.are_cpus_learned, share.is_ram_expected) == (1.0, True, False)
    at_most = HostShare(ram_mb=21 * GB)
    assert size_host(GPU_JOB, KnownRuns(exact=exact(40)), 21 * GB) == at_most, "what the machine can give"
    assert size_host(GPU_JOB, KnownRuns(exact=exact(40)), 0.0) is None, "a machine that can give nothing runs it anyway"
    # What grew after running out is at most what the machine can give.
    grown = Need(devices=1, host=HostShare(ram_mb=30 * GB))
    assert size_host(grown, KnownRuns(), 21 * GB, 10 * GB) == HostShare(ram_mb=21 * GB)
    assert size_host(grown, KnownRuns(), 21 * GB, 30 * GB) == HostShare(ram_mb=30 * GB), (
        "declared: refused, or it waits"
    )


ENOUGH, SHORT = (9 * GB, 2 * GB), (1.5 * GB, 2 * GB)


def lines(*readings: tuple[float, tuple[float, float] | None], declared_gb: float | None = 8.0) -> list[str | None]:
    """Return the warning at each reading of what the program holds, in GB, and of the machine."""
    said, found = RamWarnings(), []
    for held_gb, figures in readings:
        declared_mb = None if declared_gb is None else declared_gb * GB
        held = HeldRam(name="train.py", held_mb=held_gb * GB, declared_mb=declared_mb, option="--ram", figures=figures)
        said, line = judge_held_ram(said, held)
        found.append(line)
    return found


def test_a_program_over_its_declared_ram_is_warned_and_again_when_it_has_grown() -> None:
    assert lines((10.0, ENOUGH)) == [
        "train.py holds 10 GB of RAM, more than the 8 GB of --ram; declare 11 GB next time"
    ]
    # It is warned again only after it has grown by a quarter.
    found = lines((8.0, ENOUGH), (8.3, None), (9.0, ENOUGH), (10.0, ENOUGH), (11.3, ENOUGH), (12.0, ENOUGH))
    assert [line is not None for line in found] == [False, False, True, False, True, False]
    assert lines((8.0, ENOUGH), (8.0, SHORT)) == [None, None], "a program within its declared RAM is never warned"


def test_a_machine_that_runs_short_is_part_of_the_warning() -> None:
    found = lines((9.0, ENOUGH), (9.0, SHORT), (9.0, SHORT), (9.0, ENOUGH), (9.0, SHORT))
    assert [line is not None for line in found] == [True, True, False, False, True]
    assert "the machine has 1.5 GB of RAM left of the 2 GB to keep: nothing starts" in (found[1] or "")
    found = lines((9.0, ENOUGH), (0.1, SHORT), (9.0, SHORT), declared_gb=None)
    assert found[:2] == [None, None], "a program that declared nothing is warned only while the machine is short"
    assert (found[2] or "").startswith("train.py holds 9 GB of RAM, which was not declared; the machine has 1.5 GB")
