"""Stores results in a file, a JSON object per line, so that a run can be continued; and reports them in Markdown."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.trials import STAGES, Result, Stage

_HEAD = """# Planted faults

Written by `scripts/plant-faults --update docs/internals/planted-faults.md`; [how it works](tests.md#what-it-catches).
What each fault breaks stands beside it in `tests/faults/`.
"""
_NOT_TRIED, _SURVIVED = "not tried", "survived"
_CELLS = re.compile(r"(?<!\\)\|")
_COLUMNS = ("fault", "caught by", "stage", "version")
# What the page says about a stage, with the last stage that was tried and the one that caught the fault.
_STAGES_BY_TEXT: dict[str, tuple[Stage, Stage | None]] = {
    **{str(stage): (stage, stage) for stage in STAGES},
    **{f"not in {stage}": (stage, None) for stage in STAGES},
    _SURVIVED: (Stage.FULL, None),
}


def read_results(path: Path, faults: Iterable[Fault]) -> dict[str, Result]:
    """Return the last result of each fault that has not changed since. Skips a line that a crash cut off."""
    digests = {fault.id: fault.digest for fault in faults}
    found: dict[str, Result] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        result = _parse(line)
        if result is not None and digests.get(result.id) == result.digest:
            found[result.id] = result
    return found


def append_result(path: Path, result: Result) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(result))}\n")


def is_settled(result: Result | None, up_to: Stage) -> bool:
    """Return whether no stage up to that one is left to try."""
    if result is None:
        return False
    return result.caught is not None or STAGES.index(result.tried) >= STAGES.index(up_to)


def _parse(line: str) -> Result | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    caught = fields["caught"]
    return Result(
        **{
            **fields,
            "tried": Stage(fields["tried"]),
            "caught": None if caught is None else Stage(caught),
            "by_chance": tuple(fields["by_chance"]),
        }
    )


def stage_of(result: Result) -> str:
    """Return the stage that caught the fault, `survived`, or `not in` the last stage that was tried."""
    if result.caught is not None:
        return result.caught
    return _SURVIVED if result.tried is Stage.FULL else f"not in {result.tried}"


def read_report(page: str, faults: Iterable[Fault]) -> dict[str, Result]:
    """Return the results on a page for faults that have not changed since."""
    digests = {fault.id: fault.digest for fault in faults}
    found = filter(None, map(_parse_row, page.splitlines()))
    return {result.id: result for result in found if digests.get(result.id) == result.digest}


def _parse_row(line: str) -> Result | None:
    cells = [cell.strip().strip("`").replace("\\|", "|") for cell in _CELLS.split(line)[1:-1]]
    if len(cells) != len(_COLUMNS) or cells[2] not in _STAGES_BY_TEXT:
        return None
    fault_id, test, stage, digest = cells
    tried, caught = _STAGES_BY_TEXT[stage]
    return Result(id=fault_id, digest=digest, tried=tried, caught=caught, test=None if test == "-" else test)


def report(areas: Mapping[str, Sequence[Fault]], results: Mapping[str, Result]) -> str:
    """Return the page: totals by area, then every fault with the test that caught it."""
    parts = [_HEAD, _totals({area: [results.get(fault.id) for fault in faults] for area, faults in areas.items()})]
    parts += [_table(area, faults, results) for area, faults in areas.items() if faults]
    return "\n".join(parts)


def _totals(by_area: Mapping[str, Sequence[Result | None]]) -> str:
    columns = [*STAGES, "not caught", _NOT_TRIED]
    lines = [_row("area", "faults", *columns), _row(*["---"] * (2 + len(columns)))]
    for area, results in by_area.items():
        lines.append(_row(area, len(results), *_counts(results)))
    everything = [result for results in by_area.values() for result in results]
    lines.append(_row("**all**", len(everything), *_counts(everything)))
    return "\n".join(lines) + "\n"


def _counts(results: Sequence[Result | None]) -> list[int]:
    known = [result for result in results if result is not None]
    return [*(sum(result.caught == stage for result in known) for stage in (*STAGES, None)), len(results) - len(known)]


def _table(area: str, faults: Sequence[Fault], results: Mapping[str, Result]) -> str:
    lines = [f"## {area}\n", _row(*_COLUMNS), _row(*["---"] * len(_COLUMNS))]
    for fault in faults:
        known = _result_cells(results[fault.id]) if fault.id in results else ("-", _NOT_TRIED, "-")
        lines.append(_row(f"`{fault.id}`", *known))
    return "\n".join(lines) + "\n"


def _result_cells(result: Result) -> tuple[str, ...]:
    test = "-" if result.test is None else f"`{_escaped(result.test)}`"
    return test, stage_of(result), f"`{result.digest}`"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
