"""The pace of a batch: which figures its gates use, and when the next run may start."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lease import Need, UncertainMemory
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.batch_pacing import (
    ExpectedUse,
    GateFigure,
    PaceState,
    device_refusal,
    unreadable_bounds,
    unshown_percent,
    update_pace,
)
from gpuyard.policy.device_state import DeviceState, PromisedShare
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import PlacementState
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.rules import HostLoad, Stagger, StartRequest
from gpuyard.policy.running_counts import StartedSoFar
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import World
from tests.known import known
from tests.unit.policy.test_placement import ALICE, CARD, GB, card, lease, shared

PACE = BatchPace(
    max_cpu_percent=80.0, min_free_memory_mb=2 * GB, max_gpu_percent=70.0, max_gpu_memory_mb=8 * GB, steady_s=3.0
)
AT_ONCE = replace(PACE, smoothing_s=0.0, steady_s=0.0)
NOTHING = ExpectedUse()


class Seen(Struct, frozen=True, kw_only=True):
    """Figures of a host and of one card in one snapshot."""

    at: float
    cpu: float | None = 0.0
    ram: float | None = 32 * GB
    gpu: float | None = 0.0
    used: float | None = 0.0

    def snapshot(self) -> Snapshot:
        host = Host(cpu_percent=self.cpu, memory_available_mb=self.ram)
        return Snapshot(taken_at=self.at, host=host, devices=(card(0, self.used, utilization_percent=self.gpu),))


def after(pace: BatchPace, *samples: Seen, expected: ExpectedUse = NOTHING, running: int = 0) -> PaceState:
    return standings(pace, samples, expected, running)[-1]


def standings(
    pace: BatchPace, samples: Sequence[Seen], expected: ExpectedUse = NOTHING, running: int = 0
) -> list[PaceState]:
    standing, found = PaceState(running=running), []
    for reading in samples:
        standing = update_pace(standing, pace, reading.snapshot(), expected, reading.at)
        found.append(standing)
    return found


def pace_refusals(pace: BatchPace, standing: PaceState, now: float) -> list[Reason]:
    """Return why no run may start on any device."""
    machine = Machine(now=now, snapshot=Snapshot(taken_at=None, host=Host()))
    world = World(now=now, machine=machine, pace_states={1: standing})
    run = StartRequest(need=Need(), lane=Lane(id=1, priority=0, user="", tag="", need=Need(), group=1, pace=pace))
    found = [rule.refuse(run, None, PlacementState(machine, StartedSoFar(world))) for rule in (Stagger(), HostLoad())]
    return [reason for reason in found if reason is not None]


def refused(pace: BatchPace, standing: PaceState, now: float = 10.0) -> list[ReasonKind]:
    return [reason.kind for reason in pace_refusals(pace, standing, now)]


def on_card(pace: BatchPace, standing: PaceState, *promises: PromisedShare, need: Need = shared(GB)) -> Reason | None:  # noqa: B008
    return device_refusal(pace, standing, DeviceState(card(0), promises, None), need, 10.0)


def promised(memory_mb: float | None, measured_mb: float | None = None) -> PromisedShare:
    (share,) = lease("a", "G0", memory_mb=memory_mb).shares
    return PromisedShare(share=share, holder=ALICE, measured_mb=measured_mb, lease_id="a")


def charged_on(room: DeviceState, need: Need) -> float:
    """Return the refusal with a memory limit of zero."""
    reason = device_refusal(BatchPace(max_gpu_memory_mb=0.0), PaceState(), room, need, 10.0)
    return 0.0 if reason is None else reason.had or 0.0


def test_a_run_of_which_nothing_is_known_counts_as_the_largest_of_its_batch() -> None:
    rest = Need(memory=UncertainMemory(12 * GB, 6 * GB, 6 * GB))
    largest = PaceState(run_vram_mb=3 * GB)
    assert on_card(PACE, largest, promised(5 * GB, 2 * GB), need=rest) is None
    reason = known(on_card(PACE, largest, promised(6 * GB, 2 * GB), need=rest))
    assert (reason.kind, reason.had) == (ReasonKind.TOO_FULL, 9 * GB)


@pytest.mark.parametrize(
    ("reading", "kind", "text"),
    [
        (Seen(at=10.0, cpu=81.0), ReasonKind.HOST_TOO_BUSY, "CPU 81% > 80%"),
        (Seen(at=10.0, ram=2000.0), ReasonKind.HOST_TOO_FULL, "2000 MB of RAM available < 2048 MB"),
    ],
)
def test_a_host_beyond_its_bound_holds_the_next_run_back(reading: Seen, kind: ReasonKind, text: str) -> None:
    (reason,) = pace_refusals(PACE, after(PACE, reading), 10.0)
    assert (reason.kind, reason.text) == (kind, text)


@pytest.mark.parametrize(
    ("reading", "kind", "text"),
    [
        (Seen(at=10.0, gpu=91.0), ReasonKind.TOO_BUSY, "GPU 91% > 70%"),
        (Seen(at=10.0, used=9000.0), ReasonKind.TOO_FULL, "GPU memory 9000 MB > 8192 MB"),
    ],
)
def test_a_device_beyond_its_bound_is_refused_with_its_figure(reading: Seen, kind: ReasonKind, text: str) -> None:
    reason = known(on_card(PACE, after(PACE, reading)))
    assert (reason.kind, reason.text, reason.device_id) == (kind, text, "G0")


def test_a_figure_at_its_limit_or_without_a_bound_closes_no_gate() -> None:
    standing = after(PACE, Seen(at=10.0, cpu=80.0, ram=2 * GB, gpu=70.0, used=8 * GB))
    assert not refused(PACE, standing)
    assert on_card(PACE, standing) is None, "a figure equal to its limit closes no gate"
    free = BatchPace()
    standing = after(free, Seen(at=10.0, cpu=100.0, ram=1.0, gpu=100.0, used=CARD))
    assert not refused(free, standing)
    assert on_card(free, standing) is None, "a bound that was not asked for holds nothing back"


def test_one_spike_or_lull_of_load_decides_nothing() -> None:
    calm = [Seen(at=float(second), cpu=20.0, gpu=20.0) for second in range(10)]
    standing = after(PACE, *calm, Seen(at=10.0, cpu=100.0, gpu=100.0))
    assert not refused(PACE, standing)
    assert on_card(PACE, standing) is None, "one spike of load decides nothing"
    busy = [Seen(at=float(second), cpu=100.0, gpu=100.0) for second in range(10)]
    standing = after(PACE, *busy, Seen(at=10.0, cpu=0.0, gpu=0.0))
    assert refused(PACE, standing) == [ReasonKind.HOST_TOO_BUSY]
    assert on_card(PACE, standing) is not None, "one lull of load decides nothing"


def test_memory_is_judged_by_the_worse_of_now_and_of_late() -> None:
    empty, full = Seen(at=0.0), Seen(at=1.0, ram=GB, used=20 * GB)
    for samples in ((empty, full), (replace(full, at=0.0), replace(empty, at=1.0))):
        standing = after(PACE, *samples)
        assert ReasonKind.HOST_TOO_FULL in refused(PACE, standing)
        assert on_card(PACE, standing) is not None
    # A host without a byte of memory is full at once.
    assert refused(PACE, after(PACE, Seen(at=9.9), Seen(at=10.0, ram=0.0))) == [ReasonKind.HOST_TOO_FULL]


def test_use_counts_before_it_is_measured() -> None:
    reading = Seen(at=10.0, ram=4 * GB)
    assert not refused(PACE, after(PACE, reading, expected=ExpectedUse(unshown_mb=2 * GB)))
    (reason,) = pace_refusals(PACE, after(PACE, reading, expected=ExpectedUse(unshown_mb=3 * GB)), 10.0)
    assert reason.text == "1024 MB of RAM left (3072 MB reserved for runs) < 2048 MB"
    # A run counts its own memory where it would not be the first.
    reading, expected = Seen(at=10.0, ram=4 * GB), ExpectedUse(run_mb=3 * GB)
    assert not refused(PACE, after(PACE, reading, expected=expected))
    assert refused(PACE, after(PACE, reading, expected=expected, running=1)) == [ReasonKind.HOST_TOO_FULL]


def test_load_counts_before_averages_show_it() -> None:
    bound = PACE.max_cpu_percent or 0.0
    reading = Seen(at=10.0, cpu=bound - 10.0)
    assert not refused(PACE, after(PACE, reading, expected=ExpectedUse(cpu_percent=10.0)))
    standing = after(PACE, reading, expected=ExpectedUse(cpu_percent=11.0))
    (reason,) = pace_refusals(PACE, standing, 10.0)
    assert reason.text == f"CPU {bound + 1:.0f}% > {bound:.0f}% (including runs that have just started)"
    assert not refused(PACE, update_pace(standing, PACE, reading.snapshot(), ExpectedUse(), 10.1))
    # A machine that may be as busy as it likes waits for no load to come.
    pace = replace(PACE, max_cpu_percent=100.0)
    assert not refused(pace, after(pace, Seen(at=10.0, cpu=100.0), expected=ExpectedUse(cpu_percent=300.0)))


@pytest.mark.parametrize(("age_s", "percent"), [(0.0, 80.0), (5.0, 40.0), (10.0, 20.0), (-1.0, 80.0)])
def test_an_average_shows_a_load_by_and_by(age_s: float, percent: float) -> None:
    assert unshown_percent(80.0, age_s, 5.0) == percent
    assert unshown_percent(80.0, age_s, 0.0) == 0.0


@pytest.mark.parametrize(
    ("need", "promises", "charged"),
    [
        (shared(6 * GB), [], 0.0),
        (shared(6 * GB), [promised(4 * GB)], 10 * GB),
        (shared(6 * GB), [promised(4 * GB, measured_mb=5 * GB)], 11 * GB),
        (Need(), [promised(4 * GB)], 4 * GB),
        (Need(memory=UncertainMemory(6 * GB, 4 * GB, 2 * GB)), [promised(4 * GB)], 4 * GB),
        (shared(6 * GB), [promised(None)], CARD + 6 * GB),
    ],
)
def test_a_device_is_charged_one_more_run(need: Need, promises: list[PromisedShare], charged: float) -> None:
    assert charged_on(DeviceState(card(0), promises, None), need) == charged


def test_a_device_is_charged_foreign_memory_and_one_of_unknown_size_nothing() -> None:
    assert charged_on(DeviceState(card(0, used=3 * GB), [promised(4 * GB, measured_mb=GB)], None), shared(GB)) == 7 * GB
    # A device of unknown size is charged nothing.
    bare = card(0, used=None, memory_total_mb=None)
    room = DeviceState(bare, [], None)
    assert device_refusal(PACE, PaceState(), room, shared(GB), 10.0) is None


def test_no_launch_exceeds_the_limit_of_a_device_that_seems_empty() -> None:
    standing = after(PACE, Seen(at=10.0))
    assert on_card(PACE, standing, promised(4 * GB), need=shared(4 * GB)) is None
    reason = known(on_card(PACE, standing, promised(4 * GB), need=shared(4 * GB + 1)))
    assert reason.text == "GPU memory 8193 MB, including reservations and one more run, > 8192 MB"


def test_a_gate_that_has_closed_tells_for_how_long_its_figure_has_been_within() -> None:
    pace = replace(PACE, smoothing_s=0.0)
    standing = after(pace, Seen(at=8.0, cpu=90.0), Seen(at=9.0, cpu=50.0), Seen(at=10.0, cpu=50.0))
    (reason,) = pace_refusals(pace, standing, 10.0)
    assert reason.text == "CPU 50% <= 80% for 1 s of 3 s"
    assert not refused(pace, after(pace, Seen(at=8.0, cpu=90.0), Seen(at=9.0), Seen(at=12.0)), 12.0)


def test_starts_are_staggered() -> None:
    pace = BatchPace(stagger_s=5.0)
    standing = PaceState(launched_at=10.0, sampled_at=12.0)
    (reason,) = pace_refusals(pace, standing, 12.0)
    assert (reason.kind, reason.text) == (ReasonKind.STAGGERED, "runs start 5 s apart, the next one in 3.0 s")
    assert not refused(pace, standing, 15.0), "launches are so far apart"
    # A clock that was set back holds no batch up until it is there again.
    assert not refused(BatchPace(stagger_s=5.0), PaceState(launched_at=5000.0, sampled_at=5000.0), now=1000.0)
    # A run of another batch delays the next one until a new snapshot.
    standing = after(PACE, Seen(at=10.0))
    assert refused(PACE, replace(standing, any_launched_at=10.0)) == [ReasonKind.STAGGERED]
    assert refused(PACE, replace(standing, any_launched_at=9.9)) == []


@pytest.mark.parametrize(("sampled_at", "may"), [(9.0, False), (10.0, False), (10.001, True), (None, True)])
def test_the_next_run_needs_a_snapshot_taken_after_the_last_start(sampled_at: float | None, may: bool) -> None:
    standing = PaceState(launched_at=10.0, sampled_at=sampled_at)
    assert refused(BatchPace(), standing, 20.0) == ([] if may else [ReasonKind.STAGGERED])


@pytest.mark.parametrize(
    ("change", "options_named"),
    [
        ({}, []), ({"cpu": None}, ["--max-cpu"]), ({"ram": None}, ["--min-free-mem-mb"]),
        ({"gpu": None}, ["--max-gpu"]), ({"used": None}, ["--max-gpu-mem-mb"]),
    ],
)  # fmt: skip
def test_an_unreadable_figure_is_reported_and_closes_no_gate(change: dict[str, None], options_named: list[str]) -> None:
    standing = after(PACE, replace(Seen(at=10.0), **change))
    assert list(unreadable_bounds(PACE, standing, has_devices=True)) == options_named
    assert not refused(PACE, standing)
    assert on_card(PACE, standing) is None


def test_a_lower_bound_of_the_used_memory_closes_its_gate() -> None:
    def standing(at_least_mb: float) -> PaceState:
        device = card(0, used=None, memory_used_at_least_mb=at_least_mb)
        snapshot = Snapshot(taken_at=1.0, host=Host(cpu_percent=1.0, memory_available_mb=GB), devices=(device,))
        return update_pace(PaceState(), PACE, snapshot, NOTHING, 1.0)

    assert not list(unreadable_bounds(PACE, standing(7 * GB), has_devices=True))
    assert on_card(PACE, standing(7 * GB)) is None
    assert known(on_card(PACE, standing(9 * GB))).kind is ReasonKind.TOO_FULL


def test_which_bounds_are_missed() -> None:
    blind, seeing = card(0, None, utilization_percent=None), card(1)
    snapshot = Snapshot(taken_at=1.0, host=Host(cpu_percent=1.0, memory_available_mb=GB), devices=(blind, seeing))
    assert not list(unreadable_bounds(PACE, update_pace(PaceState(), PACE, snapshot, NOTHING, 1.0), has_devices=True))
    # A bound that was not asked for is not missed.
    nothing = Snapshot(taken_at=1.0, host=Host())
    assert not list(
        unreadable_bounds(BatchPace(), update_pace(PaceState(), BatchPace(), nothing, NOTHING, 1.0), has_devices=False)
    )
    # Devices that are gone for a moment are not devices without figures.
    standing = update_pace(PaceState(), PACE, Snapshot(taken_at=1.0, host=Host()), NOTHING, 1.0)
    of_the_host = ["--max-cpu", "--min-free-mem-mb"]
    assert list(unreadable_bounds(PACE, standing, has_devices=True)) == of_the_host
    assert list(unreadable_bounds(PACE, standing, has_devices=False)) == [*of_the_host, "--max-gpu", "--max-gpu-mem-mb"]


def test_a_figure_missing_for_a_moment_is_remembered_and_one_missing_for_long_is_forgotten() -> None:
    busy, blind = Seen(at=0.0, cpu=100.0), Seen(at=1.0, cpu=None)
    assert refused(PACE, after(PACE, busy, blind)) == [ReasonKind.HOST_TOO_BUSY]
    assert not refused(PACE, after(PACE, busy, blind, replace(blind, at=60.0)))


percents = st.one_of(st.none(), st.floats(0.0, 100.0))
sizes = st.one_of(st.none(), st.floats(0.0, CARD))
samples = st.builds(Seen, at=st.just(0.0), cpu=percents, ram=sizes, gpu=percents, used=sizes)
sequences = st.lists(st.tuples(st.floats(0.01, 5.0), samples), min_size=1, max_size=20)


def with_times(steps: list[tuple[float, Seen]]) -> list[Seen]:
    now, found = 0.0, []
    for later_s, reading in steps:
        now += later_s
        found.append(replace(reading, at=now))
    return found


def figures(standing: PaceState) -> list[tuple[GateFigure, Callable[[float], bool]]]:
    """Return each figure with a check that it exceeds its limit."""
    return [
        (standing.cpu, lambda value: value > 80.0),
        (standing.memory, lambda value: value < 2 * GB),
        *((figure, lambda value: value > 70.0) for figure in standing.device_loads.values()),
        *((figure, lambda value: value > 8 * GB) for figure in standing.device_memory.values()),
    ]


@given(sequences)
def test_gates_follow_their_figures(steps: list[tuple[float, Seen]]) -> None:
    # A gate is never open while its figure is beyond its bound.
    for standing in standings(PACE, with_times(steps)):
        for figure, is_beyond in figures(standing):
            assert figure.judged is not None or not figure.gate.is_closed
            assert figure.judged is None or not is_beyond(figure.judged) or figure.gate.is_closed
    # Without smoothing and steady time a gate follows the last reading.
    *_, last = with_times(steps)
    standing = after(AT_ONCE, *with_times(steps))
    assert (last.cpu is None) or standing.cpu.gate.is_closed == (last.cpu > 80.0)
    assert (last.ram is None) or standing.memory.gate.is_closed == (last.ram < 2 * GB)


@given(sequences)
def test_a_closed_gate_opens_once_its_figure_was_within_for_long(steps: list[tuple[float, Seen]]) -> None:
    beyond_at: dict[int, float] = {}
    was_closed: dict[int, bool] = {}
    for reading, standing in zip(with_times(steps), standings(PACE, with_times(steps)), strict=True):
        for place, (figure, is_beyond) in enumerate(figures(standing)):
            if was_closed.get(place) and not figure.gate.is_closed and figure.judged is not None:
                assert reading.at - beyond_at[place] >= PACE.steady_s - 1e-9
            if figure.judged is not None and is_beyond(figure.judged):
                beyond_at[place] = reading.at
            was_closed[place] = figure.gate.is_closed


@given(sequences, st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 4 * GB)), min_size=20, max_size=20))
def test_more_load_never_opens_a_gate_earlier(steps: list[tuple[float, Seen]], more: list[tuple[float, float]]) -> None:
    calm = with_times(steps)
    busy = [_with_more(reading, *hog) for reading, hog in zip(calm, more, strict=False)]
    for quiet, loud in zip(standings(PACE, calm), standings(PACE, busy), strict=True):
        for (figure, _), (other, _) in zip(figures(quiet), figures(loud), strict=True):
            assert other.gate.is_closed or not figure.gate.is_closed


def _with_more(reading: Seen, percent: float, memory_mb: float) -> Seen:
    return replace(
        reading,
        cpu=None if reading.cpu is None else reading.cpu + percent,
        gpu=None if reading.gpu is None else reading.gpu + percent,
        ram=None if reading.ram is None else max(0.0, reading.ram - memory_mb),
        used=None if reading.used is None else reading.used + memory_mb,
    )


def test_a_device_that_is_out_of_order_has_no_gates_until_it_is_back() -> None:
    broken = Snapshot(taken_at=1.0, host=Host(), devices=(card(0, fault="it fell off the bus"),))
    standing = update_pace(after(PACE, Seen(at=0.0, gpu=100.0)), PACE, broken, NOTHING, 1.0)
    assert not standing.device_loads
    assert not standing.device_memory
