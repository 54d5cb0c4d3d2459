"""Reading what AMD's tools print: JSON among warnings, tables whose cells hold spaces, and exit codes that cry wolf."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from gpuyard.core.snapshot import Reading
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.run_tool import ToolOutput

# Only where a line begins: what is indented belongs to a document, and a part of a torn one is no answer.
_DOCUMENT_START = re.compile(r"(?:\A\s*|^)(?=[\[{])", re.MULTILINE)
_MOST_STARTS = 64
_UNIT = re.compile(r"W|°?C|%|[KMGT]?i?B|[kMG]?Hz|[KMG]b/s|GT/s|[KMG]T/s|RPM|J|mV|[mnu]s")


def json_documents(text: str) -> Iterator[Any]:
    """The JSON arrays and objects in `text`, which may have warnings before, between and after them."""
    decoder = json.JSONDecoder()
    end = 0
    for start in islice((match.end() for match in _DOCUMENT_START.finditer(text)), _MOST_STARTS):
        if start < end:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        yield value


def section(record: Any, name: str) -> dict[str, Any]:
    """A part of a record; a release that cannot read it prints "N/A" in its place."""
    part = record.get(name) if isinstance(record, dict) else None
    return part if isinstance(part, dict) else {}


def cells(line: str) -> list[str]:
    """The words of a table's line, but "55 °C", "NPS1, SPX", "[0x74a1 : 0x00]" and "2.9/ 15.9 GB" are one cell each."""
    joined: list[str] = []
    for word in line.split():
        if joined and (_UNIT.fullmatch(word) or joined[-1].endswith((",", "/")) or _is_open(joined[-1])):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def table_rows(header: Sequence[str], lines: Sequence[str]) -> list[tuple[dict[str, str], str]]:
    """Each row that begins with a number, by column, and the line after it.

    Of a row with more or fewer cells than the header only the first cell is sure.
    """
    rows = []
    for line, following in pairwise([*lines, ""]):
        row = cells(line)
        if row and row[0].isdecimal():
            rows.append((dict(zip(header, row if len(row) == len(header) else row[:1], strict=False)), following))
    return rows


def csv_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the cells of each line that has any; a line that is no CSV is one cell."""
    for line in lines:
        try:
            row = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error:
            row = [line]
        if any(row):
            yield [cell.strip() for cell in row]


def garbled(source: str, text: str) -> ProbeGarbled:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = f"no cards can be read from what it printed: {first[:100]!r}" if first else "it printed nothing"
    return ProbeGarbled(source, said, hint=f"run `{source}` by hand to see")


def parse_output(output: ToolOutput, parse: Callable[[str], Reading]) -> Reading:
    """AMD's tools end with an error where one figure of many is not supported: what can be read counts."""
    try:
        return parse(output.stdout)
    except ProbeGarbled:
        if output.status not in (0, None):
            raise output.failure() from None
        raise


def _is_open(cell: str) -> bool:
    return cell.startswith("[") and "]" not in cell
