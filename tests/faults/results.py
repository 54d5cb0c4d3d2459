"""Stores results in a file, a JSON object per line, so that a run can be continued; and reports them in Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.trials import STAGES, Result, Stage

_HEAD = """# Planted faults

`scripts/plant-faults` plants each of these faults in a copy of the working tree, one at a time, and runs tests until
one fails twice: first the tests *near* the fault, then all of `make test`, then all of `make test-full`. The result
shows which faults `make test` would miss. The faults are defined in `tests/faults/`; `scripts/plant-faults --write
docs/planted-faults.md` writes this page.
"""


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
    return "survived" if result.tried is Stage.FULL else f"not in {result.tried}"


def report(areas: Mapping[str, Sequence[Fault]], results: Mapping[str, Result]) -> str:
    """Return the page: totals by area, then every fault with the test that caught it."""
    known = {area: [fault for fault in faults if fault.id in results] for area, faults in areas.items()}
    parts = [_HEAD, _totals({area: [results[fault.id] for fault in faults] for area, faults in known.items()})]
    parts += [_table(area, faults, results) for area, faults in known.items() if faults]
    return "\n".join(parts)


def _totals(by_area: Mapping[str, Sequence[Result]]) -> str:
    columns = [*STAGES, "not caught"]
    lines = [_row("area", "faults", *columns), _row(*["---"] * (2 + len(columns)))]
    for area, results in by_area.items():
        lines.append(_row(area, len(results), *_counts(results)))
    everything = [result for results in by_area.values() for result in results]
    lines.append(_row("**all**", len(everything), *_counts(everything)))
    return "\n".join(lines) + "\n"


def _counts(results: Sequence[Result]) -> list[int]:
    return [sum(result.caught == stage for result in results) for stage in (*STAGES, None)]


def _table(area: str, faults: Sequence[Fault], results: Mapping[str, Result]) -> str:
    lines = [f"## {area}\n", _row("fault", "what breaks", "caught by", "stage", "s"), _row(*["---"] * 5)]
    for fault in faults:
        result = results[fault.id]
        test = "-" if result.test is None else f"`{_escaped(result.test)}`"
        lines.append(_row(f"`{fault.id}`", _escaped(fault.breaks), test, stage_of(result), f"{result.seconds:.0f}"))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
