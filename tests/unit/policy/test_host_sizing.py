"""How much RAM and how many CPUs a job reserves: declared, learned or expected."""

from gpuyard.model.lease import HostShare, Need
from gpuyard.policy.estimates import FinishedRun, Profile, learn
from gpuyard.policy.numbers import LEAST_RAM_MB
from gpuyard.policy.sizing import KnownRuns, expected_ram_mb, learned_cpus, learned_ram_mb, size_host

GB = 1024.0
CPU_JOB, GPU_JOB = Need(devices=0), Need(devices=1)


def exact(*peaks_gb: float, cpus: tuple[float, ...] = ()) -> Profile:
    return Profile(ram_peaks_mb=tuple(peak * GB for peak in peaks_gb), cpu_uses=cpus)


def program(*peaks_gb: float) -> Profile:
    return Profile(is_exact=False, ram_peaks_mb=tuple(peak * GB for peak in peaks_gb))


def test_a_declared_amount_wins() -> None:
    need = Need(devices=1, host=HostShare(ram_mb=2 * GB, cpus=3.0))
    assert size_host(need, KnownRuns(exact=exact(8, cpus=(6.0,))), 100 * GB) == need.host


def test_the_highest_run_counts_with_a_margin_that_shrinks_with_evidence() -> None:
    one, many = learned_ram_mb(exact(4), None), learned_ram_mb(exact(*[4] * 9), None)
    assert one is not None
    assert many is not None
    assert 4 * GB < many < one < 5 * GB


def test_other_arguments_count_if_the_runs_of_the_program_are_alike() -> None:
    assert learned_ram_mb(None, program(4, 5)) is not None
    assert learned_ram_mb(None, program(1, 5)) is None
    assert learned_ram_mb(None, program(4)) is None


def test_a_first_run_with_devices_is_charged_what_is_expected() -> None:
    share = size_host(GPU_JOB, KnownRuns(), 21 * GB)
    assert share == HostShare(ram_mb=21 * GB / 64, is_ram_expected=True)
    assert size_host(GPU_JOB, KnownRuns(), None) == HostShare(ram_mb=512.0, is_ram_expected=True)
    share = size_host(GPU_JOB, KnownRuns(machine=program(1, 3, 9)), 21 * GB)
    assert share == HostShare(ram_mb=3 * GB, is_ram_expected=True)


def test_a_small_job_without_devices_reserves_nothing() -> None:
    assert size_host(CPU_JOB, KnownRuns(), 21 * GB) is None
    assert size_host(CPU_JOB, KnownRuns(exact=exact(0.1, cpus=(0.9,))), 21 * GB) is None


def test_a_large_job_without_devices_reserves_what_it_learned() -> None:
    share = size_host(CPU_JOB, KnownRuns(exact=exact(4, cpus=(0.9,))), 21 * GB)
    assert share is not None
    assert (share.ram_mb or 0.0) > 4 * GB > LEAST_RAM_MB
    assert (share.cpus, share.are_cpus_learned, share.is_ram_expected) == (1.0, True, False)


def test_a_learned_amount_is_at_most_what_the_machine_can_give() -> None:
    share = size_host(GPU_JOB, KnownRuns(exact=exact(40)), 21 * GB)
    assert share == HostShare(ram_mb=21 * GB)
    assert size_host(GPU_JOB, KnownRuns(exact=exact(40)), 0.0) is None, "a machine that can give nothing runs it anyway"


def test_what_grew_after_running_out_is_at_most_what_the_machine_can_give() -> None:
    grown = Need(devices=1, host=HostShare(ram_mb=30 * GB))
    assert size_host(grown, KnownRuns(), 21 * GB, 10 * GB) == HostShare(ram_mb=21 * GB)
    assert size_host(grown, KnownRuns(), 21 * GB, 30 * GB) == HostShare(ram_mb=30 * GB), (
        "declared: refused, or it waits"
    )


def test_cpus_are_the_median_in_halves() -> None:
    assert learned_cpus(exact(1, cpus=(3.1, 3.2, 11.0)), None) == 3.5
    assert learned_cpus(None, None) is None


def test_the_expected_ram_follows_what_a_job_uses_once_it_has_shown_it() -> None:
    assert expected_ram_mb(500.0, 20.0, 1.0) == 500.0
    assert expected_ram_mb(500.0, 900.0, 1.0) == 900.0
    assert expected_ram_mb(500.0, 20.0, 60.0) == 25.0


def test_runs_teach_ram_and_cpus() -> None:
    profile = learn(Profile(), FinishedRun(seconds=9.0, ram_mb=100.0, cpus_used=2.0))
    profile = learn(profile, FinishedRun(ram_mb=50.0, cpus_used=9.0, is_whole=False))
    assert (profile.ram_peaks_mb, profile.cpu_uses) == ((100.0,), (2.0,)), (
        "a run that was cut short proves nothing less"
    )
    profile = learn(profile, FinishedRun(ram_mb=150.0, is_whole=False))
    assert profile.ram_peaks_mb == (100.0, 150.0)
