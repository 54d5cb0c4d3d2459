"""One meaning per class name: no name is defined twice in `src`, but for those listed here."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
# Names that stand for the same idea in two places. None does at present.
SHARED: set[str] = set()


def class_names() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    return found


def test_a_class_name_is_defined_once() -> None:
    twice = {name: files for name, files in class_names().items() if len(files) > 1 and name not in SHARED}
    assert twice == {}, "give one of them a name of its own, or list it above with the idea that they share"


def test_every_listed_name_is_still_shared() -> None:
    names = class_names()
    assert [name for name in SHARED if len(names[name]) < 2] == []
