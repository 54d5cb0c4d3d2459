"""Command lines as one text, and changes of a command's arguments."""

import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.command_line import change_arguments, is_change_of_arguments, read_line

COMMAND = ("python", "train.py", "--lr", "3e-4", "--seed=1", "--verbose", "data.csv", "model.width=64")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python a.py --lr 1", ("python", "a.py", "--lr", "1")),
        ("python a.py 'two words'", ("python", "a.py", "two words")),
        ("python a.py --lr {lr}", ("python", "a.py", "--lr", "{lr}")),
        ("python a.py && python b.py", ("/bin/sh", "-c", "python a.py && python b.py")),
        ("LR=1 python a.py", ("/bin/sh", "-c", "LR=1 python a.py")),
        ("echo {1..3}", ("/bin/sh", "-c", "echo {1..3}")),
        ("a | b > c", ("/bin/sh", "-c", "a | b > c")),
    ],
)
def test_only_a_line_with_shell_syntax_needs_a_shell(line: str, command: tuple[str, ...]) -> None:
    assert read_line(line) == command


@example("a='")
@given(st.text(st.sampled_from("ab-=/.'\" \t\r\v\x1f\xa0é"), max_size=12))
def test_other_lines_are_split_like_those_of_a_shell(line: str) -> None:
    """A no-break space, for one, is part of an argument."""
    try:
        command = read_line(line)
    except UserError:
        with pytest.raises(ValueError, match="No closing quotation"):
            shlex.split(line)
    else:  # a shell says itself that a quote is open
        assert command == ("/bin/sh", "-c", line) or command == tuple(shlex.split(line))


def test_an_open_quote_is_an_error() -> None:
    with pytest.raises(UserError, match="No closing quotation"):
        read_line("python 'a.py")


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--lr", "1e-3"], (*COMMAND[:3], "1e-3", *COMMAND[4:])),
        (["--lr=1e-3"], (*COMMAND[:2], "--lr=1e-3", *COMMAND[4:])),
        (["--seed", "2"], (*COMMAND[:4], "--seed", "2", *COMMAND[5:])),
        (["--verbose"], COMMAND),
        (["model.width=128"], (*COMMAND[:-1], "model.width=128")),
        (["--new", "-5"], (*COMMAND, "--new", "-5")),
        (["--lr", "-1", "--new"], (*COMMAND[:3], "-1", *COMMAND[4:], "--new")),
    ],
)  # fmt: skip
def test_options_that_the_command_has_are_replaced_and_others_added(words: list[str], changed: tuple[str, ...]) -> None:
    assert change_arguments(COMMAND, words) == changed


@pytest.mark.parametrize(
    ("words", "is_change"),
    [
        (["--lr", "1"], True), (["-n", "1"], True), (["lr=1"], True), (["python", "b.py"], False), (["-5"], False),
        ([], False),
    ],
)  # fmt: skip
def test_words_that_begin_with_an_option_or_a_setting_name_no_program(words: list[str], is_change: bool) -> None:
    assert is_change_of_arguments(words) is is_change
