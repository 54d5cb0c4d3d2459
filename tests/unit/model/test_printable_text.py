import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lazy_pattern import LazyPattern
from gpuyard.model.printable_text import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("python train.py", "python train.py", id="plain"),
        pytest.param("ünï 日本 👍", "ünï 日本 👍", id="other scripts"),
        pytest.param("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07", id="terminal escapes"),
        pytest.param("\x9b31m\x7f", "\\x9b31m\\x7f", id="C1 and DEL"),
        pytest.param("two\r\nlines\u2028three", "two\\r\\nlines\\u2028three", id="line ends"),
        pytest.param("abc\u202edef\u2066", "abc\\u202edef\\u2066", id="direction of writing"),
        pytest.param("a\udcffb", "a\\udcffb", id="lone surrogate"),
        pytest.param("a\u00a0b\u3000c", "a b c", id="other spaces"),
        pytest.param("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff", id="invisible"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()), st.integers(1, 50))
def test_any_text_becomes_one_printable_line_of_limited_length(text: str, longest: int) -> None:
    assert printable(text).isprintable()
    short = printable(text, longest)
    assert short.isprintable()
    assert len(short) <= longest
    short.encode()  # no lone surrogates


def test_long_texts_and_lines() -> None:
    assert printable("x" * 120_000, 10) == "xxxxxxxxx…"
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("\x1b" * 120_000, 10) == "\\x1b\\x1b\\…", "a long text ends in an ellipsis"
    assert printable_lines("one\n  two\x1b[2J\n") == "one\n  two\\x1b[2J\n", "lines stay lines"


def test_escapes_need_no_file() -> None:
    """The daemon writes log lines at its limit on open files, too."""
    code = (
        "import resource; from gpuyard.model.printable_text import printable\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); print(printable('a\\x1b\\n'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("a\\x1b\\n\n", "")


def test_a_lazy_pattern_is_compiled_when_used_and_finds_what_the_pattern_finds() -> None:
    pattern = LazyPattern(r"a(\d)", re.IGNORECASE)
    assert [match[1] for match in pattern.finditer("A1 a2")] == ["1", "2"]
    assert pattern.search("A1 a2", 1, 4) is None
    assert pattern.match("xa1") is None
    assert pattern.fullmatch("A1") is not None
    assert pattern.sub("-", "A1 a2") == "- -", "a lazy pattern finds what the pattern finds"
    # A lazy pattern is compiled when it is first used.
    pattern = LazyPattern("(")
    with pytest.raises(re.error):
        pattern.search("")
