"""Session names that tmux accepts."""

import pytest

from gpuyard.engines.session.tmux import session_name


@pytest.mark.parametrize("name", ["TASK_exp1_gpu0", "größe-2_cpu", "実験", "-x"])
def test_letters_digits_underscores_and_dashes_stay(name: str) -> None:
    assert session_name(name) == name


@pytest.mark.parametrize("letter", list(":.#$(){}\"'\\;=@%!&|<> \t\n\x1b\udcff"))
def test_anything_else_becomes_an_underscore(letter: str) -> None:
    assert session_name(f"a{letter}b") == "a_b"


def test_a_session_name_is_never_empty() -> None:
    assert session_name("") == "_"
