"""SECURITY.md: each promise names tests that exist, and the catalogue of attacks is current."""

import re
from pathlib import Path

import pytest

from tests.hostile.catalogue import PAGE, load_attacks, page

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def section(title: str) -> str:
    """Return the text under a heading, up to the next one."""
    return SECURITY.partition(f"### {title}\n")[2].partition("\n##")[0]


def promises() -> list[str]:
    """Return the rows of the table of what is protected, without its head."""
    rows = [line for line in section("What is protected").splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("promise", promises(), ids=lambda row: row.split("|")[1].strip())
def test_each_promise_names_its_tests(promise: str) -> None:
    assert _TEST.findall(promise), "name a test: `tests/hostile/test_area.py::test_name`"


def test_the_named_tests_exist() -> None:
    named = _TEST.findall(SECURITY)
    assert len(named) > 20
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        assert not test or re.search(rf"^ *def {test}\(", path.read_text(encoding="utf-8"), re.MULTILINE), (file, test)


def test_attacks_are_many_current_and_their_limits_said() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.hostile.catalogue --write`"
    attacks = load_attacks()
    assert len(attacks) >= 75
    assert len({each.tries for each in attacks}) == len(attacks), "there are many attacks and each says what it tries"
    assert all(each.tries and "|" not in each.tries + each.now for each in attacks)
    # What remains is said in the known limits.
    limits = section("Known limits")
    silent = {each.file for each in load_attacks() if each.verdict == "remains" and each.file not in limits}
    assert not silent, "say under Known limits what remains, and name the file"
