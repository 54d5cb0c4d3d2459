"""Slowdown of jobs on one device: as measured, and never faster than the device allows."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.simulator.traces import Sharing, curve, fit_demands, read_sharing, utilization_percent
from tests.unit.simulator.samples import write_traces

members = st.lists(
    st.tuples(st.sampled_from(["", "BERT/SQuAD/32", "ResNet50/ImageNet/64"]), st.floats(0, 100)), min_size=1, max_size=6
)
speeds = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), st.floats(0.05, 1.0), min_size=1
).map(lambda found: {**{pair[::-1]: speed for pair, speed in found.items()}, **found})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    return read_sharing(write_traces(tmp_path_factory.mktemp("traces")))


def test_a_job_alone_runs_at_full_speed(measured: Sharing) -> None:
    assert measured.speeds((("BERT/SQuAD/32", 99.0),)) == (1.0,)


def test_a_measured_pair_has_its_measured_speeds_but_never_more_than_alone(measured: Sharing) -> None:
    assert measured.speeds((("BERT/SQuAD/32", 99.0), ("ResNet50/ImageNet/64", 95.0))) == pytest.approx((0.62, 0.55))
    assert measured.speeds((("BERT/SQuAD/32", 99.0), ("NeuMF/MovieLens/128", 20.0))) == pytest.approx((0.97, 1.0))


def test_pairs_that_were_not_measured_follow_the_curve() -> None:
    assert Sharing().speeds((("", 20.0), ("", 20.0)))[0] == pytest.approx(1.0, abs=0.01)
    assert Sharing().speeds((("", 100.0), ("", 100.0)))[0] == pytest.approx(curve(200.0) / (2 * curve(200.0)))


@given(members)
def test_a_device_does_no_more_than_one_second_of_demand_per_second(
    measured: Sharing, present: list[tuple[str, float]]
) -> None:
    found = measured.speeds(tuple(present))
    assert all(0.0 < speed <= 1.0 for speed in found)
    work = sum(measured.demand(each) * speed for each, speed in zip(present, found, strict=True))
    assert work <= 1.0 + 1e-9


@given(speeds, st.dictionaries(st.sampled_from("abcd"), st.floats(1, 100)))
def test_no_measured_pair_breaks_the_demands_fitted_to_it(
    pairs: dict[tuple[str, str], float], loads: dict[str, float]
) -> None:
    demands = fit_demands(loads, pairs)
    for (one, other), speed in pairs.items():
        assert demands[one] * speed + demands[other] * pairs[other, one] <= 1.0 + 1e-9
    assert all(demands[kind] <= load / 100.0 + 1e-9 for kind, load in loads.items() if kind in demands)


def test_the_load_of_a_device_is_the_sum_of_its_jobs() -> None:
    assert utilization_percent([]) == 0.0
    assert utilization_percent([60.0]) == pytest.approx(60.0)
    assert utilization_percent([50.0, 50.0]) == pytest.approx(75.0)


def test_a_file_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    (write_traces(tmp_path) / "lucid-colocate_info.csv").write_text("model1,dataset1\na,b\n")
    with pytest.raises(UserError, match=r"lucid-colocate_info\.csv lacks the columns batchsize1"):
        read_sharing(tmp_path)
