"""A line that a program overwrites is shown as a terminal shows it, in bounded memory."""

import re
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuyard.model.terminal_line import MOST_KEPT, ShownLines, shorten_line, shown_line
from tests.terminal_lines import SHOWN

ANYTHING = st.lists(
    st.sampled_from(["a", "bc", "\r", "\b", "\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[31m", "\x1b[0m", "█", " "])
).map("".join)


@pytest.mark.parametrize(("line", "shown"), SHOWN)
def test_a_line_is_shown_as_on_a_terminal(line: str, shown: str) -> None:
    assert re.sub("\x1b\\[[0-9;]*m", "", shown_line(line)) == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mred\x1b[0m plain\x1b[?25l", "\x1b[31mred\x1b[0m plain\x1b[?25l"),
        ("\x1b[31mred\rX", "\x1b[31mXed"),
        ("\x1b[31mred\x1b[0m\rX", "X\x1b[31med\x1b[0m"),
        ("\x1b[31m##\x1b[0m__\r\x1b[31m###\x1b[0m", "\x1b[31m###\x1b[0m_"),
        ("\x1b[1m\x1b[31mred\x1b[0m\rdone", "done"),
    ],
)
def test_colours_stay_with_their_text_and_do_not_reach_the_next_line(line: str, shown: str) -> None:
    assert shown_line(line) == shown


@example("a\x1b[2K", "a")
@given(ANYTHING, ANYTHING)
def test_a_shortened_line_is_shown_alike_whatever_follows(line: str, more: str) -> None:
    assert shown_line(shorten_line(line) + more + "\r") == shown_line(line + more + "\r")


@given(ANYTHING, st.integers(1, 5))
def test_pieces_show_the_same_as_the_whole(text: str, size: int) -> None:
    content = (text + "\n" + text).encode()
    lines = ShownLines()
    shown = b"".join(lines.feed(content[at : at + size]) for at in range(0, len(content), size)) + lines.finish()
    assert shown.decode() == "\n".join(map(shown_line, (text, text)))


@pytest.mark.parametrize("piece", [b"50%|#####     |\r", b"x" * 15], ids=["bar", "text"])
def test_a_line_of_any_length_needs_little_memory(piece: bytes) -> None:
    lines, chunk, written = ShownLines(), piece * 4096, 0
    tracemalloc.start()
    try:
        for _ in range(60):
            written += len(lines.feed(chunk))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    written += len(lines.finish())
    assert most < 200 * MOST_KEPT
    assert written == (len(piece) - 1 if piece.endswith(b"\r") else 60 * len(chunk))


def test_a_very_long_line_is_passed_on_and_its_carriage_return_ends_it() -> None:
    lines = ShownLines()
    text = b"x" * (MOST_KEPT + 1)
    assert lines.feed(text) == text
    assert lines.feed(b"y\r 1%\r 2%\n") == b"y\n 2%\n"
    assert lines.feed(text) + lines.feed(b"\n 1%\r 2%\n") == text + b"\n 2%\n"
    assert lines.feed(text) + lines.feed(b"\r\nend") + lines.finish() == text + b"\nend"
    lines = ShownLines()
    assert lines.feed(b"\xff\xfe\rX\n\x80\n") == b"X\xfe\n\x80\n", "bytes that are no text stay"
