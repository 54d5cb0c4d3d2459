"""Printing: control characters never reach a terminal, except the colours that gpuyard adds."""

import logging

import pytest

from gpuyard.daemon.main import OneLineFormatter
from gpuyard.ui.cli.terminal import note, say


def test_colours_of_our_own_stay_and_other_controls_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say("\x1b[31mred\x1b[0m and \x1b]0;title\x07", "\x1b[2Jcleared", "two\nlines \x1b[31;5mblink")
    assert capsys.readouterr().out == (
        "\x1b[31mred\x1b[0m and \\x1b]0;title\\x07\n\\x1b[2Jcleared\ntwo\nlines \\x1b[31;5mblink\n"
    )


def test_standard_error_has_no_controls(capsys: pytest.CaptureFixture[str]) -> None:
    note("no such file: \x1b[2J\u202e\nhint")
    assert capsys.readouterr().err == "no such file: \\x1b[2J\\u202e\nhint\n"


def test_a_message_in_the_daemon_s_log_is_one_line() -> None:
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "cannot open %s", ("/tmp/a\nERROR forged\x1b[2J",), None)
    assert OneLineFormatter("%(levelname)s %(message)s").format(record) == (
        "ERROR cannot open /tmp/a\\nERROR forged\\x1b[2J"
    )
