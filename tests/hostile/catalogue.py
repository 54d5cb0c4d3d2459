"""The catalogue of attacks: what the attacker tries, and what comes of it."""

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

import tests.hostile
from tests.unit.ledger import as_root

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "attacks.md"
# What comes of an attack, from best to worst. The verdict `remains` needs a paragraph in SECURITY.md.
VERDICTS = {
    "refused": "the attacker, or the victim's command, gets an error, and nothing else happens",
    "ignored": "the victim's programs go on without the attacker's file, and name it",
    "harmless": "it works, and costs the victim nothing",
    "bounded": "it costs the victim a limited amount of time or space",
    "remains": "it does harm; SECURITY.md says so, and what to do about it",
}
Test = TypeVar("Test", bound=Callable[..., None])


class Attack(NamedTuple):
    """`now` is what comes of it."""

    area: str
    name: str
    tries: str
    now: str

    @property
    def verdict(self) -> str:
        return self.now.partition(":")[0]

    @property
    def file(self) -> str:
        return f"tests/hostile/test_{self.area.replace(' ', '_')}.py"


_attacks: list[Attack] = []


def attack(tries: str, *, now: str) -> Callable[[Test], Test]:
    """Record a test as an attack. `now` begins with one of VERDICTS, and may go on after a colon."""
    assert now.partition(":")[0] in VERDICTS, now

    def register(test: Test) -> Test:
        area = test.__module__.rpartition(".test_")[2].replace("_", " ")
        name = test.__name__.removeprefix("test_").replace("_", " ")
        _attacks.append(Attack(area=area, name=name, tries=tries, now=now))
        marked: Test = pytest.mark.linux("how users are told apart is Linux's")(as_root(test))
        return marked

    return register


def load_attacks() -> list[Attack]:
    """Return all attacks, by area."""
    for module in pkgutil.iter_modules(tests.hostile.__path__):
        if module.name.startswith("test_"):
            importlib.import_module(f"tests.hostile.{module.name}")
    unique = {(each.area, each.name): each for each in _attacks}
    return [unique[key] for key in sorted(unique)]


def page() -> str:
    """Return the catalogue as a page of the docs."""
    attacks = load_attacks()
    counts = Counter(each.verdict for each in attacks)
    lines = [
        "# Attacks",
        "",
        "What a hostile user of the machine can try, and what comes of it. Each line is a test in `tests/hostile`;",
        "`make test-full` runs all of them, `make test` most. [SECURITY.md](../../SECURITY.md) says what is promised.",
        "",
        "| verdict | attacks | meaning |",
        "| --- | --- | --- |",
        *(f"| {verdict} | {counts[verdict]} | {meaning} |" for verdict, meaning in VERDICTS.items()),
    ]
    for area in sorted({each.area for each in attacks}):
        lines += ["", f"## {area.capitalize()}", "", f"In `tests/hostile/test_{area.replace(' ', '_')}.py`."]
        lines += ["", "| attack | what comes of it |", "| --- | --- |"]
        lines += [f"| {each.tries} | {each.now} |" for each in attacks if each.area == area]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from tests.hostile import catalogue

    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(catalogue.page(), encoding="utf-8")
    else:
        sys.stdout.write(catalogue.page())
