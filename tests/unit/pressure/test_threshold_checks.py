"""The checks of a soak find a start that crosses a threshold, and none that could not know."""

from collections.abc import Iterator
from typing import Any

from tests.pressure.soak_evidence import read_soak
from tests.pressure.threshold_checks import (
    ForeignUse,
    ProgramRun,
    check_cpu_load,
    check_cpus,
    check_device_memory,
    check_disks,
    check_ram_floor,
    check_ram_promises,
)
from tests.pressure.watch import MachineReading

FLOOR, TOTAL = 1000.0, 4000.0


def run(start: float = 100.0, **more: Any) -> ProgramRun:
    return ProgramRun(**{"run": f"at-{start:g}", "start": start, "last": start + 10.0, "is_job": True, **more})


def readings(*available_mb: float, cpu: float = 0.0, disk_mb: float = 50.0) -> list[MachineReading]:
    """Return a reading per second, the last one at 100 s, with `cpu` CPUs in use."""
    first = 101 - len(available_mb)
    return [
        MachineReading(at=float(first + i), available_mb=mb, cpu_used_s=cpu * i, free_disk_mb={"home": disk_mb})
        for i, mb in enumerate(available_mb)
    ]


def count(violations: Iterator[str]) -> int:
    return len(list(violations))


def test_a_start_crosses_the_floor_if_it_was_low_all_the_time_before() -> None:
    assert count(check_ram_floor([run()], readings(*[900.0] * 8), FLOOR)) == 1
    assert count(check_ram_floor([run()], readings(*[900.0] * 6, 1100.0, 900.0), FLOOR)) == 0, "it may have been free"
    assert count(check_ram_floor([run()], readings(1100.0, *[900.0] * 8), FLOOR)) == 1, "that was too long ago"


def test_promises_that_are_not_taken_yet_count_against_what_is_available() -> None:
    other = run(98.0, ram_mb=1000.0, held=((99.0, 200.0),))
    assert count(check_ram_promises([other, run(ram_mb=1000.0)], readings(*[2500.0] * 8), FLOOR, TOTAL)) == 1
    assert count(check_ram_promises([other, run(ram_mb=1000.0)], readings(*[3000.0] * 8), FLOOR, TOTAL)) == 0
    taken = run(90.0, ram_mb=1000.0, held=((91.0, 1000.0),))
    assert count(check_ram_promises([taken, run(ram_mb=1000.0)], readings(*[2100.0] * 8), FLOOR, TOTAL)) == 0


def test_promises_never_exceed_the_ram_without_the_floor() -> None:
    programs = [run(99.0, ram_mb=2000.0), run(ram_mb=1100.0)]
    assert count(check_ram_promises(programs, readings(*[9000.0] * 8), FLOOR, TOTAL)) == 1


def test_a_start_on_a_full_disk_is_found() -> None:
    assert count(check_disks([run(disks={"home": 8.0})], readings(*[0.0] * 8, disk_mb=4.0))) == 1
    assert count(check_disks([run(disks={"home": 8.0})], readings(*[0.0] * 8, disk_mb=9.0))) == 0
    assert count(check_disks([run()], readings(*[0.0] * 8, disk_mb=4.0))) == 0


def test_a_job_that_starts_after_a_long_time_of_full_load_is_found() -> None:
    assert count(check_cpu_load([run()], readings(*[0.0] * 20, cpu=0.6), cpus=0.6)) == 1
    assert count(check_cpu_load([run()], readings(*[0.0] * 20, cpu=0.5), cpus=0.6)) == 0
    assert count(check_cpu_load([run()], readings(*[0.0] * 8, cpu=0.6), cpus=0.6)) == 0, "not long enough"
    assert count(check_cpu_load([run(is_job=False)], readings(*[0.0] * 20, cpu=0.6), cpus=0.6)) == 0


def test_declared_cpus_are_added_up() -> None:
    assert count(check_cpus([run(95.0, cpus=1.0), run(cpus=1.0)], 1.0)) == 1
    assert count(check_cpus([run(80.0, cpus=1.0), run(cpus=1.0)], 1.0)) == 0


def test_use_without_a_lease_and_promises_of_others_count_on_a_device() -> None:
    def found(use_end: float, vram_mb: float) -> int:
        foreign = [ForeignUse(device="0", mb=10_000.0, start=50.0, end=use_end)]
        programs = [run(99.0, vram_mb=8000.0, devices=("0",)), run(vram_mb=vram_mb, devices=("0",))]
        return count(check_device_memory(programs, foreign, {"0": 24_000.0}))

    assert found(use_end=200.0, vram_mb=7000.0) == 1
    assert found(use_end=200.0, vram_mb=6000.0) == 0
    assert found(use_end=98.0, vram_mb=7000.0) == 0, "it had ended"


def test_evidence_becomes_programs_with_what_they_were_promised() -> None:
    lines = [
        "start 7.1 40 100.0 0 2048 gpu-ram-3:400:1",
        "tick 7.1 40 101.0 200",
        "start outside-gpu1 41 100.5 1 4096 outside-gpu1",
        "tick outside-gpu1 41 100.9 1",
        "end outside-gpu1 41 120.0 0",
        "start run5:300:0 42 102.0 -1 0 run5:300:0",
        "start outside-ram1 43 102.5 -1 0 outside-ram1",
        "end 7.1 40 110.0 0",
    ]
    programs, foreign = read_soak(lines, {"home": 8.0}, ("output", 12.0))
    first, second = programs
    assert (first.ram_mb, first.vram_mb, first.cpus, first.devices) == (400.0, 2048.0, 1.0, ("0",))
    assert (first.is_job, dict(first.disks), first.held_mb(105.0), first.held_mb(100.5)) == (
        True,
        {"home": 8.0},
        200.0,
        0,
    )
    assert (second.is_job, second.ram_mb, dict(second.disks)) == (False, 300.0, {})
    assert foreign == [ForeignUse(device="1", mb=4096.0, start=100.9, end=120.0)]
