"""Parse the output of AMD's tools: JSON among warnings, tables with spaces in cells, misleading exit codes."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from gpuyard.core.snapshot import Reading
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.run_tool import ToolOutput

# Only at the start of a line: indented text belongs to a document, and a part of a truncated one is no answer.
_DOCUMENT_START = re.compile(r"(?:\A\s*|^)(?=[\[{])", re.MULTILINE)
_MOST_STARTS = 64
_UNIT = re.compile(r"W|°?C|%|[KMGT]?i?B|[kMG]?Hz|[KMG]b/s|GT/s|[KMG]T/s|RPM|J|mV|[mnu]s")


def json_documents(text: str) -> Iterator[Any]:
    """Return the JSON arrays and objects in `text`, which may have warnings before, between and after them."""
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


def cells(line: str) -> list[str]:
    """Split a line of a table; "55 °C", "NPS1, SPX", "[0x74a1 : 0x00]" and "2.9/ 15.9 GB" are one cell each."""
    joined: list[str] = []
    for word in line.split():
        is_open = bool(joined) and joined[-1].startswith("[") and "]" not in joined[-1]
        if joined and (is_open or _UNIT.fullmatch(word) or joined[-1].endswith((",", "/"))):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def table_rows(header: Sequence[str], lines: Sequence[str]) -> list[tuple[dict[str, str], str]]:
    """Return each row that starts with a number, by column, and the line after it.

    In a row with more or fewer cells than the header only the first cell is certain.
    """
    rows = []
    for line, following in pairwise([*lines, ""]):
        row = cells(line)
        if row and row[0].isdecimal():
            rows.append((dict(zip(header, row if len(row) == len(header) else row[:1], strict=False)), following))
    return rows


def csv_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the cells of each non-empty line; a line that is not CSV is one cell."""
    for line in lines:
        try:
            row = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error:
            row = [line]
        if any(row):
            yield [cell.strip() for cell in row]


def garbled(source: str, text: str) -> ProbeGarbled:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = f"no cards in its output: {first[:100]!r}" if first else "it printed nothing"
    return ProbeGarbled(source, said, hint=f"run `{source}` yourself to see why")


def parse_output(output: ToolOutput, parse: Callable[[str], Reading]) -> Reading:
    """Parse the output even if the tool failed: AMD's tools fail if a single figure is not supported."""
    try:
        return parse(output.stdout)
    except ProbeGarbled:
        if output.status not in (0, None):
            raise output.failure() from None
        raise
