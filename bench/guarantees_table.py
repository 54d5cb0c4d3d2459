"""The cases of `bench.guarantees` by trace and machine: the mean over the seeds and the worst seed, and how far single
cases are off."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from bench.against_fifo import FIGURES, PassSummary, broken_means, mean_ratio

# A trace, its machine, and fifo, first and second pass of one seed.
Cell = tuple[str, str, tuple[PassSummary, PassSummary, PassSummary]]
_WIDTH = 25
_OVER_PERCENT = (0.5, 1, 2, 5, 10, 20)
_COMPARED = (("first / fifo", 1), ("second / first", 2))


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a line for each trace and machine: mean and worst seed of each ratio, and jobs that wait too long; `!`
    marks a mean that breaks a promise."""
    columns = "  ".join(f"{name} {what[:-2]}".rjust(_WIDTH) for name, _ in _COMPARED for what in FIGURES)
    yield f"{'trace':<18} {'cards':<8} {'seeds':>5}  {columns}  late"
    for (trace, cards), group in groupby(sorted(cells, key=_place), key=_place):
        passes = [each for _, _, each in group]
        ratios = "  ".join(_mean_and_worst(passes, what, number) for _, number in _COMPARED for what in FIGURES)
        late = sum(each.late_jobs for of_seed in passes for each in of_seed[1:])
        mark = "!" if broken_means(passes) else ""
        yield f"{trace:<18} {cards:<8} {len(passes):>5}  {ratios}  {late:>4} {mark}".rstrip()


def histogram(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a line for each ratio: in how many cases it is worse than 1 by more than some percent."""
    for name, number in _COMPARED:
        for what in FIGURES:
            ratios = [_ratio(each, what, number) for _, _, each in cells]
            counts = ", ".join(f"{sum(each > 1 + over / 100 for each in ratios)} by {over}%" for over in _OVER_PERCENT)
            yield f"{name} {what[:-2]}: of {len(ratios)} cases worse by more than: {counts}; at worst {max(ratios):.3f}"


def _place(cell: Cell) -> tuple[str, str]:
    return cell[0], cell[1]


def _mean_and_worst(passes: Sequence[tuple[PassSummary, ...]], what: str, number: int) -> str:
    mean = mean_ratio(what, [(each[number], each[number - 1]) for each in passes])
    worst = max(_ratio(each, what, number) for each in passes)
    return f"{mean:.3f} (worst {worst:.3f})".rjust(_WIDTH)


def _ratio(passes: tuple[PassSummary, ...], what: str, number: int) -> float:
    after, before = getattr(passes[number], what), getattr(passes[number - 1], what)
    return float(after / before)
