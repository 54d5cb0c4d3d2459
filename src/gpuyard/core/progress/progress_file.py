"""The file that a program may write about its progress: one line such as `120/4000 loss=0.12 acc=0.91`.

`GPUYARD_PROGRESS` names it (docs/reference/job-environment.md). The first word is `done/total`, `done` alone, or a
percentage such as `40%`; each further word is a name and a number. `left=SECONDS` is the time left, and `unit=WORD`
what is counted. Anything else in the line is ignored; a line that does not begin like this says nothing.
"""

import math
import re

from gpuyard.core.printable_text import printable
from gpuyard.core.progress.job_progress import MOST_FIGURES, ProgressReading, WorkDone
from gpuyard.core.progress.line_counts import LARGEST_TOTAL, LONGEST_NAME

VARIABLE = "GPUYARD_PROGRESS"
LONGEST_FILE = 4096
_FIRST = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)(?:(%)|/(\d{1,20}(?:\.\d{1,20})?))?")


def read_progress_line(text: str) -> ProgressReading | None:
    """Return what the first line of the file says, or None if it cannot be read."""
    words = text.partition("\n")[0].split()
    match = _FIRST.fullmatch(words[0]) if words else None
    if match is None:
        return None
    done = float(match[1])
    total = 100.0 if match[2] else float(match[3]) if match[3] else None
    if done > LARGEST_TOTAL or (total is not None and not 0 < total <= LARGEST_TOTAL):
        return None
    left_s, unit, figures = None, "%" if match[2] else "", dict[str, float | None]()
    for name, _, value in (word.partition("=") for word in words[1:]):
        if name == "unit":
            unit = printable(value, LONGEST_NAME)
        elif (number := _number(value)) is None or not name:
            continue
        elif name == "left":
            left_s = number if 0 <= number < LARGEST_TOTAL else None
        elif len(figures) < MOST_FIGURES:
            figures[printable(name, LONGEST_NAME)] = number if math.isfinite(number) else None
    amount = WorkDone(done=done if total is None else min(done, total), total=total, unit=unit, left_s=left_s)
    return ProgressReading(amount=amount, figures=(tuple(figures.items()),) if figures else (), is_told=True)


def _number(text: str) -> float | None:
    """Return a number, which may be nan or inf; None if the text is none."""
    try:
        return float(text[:40])
    except ValueError:
        return None
