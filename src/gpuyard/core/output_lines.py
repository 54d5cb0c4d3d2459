"""Lines of a program's output as a person reads them: without colours, without what was overwritten, and without what
launchers, gpuyard and unfinished progress bars have before each line.
"""

import re

from gpuyard.core.terminal_line import plain_line

# Our times (--timestamps), and the prefixes of launchers: `[rank0]: `, `[default1]:`, `[1,0]<stderr>:`,
# `(train pid=17) `.
_PREFIX = re.compile(
    r"^(?:\d{4}-\d\d-\d\dT[\d:.]{12}[+-]\d\d:\d\d )?"
    r"(?:\s{0,8}(?:\[[a-z]{0,10}\d{1,5}\]:|\[\d{1,5},\d{1,5}\]<std\w{3}>:|\(\w{1,60} pid=\d{1,9}[^)]{0,60}\)) ?)?"
)
# The end of tqdm's bar, `… [00:01<00:02, 2.00it/s]`, before other text: a program that fails does not end the line.
_BAR = re.compile(r"^.{0,400}\[(?:\d{1,4}:)?\d\d:\d\d[<,][^\]]{0,200}\]\s{0,8}(?=\S)")


def last_lines(text: str, most_lines: int, most_chars: int, longest: int) -> list[str]:
    """Return the last lines of an output, in order; of each line the first `longest` characters."""
    lines = text[-most_chars:].split("\n")[-most_lines:]
    return [without_prefix(plain_line(line))[:longest] for line in lines]


def without_prefix(line: str) -> str:
    """Return a line without our time, and without a bar or what a launcher wrote before it."""
    return _BAR.sub("", _PREFIX.sub("", line, count=1), count=1)
