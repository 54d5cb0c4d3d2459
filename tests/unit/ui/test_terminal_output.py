"""Printing: control characters never reach a terminal, except the colours that gpuyard adds."""

import logging

import pytest

from gpuyard.daemon.main import OneLineFormatter
from gpuyard.ui.cli.terminal import note, say


def test_what_is_printed_has_no_controls_but_our_colours(capsys: pytest.CaptureFixture[str]) -> None:
    say("\x1b[31mred\x1b[0m and \x1b]0;title\x07", "\x1b[2Jcleared", "two\nlines \x1b[31;5mblink")
    assert capsys.readouterr().out == (
        "\x1b[31mred\x1b[0m and \\x1b]0;title\\x07\n\\x1b[2Jcleared\ntwo\nlines \\x1b[31;5mblink\n"
    )
    note("no such file: \x1b[2J\u202e\nhint")
    assert capsys.readouterr().err == "no such file: \\x1b[2J\\u202e\nhint\n"
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "cannot open %s", ("/tmp/a\nERROR forged\x1b[2J",), None)
    assert OneLineFormatter("%(levelname)s %(message)s").format(record) == (
        "ERROR cannot open /tmp/a\\nERROR forged\\x1b[2J"
    )
