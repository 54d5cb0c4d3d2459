"""The memory that a job gets: declared, learned, and more after it ran out. A card has 24 GB."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Growth, Job, Started, Usage
from gpuyard.model.job_spec import BatchPace, JobSpec, TagSharing
from gpuyard.model.lease import (
    FixedMemory,
    HostShare,
    MemoryNeed,
    Need,
    PartOfDevice,
    UncertainMemory,
    UnknownMemory,
    WholeDevice,
)
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.estimates import ExpectedPeak, Profile
from gpuyard.policy.numbers import MOST_RERUNS
from gpuyard.policy.placement import choose
from gpuyard.policy.sizing import (
    FirstRuns,
    KnownRuns,
    declaration_advice,
    grow,
    lacked_mb,
    predicted_mb,
    ram_limit_mb,
    size_need,
)
from tests.unit.policy.test_placement import CARD, GB, card, on_cards, shared

CARDS = (card(0), card(1))
UNKNOWN = Need(memory=UnknownMemory())
ALONE = FirstRuns(share=False)


def job(need: Need | None = None, growth: Growth | None = None, **changes: Any) -> Job:
    """Return a job that declares nothing where `need` is None."""
    spec = JobSpec(command=("train",), cwd="/", environment={}, need=need or UNKNOWN, **changes)
    return Job(
        id=1, spec=spec, state=JobState.QUEUED, priority=0, user="me", submitted_at=0.0, growth=growth or Growth()
    )


def attempt(usage: Usage | None = None, **changes: Any) -> Attempt:
    began = Attempt(job_id=1, number=1, phase=Started(at=0.0, keeper_pid=9), boot_id="b", devices=("G0",), usage=usage)
    return replace(began, **changes)


def seen(*peaks_mb: float, **changes: Any) -> Profile:
    return Profile(peaks_mb=peaks_mb, **changes)


def ran_out(asked_mb: float | None = None, held_mb: float | None = None, *, on_host: bool = False) -> Shortage:
    where = ShortageKind.HOST if on_host else ShortageKind.DEVICE
    return Shortage(where=where, says="out of memory", asked_mb=asked_mb, held_mb=held_mb)


def known(exact: Profile | None = None, program: Profile | None = None, **more: Any) -> KnownRuns:
    return KnownRuns(exact=exact, program=program, **more)


def first_run(*devices: Device, first_runs: FirstRuns | None = None, about: KnownRuns | None = None) -> MemoryNeed:
    return size_need(job(), about or known(), devices, first_runs or FirstRuns()).memory


def charged_mb(*devices: Device, about: KnownRuns | None = None) -> float:
    memory = first_run(*devices, about=about)
    assert isinstance(memory, UncertainMemory)
    return memory.mean_mb + 1.2816 * memory.spread_mb


def test_what_a_first_run_is_expected_to_need() -> None:
    assert CARD / 2 < charged_mb(*CARDS) < 0.6 * CARD, "a first run is charged what is expected or gets a whole card"
    assert charged_mb(card(0), card(1, memory_free_mb=80 * GB)) == charged_mb(*CARDS), "the smallest is enough too"
    assert charged_mb(card(0, memory_free_mb=8 * GB), card(1, memory_free_mb=80 * GB)) <= 8 * GB
    assert first_run(*CARDS, first_runs=ALONE) == WholeDevice()
    # First runs of other programs and runs with other arguments say what to expect.
    on_machine = seen(*[1000.0] * 20, is_exact=False)
    assert charged_mb(*CARDS, about=known(machine=on_machine)) < CARD / 4
    large = known(program=seen(15_000.0, is_exact=False), machine=on_machine)
    assert charged_mb(*CARDS, about=large) > 8_000.0
    assert charged_mb(*CARDS, about=known(running_mb=(2000.0, 2100.0))) < charged_mb(*CARDS) - 2000.0
    # A program with differing runs counts as unknown however many there are.
    for largest in (4000.0, 18_000.0):
        program = seen(*[1000.0, largest] * 8, is_exact=False)
        assert predicted_mb(None, program) is None
        assert largest / 2 < charged_mb(*CARDS, about=known(program=program)) < 1.5 * largest


def test_a_shared_tag_gives_a_first_run_its_part() -> None:
    three = job(tag_sharing=TagSharing(most_per_device=3))
    need = size_need(three, known(), CARDS)
    assert need.memory == PartOfDevice(1 / 3)
    learned = size_need(three, known(seen(4000.0)), CARDS)
    assert isinstance(learned.memory, FixedMemory)
    grown = size_need(
        job(growth=Growth(count=1, memory_mb=9 * GB), tag_sharing=TagSharing(most_per_device=3)), known(), CARDS
    )
    assert grown.memory == FixedMemory(9 * GB), "a first run with a shared tag gets its part until its memory is known"
    # A job with a shared tag gets a whole device at limit one or of unknown size.
    assert size_need(job(tag_sharing=TagSharing(most_per_device=1)), known(), CARDS, ALONE).is_exclusive
    unknown = card(0, used=None, memory_total_mb=None)
    assert size_need(job(tag_sharing=TagSharing(most_per_device=4)), known(), (unknown,)).is_exclusive


def test_where_processes_are_not_listed_a_first_run_is_alone() -> None:
    desktop = card(0, used=8 * GB, processes=None)
    assert first_run(desktop) == WholeDevice(8 * GB)
    fuller = card(1, used=20 * GB, processes=None)
    assert first_run(desktop, fuller) == WholeDevice(8 * GB), "of what is free on the best"
    assert first_run(card(0, used=23.5 * GB, processes=None)) == WholeDevice(0.05 * CARD), "at least a tiny part"
    assert first_run(card(0, processes=None, memory_free_mb=400.0)) == WholeDevice(), "all of a tiny card"
    two = job()
    two = replace(two, spec=replace(two.spec, need=replace(UNKNOWN, devices=2)))
    needed = size_need(two, known(), (desktop, fuller)).memory
    assert needed == WholeDevice(2 * GB), "where it needs two, both have to have it"
    # Cards that list processes decide how much a first run needs.
    assert charged_mb(card(0, used=20 * GB, processes=None), card(1)) == charged_mb(card(1))
    # Where a size is unknown a first run is alone.
    assert first_run(card(0), card(1, used=None, memory_total_mb=None)) == WholeDevice()
    assert first_run(card(0, used=None, memory_total_mb=None, processes=None)) == WholeDevice()


def test_what_was_learned_becomes_the_need() -> None:
    need = size_need(job(), known(seen(4000.0), seen(9000.0, 9000.0, is_exact=False)), CARDS)
    assert isinstance(need.memory, FixedMemory)
    assert 4000.0 < need.memory.required_mb < 5000.0
    by_program = size_need(job(), known(program=seen(9000.0, 9000.0, is_exact=False)), CARDS)
    assert isinstance(by_program.memory, FixedMemory)
    assert by_program.memory.required_mb > 9000.0
    need = size_need(job(pace=BatchPace()), known(batch=ExpectedPeak(3000.0, 500.0)), CARDS)
    assert isinstance(need.memory, UncertainMemory)
    assert (need.memory.mean_mb, need.memory.spread_mb) == (3000.0, 500.0)
    learned = size_need(job(pace=BatchPace()), known(seen(2 * GB), batch=ExpectedPeak(9000.0, 1.0)), CARDS)
    assert (learned.required_mb or 0.0) < 3 * GB, "a run of a batch is expected to be like the others"
    memory = first_run(*CARDS, about=known(seen(floor_mb=15_000.0)))
    assert isinstance(memory, UncertainMemory)
    assert memory.mean_mb == 15_000.0, "the same command needs more than what was not enough"
    large = known(program=seen(30 * GB, 50 * GB, is_exact=False))
    need = size_need(job(), large, (card(0), card(1, memory_free_mb=80 * GB)))
    assert need.only == ("G1",), "a program that takes more than the small cards have goes to a large one"
    # The learned load is part of the need.
    assert size_need(job(), known(seen(load_percent=70.0)), CARDS).load_percent == 70.0
    assert size_need(job(), known(program=Profile(load_percent=30.0)), CARDS).load_percent == 30.0


def test_what_is_expected_never_keeps_a_job_from_running_beside_a_desktop() -> None:
    """First runs on this machine took most of a card. A new program starts on a card with a desktop all the same."""
    desktops = (card(0, used=1.5 * GB), card(1, used=3 * GB))
    for peaks in ([20 * GB] * 8, [20 * GB] * 3, [60 * GB] * 9):
        need = size_need(job(), known(machine=seen(*peaks, is_exact=False)), desktops)
        assert choose(need, on_cards(*desktops)).claim is not None


def test_a_declared_amount_wins_over_a_learned_one() -> None:
    for declared in (shared(2 * GB), Need(memory=WholeDevice(2 * GB))):
        assert size_need(job(declared), known(seen(20_000.0)), CARDS) == declared
    # A job without devices is given none.
    assert size_need(job(Need(devices=0)), known(seen(4000.0)), CARDS) == Need(devices=0)
    declared = Need(host=HostShare(ram_mb=200.0))
    assert ram_limit_mb(job()) is None
    assert ram_limit_mb(job(growth=Growth(count=1, ram_mb=900.0))) is None, "without a declaration there is no limit"
    assert ram_limit_mb(job(need=declared)) == 200.0, "a limit of RAM is what was declared and more after it ran out"
    assert ram_limit_mb(job(need=declared, growth=Growth(count=1, ram_mb=300.0))) == 300.0


@pytest.mark.parametrize(
    ("changes", "devices", "only"),
    [
        ({}, (card(0), card(1, memory_free_mb=80 * GB)), ("G1",)),
        ({"only": ("G0",)}, (card(0), card(1, memory_free_mb=80 * GB)), ("G0",)),
        ({"banned": ("G1",)}, (card(0), card(1, memory_free_mb=80 * GB)), ("G0",)),
        ({"vendor": Vendor.NVIDIA}, (card(0), card(1, memory_free_mb=80 * GB, vendor=Vendor.AMD)), ("G0",)),
        ({"model": "3090"}, (card(0, name="RTX 3090"), card(1, name="H100", memory_free_mb=80 * GB)), ("G0",)),
        ({"devices": 2}, (card(0), card(1, memory_free_mb=80 * GB), card(2)), ("G0", "G1", "G2")),
    ],
)
def test_at_last_it_is_alone(changes: dict[str, Any], devices: tuple[Device, ...], only: tuple[str, ...]) -> None:
    need = size_need(job(replace(shared(4 * GB), **changes), Growth(count=3, is_alone=True)), known(), devices)
    assert (need.only, need.memory) == (only, WholeDevice())


@st.composite
def machines(draw: st.DrawFn) -> tuple[Device, ...]:
    """Draw cards of two models and several sizes, each with a desktop on it, or nearly empty."""
    return tuple(
        card(
            index,
            name=draw(st.sampled_from(["RTX 3090", "H100"])),
            used=draw(st.sampled_from([0.0, 4.0, 500.0, 1000.0])),
            memory_free_mb=draw(st.sampled_from([7, 23, 39, 79])) * GB,
        )
        for index in range(draw(st.integers(1, 4)))
    )


figures = st.one_of(st.none(), st.floats(1.0, 100_000.0))
growths = st.one_of(
    st.just(Growth()),
    st.builds(lambda memory: Growth(count=1, memory_mb=memory), st.floats(1.0, 200_000.0)),
    st.just(Growth(count=3, is_alone=True)),
)
wishes = st.builds(
    lambda devices, model, only: Need(devices=devices, model=model, only=only),
    st.integers(1, 3),
    st.sampled_from([None, None, "3090", "h100"]),
    st.sampled_from([None, None, ("G0", "G1")]),
)


@given(machines(), wishes, st.lists(st.floats(1.0, 100_000.0), max_size=4), figures, growths)
def test_a_learned_amount_never_keeps_a_job_from_running(
    devices: tuple[Device, ...], need: Need, peaks: list[float], floor_mb: float | None, growth: Growth
) -> None:
    """A job that could run without any profile can run with one: at worst it runs alone."""
    view = on_cards(*devices)
    learner = replace(job(growth=growth), spec=replace(job().spec, need=need))
    sized = size_need(learner, known(seen(*peaks, floor_mb=floor_mb)), devices)
    assert (choose(sized, view).claim is None) == (choose(need, view).claim is None)


def test_a_job_gets_more_than_what_was_not_enough() -> None:
    had = attempt(Usage(peaks_mb={"G0": 6000.0}), reserved_mb=4 * GB)
    growth = grow(job(shared(4 * GB)), had, ran_out(asked_mb=2000.0), CARDS)
    assert growth is not None
    assert growth.memory_mb is not None
    assert growth.memory_mb > 8000.0
    predicted = attempt(Usage(peaks_mb={"G0": 100.0}), reserved_mb=4000.0, predicted_mb=4000.0)
    growth = grow(job(), predicted, ran_out(50.0), CARDS)
    assert growth is not None
    assert (growth.memory_mb or 0.0) > 4000.0
    first = grow(job(), replace(predicted, predicted_mb=None), ran_out(50.0), CARDS)
    assert first is not None, "a job that ran out with its predicted memory gets more"
    assert (first.memory_mb or 0.0) < 200.0, "what is expected of a first run is no figure that was not enough"
    growth = grow(job(), attempt(Usage(peaks_mb={"G0": 1000.0})), ran_out(50.0), CARDS)
    assert growth == Growth(count=1, is_alone=True), "a job that ran out on a whole device gets one again"
    growth = grow(job(shared(20 * GB)), attempt(reserved_mb=20 * GB), ran_out(), CARDS)
    assert growth == Growth(count=1, is_alone=True), "a job that needs more than any card gets a whole one"
    first = grow(job(), attempt(Usage(ram_mb=20 * GB)), ran_out(on_host=True), CARDS, 64 * GB)
    assert first == Growth(count=1, ram_mb=30 * GB)
    last = grow(job(growth=first), attempt(Usage(ram_mb=50 * GB)), ran_out(on_host=True), CARDS, 64 * GB)
    assert last == Growth(count=2, ram_mb=48 * GB), "more RAM is waited for and never more than there can be"
    assert size_need(job(growth=last), known(), CARDS).ram_mb == 48 * GB


@pytest.mark.parametrize(
    ("usage", "shortage", "reserved_mb", "least"),
    [
        (None, ran_out(), None, None),
        (None, ran_out(), 4000.0, None),
        (Usage(peaks_mb={"G0": 6000.0}), ran_out(), 4000.0, 6000.0),
        (Usage(peaks_mb={"G0": 6000.0}), ran_out(2000.0, 7000.0), 4000.0, 9000.0),
        (None, ran_out(2000.0), None, 2000.0),
        (Usage(peaks_mb={"G0": 100.0}), ran_out(50.0), 4000.0, 150.0),
    ],
)
def test_the_lacked_memory_is_held_plus_requested(
    usage: Usage | None, shortage: Shortage, reserved_mb: float | None, least: float | None
) -> None:
    assert lacked_mb(attempt(usage, reserved_mb=reserved_mb), shortage) == least


@given(
    st.one_of(st.none(), st.just(shared(4 * GB)), st.just(Need(devices=2, memory=WholeDevice(9 * GB)))),
    st.lists(st.tuples(figures, figures, figures, st.booleans()), min_size=6, max_size=6),
    st.booleans(),
)
def test_growing_always_ends_and_never_gives_less(
    need: Need | None, shortages: list[tuple[float | None, float | None, float | None, bool]], knows_devices: bool
) -> None:
    one = job(need)
    grown: list[Growth] = []
    for peak, asked, ram, on_host in shortages:
        usage = None if peak is None else Usage(peaks_mb={"G0": peak}, ram_mb=ram)
        shortage = ran_out(asked, on_host=on_host)
        growth = grow(one, attempt(usage), shortage, CARDS if knows_devices else (), 64 * GB)
        if growth is None:
            break
        grown.append(growth)
        one = replace(one, growth=growth)
    assert len(grown) == MOST_RERUNS
    assert [each.count for each in grown] == [1, 2, 3]
    assert not any(earlier.is_alone and not later.is_alone for earlier, later in itertools.pairwise(grown))
    if not shortages[MOST_RERUNS - 1][3]:
        assert grown[-1].is_alone
    assert all(each.ram_mb is None or each.ram_mb < 64 * GB for each in grown)


@pytest.mark.parametrize(
    ("declared_gb", "used_gb", "changes"),
    [
        (20, 4, "leave --vram out"), (4, 6, "run out of memory"), (4, 4, None), (6, 4, None), (None, 4, None),
        (4, None, None),
    ],
)  # fmt: skip
def test_a_far_off_declaration_is_named(declared_gb: float | None, used_gb: float | None, changes: str | None) -> None:
    declared = None if declared_gb is None else declared_gb * GB
    usage = None if used_gb is None else Usage(peaks_mb={"G0": used_gb * GB})
    advice = declaration_advice(declared, usage)
    assert (advice is None) == (changes is None)
    assert changes is None or changes in (advice or "")
