"""Parse the output of AMD's tools: JSON among warnings, and misleading exit codes."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from gpuyard.core.snapshot import Reading
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.run_tool import ToolOutput

# Only at the start of a line: indented text belongs to a document, and a part of a truncated one is no answer.
_DOCUMENT_START = re.compile(r"(?:\A\s*|^)(?=[\[{])", re.MULTILINE)
_MOST_STARTS = 64


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
