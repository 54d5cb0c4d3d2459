"""Lines that are drawn in place on a terminal, as the terminal shows them."""

import io
import re
import sys

import pytest

from gpuyard.ui.views.live_display import LiveDisplay, printing_above


class Teletype(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Teletype:
    monkeypatch.setenv("COLUMNS", "20")
    return Teletype()


def shown_on(output: str) -> list[str]:
    """Return the lines that a terminal shows, without styles."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\x1b\[\d*[AJm]|\r|\n)", output):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[J":
            lines[row] = lines[row][:column]
            del lines[row + 1 :]
        elif part.startswith("\x1b"):
            row -= int(part[2:-1]) if part.endswith("A") else 0
        else:
            lines[row] = lines[row][:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line for line in lines if line]


def test_lines_replace_those_before_and_are_cut_to_the_width(terminal: Teletype) -> None:
    with LiveDisplay(terminal) as shown:
        shown.draw([(("first", "bold"),), (("x" * 40, None),), (("third", None),)])
        assert shown_on(terminal.getvalue()) == ["first", "x" * 19 + "…", "third"]
        shown.draw([(("again", "red"),)])
    assert shown_on(terminal.getvalue()) == ["again"]
    assert "\x1b[?25l" not in terminal.getvalue()  # the cursor stays visible, also after an interrupt


def test_at_the_end_transient_lines_are_gone_and_notes_stay(terminal: Teletype) -> None:
    with LiveDisplay(terminal, is_transient=True) as shown:
        shown.draw([(("one", None),), (("two", None),)])
        shown.note("a note")
        assert shown_on(terminal.getvalue()) == ["a note", "one", "two"]
    assert shown_on(terminal.getvalue()) == ["a note"]


def test_what_a_program_prints_appears_above_the_lines(terminal: Teletype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    with LiveDisplay(terminal) as shown, printing_above(shown):
        shown.draw([(("1 of 2", None),)])
        print("printed", end="")  # noqa: T201
        assert shown_on(terminal.getvalue()) == ["1 of 2"]
        print(" in parts\nrest", end="")  # noqa: T201
        assert shown_on(terminal.getvalue()) == ["printed in parts", "1 of 2"]
    assert shown_on(terminal.getvalue()) == ["printed in parts", "rest", "1 of 2"]
    assert sys.stdout is terminal
