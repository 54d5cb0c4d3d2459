"""Random traces from measured programs, and public traces as they are."""

from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.simulator.program_mixes import draw, mean_duration_s, read_pods, read_programs, similar_configuration
from tests.unit.simulator.samples import write_traces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_traces(tmp_path)


def test_the_same_seed_draws_the_same_trace(folder: Path) -> None:
    programs = read_programs(["lucid", "carma"], folder)
    assert draw(programs, 50, 7, 60.0) == draw(programs, 50, 7, 60.0)
    assert draw(programs, 50, 7, 60.0) != draw(programs, 50, 8, 60.0)


def test_a_run_is_like_its_program_but_not_quite(folder: Path) -> None:
    programs = {program.command: program for program in read_programs(["lucid"], folder)}
    for job in draw(list(programs.values()), 200, 1, 60.0):
        measured = programs[job.program]
        assert job.peak_mb == pytest.approx(measured.memory_mb, rel=0.03)
        assert job.load_percent == measured.load_percent
        assert job.peak_mb <= (job.declared_mb or 0.0) <= 1.5 * job.peak_mb + 1024.0
        assert 60.0 <= job.duration_s <= 14_400.0


def test_jobs_arrive_at_the_rate_that_was_asked_for(folder: Path) -> None:
    jobs = draw(read_programs(["lucid"], folder), 2000, 1, 120.0)
    assert jobs[-1].at_s / len(jobs) == pytest.approx(30.0, rel=0.1)
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)


def test_a_program_without_a_measured_load_gets_that_of_a_similar_program(folder: Path) -> None:
    bert, resnet, dlrm = read_programs(["carma"], folder)
    assert (bert.kind, bert.load_percent, bert.duration_s) == ("BERT/SQuAD/32", 99.0, 894.9)
    assert (resnet.kind, resnet.load_percent) == ("ResNet50/ImageNet/64", 95.0)
    assert (dlrm.kind, dlrm.command) == ("NeuMF/MovieLens/128", "python dlrm_criteo.py")
    assert similar_configuration("xception_imagenet", "32") == "ResNet50/ImageNet/32"
    assert similar_configuration("mobilenet_v2_cifar100", "128") == "MobileNetV2/CIFAR-10/128"


def test_the_mean_duration_counts_measured_and_drawn_values(folder: Path) -> None:
    assert mean_duration_s(read_programs(["carma"], folder)) == pytest.approx((894.9 + 1200.0 + 300.0) / 3)


def test_an_unknown_mix_is_a_user_error(folder: Path) -> None:
    with pytest.raises(UserError, match="there is no mix 'imagenet'"):
        read_programs(["lucid", "imagenet"], folder)


def test_an_invalid_figure_is_a_user_error(folder: Path) -> None:
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
