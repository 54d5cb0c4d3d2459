"""A render that is killed at any moment and run again produces the same outputs, byte for byte."""

from pathlib import Path

import pytest

from tests.integration.render_fixture import (
    ALL,
    folder,  # noqa: F401 - a fixture is found where it is named
    outputs,
    render,
    rendered,
)

pytestmark = pytest.mark.usefixtures("folder", "unmeasured")


@pytest.mark.parametrize("dying", ["dying", "dying_before_rename", "dying_after_rename"])
def test_after_repeated_kill_9_the_outputs_equal_those_of_an_undisturbed_run(dying: str) -> None:
    assert render("render", "--out", "undisturbed").returncode == 0
    expected = outputs("undisturbed")
    before: set[str] = set()
    for _ in range(2):
        killed = render(dying, "--resume")
        assert killed.returncode == -9, killed.stderr
        now = outputs()
        assert {name: content for name, content in expected.items() if name in now} == now
        assert before < rendered() < ALL
        before = rendered()
    assert list(Path("out/.partial").iterdir())
    assert render("render", "--resume").returncode == 0
    assert outputs() == expected
    assert not Path("out/.partial").exists()
