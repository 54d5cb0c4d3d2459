"""What a terminal shows of lines that a program overwrites, as progress bars do, and the last lines of an output as a
person reads them: without colours, and without what launchers, gpuyard and unfinished bars have before each line.
"""

import re
from itertools import groupby

# The most of an unfinished line that is kept. More than that without an end is passed on as it is.
MOST_KEPT = 1 << 16
_ERASES = re.compile(b"\x1b\\[[012]?K")
_ESCAPE = "\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]P^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[()][0-9A-Z]|[@-OQ-Z\\\\])"
ESCAPES = re.compile(_ESCAPE)
_MOVES = re.compile(f"(\r|\b|{_ESCAPE})")
_HALF_ESCAPE = re.compile("\x1b(?:\\[[0-?]{0,64}[ -/]{0,8}|[\\]P^_][^\x07\x1b]{0,1024}\x1b?)?\\Z")
_ERASE = re.compile("\x1b\\[([012]?)K")
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")


class _Cells:
    """The cells of a line on a terminal, each with its character and its colours, and the cursor."""

    def __init__(self, line: str) -> None:
        self._characters: list[str] = []
        self._styles: list[str] = []
        self._at = 0
        self._style = ""
        for part in _MOVES.split(line):
            if part == "\r":
                self._at = 0
            elif part == "\b":
                self._at = max(0, self._at - 1)
            elif part.startswith("\x1b"):
                self._obey(part)
            elif part:
                self._write(part)

    def _write(self, text: str) -> None:
        self._fill_up()
        end = self._at + len(text)
        self._characters[self._at : end] = text
        self._styles[self._at : end] = [self._style] * len(text)
        self._at = end

    def _fill_up(self) -> None:
        """Have blanks up to the cursor, which may be beyond the end of an erased line."""
        missing = self._at - len(self._characters)
        if missing > 0:
            self._characters += " " * missing
            self._styles += [""] * missing

    def _obey(self, escape: str) -> None:
        erase = _ERASE.fullmatch(escape)
        if erase is not None:
            begins, ends = {"1": (0, self._at + 1), "2": (0, None)}.get(erase[1], (self._at, None))
            if ends is not None and ends < len(self._characters):
                self._characters[begins:ends] = " " * ends
                self._styles[begins:ends] = [""] * ends
            else:
                del self._characters[begins:], self._styles[begins:]
        elif escape in ("\x1b[m", "\x1b[0m"):
            self._style = ""
        elif _COLOUR.fullmatch(escape):
            is_new = len(self._style) > 256 or escape.startswith("\x1b[0;")
            self._style = escape if is_new else self._style + escape

    def text(self) -> str:
        end = len(self._characters)
        while end and self._characters[end - 1] == " " and not self._styles[end - 1]:
            end -= 1
        return self._draw(end, self._style)

    def as_line(self) -> str:
        """Return a line with the same cells and the same cursor."""
        self._fill_up()
        end = len(self._characters)
        if self._at == end:
            return self._draw(end, self._style)
        return f"{self._draw(end, '')}\r{self._draw(self._at, self._style)}"

    def _draw(self, end: int, last_style: str) -> str:
        """Return the cells up to `end`, and the escape sequences for the colours of what follows."""
        if not any(self._styles[:end]) and not last_style:
            return "".join(self._characters[:end])
        drawn, style, at = "", "", 0
        for each, cells in groupby(self._styles[:end]):
            count = sum(1 for _ in cells)
            reset = "\x1b[0m" if style else ""
            drawn += f"{reset}{each}{''.join(self._characters[at : at + count])}"
            style, at = each, at + count
        return drawn if style == last_style else f"{drawn}\x1b[0m{last_style}"


def shown_line(line: str) -> str:
    """Return what a terminal shows of a line, given without its end."""
    return _Cells(line).text() if _is_overwritten(line.encode(errors="replace")) else line


def shorten_line(line: str) -> str:
    """Return a line that is shown alike now and after anything that may be appended, without what was overwritten."""
    half = _HALF_ESCAPE.search(line)
    end = len(line) if half is None else half.start()
    return _Cells(line[:end]).as_line() + line[end:]


class ShownLines:
    """Output in pieces as bytes; what a terminal shows of each line comes out. Of an unfinished line it keeps 64 KiB:
    if more than that is visible, it is passed on as it is, and the next carriage return counts as its end."""

    def __init__(self) -> None:
        self._line = b""
        self._is_passed_on = False

    def feed(self, chunk: bytes) -> bytes:
        passed = b""
        if self._is_passed_on:
            end = min((at for at in map(chunk.find, (b"\n", b"\r")) if at >= 0), default=-1)
            if end < 0:
                return chunk
            self._is_passed_on = False
            after = end + (2 if chunk.startswith(b"\r\n", end) else 1)
            passed, chunk = chunk[:end] + b"\n", chunk[after:]
        finished, newline, self._line = (self._line + chunk).rpartition(b"\n")
        passed += _shown_bytes(finished) + newline
        if len(self._line) > MOST_KEPT:
            self._line = self.shorten()
            if len(self._line) > MOST_KEPT:
                passed, self._line, self._is_passed_on = passed + self._line, b"", True
        return passed

    def shorten(self) -> bytes:
        """Return the unfinished line, with the cursor where the program left it."""
        return shorten_line(self._line.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def finish(self) -> bytes:
        """Return what is shown of the unfinished line."""
        line, self._line, self._is_passed_on = self._line, b"", False
        return _shown_bytes(line)


def _is_overwritten(lines: bytes) -> bool:
    return b"\r" in lines or b"\b" in lines or (b"\x1b" in lines and _ERASES.search(lines) is not None)


def _shown_bytes(lines: bytes) -> bytes:
    if not _is_overwritten(lines):
        return lines
    shown = lines.split(b"\n")
    for at, line in enumerate(shown):
        if _is_overwritten(line):
            shown[at] = _Cells(line.decode(errors="surrogateescape")).text().encode(errors="surrogateescape")
    return b"\n".join(shown)


# Our times (--timestamps), and the prefixes of launchers: `[rank0]: `, `[default1]:`, `[1,0]<stderr>:`,
# `(train pid=17) `.
_PREFIX = re.compile(
    r"^(?:\d{4}-\d\d-\d\dT[\d:.]{12}[+-]\d\d:\d\d )?"
    r"(?:\s{0,8}(?:\[[a-z]{0,10}\d{1,5}\]:|\[\d{1,5},\d{1,5}\]<std\w{3}>:|\(\w{1,60} pid=\d{1,9}[^)]{0,60}\)) ?)?"
)
# The end of tqdm's bar, `… [00:01<00:02, 2.00it/s]`, before other text: a program that fails does not end the line.
_BAR = re.compile(r"^.{0,400}\[(?:\d{1,4}:)?\d\d:\d\d[<,][^\]]{0,200}\]\s{0,8}(?=\S)")


def last_lines(text: str, most_lines: int, most_chars: int, longest: int) -> list[str]:
    """Return the last lines of an output, in order; of each line the first `longest` characters, without escapes."""
    lines = [shown_line(line.removesuffix("\r")) for line in text[-most_chars:].split("\n")[-most_lines:]]
    return [without_prefix(ESCAPES.sub("", each) if "\x1b" in each else each)[:longest] for each in lines]


def without_prefix(line: str) -> str:
    """Return a line without our time, and without a bar or what a launcher wrote before it."""
    return _BAR.sub("", _PREFIX.sub("", line, count=1), count=1)
