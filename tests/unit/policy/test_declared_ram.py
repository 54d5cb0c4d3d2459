"""Warnings for programs beside the queue that hold more RAM than they declared. Of the machine, 2 GB stay free."""

from gpuyard.policy.memory_guards import HeldRam, RamWarnings, judge_held_ram

GB = 1024.0
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


def test_a_program_over_its_declared_ram_is_warned_with_figures() -> None:
    assert lines((10.0, ENOUGH)) == [
        "train.py holds 10 GB of RAM, more than the 8 GB of --ram; declare 11 GB next time",
    ]


def test_it_is_warned_again_only_after_it_has_grown_by_a_quarter() -> None:
    found = lines((8.0, ENOUGH), (8.3, None), (9.0, ENOUGH), (10.0, ENOUGH), (11.3, ENOUGH), (12.0, ENOUGH))
    assert [line is not None for line in found] == [False, False, True, False, True, False]


def test_a_machine_that_runs_short_is_part_of_the_warning_once_per_shortage() -> None:
    found = lines((9.0, ENOUGH), (9.0, SHORT), (9.0, SHORT), (9.0, ENOUGH), (9.0, SHORT))
    assert [line is not None for line in found] == [True, True, False, False, True]
    assert "the machine has 1.5 GB of RAM left of the 2 GB to keep: nothing starts" in (found[1] or "")


def test_a_program_within_its_declared_ram_is_never_warned() -> None:
    assert lines((8.0, ENOUGH), (8.0, SHORT)) == [None, None]


def test_a_program_that_declared_nothing_is_warned_only_while_the_machine_is_short() -> None:
    found = lines((9.0, ENOUGH), (0.1, SHORT), (9.0, SHORT), declared_gb=None)
    assert found[:2] == [None, None]
    assert (found[2] or "").startswith("train.py holds 9 GB of RAM, which was not declared; the machine has 1.5 GB")
