"""Names as tmux can hold and find them."""

import pytest

from gpuyard.engines.session.tmux import speakable


@pytest.mark.parametrize("name", ["TASK_exp1_gpu0", "größe-2_cpu", "実験", "-x"])
def test_letters_digits_underscores_and_dashes_stay(name: str) -> None:
    assert speakable(name) == name


@pytest.mark.parametrize("letter", list(":.#$(){}\"'\\;=@%!&|<> \t\n\x1b\udcff"))
def test_anything_else_becomes_an_underscore(letter: str) -> None:
    assert speakable(f"a{letter}b") == "a_b"


def test_there_is_always_a_name() -> None:
    assert speakable("") == "_"
