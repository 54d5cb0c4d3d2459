"""Random traces from measured programs, and public traces as they are."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.simulator.traces import (
    Sharing,
    curve,
    draw,
    fit_demands,
    mean_duration_s,
    read_pods,
    read_programs,
    read_sharing,
    similar_configuration,
    utilization_percent,
)
from tests.unit.simulator.samples import write_traces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_traces(tmp_path)


def test_drawn_runs_are_like_their_programs(folder: Path) -> None:
    programs = read_programs(["lucid", "carma"], folder)
    assert draw(programs, 50, 7, 60.0) == draw(programs, 50, 7, 60.0)
    assert draw(programs, 50, 7, 60.0) != draw(programs, 50, 8, 60.0), "the same seed draws the same trace"
    # A run is like its program but not quite.
    by_command = {program.command: program for program in read_programs(["lucid"], folder)}
    for job in draw(list(by_command.values()), 200, 1, 60.0):
        measured = by_command[job.program]
        assert job.peak_mb == pytest.approx(measured.memory_mb, rel=0.03)
        assert job.load_percent == measured.load_percent
        assert job.peak_mb <= (job.declared_mb or 0.0) <= 1.5 * job.peak_mb + 1024.0
        assert 60.0 <= job.duration_s <= 14_400.0
    jobs = draw(read_programs(["lucid"], folder), 2000, 1, 120.0)
    assert jobs[-1].at_s / len(jobs) == pytest.approx(30.0, rel=0.1)
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs), "jobs arrive at the rate that was asked for"
    # The mean duration counts measured and drawn values.
    assert mean_duration_s(read_programs(["carma"], folder)) == pytest.approx((894.9 + 1200.0 + 300.0) / 3)


def test_a_program_without_a_measured_load_gets_that_of_a_similar_program(folder: Path) -> None:
    bert, resnet, dlrm = read_programs(["carma"], folder)
    assert (bert.kind, bert.load_percent, bert.duration_s) == ("BERT/SQuAD/32", 99.0, 894.9)
    assert (resnet.kind, resnet.load_percent) == ("ResNet50/ImageNet/64", 95.0)
    assert (dlrm.kind, dlrm.command) == ("NeuMF/MovieLens/128", "python dlrm_criteo.py")
    assert similar_configuration("xception_imagenet", "32") == "ResNet50/ImageNet/32"
    assert similar_configuration("mobilenet_v2_cifar100", "128") == "MobileNetV2/CIFAR-10/128"


def test_bad_mixes_and_figures_are_user_errors(folder: Path) -> None:
    with pytest.raises(UserError, match="there is no mix 'imagenet'"):
        read_programs(["lucid", "imagenet"], folder)
    # An invalid figure is a user error.
    (folder / "carma-summary.csv").write_text("Model,Max memory.used [MB],Run folder,Execution time(s)\nx,much,x,1\n")
    with pytest.raises(UserError, match=r"Max memory\.used \[MB\] is 'much', not a number"):
        read_programs(["carma"], folder)


def test_pods_have_the_same_share_of_memory_as_of_time_and_those_that_never_ran_are_left_out(folder: Path) -> None:
    jobs, left_out = read_pods(folder / "alibaba-openb_pod_list_default.csv", 10_000.0)
    assert left_out == 2
    assert [(job.at_s, job.duration_s, job.peak_mb, job.load_percent, job.gpus) for job in jobs] == [
        (0.0, 300.0, 10_000.0, 100.0, 1),
        (200.0, 700.0, 4600.0, 46.0, 1),
        (210.0, 300.0, 10_000.0, 100.0, 2),
    ]


members = st.lists(
    st.tuples(st.sampled_from(["", "BERT/SQuAD/32", "ResNet50/ImageNet/64"]), st.floats(0, 100)), min_size=1, max_size=6
)
speeds = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), st.floats(0.05, 1.0), min_size=1
).map(lambda found: {**{pair[::-1]: speed for pair, speed in found.items()}, **found})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    return read_sharing(write_traces(tmp_path_factory.mktemp("traces")))


def test_pairs_run_as_measured_or_by_the_curve(measured: Sharing) -> None:
    assert measured.speeds((("BERT/SQuAD/32", 99.0),)) == (1.0,), "a job alone runs at full speed"
    # A measured pair has its measured speeds but never more than alone.
    assert measured.speeds((("BERT/SQuAD/32", 99.0), ("ResNet50/ImageNet/64", 95.0))) == pytest.approx((0.62, 0.55))
    assert measured.speeds((("BERT/SQuAD/32", 99.0), ("NeuMF/MovieLens/128", 20.0))) == pytest.approx((0.97, 1.0))
    # Pairs that were not measured follow the curve.
    assert Sharing().speeds((("", 20.0), ("", 20.0)))[0] == pytest.approx(1.0, abs=0.01)
    assert Sharing().speeds((("", 100.0), ("", 100.0)))[0] == pytest.approx(curve(200.0) / (2 * curve(200.0)))
    assert utilization_percent([]) == 0.0
    assert utilization_percent([60.0]) == pytest.approx(60.0)
    assert utilization_percent([50.0, 50.0]) == pytest.approx(75.0), "the load of a device is the sum of its jobs"


@given(members)
def test_no_device_does_more_than_its_time_allows(measured: Sharing, present: list[tuple[str, float]]) -> None:
    found = measured.speeds(tuple(present))
    assert all(0.0 < speed <= 1.0 for speed in found)
    work = sum(measured.demand(each) * speed for each, speed in zip(present, found, strict=True))
    assert work <= 1.0 + 1e-9


@given(speeds, st.dictionaries(st.sampled_from("abcd"), st.floats(1, 100)))
def test_no_measured_pair_breaks_fitted_demands(pairs: dict[tuple[str, str], float], loads: dict[str, float]) -> None:
    demands = fit_demands(loads, pairs)
    for (one, other), speed in pairs.items():
        assert demands[one] * speed + demands[other] * pairs[other, one] <= 1.0 + 1e-9
    assert all(demands[kind] <= load / 100.0 + 1e-9 for kind, load in loads.items() if kind in demands)


def test_a_file_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    (write_traces(tmp_path) / "lucid-colocate_info.csv").write_text("model1,dataset1\na,b\n")
    with pytest.raises(UserError, match=r"lucid-colocate_info\.csv lacks the columns batchsize1"):
        read_sharing(tmp_path)
